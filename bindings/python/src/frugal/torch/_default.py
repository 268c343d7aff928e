"""The engine of the process, for modules that are not given a trainer."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from typing import Optional, cast

import torch

import frugal

from ._ranks import world

_lock = threading.Lock()
_engine: Optional[frugal.Engine] = None  # that has opened before its trainer
_trainer: Optional[frugal.Trainer] = None
_pid = 0


def trainer(device: object = None) -> frugal.Trainer:
    """The trainer of the process's own engine, which opens with the first module and closes at exit.

    It is on the GPU that the first module is made for (`device`, or else torch.get_default_device()), or on the CPU,
    and goes to the GPU that a module is moved to. One of a controller stays where it is: a process that uses CUDA when
    it makes its first module has it on torch.cuda.current_device().

    With FRUGAL_SERVICE in the environment the engine is the controller's there; RANK and WORLD_SIZE say which rank of
    how many this process is. Rows that modules do not draw follow torch.manual_seed, as it was when the engine was
    opened.
    """
    global _trainer, _pid
    with _lock:
        if _trainer is None or _pid != os.getpid():
            _trainer, _pid = _open(place_of(device)), os.getpid()
        return _trainer


def engine(seed: Optional[int] = None) -> frugal.Engine:
    """The process's own engine, of one rank, before its trainer joins. `seed`: of rows that modules do not draw."""
    global _engine
    with _lock:
        if _trainer is not None or _engine is not None:
            raise RuntimeError(
                "the process's engine is open: make frugal.torch.Checkpoints before the first module, and once"
            )
        _engine = frugal.Engine(seed=_seed() if seed is None else seed, service="")
        atexit.register(_close, _engine, None, os.getpid())
        return _engine


def close_engine() -> None:
    """Takes back what engine() has opened, if no trainer has joined."""
    global _engine
    with _lock:
        if _engine is not None and _trainer is None:
            _engine.close()
            _engine = None


def _seed() -> int:
    return torch.initial_seed() % 2**64


def place_of(device: object) -> torch.device:
    """Where PyTorch would put a tensor that is made for `device`; None is the program's default."""
    place = torch.get_default_device() if device is None else torch.device(device)  # type: ignore[call-overload]
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return cast(torch.device, place)


def refuse_meta(what: str) -> None:
    """Rows are in an engine, and not on a device of PyTorch's."""
    raise NotImplementedError(
        f"{what}: a table has no rows on the meta device, which would have to be made later. Make the module without"
        " the device; with lazy=True a row takes memory when it is used first"
    )


_TRACE = torch._C._TorchDispatchModeKey.PROXY
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def in_fake_mode() -> bool:
    """Whether operations are written down (make_fx), or made of tensors without values (FakeTensorMode)."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return torch._C._get_dispatch_mode(_TRACE) is not None or torch._C._get_dispatch_mode(_FAKE) is not None


def _open(device: torch.device) -> frugal.Trainer:
    place = world(alone=True)
    # Ranks of a script that seeds them apart share the tables.
    engine = _engine
    if engine is None:
        engine = frugal.Engine(world_size=place.size, seed=_seed() if place.size == 1 else 0)
    replace = place.again and bool(engine.service)
    trainer = None
    if engine.service and device.type == "cpu" and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # Such a trainer cannot go to a GPU later, and one on a GPU serves modules on the CPU, too.
        with contextlib.suppress(frugal.DeviceError, frugal.Unsupported):
            trainer = engine.create_trainer(place.rank, device=str(place_of("cuda")), replace=replace)
    if trainer is None:
        name = str(device) if device.type == "cuda" else "cpu"
        trainer = engine.create_trainer(place.rank, device=name, replace=replace)
    atexit.register(_close, engine, trainer, os.getpid())
    return trainer


def _close(engine: frugal.Engine, trainer: Optional[frugal.Trainer], pid: int) -> None:
    global _engine, _trainer
    if pid == os.getpid():
        _engine = _trainer = None
        try:
            if trainer is not None:
                trainer.close()
        except frugal.Error:
            pass  # it was lost, and so the engine ends
        engine.close()


def _forked() -> None:
    global _engine, _lock, _trainer
    _engine, _lock, _trainer = None, threading.Lock(), None


os.register_at_fork(after_in_child=_forked)
