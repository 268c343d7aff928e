"""The usual forward, backward and step in C++ (bindings/python/native), where they were built for this Python and this
torch. All that they do is done in Python as well: there is no word where they are not.

FRUGAL_TORCH_NATIVE=0 in the environment leaves them out. Another value is the file that is to be loaded.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import importlib.util
import os
import sysconfig
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Optional, Tuple

import torch
from torch.utils._device import DeviceContext

from frugal._lib import lib

from . import _native

if TYPE_CHECKING:
    from ._anchor import Anchor
    from ._lookup import Lookup

_NAME = "_direct"
_REVISION = 12  # of what is said to each other here and there


def _load() -> Any:
    said = os.environ.get("FRUGAL_TORCH_NATIVE", "")
    if said == "0":
        return None
    beside = Path(__file__).parent / f"{_NAME}.torch-{torch.__version__}{sysconfig.get_config_var('EXT_SUFFIX')}"
    path = said or str(beside)
    if not os.path.exists(path):
        return None
    loader = importlib.machinery.ExtensionFileLoader(f"{__package__}.{_NAME}", path)
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError:
        return None
    return module if getattr(module, "REVISION", 0) == _REVISION else None


native: Any = _load()  # or None


def tell(held: type, part: type, gradient: type, lookup: type, count: type) -> None:
    """Sets which classes are those of a usual backward and step."""
    if native is not None:
        native.tell(type(threading.RLock()), held, part, gradient, lookup, count, DeviceContext)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def never(*args: Any) -> Optional[torch.Tensor]:
    """The forward of a module that has no usual one."""
    return None


def forward(lookup: "Lookup", anchor: "Anchor", first: str, bags: bool) -> Callable[..., Optional[torch.Tensor]]:
    """Called with a module of one table, its input, its offsets and its per_sample_weights, gives the output; or None,
    if Python is to do it. The rows of a module of bags that are not to be pooled are for their maximum."""
    if native is None:
        return never
    (feature,) = lookup.features
    table, pooling, padding, _ = feature
    padded = padding is not None
    shows = padded and pooling == _native.POOL_NONE and not table.hashed  # see Feature.hidden
    made: Callable[..., Optional[torch.Tensor]] = native.Forward(
        _address(lib.frugal_lookup), _address(lib.frugal_step_begin), _address(lib.frugal_read),
        lookup.steps.trainer.engine.handle, table.handle, table.dim, pooling, padding or 0, bags, padded, shows,
        lookup, table, lookup.steps, anchor, lookup.places[0], first,
    )  # fmt: skip
    return made


class _Calls:
    """The library's calls of a step, and where they are."""

    begin: Any = None
    push: Any = None
    end: Any = None
    at: Tuple[int, int, int] = (0, 0, 0)

    def look(self) -> None:
        self.begin, self.push, self.end = lib.frugal_step_begin, lib.frugal_push_grad, lib.frugal_step_end
        self.at = _address(self.begin), _address(self.push), _address(self.end)

    def are_as_now(self) -> bool:
        begin, push, end = lib.frugal_step_begin, lib.frugal_push_grad, lib.frugal_step_end
        return begin is self.begin and push is self.push and end is self.end


_calls = _Calls()


def step(optimizer: torch.optim.Optimizer, known: Any) -> bool:
    """Makes the step of the tables that an optimizer has, and hides their gradients; or does nothing and is false."""
    if native is None:
        return False
    if not _calls.are_as_now():
        _calls.look()
    return native.step(*_calls.at, optimizer, known) is True


def show(known: Any) -> bool:
    """Gives the gradients back that a step has hidden; or does nothing and is false."""
    return native is not None and native.show(known) is True
