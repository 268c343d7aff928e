"""The engine of the process, for modules that are not given a trainer."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from typing import Optional, Set, cast

import torch

import frugal

from ._ranks import world

_lock = threading.Lock()
_trainer: Optional[frugal.Trainer] = None
_pid = 0
_seed: Optional[int] = None  # of torch, that initial rows follow; None: they follow none
_states: Set[int] = set()  # of torch's generator where modules were made, as hashes


def trainer(device: object = None) -> frugal.Trainer:
    """The trainer of the process's own engine, which opens with the first module and closes at exit.

    It is on the GPU that the first module is made for (`device`, or else torch.get_default_device()), or on the CPU, and goes to
    the GPU that a module is moved to. One of a controller stays where it is: a process that uses CUDA when it makes its
    first module has it on torch.cuda.current_device().

    With FRUGAL_SERVICE in the environment the engine is the controller's there; RANK and WORLD_SIZE say which rank of how
    many this process is. Initial rows follow torch.manual_seed, as it was when the engine was opened.
    """
    global _trainer, _pid
    with _lock:
        if _trainer is None or _pid != os.getpid():
            _trainer, _pid = _open(place_of(device)), os.getpid()
        return _trainer


def place_of(device: object) -> torch.device:
    """Where PyTorch would put a tensor that is made for `device`; None is the program's default."""
    place = torch.get_default_device() if device is None else torch.device(device)  # type: ignore[call-overload]
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return cast(torch.device, place)


def refuse_meta(what: str) -> None:
    """Rows are in an engine, and not on a device of PyTorch's."""
    raise NotImplementedError(
        f"{what}: a table has no rows on the meta device, which would have to be made later. Make the module without the"
        " device; with lazy=True a row takes memory when it is used first"
    )


_TRACE = torch._C._TorchDispatchModeKey.PROXY
_FAKE = torch._C._TorchDispatchModeKey.FAKE


def in_fake_mode() -> bool:
    """Whether operations are written down (make_fx), or made of tensors without values (FakeTensorMode)."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    return torch._C._get_dispatch_mode(_TRACE) is not None or torch._C._get_dispatch_mode(_FAKE) is not None


def _open(device: torch.device) -> frugal.Trainer:
    global _seed
    place = world(alone=True)
    # Ranks of a script that seeds them apart share the tables.
    _seed = torch.initial_seed() % 2**64 if place.size == 1 else None
    engine = frugal.Engine(world_size=place.size, seed=_seed or 0)
    if engine.service and device.type == "cpu" and torch.cuda.is_initialized():
        # Such a trainer cannot go to a GPU later, and one on a GPU serves modules on the CPU, too.
        device = place_of("cuda")
    name = str(device) if device.type == "cuda" else "cpu"
    trainer = engine.create_trainer(place.rank, device=name, replace=place.again and bool(engine.service))
    atexit.register(_close, engine, trainer, os.getpid())
    return trainer


def seeded_since(trainer: frugal.Trainer) -> bool:
    """Whether initial rows of this trainer's tables follow another torch.manual_seed() than the last one: one of another
    number, or of the same, by which the generator is where it was when another module was made. So that it does not stand
    still from module to module, each draws a number."""
    if trainer is not _trainer or _seed is None:
        return False
    state = torch.default_generator.get_state()
    found = hash(ctypes.string_at(state.data_ptr(), state.nbytes))
    again = found in _states
    _states.add(found)
    torch.empty((), dtype=torch.int64, device="cpu").random_()
    return again or torch.initial_seed() % 2**64 != _seed


def _close(engine: frugal.Engine, trainer: frugal.Trainer, pid: int) -> None:
    global _trainer
    if pid == os.getpid():
        _trainer = None
        try:
            trainer.close()
        except frugal.Error:
            pass  # it was lost, and so the engine ends
        engine.close()


def _forked() -> None:
    global _lock, _trainer
    _lock, _trainer = threading.Lock(), None


os.register_at_fork(after_in_child=_forked)
