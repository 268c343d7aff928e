"""Exceptions. A failed call of the library raises an Error with its status and message.

Each status that a program may want to catch has its own class. If Python has an exception of the same meaning, it is
a base class of that class. An argument that never reaches the library (a buffer of the wrong type, shape or device)
raises a TypeError or a ValueError.
"""

from __future__ import annotations

from ctypes import addressof
from typing import Dict, Tuple, Type

from . import _abi
from ._lib import lib

__all__ = [
    "BadHandle",
    "Busy",
    "Closed",
    "Damaged",
    "DeviceError",
    "Error",
    "Exists",
    "FileError",
    "Forked",
    "InvalidArgument",
    "KeyOutOfRange",
    "NanGradient",
    "NoSpace",
    "NotFound",
    "NotInStep",
    "OutOfMemory",
    "PeerLost",
    "StepAborted",
    "StepOrder",
    "StepRange",
    "TableFull",
    "Timeout",
    "TooNew",
    "Unhealthy",
    "Unsupported",
]


class Error(Exception):
    """A call of the library failed."""

    status: int
    """The status, a negative number that never changes."""
    status_name: str
    """Its name, for example "FRUGAL_ERR_TIMEOUT"."""
    message: str
    """What was wrong and what to do."""
    system_code: int
    """The errno of the system call that failed, or 0."""
    device_code: int
    """The CUDA error that caused it, or 0."""

    def __init__(self, message: str, status: int = -21, system_code: int = 0, device_code: int = 0) -> None:
        # The base classes get one argument: OSError gives two or more another meaning.
        super().__init__(message)
        self.message = message
        self.status = status
        self.status_name = lib.frugal_status_name(status).decode()
        self.system_code = system_code
        self.device_code = device_code

    def __str__(self) -> str:
        return f"{self.status_name}: {self.message}"

    def __reduce__(self) -> Tuple[Type[Error], Tuple[str, int, int, int]]:
        return type(self), (self.message, self.status, self.system_code, self.device_code)


class InvalidArgument(Error, ValueError):
    """A value is out of its range."""


class BadHandle(Error):
    """The object was closed, or the table dropped."""


class OutOfMemory(Error, MemoryError):
    """Memory, or the engine's host_bytes, is exhausted."""


class KeyOutOfRange(Error, IndexError):
    """An id of a dense table is not in 0..rows-1."""


class TableFull(Error):
    """The new keys of the call do not all fit."""


class Exists(Error):
    """A table of that name, or a trainer of that rank, exists."""


class StepOrder(Error):
    """Another step must come now; the message names it."""


class StepRange(Error):
    """A declared step has begun, or lies beyond the lookahead."""


class NotInStep(Error):
    """The call belongs between step_begin and step_end."""


class StepAborted(Error):
    """Another rank aborted the step. Begin the step that the message names."""


class Busy(Error):
    """A rank is inside a step, or ranks have ended different steps."""


class Timeout(Error, TimeoutError):
    """The time-out passed; the message names what the call waited for. It had no effect and can be made again."""


class NanGradient(Error, ArithmeticError):
    """A gradient has a NaN and the table rejects them."""


class Forked(Error):
    """The engine belongs to the parent of this process."""


class Unsupported(Error, NotImplementedError):
    """The call is well formed, but this build or machine cannot do it."""


class NotFound(Error, LookupError):
    """No such table or batch."""


class Unhealthy(Error):
    """A background thread failed; Engine.health returns the status."""


class Closed(Error):
    """The object was closed while the call waited."""


class DeviceError(Error):
    """There is no such GPU, or it failed; device_code has the CUDA error."""


class PeerLost(Error, ConnectionError):
    """A trainer process or the controller is gone; the message says which."""


class NoSpace(Error, OSError):
    """A disk, a quota or the limit of a file's size is full. The message names the file."""


class FileError(Error, OSError):
    """A read, a write or a sync of a file failed. The message names the file."""


class Damaged(Error):
    """Bytes of a file are not what was written there. The message names file and offset."""


class TooNew(Error):
    """A later version of the library wrote the file; use that version."""


FORKED = _abi.STATUS["FRUGAL_ERR_FORKED"]

_CLASSES: Dict[int, Type[Error]] = {
    _abi.STATUS["FRUGAL_ERR_INVALID_ARGUMENT"]: InvalidArgument,
    _abi.STATUS["FRUGAL_ERR_BAD_HANDLE"]: BadHandle,
    _abi.STATUS["FRUGAL_ERR_OUT_OF_MEMORY"]: OutOfMemory,
    _abi.STATUS["FRUGAL_ERR_KEY_OUT_OF_RANGE"]: KeyOutOfRange,
    _abi.STATUS["FRUGAL_ERR_TABLE_FULL"]: TableFull,
    _abi.STATUS["FRUGAL_ERR_EXISTS"]: Exists,
    _abi.STATUS["FRUGAL_ERR_STEP_ORDER"]: StepOrder,
    _abi.STATUS["FRUGAL_ERR_STEP_RANGE"]: StepRange,
    _abi.STATUS["FRUGAL_ERR_NOT_IN_STEP"]: NotInStep,
    _abi.STATUS["FRUGAL_ERR_STEP_ABORTED"]: StepAborted,
    _abi.STATUS["FRUGAL_ERR_BUSY"]: Busy,
    _abi.STATUS["FRUGAL_ERR_TIMEOUT"]: Timeout,
    _abi.STATUS["FRUGAL_ERR_NAN"]: NanGradient,
    FORKED: Forked,
    _abi.STATUS["FRUGAL_ERR_UNSUPPORTED"]: Unsupported,
    _abi.STATUS["FRUGAL_ERR_NOT_FOUND"]: NotFound,
    _abi.STATUS["FRUGAL_ERR_UNHEALTHY"]: Unhealthy,
    _abi.STATUS["FRUGAL_ERR_CLOSED"]: Closed,
    _abi.STATUS["FRUGAL_ERR_DEVICE"]: DeviceError,
    _abi.STATUS["FRUGAL_ERR_PEER_LOST"]: PeerLost,
    _abi.STATUS["FRUGAL_ERR_NO_SPACE"]: NoSpace,
    _abi.STATUS["FRUGAL_ERR_IO"]: FileError,
    _abi.STATUS["FRUGAL_ERR_DAMAGED"]: Damaged,
    _abi.STATUS["FRUGAL_ERR_TOO_NEW"]: TooNew,
}


def last_error(status: int) -> Error:
    """Returns the calling thread's last failure, which was `status`, as an exception to raise."""
    error = _abi.frugal_error()
    lib.frugal_last_error(addressof(error))
    message = (error.message or b"").decode(errors="replace")
    return _CLASSES.get(status, Error)(message, status, error.system_code, error.device_code)


def check(status: int) -> None:
    """Raises the calling thread's last failure unless `status` is FRUGAL_OK."""
    if status != 0:
        raise last_error(status)
