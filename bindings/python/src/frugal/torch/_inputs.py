"""Checks of the tensors that callers give: what goes to the library by address is right, or an error says what would
be.

Nothing is copied here but 32-bit keys and offsets, which the ABI does not have, and offsets that lack their last
element.
"""

from __future__ import annotations

from typing import Optional

import torch

_WIDE = (torch.int64, torch.uint64)


def _tensor(value: object, what: str, device: torch.device) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, not {type(value).__name__}")
    if value.layout != torch.strided:
        raise TypeError(f"{what} must be a dense tensor, not one of layout {value.layout}")
    if value.device != device:
        raise ValueError(f"{what} is on {value.device}, the trainer on {device}: move it with .to({str(device)!r})")
    if value.is_neg():
        raise ValueError(f"{what} is a negative view, whose memory has the other sign: call .resolve_neg()")
    if not value.is_contiguous():
        raise ValueError(
            f"{what} has shape {tuple(value.shape)} and strides {value.stride()}: the library takes the"
            " address of contiguous memory; call .contiguous()"
        )
    return value


def _integers(value: object, what: str, device: torch.device) -> torch.Tensor:
    tensor = _tensor(value, what, device)
    if tensor.dtype in _WIDE:
        return tensor
    if tensor.dtype == torch.int32:
        return tensor.to(torch.int64)
    raise TypeError(f"{what} is of {tensor.dtype}: give torch.int64, torch.uint64 or torch.int32")


def _signed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int64) if tensor.dtype == torch.uint64 else tensor


def keys(value: object, what: str, device: torch.device) -> torch.Tensor:
    """Keys of 64 bits."""
    return _integers(value, what, device)


def offsets(value: object, count: int, complete: bool, what: str, device: torch.device) -> torch.Tensor:
    """Offsets of bags with the last, which is the number of keys; `complete`: it is there already."""
    tensor = _signed(_integers(value, what, device))
    if tensor.dim() != 1:
        raise ValueError(f"{what} has {tensor.dim()} dimensions and must have 1")
    if not complete:
        return torch.nn.functional.pad(tensor, (0, 1), value=count)
    if tensor.numel() == 0:
        raise ValueError(f"{what} is empty: with include_last_offset it has a number for each bag and one more")
    return tensor


def offsets_of_lengths(value: object, what: str, device: torch.device) -> torch.Tensor:
    """Offsets, with the last, of bags of these lengths."""
    lengths = _signed(_integers(value, what, device))
    if lengths.dim() != 1:
        raise ValueError(f"{what} has {lengths.dim()} dimensions and must have 1")
    out = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, out=out[1:])
    return out


def weights(value: object, like: torch.Tensor, what: str, device: torch.device) -> torch.Tensor:
    """A factor for each key."""
    tensor = _tensor(value, what, device)
    if tensor.dtype != torch.float32:
        raise TypeError(f"{what} is of {tensor.dtype} and must be torch.float32")
    if tensor.shape != like.shape:
        raise ValueError(f"{what} has shape {tuple(tensor.shape)}, the keys have {tuple(like.shape)}")
    return tensor


def gradient(grad: torch.Tensor) -> torch.Tensor:
    """A gradient of (rows, columns) whose rows are contiguous and apart. What autograd delivers otherwise, expanded or
    transposed, is copied, as torch's own backward of an embedding does."""
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


class Arange:
    """The offsets of 2-D inputs: remembers the last."""

    def __init__(self) -> None:
        self._last: Optional[torch.Tensor] = None
        self._shape = (-1, -1)

    def offsets(self, shape: torch.Size, device: torch.device) -> torch.Tensor:
        bags, length = int(shape[0]), int(shape[1])
        last = self._last
        if last is None or self._shape != (bags, length) or last.device != device:
            # Not an inference tensor, which a backward could not keep.
            with torch.inference_mode(False):
                if length:
                    last = torch.arange(0, bags * length + 1, length, device=device)
                else:
                    last = torch.zeros(bags + 1, dtype=torch.int64, device=device)
            self._last, self._shape = last, (bags, length)
        return last
