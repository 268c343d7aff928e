"""Ranks that are processes of their own."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, NamedTuple, Optional, Tuple

import torch

import frugal
from frugal._engine import SERVICE
from frugal._wait import WORD_MS

if TYPE_CHECKING:
    from frugal._engine import Path


@contextmanager
def attach(
    service: Optional[Path] = None, *, cache_bytes: int = 0, cache_ratio: float = 0.0, **options: Any
) -> Iterator[frugal.Trainer]:
    """The trainer of this process, which torchrun has started; for a `with` block.

    The engine is the controller's at `service` (None: what the environment variable FRUGAL_SERVICE says); `options`
    are those of frugal.Engine, alike on all ranks. Rank and number of ranks are RANK and WORLD_SIZE of the environment.
    After torchrun has restarted the ranks, a trainer takes the place of the one that had its rank before.
    """
    place = world(service)
    with frugal.Engine(world_size=place.size, service=service, **options) as engine:
        with engine.create_trainer(
            place.rank, cache_bytes=cache_bytes, cache_ratio=cache_ratio, replace=place.again and bool(engine.service)
        ) as trainer:
            yield trainer


class World(NamedTuple):
    """Which rank of how many this process is, and whether torchrun has started the ranks anew."""

    rank: int
    size: int
    again: bool


def world(service: Optional[Path] = None, *, alone: bool = False) -> World:
    """What the environment says, or torch.distributed. `alone`: without both this process is the only rank, and not an
    error."""
    known: Tuple[Optional[int], Optional[int]] = _group() or ((0, 1) if alone else (None, None))
    rank, size = _number("RANK", known[0]), _number("WORLD_SIZE", known[1])
    if _number("LOCAL_WORLD_SIZE", size) != size:
        raise RuntimeError(f"{size} ranks on several machines: those of one machine can share an engine")
    if size > 1 and not (os.environ.get(SERVICE) if service is None else service):
        raise RuntimeError(
            f"no address of a controller, which {size} ranks in processes need: start frugal-controller ADDRESS,"
            f" and give the address as `service` or in {SERVICE}"
        )
    return World(rank, size, _number("TORCHELASTIC_RESTART_COUNT", 0) > 0)


def size() -> int:
    """How many ranks the environment says, or torch.distributed."""
    group = _group()
    return _number("WORLD_SIZE", 1 if group is None else group[1])


def _group() -> Optional[Tuple[int, int]]:
    """Rank and number of ranks that a script has told torch.distributed, as one without torchrun does."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def are_told(rank: int, size: int) -> bool:
    """Whether torch.distributed has these ranks, of which there are several."""
    if size == 1:
        return False
    group = _group()
    if group is not None and group[1] == size and group[0] != rank:
        raise RuntimeError(f"rank {rank} of the tables is rank {group[0]} of torch.distributed: let RANK say the same")
    return group == (rank, size)


_turns: Dict[str, int] = {}  # how often the ranks of now have done what has this name


def _key(name: str) -> Tuple[Any, str]:
    """torch.distributed's store, and what this rank and the others write there when they do this the next time. The
    store may be that of ranks which torchrun has started before."""
    store: Any = torch.distributed.distributed_c10d._get_default_store()
    number = _turns[name] = _turns.get(name, 0) + 1
    return store, f"frugal/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{name}/{number}"


class Load:
    """The load of a table's rows that all ranks make. A rank whose state lacks the table says so, and does not wait."""

    _lacking: Dict[str, str] = {}  # by table, what this rank has said last

    def __init__(self, table: str, rank: int) -> None:
        self._table, self._rank = table, rank
        self._store, self._key = _key(f"load of table {table!r}")
        said = self._lacking.pop(table, None)
        if said is not None:
            self._store.delete_key(said)  # it may have been alone, and others wait for it in this load

    def lacks(self) -> None:
        self._store.set(self._key, str(self._rank))
        self._lacking[self._table] = self._key

    def check(self, name: str) -> None:
        """An error, where a rank that this one waits for has said that. This rank's turn to do what has this name is
        then its next one."""
        if self._store.check([self._key]):
            _turns[name] -= 1
            rank = self._store.get(self._key).decode()
            raise RuntimeError(
                f"the state that rank {rank} has loaded lacks table {self._table!r}, and that of rank {self._rank} has"
                " it: load the same state on all ranks"
            )


def meet(name: str, size: int, tell: Callable[[], None], load: Optional[Load] = None) -> None:
    """Waits for all ranks to come here. `tell`: says once that one waits long."""
    store, key = _key(name)
    begin = time.monotonic()
    told = False
    come = store.add(key, 1)
    while come < size:
        waited = time.monotonic() - begin
        if waited > store.timeout.total_seconds():
            raise RuntimeError(f"{name}: {come} of {size} ranks have come within the time-out of init_process_group()")
        if waited * 1000 >= WORD_MS:
            try:
                if load is not None:
                    load.check(name)
            except RuntimeError:
                store.add(key, -1)
                raise
            if not told:
                told = True
                tell()
        time.sleep(0.001)
        come = store.add(key, 0)


@contextmanager
def in_turn(what: str, rank: int, size: int, load: Optional[Load] = None) -> Iterator[bool]:
    """The others come when rank 0 has left the block, in which it makes this: a table with its rows, or the state of
    one. They take what rank 0 has, as with DistributedDataParallel. False: the ranks are none of torch.distributed's,
    and no rank waits."""
    if not are_told(rank, size):
        yield False
        return
    store, key = _key(what)
    if rank != 0:
        begin = time.monotonic()
        while load is not None and time.monotonic() - begin < store.timeout.total_seconds():
            try:
                store.wait([key], timedelta(milliseconds=max(WORD_MS, 1)))
                break
            except RuntimeError:  # not yet
                load.check(what)
        try:
            made = store.get(key) == b"made"  # waits for it
        except RuntimeError as error:
            raise RuntimeError(
                f"{what}: rank 0 has not made it within the time-out of init_process_group(): make the same modules,"
                f" and load the same states, in the same order on all ranks ({error})"
            ) from None
        if not made:
            raise RuntimeError(f"{what}: rank 0 could not make it, and says why")
        yield True
        return
    try:
        yield True
    except BaseException:
        store.set(key, "failed")
        raise
    store.set(key, "made")


def _number(name: str, otherwise: Optional[int] = None) -> int:
    text = os.environ.get(name)
    if text is None:
        if otherwise is None:
            raise RuntimeError(
                f"{name} is not in the environment: torchrun sets it; without torchrun open a frugal.Engine, and say"
                " world_size and create_trainer(rank)"
            )
        return otherwise
    return int(text)
