"""The library itself, loaded once when the package is imported.

The package tries, in this order: the path in the environment variable FRUGAL_LIBRARY (a library to debug or to
test); the wheel's library, next to this file; the system's libfrugal.so.0.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from . import _abi

_SONAME = f"libfrugal.so.{_abi.VERSION[0]}"


def _load() -> ctypes.CDLL:
    bundled = Path(__file__).parent / _SONAME
    path = os.environ.get("FRUGAL_LIBRARY") or (str(bundled) if bundled.exists() else _SONAME)
    try:
        library = _abi.bind(path)
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"cannot load {path}: {error}. Install the package with pip, which builds the library, or set "
            "FRUGAL_LIBRARY to the path of libfrugal.so"
        ) from error
    version = library.frugal_version().decode()
    if version.split(".")[:2] != [str(n) for n in _abi.VERSION[:2]]:
        raise ImportError(f"{path} is version {version}; this package is for {_abi.VERSION[0]}.{_abi.VERSION[1]}")
    return library


lib = _load()
