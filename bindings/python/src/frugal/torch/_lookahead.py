"""A loader that declares the keys of the next batches."""

from __future__ import annotations

import weakref
from collections import deque
from typing import (
    Any,
    Callable,
    Deque,
    Generic,
    Iterable,
    Iterator,
    List,
    Mapping,
    Optional,
    Sized,
    Tuple,
    TypeVar,
    Union,
)

import frugal

from . import _native
from ._modules import _Module
from ._steps import Steps, of

T = TypeVar("T")

# What forwards will get: a mapping, or pairs if a module gets several inputs.
Inputs = Union[Mapping[Any, Any], Iterable[Tuple[Any, Any]]]


class _Ahead(Generic[T]):
    """A batch that waits for its step."""

    def __init__(self, batch: T, inputs: List[Tuple[_Module, Any]], step: int) -> None:
        self.batch = batch
        self.inputs = inputs
        self.step = step
        self.declared: Optional[_native.Batch] = None


class Lookahead(Generic[T]):
    """Iterates `loader` and declares the keys of up to `depth` steps ahead.

    `keys(batch)` says what the forwards of that batch will get: a mapping from module to input, or pairs. `trainer`:
    whose steps; `depth`: default the engine's lookahead, which is also the most; `batches_per_step`: batches between
    two calls of Optimizer.step(). One iteration at a time: a second takes back what the first has declared.
    """

    def __init__(
        self,
        loader: Iterable[T],
        keys: Callable[[T], Inputs],
        *,
        trainer: frugal.Trainer,
        depth: Optional[int] = None,
        batches_per_step: int = 1,
    ) -> None:
        self._steps: Steps = of(trainer)
        self._trainer = trainer
        most = trainer.engine.lookahead
        if depth is not None and not 0 <= depth <= most:
            raise ValueError(
                f"depth is {depth} and must be within 0..{most}, the lookahead that the engine was opened with"
            )
        if batches_per_step < 1:
            raise ValueError(f"batches_per_step is {batches_per_step} and must be at least 1")
        self.loader = loader
        self.depth: int = most if depth is None else depth
        self.batches_per_step = batches_per_step
        self._keys = keys

    def __len__(self) -> int:
        if not isinstance(self.loader, Sized):
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return len(self.loader)

    def __iter__(self) -> Iterator[T]:
        self.close()
        iteration = _Iteration(self)
        self._steps.lookahead = weakref.ref(iteration)
        return iteration

    def close(self) -> None:
        """Takes back what an iteration over this trainer's steps has declared for steps that have not begun."""
        running = self._steps.lookahead
        iteration = None if running is None else running()
        if iteration is not None:
            iteration.close()


class _Iteration(Iterator[T]):
    def __init__(self, lookahead: Lookahead[T]) -> None:
        self._waiting: Deque[_Ahead[T]] = deque()  # first: `close` needs these, whatever fails below
        self._given: List[_Ahead[T]] = []  # to the loop; their step may not have begun
        self._steps = lookahead._steps
        self._trainer = lookahead._trainer
        self._keys = lookahead._keys
        self._depth = lookahead.depth
        self._per_step = lookahead.batches_per_step
        self._fetched = 0
        self._base = self._steps.undeclared()  # the step of the first batch
        self._batches: Optional[Iterator[T]] = iter(lookahead.loader)

    def __next__(self) -> T:
        try:
            self._follow()
            self._fill()
        except BaseException:
            self.close()
            raise
        if not self._waiting:
            self.close()
            raise StopIteration
        ahead = self._waiting.popleft()
        self._given.append(ahead)
        return ahead.batch

    def __del__(self) -> None:
        # Comes from any thread, and in the middle of anything: does not wait for a trainer that may wait for others.
        self._steps.cancel_later(self._take())

    def close(self) -> None:
        """Takes the declarations back."""
        self._batches = None
        self._steps.cancel_later(self._take())
        self._steps.cancel()

    def _take(self) -> List[_native.Batch]:
        given, self._given = self._given, []
        waiting, self._waiting = self._waiting, deque()
        return [ahead.declared for ahead in (*given, *waiting) if ahead.declared is not None]

    def _follow(self) -> None:
        """Moves declarations, if the loop took more or fewer steps than there were batches for."""
        with self._steps.lock:
            now = self._steps.next
            self._given = [ahead for ahead in self._given if ahead.step >= now]
            shift = now - self._waiting[0].step if self._waiting else 0
            if not shift:
                return
            self._steps.cancel_later(
                [ahead.declared for ahead in (*self._given, *self._waiting) if ahead.declared is not None]
            )
            self._steps.cancel()
            self._given = []
            self._base += shift
            for ahead in self._waiting:
                ahead.step += shift
                self._declare(ahead)

    def _fill(self) -> None:
        while self._batches is not None:
            step = self._base + self._fetched // self._per_step
            if step > self._steps.next + self._depth:
                return
            try:
                batch = next(self._batches)
            except StopIteration:
                self._batches = None
                return
            wanted = self._keys(batch)
            inputs = list(wanted.items()) if isinstance(wanted, Mapping) else list(wanted)
            self._fetched += 1
            ahead = _Ahead(batch, inputs, step)
            self._declare(ahead)
            self._waiting.append(ahead)

    def _declare(self, ahead: _Ahead[T]) -> None:
        declarations = []
        for module, value in ahead.inputs:
            if not isinstance(module, _Module) or module.trainer is not self._trainer:
                raise ValueError(
                    "keys(batch) has to name modules of frugal.torch that belong to the lookahead's trainer"
                )
            declarations += module._declarations(value)
        ops = _native.Ops(len(declarations))
        for feature, keys in declarations:
            ops.add(feature.table.handle, _native.POOL_NONE, feature.padding, keys)
        ahead.declared = self._steps.declare(ahead.step, ops)
