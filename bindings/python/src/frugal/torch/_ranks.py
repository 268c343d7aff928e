"""Ranks that are processes of their own."""

from __future__ import annotations

import json
import os
import struct
import time
import warnings
from contextlib import contextmanager
from datetime import timedelta
from typing import (
    TYPE_CHECKING, Any, Callable, Dict, Iterable, Iterator, NamedTuple, Optional, Sequence, Tuple,
)  # fmt: skip

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


# By table, the hyper-parameters that a rank has for a step of it.
Said = Dict[str, Dict[str, Any]]

COUNT = "count of steps"
_OF_COUNT = (COUNT, "lr", "eps", "weight_decay")  # differ where an optimizer has counted other steps


def compare(step: int, rank: int, said: Said, other: int, theirs: Said, counts: bool = True) -> None:
    """An error, where two ranks have other hyper-parameters for one step of a table. `counts` False: ranks may count
    their steps alone, and there is a warning."""
    for name in said.keys() & theirs.keys():
        mine, its = said[name], theirs[name]
        alone = not counts and mine.get(COUNT) != its.get(COUNT)
        for what in mine if mine != its else ():
            if what in its and mine[what] != its[what] and not (alone and what in _OF_COUNT):
                raise ValueError(
                    f"table {name!r}, step {step}: rank {rank} says {what}={mine[what]}, rank {other}"
                    f" {what}={its[what]}; all ranks must say the same"
                )


_NONCE = 32  # bytes, by which a file is known
_HEAD = struct.Struct("<QQQ")  # a step, how often what is said has changed, and its bytes, which come after this
_NO_STEP = 2**64 - 1


class Board:
    """Where ranks in processes compare what each says of a step. Each rank has a file without a name, which it alone
    writes, and reads those of the others: a step asks no server."""

    def __init__(self, service: str, rank: int, size: int) -> None:
        self._rank = rank
        self._said = b""
        self._version = 0
        self._files: Dict[int, int] = {}  # of the others, by rank
        self._alike: Dict[int, Tuple[int, int]] = {}  # by rank, its version, and which of this one's says the same
        keys = {each: _key(f"said by rank {each} at {service}") for each in range(size)}
        store, key = keys.pop(rank)
        self._missing = keys
        self._own = os.memfd_create("frugal_torch_said")
        nonce = os.urandom(_NONCE // 2).hex()
        os.pwrite(self._own, nonce.encode() + _HEAD.pack(_NO_STEP, 0, 0), 0)
        store.set(key, f"{nonce} /proc/{os.getpid()}/fd/{self._own}")

    def __del__(self) -> None:
        for file in [self._own, *self._files.values()]:
            os.close(file)

    def say(self, step: int, said: Said, written: bytes) -> None:
        """An error, where a rank that has come to this step says something else. `written`: what is said, as `write`
        makes it."""
        if written != self._said:
            self._said = written
            self._version += 1
            os.pwrite(self._own, written, _NONCE + _HEAD.size)
        os.pwrite(self._own, _HEAD.pack(step, self._version, len(written)), _NONCE)
        # A rank that comes at the same time sees this one: each writes before it reads.
        if self._missing:
            self._find()
        for other, file in self._files.items():
            their_step, version, length = _HEAD.unpack(os.pread(file, _HEAD.size, _NONCE))
            if their_step != step or self._alike.get(other) == (version, self._version):
                continue
            theirs = os.pread(file, length, _NONCE + _HEAD.size)
            if theirs != written:
                try:
                    compare(step, self._rank, said, other, _read(theirs), counts=False)
                except ValueError:
                    self.forget()
                    raise
            self._alike[other] = version, self._version

    def forget(self) -> None:
        """The step was undone."""
        os.pwrite(self._own, _HEAD.pack(_NO_STEP, 0, 0), _NONCE)

    def _find(self) -> None:
        for other, (store, key) in list(self._missing.items()):
            if not store.check([key]):
                continue  # it has made no step
            del self._missing[other]
            nonce, path = store.get(key).decode().split(" ", 1)
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                file = -1
            if file < 0 or os.pread(file, _NONCE, 0) != nonce.encode():
                if file >= 0:
                    os.close(file)
                warnings.warn(
                    f"rank {self._rank} cannot read {path} of rank {other}, as in another PID namespace: learning rates"
                    " of the two are not compared, and all ranks must set the same",
                    stacklevel=2,
                )
                continue
            self._files[other] = file


def write(groups: Iterable[Tuple[Dict[str, Any], Sequence[str]]]) -> bytes:
    """What is said of tables, of which some have the same hyper-parameters."""
    return json.dumps(list(groups)).encode()


def _read(written: bytes) -> Said:
    return {name: numbers for numbers, names in json.loads(written) for name in names}


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
