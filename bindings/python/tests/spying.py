"""The spy between the package and the library."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from frugal import _abi


class Spy:
    """bindings/spy/spy.c: the library, with notes of the addresses that it received."""

    class Note(ctypes.Structure):
        _fields_ = [
            ("function", ctypes.c_char * 32),
            ("op_count", ctypes.c_uint64),
            ("ops", _abi.frugal_op * 16),
        ]

    def __init__(self, path: Path, real: str) -> None:
        self.abi = _abi.bind(str(path))
        self.abi.spy_calls.restype = ctypes.c_uint64
        if self.abi.spy_open(real.encode()) != 0:
            raise OSError(f"the spy cannot load {real}")

    def last(self) -> Any:
        """Returns the last call with arrays: function, op_count, ops."""
        note = Spy.Note()
        self.abi.spy_last(ctypes.byref(note))
        return note

    def calls(self) -> int:
        """Returns the number of calls of all functions."""
        return int(self.abi.spy_calls())
