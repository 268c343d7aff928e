"""Checks of the tensors that callers give: what goes to the library by address is right, or an error says what would
be.

Tensors go as they are where they can. Copied, by element, are keys, offsets and factors that are not contiguous or of
another type than the ABI has, and offsets that lack their last element. Exceptions are instances of the class that
torch.nn raises for the same input.
"""

from __future__ import annotations

import ctypes
from typing import Any, Callable, NoReturn, Optional, Tuple

import torch
from torch.autograd import forward_ad

from . import _native

_unpack_dual: Callable[..., Any] = forward_ad.unpack_dual  # without types in torch

_Tensor, _int64 = torch.Tensor, torch.int64
_NOTHING = torch.empty(0, dtype=torch.int64, device="cpu")


class InputError(ValueError, RuntimeError):
    """A tensor of the wrong shape, place or value: torch.nn raises the one or the other."""


class InputTypeError(TypeError, RuntimeError):
    """A tensor of a type that cannot be taken: torch.nn raises RuntimeError."""


class ArgumentError(ValueError, AssertionError):
    """An argument of a constructor that contradicts another: torch.nn raises AssertionError."""


# torch has no arithmetic of those: they stand for the 64 bits of a key.
_UNSIGNED = torch.uint64
# What torch.nn.EmbeddingBag takes with offsets, and offsets with keys, of 32 or 64 bits: their common type is one
# of those.
_NARROW = (torch.uint8, torch.int8, torch.int16, torch.bool)


def _tensor(value: object, what: str, device: torch.device) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, not {type(value).__name__}")
    if value.layout != torch.strided:
        raise InputTypeError(f"{what} must be a dense tensor, not one of layout {value.layout}")
    if value.device != device:
        raise InputError(f"{what} is on {value.device}, the module on {device}: move it with .to({str(device)!r})")
    return value


def _refuse_type(what: str, dtype: torch.dtype) -> NoReturn:
    raise InputTypeError(f"{what} is of {dtype}: give torch.int64, torch.int32 or torch.uint64")


def _integers(value: object, what: str, device: torch.device, narrow: bool = False) -> torch.Tensor:
    tensor = _tensor(value, what, device)
    dtype = tensor.dtype
    if dtype == torch.int64 or dtype == _UNSIGNED:
        return tensor.contiguous()
    if dtype == torch.int32 or (narrow and dtype in _NARROW):
        # The format is said, for .to() keeps strides.
        return tensor.to(torch.int64, memory_format=torch.contiguous_format)
    _refuse_type(what, dtype)


def _signed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int64) if tensor.dtype == _UNSIGNED else tensor


def declared(value: object, what: str, device: torch.device) -> torch.Tensor:
    """Keys that are declared: as a loader has them, or where the forward will have them."""
    on_host = isinstance(value, torch.Tensor) and value.device.type == "cpu"
    return _integers(value, what, torch.device("cpu") if on_host else device)


def is_traced(value: object) -> bool:
    """Whether it stands for a tensor in torch.fx.symbolic_trace()."""
    return type(value).__module__ == "torch.fx.proxy"


def keys(value: object, what: str, device: torch.device) -> torch.Tensor:
    """Keys of 64 bits, contiguous."""
    return _integers(value, what, device)


def offsets(value: object, count: int, complete: bool, what: str, device: torch.device) -> torch.Tensor:
    """Offsets of bags with the last, which is the number of keys; `complete`: it is there already."""
    tensor = _signed(_integers(value, what, device, narrow=True))
    if tensor.dim() != 1:
        raise InputError(f"{what} has to be a 1D Tensor, and has {tensor.dim()} dimensions")
    if not complete:
        return torch.nn.functional.pad(tensor, (0, 1), value=count)
    if tensor.numel() == 0:
        raise InputError(f"{what} is empty: with include_last_offset it has a number for each bag and one more")
    return tensor


def offsets_of_lengths(value: object, what: str, device: torch.device) -> torch.Tensor:
    """Offsets, with the last, of bags of these lengths."""
    lengths = _signed(_integers(value, what, device, narrow=True))
    if lengths.dim() != 1:
        raise InputError(f"{what} has to be a 1D Tensor, and has {lengths.dim()} dimensions")
    out = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, out=out[1:])
    return out


def weights(
    value: object, like: torch.Tensor, what: str, device: torch.device, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """A factor for each key, as float32. `dtype` is that of the module's rows as the caller sees them, which factors
    must share."""
    tensor = _tensor(value, what, device)
    if tensor.shape != like.shape:
        raise InputError(
            f"{what} has shape {tuple(tensor.shape)}: it must have the same shape as the input, {tuple(like.shape)}"
        )
    if tensor.dtype != dtype:
        raise InputTypeError(f"{what} is of {tensor.dtype}: it must have the same type as the rows, {dtype}")
    if forward_ad._current_level >= 0 and _unpack_dual(tensor).tangent is not None:
        raise NotImplementedError(f"{what}: forward AD of a table's lookup is not possible, nor of PyTorch's bags")
    # Each of these has a gradient, and returns what needs nothing as it is.
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if dtype != torch.float32:
        tensor = tensor.to(torch.float32)
    return tensor.contiguous()


# What a module of bags hands on: keys; where each bag begins, and the number of keys; factors; and
# a bit for each of these that was made here, whose memory the caller does not know.
Bags = Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor], int]


def bags(
    input: object,
    offsets_: object,
    weights_: object,
    *,
    mode: str,
    complete: bool,
    device: torch.device,
    arange: "Arange",
    dtype: torch.dtype = torch.float32,
) -> Bags:
    """The arguments of EmbeddingBag.forward. `complete`: include_last_offset."""
    if (
        weights_ is None
        and not complete
        and type(input) is _Tensor
        and type(offsets_) is _Tensor
        and input.dtype is _int64
        and offsets_.dtype is _int64
        and input.dim() == 1
        and offsets_.dim() == 1
        and input.is_cpu
        and offsets_.is_cpu
        and device.type == "cpu"
        and input.is_contiguous()
    ):  # the usual case, without the calls below
        count, bags_ = input.numel(), offsets_.numel()
        if bags_:
            # At once, for another thread may be here.
            ends, known_bags, known_count, address = arange.known
            if (
                known_bags == bags_
                and known_count == count
                and offsets_.is_contiguous()
                and not _differ(address, offsets_.data_ptr(), 8 * bags_)
            ):
                return input, ends, None, 2
            return input, arange.complete(offsets_, count), None, 2
    if isinstance(input, torch.Tensor) and input.is_nested and input.dim() == 2:
        return _nested(input, weights_, mode, device, dtype)
    tensor = _tensor(input, "input", device)
    if tensor.dim() == 2:
        keys_ = _integers(tensor, "input", device)
    else:
        keys_ = _integers(tensor, "input", device, narrow=True)
        if tensor.dtype in _NARROW and getattr(offsets_, "dtype", None) in _NARROW:
            _refuse_type("input", tensor.dtype)  # nor has their common type 32 bits
    factors = None
    if weights_ is not None:
        factors = weights(weights_, keys_, "per_sample_weights", device, dtype)
    if keys_.dim() == 2:
        if offsets_ is not None:
            raise InputError("if input is 2D, then offsets has to be None: each of its rows is a bag")
        ends = arange.offsets(keys_.shape, device)
    elif keys_.dim() == 1:
        if offsets_ is None:
            raise InputError("offsets has to be a 1D Tensor but got None: input is 1D")
        ends = offsets(offsets_, keys_.numel(), complete, "offsets", device)
        if ends.numel() == 1:  # no bags, whatever the keys
            keys_, ends = keys_[:0], torch.zeros_like(ends)
            factors = None if factors is None else factors[:0]
        elif complete:
            ends = _to_the_end(ends, keys_.numel())
    else:
        raise InputError(f"input has to be 1D or 2D Tensor, and has {keys_.dim()} dimensions")
    _check_mode(mode, factors)
    mine = _is_new(keys_, input) | _is_new(ends, offsets_) << 1 | _is_new(factors, weights_) << 2
    return keys_, ends, factors, mine


def _is_new(tensor: Optional[torch.Tensor], given: object) -> bool:
    """Whether it has memory of its own: not the caller's, and not as a view."""
    return tensor is not None and not (isinstance(given, torch.Tensor) and tensor.data_ptr() == given.data_ptr())


def _check_mode(mode: str, factors: Optional[torch.Tensor]) -> None:
    if factors is not None and mode != "sum":
        raise NotImplementedError(f"per_sample_weights is only supported for mode='sum', not {mode!r}")


def _nested(input: torch.Tensor, weights_: object, mode: str, device: torch.device, dtype: torch.dtype) -> Bags:
    """A nested tensor has a bag in each row, of any length."""
    if input.layout != torch.jagged:
        raise InputTypeError("a nested input must be of layout torch.jagged")
    keys_ = _integers(input.values(), "input", device)
    if keys_.dim() != 1:
        raise InputError("a nested input must have one key an element")
    factors = None
    if weights_ is not None:
        if not (isinstance(weights_, torch.Tensor) and weights_.is_nested and weights_.layout == torch.jagged):
            raise InputError("if input is nested, then per_sample_weights must be nested")
        if weights_.shape != input.shape:  # so they are of other lengths, also where the sum is the same
            raise InputError("per_sample_weights must have the same shape as the input: make them of its offsets()")
        factors = weights(weights_.values(), keys_, "per_sample_weights", device, dtype)
    _check_mode(mode, factors)
    ends: Callable[[], torch.Tensor] = getattr(input, "offsets")  # not among the types of a Tensor
    return keys_, offsets(ends(), keys_.numel(), True, "offsets", device), factors, 0


def _to_the_end(ends: torch.Tensor, count: int) -> torch.Tensor:
    """The last bag takes what keys there are beyond the last offset, as torch.nn's does."""
    if ends.device.type != "cpu":
        return torch.nn.functional.pad(ends[:-1], (0, 1), value=count)  # to read the value would wait for the device
    last = ctypes.c_int64.from_address(ends.data_ptr() + 8 * (ends.numel() - 1)).value
    return ends if last >= count else torch.nn.functional.pad(ends[:-1], (0, 1), value=count)


def check_ends(ends: torch.Tensor, count: int) -> None:
    """Checks offsets that are not for the library: PyTorch checks some of them only, and would read past the keys."""
    if int(ends[0]) != 0 or int(ends[-1]) != count or bool((ends.diff() < 0).any()):
        raise _native.InvalidArgument(
            f"offsets must begin with 0, not decrease, and not be greater than the {count} keys",
            _native.INVALID_ARGUMENT,
        )


def check_begins(begins: Optional[torch.Tensor], keys: Optional[torch.Tensor], table: str) -> None:
    """An error of offsets that the library has refused with the last, which the caller has not given."""
    if begins is None or keys is None:
        return
    count = keys.numel()
    bad = ((begins < 0) | (begins > count)).nonzero()
    if bad.numel():
        at = int(bad[0])
        raise _native.InvalidArgument(
            f"table {table!r}: offsets[{at}] is {int(begins[at])}, and can not be below 0 or greater than the {count}"
            " keys",
            _native.INVALID_ARGUMENT,
        ) from None


def padding_idx(index: Optional[int], rows: int, hashed: bool) -> Optional[int]:
    """The padding key."""
    if index is None:
        return None
    if hashed:
        return index & 0xFFFFFFFFFFFFFFFF  # keys are the 64 bits of an int64
    if not -rows <= index < rows:
        raise ArgumentError(f"padding_idx must be within num_embeddings: {index} is not within the {rows} rows")
    return index % rows


def size(rows: int, dim: int, *, empty: bool) -> None:
    """Checks what torch takes as the shape of a weight. `empty`: it may be without elements."""
    if rows < 0 or dim < 0:
        raise InputError(f"num_embeddings {rows} and embedding_dim {dim}: neither can be negative")
    if not empty and (rows == 0 or dim == 0):
        raise InputError(
            f"num_embeddings {rows} and embedding_dim {dim}: a hashed table and one of a collection have a row of a"
            " column at least"
        )


def shape(embeddings: object) -> Tuple[int, int]:
    """That of rows that a module is to begin with."""
    if not isinstance(embeddings, torch.Tensor):
        raise TypeError(f"embeddings must be a torch.Tensor, not {type(embeddings).__name__}")
    if embeddings.dim() != 2:
        raise ArgumentError(f"embeddings has {embeddings.dim()} dimensions and must have 2")
    return int(embeddings.shape[0]), int(embeddings.shape[1])


def weight(value: Optional[torch.Tensor], rows: int, dim: int) -> None:
    """Checks the rows that a module is to begin with, if there are any."""
    if value is not None and shape(value) != (rows, dim):
        raise ArgumentError(
            f"Shape of weight does not match num_embeddings and embedding_dim: {tuple(value.shape)} and {(rows, dim)}"
        )


def exact(weight: torch.Tensor) -> None:
    """Checks that integers are what they are as float32, the type of rows."""
    if weight.dtype.itemsize > 2 and not torch.equal(weight.to(torch.float32).to(weight.dtype), weight):
        raise ArgumentError(
            f"weight is of {weight.dtype} and has numbers that float32, the type of rows, does not have"
        )


def gradient(grad: torch.Tensor) -> torch.Tensor:
    """A gradient of (rows, columns) whose rows are contiguous and apart. What autograd delivers otherwise, expanded or
    transposed, is copied, as torch's own backward of an embedding does."""
    if grad.dtype is torch.float32 and grad.is_contiguous() and not grad.is_neg():
        return grad
    if grad.is_neg():  # the library sees the memory, which has the other sign
        grad = grad.resolve_neg()
    if grad.dtype == torch.float32 and grad.layout == torch.strided:
        columns = grad.shape[1]
        if (columns == 1 or grad.stride(1) == 1) and (grad.shape[0] <= 1 or grad.stride(0) >= columns):
            return grad
    return grad.to(torch.float32).contiguous()


def row_stride(rows: torch.Tensor) -> int:
    """Bytes from row to row of what `gradient` returned, or of a new tensor."""
    return (rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]) * 4


# Of offsets: a call that is too short for other threads to be let in.
_differ: Callable[[int, int, int], int] = ctypes.PyDLL(None).memcmp
_differ.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]  # type: ignore[attr-defined]


def _to_keep(count: int) -> torch.Tensor:
    """New int64s on the CPU. A backward can keep them, as it could not keep what torch.inference_mode() makes."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return torch.empty(count, dtype=_int64, device="cpu")
    return torch.empty(count, dtype=_int64, device="cpu")


class Arange:
    """The offsets of bags: remembers the last, since those of the next batch may be the same."""

    def __init__(self) -> None:
        # Offsets with the last, their bags, the keys, and where they are.
        self.known: Tuple[torch.Tensor, int, int, int] = (_NOTHING, 0, 0, 0)
        self._last: Optional[torch.Tensor] = None
        self._shape: Tuple[int, int] = (-1, -1)

    def complete(self, offsets: torch.Tensor, count: int) -> torch.Tensor:
        """Offsets on the CPU with the last, which is the number of keys. Not to be written to: they
        are returned again."""
        bags, offsets = offsets.numel(), offsets.contiguous()
        ends = _to_keep(bags + 1)
        address = ends.data_ptr()
        ctypes.memmove(address, offsets.data_ptr(), 8 * bags)
        ctypes.c_int64.from_address(address + 8 * bags).value = count
        self.known = ends, bags, count, address
        return ends

    def offsets(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        bags, length = int(shape[0]), int(shape[1])
        last = self._last
        if last is None or self._shape != (bags, length) or last.device != device:
            # Not an inference tensor, which a backward could not keep.
            with torch.inference_mode(False):
                if length:
                    last = torch.arange(0, bags * length + 1, length, dtype=torch.int64, device=device)
                else:
                    last = torch.zeros(bags + 1, dtype=torch.int64, device=device)
            self._last, self._shape = last, (bags, length)
        return last
