"""Addresses of the caller's arrays, without copies.

An array gives its address by the buffer protocol (NumPy arrays, array.array, memoryview, ...),
`__cuda_array_interface__` or DLPack, tried in this order. An array that the ABI cannot take without a copy raises a
TypeError or a ValueError: by its type, shape, stride, byte order or device, or because an output is read-only.

A resolved array is pinned: the object that keeps its memory in place (an exported buffer, a DLPack capsule) is
appended to the list `pins` of a call. The call clears the list when it has returned.
"""

from __future__ import annotations

import array as _array
import ctypes
import sys
from ctypes import addressof, c_char, c_char_p, c_int, c_int32, c_int64, c_size_t, c_ssize_t, c_uint8, c_uint16
from ctypes import c_uint32, c_uint64, c_void_p, py_object
from typing import TYPE_CHECKING, Any, List, NamedTuple, Optional, Protocol, Sequence, Tuple, TypeVar, Union

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class SupportsDLPack(Protocol):
    """An array of another library that exports its memory by DLPack."""

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


class SupportsCudaArrayInterface(Protocol):
    """An array in the memory of a GPU."""

    @property
    def __cuda_array_interface__(self) -> Any: ...


Array = Union["ReadableBuffer", SupportsDLPack, SupportsCudaArrayInterface]
AnyArray = TypeVar("AnyArray", bound=Array)
Pins = List[Any]


class Place(NamedTuple):
    """The memory that a trainer accepts arrays in, the host and perhaps a GPU, and the stream that orders its calls."""

    gpu: Optional[int] = None
    stream: int = 0


HOST = Place()

# (address, kind, read-only, shape, strides in bytes, GPU or None). A kind is NumPy's type string without the byte
# order, for example "f4". For a type that the ABI does not have it is a description for a message.
_Resolved = Tuple[int, str, bool, Sequence[int], Sequence[int], Optional[int]]

_ANY_GPU = -1  # __cuda_array_interface__ does not name the GPU

_LONG = str(ctypes.sizeof(ctypes.c_long))
# Kinds by the struct module's formats. "<" is the byte order of every machine that the library is built for.
_FORMATS = {
    "f": "f4",
    "<f": "f4",
    "=f": "f4",
    "i": "i4",
    "<i": "i4",
    "=i": "i4",
    "<l": "i4",
    "=l": "i4",
    "l": "i" + _LONG,
    "L": "u" + _LONG,
    "q": "i8",
    "<q": "i8",
    "=q": "i8",
    "Q": "u8",
    "<Q": "u8",
    "=Q": "u8",
    "B": "u1",
    "<B": "u1",
    "=B": "u1",
    "?": "b1",
    "<?": "b1",
    "=?": "b1",
}
_SIZES = {"f4": 4, "i4": 4, "i8": 8, "u8": 8, "u1": 1, "b1": 1}

# --- The buffer protocol ---
#
# memoryview has everything but the address. For contiguous writable memory a ctypes object on it gives the address,
# in a third of the time of PyObject_GetBuffer.


class _PyBuffer(ctypes.Structure):
    """Py_buffer of CPython, the same since 3.3."""

    _fields_ = [
        ("buf", c_void_p),
        ("obj", c_void_p),
        ("len", c_ssize_t),
        ("itemsize", c_ssize_t),
        ("readonly", c_int),
        ("ndim", c_int),
        ("format", c_void_p),
        ("shape", c_void_p),
        ("strides", c_void_p),
        ("suboffsets", c_void_p),
        ("internal", c_void_p),
    ]


# An instance of its own: all modules share the argument types of ctypes.pythonapi.
_python = ctypes.PyDLL(None)
_get_buffer = _python.PyObject_GetBuffer
_get_buffer.argtypes = [py_object, c_void_p, c_int]
_get_buffer.restype = c_int
_release_buffer = _python.PyBuffer_Release
_release_buffer.argtypes = [c_void_p]
_release_buffer.restype = None
_is_buffer = _python.PyObject_CheckBuffer
_is_buffer.argtypes = [py_object]
_is_buffer.restype = c_int
_PyBUF_FULL_RO = 0x0100 | 0x0018 | 0x0004

_byte_on = c_char.from_buffer


def _address_of(view: memoryview) -> int:
    """Returns the address of a pinned view, contiguous or not, writable or not."""
    buffer = _PyBuffer()
    _get_buffer(view, addressof(buffer), _PyBUF_FULL_RO)
    address = buffer.buf or 0
    _release_buffer(addressof(buffer))
    return address


def _resolve_buffer(pins: Pins, array: Any) -> _Resolved:
    view = memoryview(array)
    pins.append(view)
    readonly = view.readonly
    if readonly or not view.c_contiguous or not view.nbytes:
        address = _address_of(view)
    else:
        address = addressof(_byte_on(view))
    form = view.format
    shape = view.shape
    strides = view.strides
    if shape is None or strides is None or view.suboffsets:
        raise ValueError("its elements are reached through pointers")
    return address, _FORMATS.get(form) or "the buffer format " + form, readonly, shape, strides, None


def _packed_strides(shape: Sequence[int], size: int) -> List[int]:
    strides = []
    for extent in reversed(shape):
        strides.append(size)
        size *= max(extent, 1)
    return strides[::-1]


# --- __cuda_array_interface__ ---


def _resolve_cuda(pins: Pins, interface: Any, array: Any, what: str, place: Place) -> _Resolved:
    pins.append(array)
    address, readonly = interface["data"]
    shape = interface["shape"]
    form = interface["typestr"]
    if interface.get("mask") is not None:
        raise TypeError(f"{what}: an array with a mask cannot go without a copy")
    kind = form[1:] if form[1:] in _SIZES and form[0] in "<|=" else f"the type {form}"
    strides = interface.get("strides") or _packed_strides(shape, _SIZES.get(kind, 1))
    stream = interface.get("stream")
    # The protocols name the default stream 1; its handle is NULL.
    if stream is not None and place.gpu is not None and (stream or 1) != (place.stream or 1):
        raise ValueError(
            f"{what}: its contents are ordered by stream {stream:#x}, and the trainer works in {place.stream:#x}: "
            "name the array's stream by Trainer.set_stream"
        )
    return address or 0, kind, bool(readonly), shape, strides, _ANY_GPU


# --- DLPack ---

_DL_CPU, _DL_CUDA, _DL_CUDA_HOST, _DL_CUDA_MANAGED = 1, 2, 3, 13
_DL_READ_ONLY, _DL_IS_COPIED = 1, 2
_DL_CODES = {0: "i", 1: "u", 2: "f", 4: "bf", 5: "c", 6: "b"}


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("ndim", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", ctypes.POINTER(c_int64)),
        ("strides", ctypes.POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = [
        ("major", c_uint32),
        ("minor", c_uint32),
        ("manager_ctx", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", _DLTensor),
    ]


_capsule_name = _python.PyCapsule_GetName
_capsule_name.argtypes = [py_object]
_capsule_name.restype = c_char_p
_capsule_pointer = _python.PyCapsule_GetPointer
_capsule_pointer.argtypes = [py_object, c_char_p]
_capsule_pointer.restype = c_void_p


def _resolve_dlpack(pins: Pins, array: Any, what: str, place: Place) -> _Resolved:
    arguments = {}
    if place.gpu is not None and array.__dlpack_device__()[0] == _DL_CUDA:
        arguments["stream"] = place.stream or 1
    try:
        try:
            capsule = array.__dlpack__(max_version=(1, 0), copy=False, **arguments)
        except TypeError:  # an older producer without these arguments never copies
            capsule = array.__dlpack__(**arguments)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{what}: {type(array).__name__} gives no DLPack tensor: {error}") from error
    # The capsule is not renamed to "used": it keeps owning the tensor, and its destructor calls the deleter.
    pins.append(capsule)
    readonly = False
    name = _capsule_name(capsule)
    pointer = _capsule_pointer(capsule, name)
    if name == b"dltensor_versioned":
        managed = _DLManagedTensorVersioned.from_address(pointer)
        if managed.major != 1:
            raise TypeError(f"{what}: DLPack version {managed.major}.{managed.minor} is not known")
        if managed.flags & _DL_IS_COPIED:
            raise TypeError(f"{what}: {type(array).__name__} cannot export its memory without a copy")
        readonly = bool(managed.flags & _DL_READ_ONLY)
        tensor = managed.tensor
    elif name == b"dltensor":
        tensor = _DLTensor.from_address(pointer)
    else:
        raise TypeError(f"{what}: __dlpack__ gave a capsule named {name!r}")
    size = tensor.bits // 8
    kind = f"{_DL_CODES.get(tensor.code, 'type ')}{size}"
    if tensor.lanes != 1 or kind not in _SIZES:
        kind = f"the DLPack type {kind}, {tensor.lanes} lanes"
    shape = tensor.shape[: tensor.ndim]
    strides = [n * size for n in tensor.strides[: tensor.ndim]] if tensor.strides else _packed_strides(shape, size)
    if tensor.device_type in (_DL_CPU, _DL_CUDA_HOST):
        gpu = None
    elif tensor.device_type in (_DL_CUDA, _DL_CUDA_MANAGED):
        gpu = tensor.device_id
    else:
        raise ValueError(f"{what}: memory of DLPack device type {tensor.device_type} cannot be used")
    return (tensor.data or 0) + tensor.byte_offset, kind, readonly, shape, strides, gpu


_plain: Any = None  # the last type that was not a masked array


def _is_masked(array: Any) -> bool:
    """Whether it is a masked array of NumPy. Its buffer has the data alone, so the mask would be lost silently."""
    global _plain
    if isinstance(array, getattr(sys.modules.get("numpy.ma"), "MaskedArray", ())):
        return True
    _plain = type(array)
    return False


def _resolve(pins: Pins, array: Any, what: str, place: Place) -> _Resolved:
    if type(array) is not _plain and _is_masked(array):
        raise TypeError(f"{what}: a masked array, whose mask would be lost; give its data, or filled(0)")
    try:
        return _resolve_buffer(pins, array)
    except (BufferError, TypeError, ValueError) as error:
        if _is_buffer(array):
            raise TypeError(f"{what}: {type(array).__name__} gives no buffer: {error}") from error
    # torch: the memory of such a tensor has the elements with the other sign, and neither protocol reports that.
    negative = getattr(array, "is_neg", None)
    if callable(negative) and negative() is True:
        raise TypeError(f"{what}: a tensor with the negative bit; give resolve_neg() of it")
    try:
        interface = getattr(array, "__cuda_array_interface__", None)
    except RuntimeError as error:  # torch: the tensor requires a gradient
        raise TypeError(f"{what}: {error}") from error
    if interface is not None:
        resolved = _resolve_cuda(pins, interface, array, what, place)
    elif hasattr(array, "__dlpack__"):
        resolved = _resolve_dlpack(pins, array, what, place)
    else:
        raise TypeError(
            f"{what}: an array is needed (NumPy, a buffer, __dlpack__ or __cuda_array_interface__), "
            f"not {type(array).__name__}"
        )
    gpu = resolved[5]
    if gpu is not None:
        if place.gpu is None:
            raise ValueError(f"{what}: memory of a GPU, where memory of the host is needed")
        if gpu not in (_ANY_GPU, place.gpu):
            raise ValueError(f"{what}: memory of cuda:{gpu}, and the trainer is on cuda:{place.gpu}")
    return resolved


# --- The arrays that the ABI takes ---


def _need(what: str, need: str, kind: str) -> TypeError:
    order = "; convert its byte order" if ">" in kind or "!" in kind else ""
    return TypeError(f"{what}: {need} is needed, this is {kind}{order}")


# An address for arrays without elements, whose own may be NULL: to the ABI, NULL means "not given".
_NOTHING = (c_uint64 * 1)()
_EMPTY = addressof(_NOTHING)


def _vector(resolved: _Resolved, size: int, what: str) -> Tuple[int, int]:
    address, _, _, shape, strides, _ = resolved
    if len(shape) != 1:
        raise ValueError(f"{what}: one dimension is needed, this has shape {tuple(shape)}")
    count = shape[0]
    if not count:
        return _EMPTY, 0
    if count > 1 and strides[0] != size:
        raise ValueError(f"{what}: not contiguous (a stride of {strides[0]} bytes); make a contiguous copy")
    if address % size:
        raise ValueError(f"{what}: the address is not a multiple of {size}")
    return address, count


def integers(pins: Pins, array: Any, what: str, place: Place = HOST) -> Tuple[int, int]:
    """Address and number of keys or offsets: int64 and uint64 in place; int32 are widened into a new array."""
    resolved = _resolve(pins, array, what, place)
    kind = resolved[1]
    if kind == "i8" or kind == "u8":
        return _vector(resolved, 8, what)
    if kind != "i4":
        raise _need(what, "int64, uint64 or int32", kind)
    address, count = _vector(resolved, 4, what)
    if resolved[5] is not None:
        raise TypeError(f"{what}: int32 in memory of a GPU; convert it to int64")
    return _widen(pins, address, count), count


def _widen(pins: Pins, address: int, count: int) -> int:
    if not count:
        return _EMPTY
    narrow = (c_int32 * count).from_address(address)
    numpy = find_numpy()
    if numpy is not None:
        wide = numpy.frombuffer(narrow, numpy.int32).astype(numpy.int64)
        pins.append(wide)
        return int(wide.ctypes.data)
    plain = _array.array("q", narrow)
    pins.append(plain)
    return plain.buffer_info()[0]


def floats(pins: Pins, array: Any, count: int, what: str, place: Place = HOST, *, output: bool = False) -> int:
    """Address of exactly `count` float32, contiguous."""
    resolved = _resolve(pins, array, what, place)
    if resolved[1] != "f4":
        raise _need(what, "float32", resolved[1])
    if output and resolved[2]:
        raise ValueError(f"{what}: read-only")
    address, have = _vector(resolved, 4, what)
    if have != count:
        raise ValueError(f"{what}: shape ({count},) is needed, this is ({have},)")
    return address


def found_flags(pins: Pins, array: Any, count: int, what: str) -> int:
    """Address of exactly `count` writable bytes of uint8 or bool, contiguous, on the host."""
    resolved = _resolve(pins, array, what, HOST)
    if resolved[1] not in ("u1", "b1"):
        raise _need(what, "uint8 or bool", resolved[1])
    if resolved[2]:
        raise ValueError(f"{what}: read-only")
    address, have = _vector(resolved, 1, what)
    if have != count:
        raise ValueError(f"{what}: shape ({count},) is needed, this is ({have},)")
    return address


def rows(
    pins: Pins, array: Any, count: int, width: int, what: str, place: Place = HOST, output: bool = False
) -> Tuple[int, int]:
    """Address and row stride (0: packed) of `count` rows of `width` float32.

    The shape is (count, width), each row contiguous; or (count * width,), packed.
    """
    # The usual case, contiguous writable memory, comes first: every call passes here.
    try:
        view = memoryview(array)
        pins.append(view)
        address = addressof(_byte_on(view))
        fits = view.format == "f" and view.shape == (count, width) and not address & 3
        if fits and (type(array) is _plain or not _is_masked(array)):
            return address, 0
    except (BufferError, TypeError, ValueError):
        pass  # another case, or an error that the code below reports
    address, kind, readonly, shape, strides, _ = _resolve(pins, array, what, place)
    if kind != "f4":
        raise _need(what, "float32", kind)
    if output and readonly:
        raise ValueError(f"{what}: read-only")
    if len(shape) == 2 and shape[0] == count and shape[1] == width:
        if width > 1 and count and strides[1] != 4:
            raise ValueError(f"{what}: not contiguous, elements of a row are {strides[1]} bytes apart")
    elif len(shape) == 1 and shape[0] == count * width:
        if width > 1 and count:
            if strides[0] != 4:
                raise ValueError(f"{what}: not contiguous, elements are {strides[0]} bytes apart")
            strides = (4 * width,)
    else:
        raise ValueError(f"{what}: shape ({count}, {width}) is needed, this is {tuple(shape)}")
    if not count:
        return _EMPTY, 0
    if address % 4:
        raise ValueError(f"{what}: the address is not a multiple of 4")
    stride = strides[0]
    if count == 1 or stride == 4 * width:
        return address, 0
    if stride < 4 * width or stride % 4:
        raise ValueError(
            f"{what}: rows are {stride} bytes apart and take {4 * width}; a larger multiple of 4 is needed"
        )
    return address, stride


# --- NumPy, if it is installed ---

_numpy: Any = None


def find_numpy() -> Any:
    """The module numpy, or None."""
    global _numpy
    if _numpy is None:
        try:
            import numpy
        except ImportError:
            return None
        _numpy = numpy
    return _numpy


def new_rows(count: int, width: int) -> Any:
    """A new NumPy array of zeros for `count` rows of `width` float32."""
    numpy = find_numpy()
    if numpy is None:
        raise TypeError("NumPy is not installed: give an array for the rows")
    return numpy.zeros((count, width), numpy.float32)
