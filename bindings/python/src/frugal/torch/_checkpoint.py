"""Checkpoints of a model and its optimizers. The engine's checkpoint has the tables; its blob has all else.

No row of a table is copied: state_dict() is asked for what is in no table (`_state.without_tables`).
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import dataclasses
import io
import os
import time
import warnings
from typing import TYPE_CHECKING, Any, Dict, Iterator, Optional, Set, Tuple, Union

import torch

import frugal
from frugal import _abi
from frugal._engine import SERVICE

from . import _default, _hook, _ranks, _state, _steps
from ._anchor import Anchor
from ._optimizer import Optimizer
from ._weight import Weight

if TYPE_CHECKING:
    from frugal._engine import Path

_FORMAT, _VERSION = b"frugal.torch\n", 1
_UNSUPPORTED, _TOO_NEW = _abi.STATUS["FRUGAL_ERR_UNSUPPORTED"], _abi.STATUS["FRUGAL_ERR_TOO_NEW"]
_PAUSE = 0.001  # seconds between two questions whether a GPU has finished


class Checkpoints:
    """Checkpoints of a model and its optimizers in a folder, of which one is restored.

    checkpoints = frugal.torch.Checkpoints("checkpoints")              # before the first module
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    extra = checkpoints.load(model, optimizer)                         # None: there is no checkpoint yet
    for i in range(extra["i"] if extra else 0, steps):
        train(model, optimizer, i)
        if i % 1000 == 999:
            checkpoints.save(model, optimizer, extra={"i": i + 1})     # training goes on while it is written

    folder: created if it is missing. One process at a time writes it.
    keep: how many checkpoints without a name stay, the newest ones.
    restore: the number of a checkpoint, or a name, of which the newest is taken. None: the newest of all. Later
    checkpoints than that stay, and save() goes on after them.
    engine: one without trainers, of whose trainer the modules will be. None: the engine of the process.

    A program makes the same modules as before, in the same order. They find their tables restored, without a warning.
    Until load() returns, what the program writes to the rows of these tables is dropped, such as initial rows by
    torch.nn.init; a step of them is an error. Ranks in several processes, and engines of a controller, have no such
    checkpoints yet.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        restore: Union[int, str, None] = None,
        engine: Optional[frugal.Engine] = None,
    ) -> None:
        _check_alone(engine)
        found = _find(folder, restore)
        state = None if found is None else _read(folder, found.number)
        seed = None if state is None else state["seed"]
        self.restored: Optional[frugal.CheckpointInfo] = None
        """The checkpoint that was restored; None: there was none."""
        self._own = engine is None
        self._seed: Optional[int] = None
        if engine is None:
            self._seed = _default._seed() if seed is None else seed
            engine = _default.engine(self._seed)
        elif list(engine._trainers) or engine.tables():
            raise RuntimeError("the engine has trainers or tables: make frugal.torch.Checkpoints before them")
        self._engine = engine
        self._shared = _steps.shared_of(engine)
        self._state = state
        self._loaded = state is None
        self._ticket: Optional[frugal.Checkpoint] = None
        self._pid = os.getpid()
        try:
            engine.open_folder(folder, keep=keep)
            if found is not None and state is not None:
                self.restored = engine.restore(number=found.number)
                self._shared.restored = {name: _restored(table) for name, table in state["tables"].items()}
                _steps.unloaded.append(self._shared)
        except BaseException:
            if self._own:
                _default.close_engine()
            raise
        self._there = set(engine.tables())

    def __repr__(self) -> str:
        return f"<frugal.torch.Checkpoints, restored {self.restored}>"

    def save(
        self, model: torch.nn.Module, *parts: Any, extra: Any = None, name: Optional[str] = None
    ) -> frugal.Checkpoint:
        """Begins a checkpoint, and returns its ticket. Call it where state_dict() would be called: after a step.

        parts: optimizers, and what else has state_dict() and load_state_dict(): schedulers, a GradScaler.
        extra: what load() is to return, such as the place of the data reader. It and all state have plain types, which
        torch.load(weights_only=True) reads: numbers, str, bytes, tensors, and lists, tuples and dicts of them.
        name: with one the checkpoint is kept until Engine.delete_checkpoint().

        The state of PyTorch's random generators is saved, too. A checkpoint that is still being written is waited for;
        if it has failed, a warning says why, and this one is begun. At the exit of the process the last one is waited
        for. An engine that the program itself closes cancels it: call wait() before.
        """
        if not self._loaded:
            raise RuntimeError("the checkpoint that was restored is not loaded: call load() before save()")
        self._check_engine(model, parts)
        while True:
            self._await_last()
            with contextlib.ExitStack() as stack:
                for steps in _steps.of_engine(self._engine):
                    stack.enter_context(steps.lock)
                    self._await_commit(steps)
                state = self._gather(model, parts, extra)
                _check_plain(state, "", set())
                file = io.BytesIO(_FORMAT)
                file.seek(len(_FORMAT))
                torch.save(state, file)
                try:
                    self._ticket = self._engine.checkpoint(name, blob=file.getvalue())
                    break
                except frugal.Busy:  # another thread has begun one
                    self._ticket = frugal.Checkpoint(self._engine, 0)
        if self._own:
            # After whatever closes the engine at exit was registered, and so before it runs.
            atexit.unregister(self._at_exit)
            atexit.register(self._at_exit)
        return self._ticket

    def load(self, model: torch.nn.Module, *parts: Any) -> Any:
        """Gives a model, and the parts that save() got, the state of the checkpoint that was restored. Returns the
        `extra` of save(), or None if there was no checkpoint.

        Tensors of `extra` are on the CPU. What is missing or of another kind is an error that names it, as with
        load_state_dict(strict=True). A table that the checkpoint lacks begins anew, with one warning.
        """
        self._check_engine(model, parts)
        if self._loaded and self.restored is not None:
            raise RuntimeError("the checkpoint is loaded already: its state is for one call of load()")
        state = self._state
        if state is None:
            return None
        self._check_tables(model, state["weights"])
        kinds = [type(part).__name__ for part in parts]
        saved = [part["class"] for part in state["parts"]]
        if kinds != saved:
            raise ValueError(f"the checkpoint has the state of {saved or 'no parts'}, and load() was given {kinds}")
        _load_model(model, state["model"])
        for part, was in zip(parts, state["parts"]):
            if isinstance(part, Optimizer):
                part._load_without_tables(was["state"])
            elif isinstance(part, torch.optim.Optimizer):
                _hook.load_without_tables(part, was["state"])
            else:
                part.load_state_dict(was["state"])
        _set_random(state["random"])
        self._loaded, self._state = True, None
        # A module that is made from here on finds a table that was restored as one that exists.
        self._shared.restored.clear()
        _steps.unloaded.remove(self._shared)
        return state["extra"]

    def wait(self, timeout: Optional[float] = None) -> Optional[frugal.CheckpointInfo]:
        """Waits until the checkpoint that save() has begun last is on disk; None: there is none. Raises the cause if it
        has failed."""
        return None if self._ticket is None else self._ticket.wait(timeout)

    def _await_last(self) -> None:
        try:
            self.wait()
        except frugal.Timeout:
            raise
        except frugal.Error as error:
            warnings.warn(f"the last checkpoint has failed, and the one before stays: {error}", stacklevel=3)
        self._ticket = None

    def _at_exit(self) -> None:
        if os.getpid() == self._pid and self._engine._finalizer.alive:
            self._await_last()

    def _await_commit(self, steps: _steps.Steps) -> None:
        """Waits until the step that the trainer has ended last is committed: its work on a GPU may go on."""
        begin = time.monotonic()
        while steps.next > 0:
            committed = self._engine.committed_step()
            if committed is not None and committed >= steps.next - 1:
                break
            if (time.monotonic() - begin) * 1000 > self._engine._timeout_ms:
                raise frugal.Timeout(f"step {steps.next - 1} is not committed", _abi.STATUS["FRUGAL_ERR_TIMEOUT"])
            time.sleep(_PAUSE)

    def _gather(self, model: torch.nn.Module, parts: Tuple[Any, ...], extra: Any) -> Dict[str, Any]:
        tables = {
            name: {
                "optimizer": _written(table.optimizer),
                "made_as": _written(table.made_as),
                "stepped": table.stepped,
                "written": table.written,
            }
            for steps in _steps.of_engine(self._engine)
            for name, table in steps.tables.items()
            if not table.is_gone()
        }
        return {
            "version": _VERSION,
            "seed": self._seed,
            "tables": tables,
            "weights": {name: anchor.table.name for name, anchor in _anchors(model)},
            "model": _dense(model),
            "parts": [{"class": type(part).__name__, "state": _part(part)} for part in parts],
            "random": _random(),
            "extra": extra,
        }

    def _check_engine(self, model: torch.nn.Module, parts: Tuple[Any, ...]) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}: a ModuleList for several")
        anchors = [anchor for _, anchor in _anchors(model)]
        for part in parts:
            if not (callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None))):
                raise TypeError(f"a {type(part).__name__} has no state_dict() and load_state_dict(): give it in extra")
            if isinstance(part, torch.optim.Optimizer):
                anchors += [p for group in part.param_groups for p in group["params"] if isinstance(p, Anchor)]
        for anchor in anchors:
            if anchor.trainer.engine is not self._engine:
                raise ValueError(
                    f"table {anchor.table.name!r} is in another engine than the checkpoints: make its module after"
                    " frugal.torch.Checkpoints, and with a trainer of the same engine, if with one"
                )

    def _check_tables(self, model: torch.nn.Module, saved: Dict[str, str]) -> None:
        now = {name: anchor.table.name for name, anchor in _anchors(model)}
        known = {name: table for name, table in now.items() if table in self._there}
        if known != saved:
            missing = [f"{name} (table {saved[name]!r})" for name in saved if name not in known]
            others = [
                f"{name} (table {table!r}" + (f", saved of {saved[name]!r})" if name in saved else ")")
                for name, table in known.items()
                if saved.get(name) != table
            ]
            raise ValueError(
                f"the tables of the model are not those of the checkpoint. Missing: {missing}. Others: {others}."
                " Make the same modules in the same order, or name their tables"
            )
        new = sorted(set(now.values()) - self._there)
        if new:
            warnings.warn(f"the checkpoint lacks the tables {new}, which begin with new rows", stacklevel=3)


def _check_alone(engine: Optional[frugal.Engine]) -> None:
    """Before anything is opened."""
    if engine is None:
        service, size = os.environ.get(SERVICE, ""), _ranks.size()
    else:
        service, size = engine.service, engine.world_size
    if not service and size == 1:
        return
    what = f"the engine of the controller at {service}" if service else f"{size} ranks"
    raise frugal.Unsupported(
        f"frugal.torch.Checkpoints of {what}: one process with an engine of its own can write them. Save state_dict()"
        " of the model and of the optimizer by torch.save() instead",
        _UNSUPPORTED,
    )


def _find(folder: Path, wanted: Union[int, str, None]) -> Optional[frugal.CheckpointInfo]:
    try:
        found = frugal.checkpoints(folder)
    except frugal.NotFound:
        found = []
    if wanted is None:
        return found[-1] if found else None
    for info in reversed(found):
        if wanted in (info.name, info.number):
            return info
    there = ", ".join(f"{info.number}" + (f" ({info.name})" if info.name else "") for info in found) or "none"
    raise frugal.NotFound(
        f"{os.fsdecode(folder)} has no checkpoint {wanted!r}: it has {there}", _abi.STATUS["FRUGAL_ERR_NOT_FOUND"]
    )


def _read(folder: Path, number: int) -> Dict[str, Any]:
    what = f"checkpoint {number} in {os.fsdecode(folder)}"
    try:
        blob = frugal.read_blob(folder, number=number)
    except frugal.NotFound:
        blob = b""
    if not blob.startswith(_FORMAT):
        raise ValueError(f"{what} was not written by frugal.torch.Checkpoints: restore it with Engine.restore()")
    state = torch.load(io.BytesIO(blob[len(_FORMAT) :]), map_location="cpu", weights_only=True)
    if state["version"] > _VERSION:
        raise frugal.TooNew(
            f"{what} has version {state['version']} of the state of PyTorch, and {_VERSION} is known here", _TOO_NEW
        )
    return dict(state)


def _written(optimizer: frugal.Optimizer) -> Dict[str, Any]:
    return {"class": type(optimizer).__name__, "fields": dataclasses.asdict(optimizer)}


def _optimizer(written: Dict[str, Any]) -> frugal.Optimizer:
    made: frugal.Optimizer = getattr(frugal, written["class"])(**written["fields"])
    return made


def _restored(table: Dict[str, Any]) -> _steps.Restored:
    return _steps.Restored(
        _optimizer(table["optimizer"]), _optimizer(table["made_as"]), table["stepped"], table["written"]
    )


def _anchors(model: torch.nn.Module) -> Iterator[Tuple[str, Anchor]]:
    """The tables' parameters, by each name that the model has for them."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if isinstance(parameter, Anchor):
            yield name, parameter


def _dense(model: torch.nn.Module) -> Dict[str, Any]:
    with _state.without_tables():
        state = model.state_dict()
    # A table's parameter in another layer, such as a decoder, is there as a Weight.
    return {name: value for name, value in state.items() if not isinstance(value, (Anchor, Weight))}


def _load_model(model: torch.nn.Module, state: Dict[str, Any]) -> None:
    with _state.without_tables():
        result = model.load_state_dict(state, strict=False)
    missing = sorted(set(result.missing_keys) - {name for name, _ in _anchors(model)})
    if missing or result.unexpected_keys:
        raise RuntimeError(
            f"the model is not that of the checkpoint, which lacks {missing or 'nothing'}, and has besides"
            f" {result.unexpected_keys or 'nothing'}"
        )


def _part(part: Any) -> Any:
    if isinstance(part, Optimizer):
        return part._without_tables()
    if isinstance(part, torch.optim.Optimizer):
        return _hook.saved_without_tables(part)
    return part.state_dict()


def _random() -> Dict[str, Any]:
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {"cpu": torch.get_rng_state(), "cuda": on_gpus}


def _set_random(state: Dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and len(state["cuda"]) <= torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter}
_LISTS = {list, tuple, set, torch.Size}
_DICTS = {dict, collections.OrderedDict}


def _check_plain(value: Any, where: str, above: Set[int]) -> None:
    """An error for what torch.load(weights_only=True) would refuse, when it is too late."""
    kind = type(value)
    if kind in _PLAIN:
        return
    if kind in _LISTS or kind in _DICTS:
        if id(value) in above:
            raise ValueError(f"{where} contains itself")
        above.add(id(value))
        for name, item in value.items() if kind in _DICTS else enumerate(value):
            if kind in _DICTS:
                _check_plain(name, f"a key of {where or 'the state'}", above)
            _check_plain(item, f"{where}[{name!r}]" if where else str(name), above)
        above.remove(id(value))
        return
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        raise TypeError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which torch.load(weights_only=True) does not read:"
            " give numbers, str, bytes, tensors, and lists, tuples and dicts of them"
        ) from error
