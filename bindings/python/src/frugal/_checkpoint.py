"""Checkpoints: tickets of those that are being written, and what a folder has of those that are on disk."""

from __future__ import annotations

import os
import warnings
from ctypes import addressof, byref, c_size_t, c_uint64, create_string_buffer, sizeof
from dataclasses import dataclass
from typing import TYPE_CHECKING, List, Optional, Union

from . import _abi
from ._lib import lib
from ._ops import uint32, uint64
from ._single import Single
from ._wait import milliseconds, wait
from .errors import Timeout, check, last_error

if TYPE_CHECKING:
    from ._engine import Engine

    Path = Union[str, bytes, os.PathLike[str], os.PathLike[bytes]]

NAMES = "surrogateescape"  # another language may give any bytes as a name


def path_bytes(path: Path, what: str) -> bytes:
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise TypeError(f"{what} must be a path, not {type(path).__name__}")
    name = os.fsencode(path)
    if b"\0" in name:
        raise ValueError(f"{what} has a NUL in it")
    return name


def c_string(text: str, what: str) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"{what} must be a str, not {type(text).__name__}")
    if "\0" in text:
        raise ValueError(f"{what} has a NUL in it")
    return text.encode(errors=NAMES)


@dataclass(frozen=True)
class CheckpointInfo:
    """What a checkpoint is."""

    number: int
    """In its folder, from 1 on."""
    step: Optional[int]
    """The last step that it has; None: it is from before the first."""
    name: str
    """Empty: it has none."""
    created: int
    """Seconds since 1970."""
    bytes: int
    """Of its files. Checkpoints share files."""
    tables: int
    world_size: int
    """Ranks of the engine that wrote it."""
    blobs: int
    """How many of them have given a blob."""


def new_info() -> _abi.frugal_checkpoint_info:
    info = _abi.frugal_checkpoint_info()
    info.struct_size = sizeof(info)
    return info


def told(info: _abi.frugal_checkpoint_info) -> CheckpointInfo:
    return CheckpointInfo(
        info.number,
        None if info.step == _abi.FRUGAL_NO_STEP else info.step,
        info.name.decode(errors=NAMES),
        info.created,
        info.bytes,
        info.tables,
        info.world_size,
        info.blobs,
    )


class Checkpoint(Single):
    """A checkpoint that Engine.checkpoint has begun. Training goes on while it is written."""

    __slots__ = ("_engine", "number")

    def __init__(self, engine: Engine, number: int) -> None:
        self._engine = engine
        self.number = number
        """Its number in the folder."""

    def __repr__(self) -> str:
        return f"<frugal.Checkpoint, number {self.number}>"

    def wait(self, timeout: Optional[float] = None) -> CheckpointInfo:
        """Waits until it is on disk. From then on no crash of the process or the machine takes it back.

        timeout: seconds; the default is the engine's. Ctrl-C ends the wait. If the checkpoint has failed, this raises
        the cause (NoSpace, FileError, Closed, ...); the one before stays, and another one can be begun.
        """
        info = new_info()
        engine = self._engine
        limit = engine._timeout_ms if timeout is None else milliseconds(timeout)
        wait(lambda ms: lib.frugal_checkpoint_wait(engine._handle, self.number, ms, addressof(info)), limit)
        return told(info)

    def done(self) -> bool:
        """Whether it is on disk. Raises the cause if it has failed."""
        try:
            self.wait(0)
        except Timeout:
            return False
        return True

    def cancel(self) -> None:
        """Gives it up, if it is not on disk yet. Raises NotFound if it is not being written."""
        check(lib.frugal_checkpoint_cancel(self._engine._handle, self.number))


def checkpoints(folder: Path) -> List[CheckpointInfo]:
    """Returns the checkpoints of a folder, in the order of their numbers. Another process may write the folder.

    One that cannot be read is left out, with a warning.
    """
    name, cursor = path_bytes(folder, "folder"), c_uint64(0)
    found: List[CheckpointInfo] = []
    while True:
        info = new_info()
        before = cursor.value
        status = lib.frugal_checkpoint_next(name, byref(cursor), addressof(info))
        if status:
            error = last_error(status)
            if cursor.value == before:
                raise error
            warnings.warn(f"a checkpoint is left out: {error}", stacklevel=2)
            continue
        if info.number == 0:
            return found
        found.append(told(info))


def read_blob(folder: Path, rank: int = 0, *, number: int = 0) -> bytes:
    """Returns the blob that a rank has given for a checkpoint; number 0 is the newest. Raises NotFound without one."""
    name, number, rank = path_bytes(folder, "folder"), uint64(number, "number"), uint32(rank, "rank")
    size = c_size_t()
    status = lib.frugal_checkpoint_read_blob(name, number, rank, None, 0, byref(size))
    while status == _abi.FRUGAL_ERR_OVERFLOW:  # the newest may be another one in the next call
        blob = create_string_buffer(size.value)
        status = lib.frugal_checkpoint_read_blob(name, number, rank, blob, size.value, byref(size))
        if status == _abi.FRUGAL_OK:
            return blob.raw[: size.value]
    if status:
        raise last_error(status)
    return b""


def copy_checkpoint(folder: Path, to: Path, *, number: int = 0) -> None:
    """Copies a checkpoint into another folder, which then needs nothing of the first one; number 0 is the newest.

    The folder `to` is created if it is missing. Raises Exists if it has checkpoints.
    """
    check(lib.frugal_checkpoint_copy(path_bytes(folder, "folder"), uint64(number, "number"), path_bytes(to, "to")))
