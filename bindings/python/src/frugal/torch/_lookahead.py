"""A loader that declares the keys of the next batches."""

from __future__ import annotations

import statistics
import time
import warnings
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
    cast,
)

import frugal

from . import _native
from ._modules import _Module
from ._steps import Steps, of

T = TypeVar("T")

_LOOK = 16  # batches from one reading of the engine's counters to the next

# What forwards will get: a mapping, or pairs if a module gets several inputs.
Inputs = Union[Mapping[Any, Any], Iterable[Tuple[Any, Any]]]


_clock = time.perf_counter


class _Trial:
    """Whether declaring pays, by the time of a batch: the loop runs some batches with it and some without, in turns.

    What follows a turn's beginning, or an iteration's, is left out until nothing of before is ahead any more. An
    iteration that ends before that is timed as a whole, but for the first. Two turns are enough where they differ much.
    The next epochs go on with what was found. Long afterwards the trial is made again, since loops change.
    """

    TURNS = 4  # with, without, with, without
    COUNT = 32  # batches that are timed in a turn
    FEW = 8  # that are enough where they take
    SECONDS = 0.25
    AGAIN = 8192  # batches between trials
    CLEAR = 1.1  # a ratio of times that is enough
    GAIN = 1.02  # what a declaration has to be worth: less is noise, and its cost is not

    def __init__(self, depth: int) -> None:
        self._ahead = depth + 2
        self.on = True  # declare now
        self._begin()

    def _begin(self) -> None:
        self._warm = False  # the first iteration does much that later ones do not
        self._turn = 0
        self._times: Tuple[List[float], List[float]] = ([], [])
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._batches = 0  # that were timed
        self._seconds = 0.0
        self._leave_out(whole=False)

    def _leave_out(self, whole: bool) -> None:
        self._skip = self._ahead
        self._asked: List[float] = []  # when the loop has asked for batches
        self._whole = whole  # that is since its beginning, and nothing of it is timed

    def resume(self) -> None:
        """Another iteration of the loop begins."""
        if self._whole and len(self._asked) > 1:
            if self._warm:
                self._took(self._asked[-1] - self._asked[0], len(self._asked) - 1)
            self._warm = True
        self._leave_out(whole=True)

    def batch(self) -> None:
        """The loop asks for a batch."""
        if self._turn == self.TURNS:
            self._batches += 1
            if self._batches > self.AGAIN:
                self.on = True
                self._begin()
            return
        self._asked.append(_clock())
        if self._skip:
            self._skip -= 1
            return
        self._whole = False
        self._took(self._asked[-1] - self._asked[-2], 1)

    def _took(self, seconds: float, batches: int) -> None:
        self._times[self._turn % 2].append(seconds / batches)
        self._batches += batches
        self._seconds += seconds
        short = self._batches < self.FEW or self._seconds < self.SECONDS
        if short and self._batches < self.COUNT:
            return
        self._turn += 1
        self._begin_turn()
        self.on = self._turn % 2 == 0
        if self.on:
            with_, without = (statistics.median(times) for times in self._times)
            if self._turn == self.TURNS or with_ > self.CLEAR * without or without > self.CLEAR * with_:
                self._turn = self.TURNS
                self.on = with_ * self.GAIN <= without


class _Ahead(Generic[T]):
    """A batch that waits for its step."""

    def __init__(self, batch: T, inputs: List[Tuple[_Module, Any]], step: int, device: object) -> None:
        self.batch = batch
        self.inputs = inputs
        self.step = step
        self.device = device  # the trainer's when the batch was taken
        self.declared: Optional[_native.Batch] = None


class Lookahead(Generic[T]):
    """Iterates `loader` and declares the keys of up to `depth` steps ahead.

    `keys(batch)` says what the forwards of that batch will get: a mapping from module to input, or pairs. `trainer`:
    whose steps (default: that of the modules which the first batch names); `depth`: default the engine's lookahead,
    which is also the most; `batches_per_step`: batches between two calls of Optimizer.step(). One iteration of a
    trainer's declares at a time, the newest: an older one takes back what it has declared and goes on without
    declaring, until the newer one is over. `measure`: it times some batches with and some without declarations, and
    goes on with what is faster.
    """

    def __init__(
        self,
        loader: Iterable[T],
        keys: Callable[[T], Inputs],
        *,
        trainer: Optional[frugal.Trainer] = None,
        depth: Optional[int] = None,
        batches_per_step: int = 1,
        measure: bool = True,
    ) -> None:
        if depth is not None and depth < 0:
            raise ValueError(f"depth is {depth} and must be at least 0")
        if batches_per_step < 1:
            raise ValueError(f"batches_per_step is {batches_per_step} and must be at least 1")
        self.loader = loader
        self.depth = depth
        self.batches_per_step = batches_per_step
        self.measure = measure
        self._keys = keys
        self._trainer: Optional[frugal.Trainer] = None
        self.warned = False
        if trainer is not None:
            self._belong_to(trainer)

    def __len__(self) -> int:
        if not isinstance(self.loader, Sized):
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return len(self.loader)

    def __iter__(self) -> Iterator[T]:
        iteration = _Iteration(self)
        if self._trainer is not None:
            iteration.belong_to(self._trainer)
        return iteration

    def close(self) -> None:
        """Takes back what an iteration over this trainer's steps has declared for steps that have not begun. If it goes
        on, it declares again."""
        if self._trainer is not None:
            running = _running(of(self._trainer))
            if running is not None:
                running.retire()

    def _belong_to(self, trainer: frugal.Trainer) -> None:
        of(trainer)  # checks the type
        most = trainer.engine.lookahead
        if self.depth is None:
            self.depth = most
        elif self.depth > most:
            raise ValueError(
                f"depth is {self.depth} and must be within 0..{most}, the lookahead that the engine was opened with"
            )
        self._trainer = trainer


def _running(steps: Steps) -> Optional["_Iteration[Any]"]:
    """The iteration that declares."""
    reference = steps.lookahead
    return None if reference is None else cast("Optional[_Iteration[Any]]", reference())


class _Iteration(Iterator[T]):
    def __init__(self, lookahead: Lookahead[T]) -> None:
        self._waiting: Deque[_Ahead[T]] = deque()  # first: `close` needs these, whatever fails below
        self._given: List[_Ahead[T]] = []  # to the loop; their step may not have begun
        self._steps: Optional[Steps] = None
        self._lookahead = lookahead
        self._keys = lookahead._keys
        self._depth = 0
        self._per_step = lookahead.batches_per_step
        self._fetched = 0  # since the batch that was for step _base
        self._base = 0
        self._trial: Optional[_Trial] = None
        self._told: Optional[Tuple[int, int]] = None  # keys looked up, and of these undeclared, when last asked
        self._asked = 0  # batches since then
        self._batches: Optional[Iterator[T]] = iter(lookahead.loader)

    def belong_to(self, trainer: frugal.Trainer) -> None:
        """Becomes the iteration that declares for this trainer."""
        steps = of(trainer)
        assert self._lookahead.depth is not None
        self._depth = self._lookahead.depth
        self._trainer = trainer
        if self._lookahead.measure and self._depth:
            loop = self._depth, self._per_step, getattr(self._keys, "__code__", type(self._keys))
            trial = steps.trials.get(loop)
            if trial is None:
                steps.trials.clear()
                trial = steps.trials[loop] = _Trial(self._depth)
            trial.resume()
            self._trial = trial
        with steps.lock:
            before = _running(steps)
            if before is not None:
                before.retire()
            self._steps = steps
            steps.lookahead = weakref.ref(self)

    def __next__(self) -> T:
        try:
            if self._steps is None:
                self._first()
            else:
                if self._trial is not None:
                    self._trial.batch()
                    if not self._trial.on and not self._waiting and self._batches is not None:
                        return next(self._batches)
                self._look(self._steps)
                declare = self._follow(self._steps) and (self._trial is None or self._trial.on)
                self._fill(self._steps, declare)
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
        if self._steps is not None:
            self._steps.cancel_later(self._take())

    def close(self) -> None:
        """Is over."""
        self._batches = None
        self._waiting_are_over()
        self.retire()

    def moved(self) -> None:
        """The trainer goes to another device, where times are others."""
        self.retire()
        self._trial = None

    def retire(self) -> None:
        """Takes the declarations back. The next Lookahead may declare."""
        steps = self._steps
        if steps is None:
            return
        if _running(steps) is self:
            steps.lookahead = None
        steps.cancel_later(self._take())
        steps.cancel()

    def _waiting_are_over(self) -> None:
        self._given += self._waiting
        self._waiting.clear()

    def _take(self) -> List[_native.Batch]:
        """What is declared, and forgets that it is."""
        taken = []
        for ahead in (*self._given, *self._waiting):
            if ahead.declared is not None:
                taken.append(ahead.declared)
                ahead.declared = None
        self._given = []
        return taken

    def _look(self, steps: Steps) -> None:
        """One warning where forwards look up other keys than `keys` says."""
        if self._trial is not None and not self._trial.on:
            self._asked, self._told = 0, None
            return
        self._asked += 1
        if self._asked < _LOOK or self._lookahead.warned:
            return
        self._asked = 0
        stats = steps.trainer.engine.stats()
        now = stats["keys_looked_up"], stats["keys_undeclared"]
        before, self._told = self._told, now
        if before is None or steps.world_size > 1 or not self._depth:
            return
        looked_up, undeclared = now[0] - before[0], now[1] - before[1]
        # A key that was not declared counts when it is looked up, and when it is pushed again. An eighth of them may be
        # of what comes between, as a batch of another loop.
        if 4 * undeclared > looked_up:
            self._lookahead.warned = True
            warnings.warn(
                f"Lookahead: {(undeclared + 1) // 2} of {looked_up} keys that forwards looked up were not declared:"
                " does keys(batch) say of each module what its forward gets?",
                stacklevel=3,
            )

    def _first(self) -> None:
        """Finds the trainer by the first batch."""
        ahead = self._fetch(0)
        if ahead is None:
            return
        for module, _ in ahead.inputs:
            if isinstance(module, _Module):
                if self._lookahead._trainer is None:
                    self._lookahead._belong_to(module.trainer)
                self.belong_to(self._lookahead._trainer or module.trainer)
                break
        if self._steps is None:
            raise ValueError(
                "keys(batch) names no module of frugal.torch in the first batch: it has to, or Lookahead(...,"
                " trainer=trainer) says whose steps these are"
            )
        self._base = ahead.step = self._steps.next
        if self._trial is not None:
            self._trial.batch()
        declare = self._trial is None or self._trial.on
        if declare:
            self._declare(self._steps, ahead)
        self._waiting.append(ahead)
        self._fill(self._steps, declare)

    def _follow(self, steps: Steps) -> bool:
        """Moves declarations, if the loop took more or fewer steps than there were batches for. Returns whether to
        declare."""
        with steps.lock:
            running = _running(steps)
            again = running is None
            if again:
                steps.lookahead = weakref.ref(self)
            elif running is not self:
                return False
            now = steps.next
            self._given = [ahead for ahead in self._given if ahead.step >= now]
            shift = now - self._waiting[0].step if self._waiting else 0
            if not shift and not again:
                return True
            steps.cancel_later(self._take())
            steps.cancel()
            self._base += shift
            for ahead in self._waiting:
                ahead.step += shift
                self._declare(steps, ahead)
            return True

    def _fill(self, steps: Steps, declare: bool) -> None:
        while self._batches is not None:
            step = self._base + self._fetched // self._per_step
            if not self._waiting and step != steps.next:
                # What the loop gets now is for the step that is open or comes next, whatever was thought before.
                steps.cancel_later(self._take())
                step = self._base = steps.next
                self._fetched = 0
            elif self._waiting and (not declare or step > steps.next + self._depth):
                return
            ahead = self._fetch(step)
            if ahead is None:
                return
            if declare:
                self._declare(steps, ahead)
            self._waiting.append(ahead)

    def _fetch(self, step: int) -> Optional[_Ahead[T]]:
        """The next batch of the loader."""
        if self._batches is None:
            return None
        try:
            batch = next(self._batches)
        except StopIteration:
            self._batches = None
            return None
        wanted = self._keys(batch)
        self._fetched += 1
        inputs = list(wanted.items() if isinstance(wanted, Mapping) else wanted)
        return _Ahead(batch, inputs, step, None if self._steps is None else self._steps.device)

    def _declare(self, steps: Steps, ahead: _Ahead[T]) -> None:
        if ahead.device is not None and ahead.device is not steps.device:
            return  # its inputs are where the trainer was
        declarations = []
        for module, value in ahead.inputs:
            if not isinstance(module, _Module) or module.trainer is not self._trainer:
                raise ValueError(
                    "keys(batch) has to name modules of frugal.torch that belong to the lookahead's trainer"
                )
            declarations += module._declarations(value)
        ops = [
            _native.op(feature.table.handle, _native.POOL_NONE, feature.padding, keys)
            for feature, keys in declarations
        ]
        try:
            ahead.declared = steps.declare(ahead.step, ops)
        except (frugal.KeyOutOfRange, frugal.InvalidArgument) as error:
            raise type(error)(f"Lookahead: what keys(batch) says of a batch: {error.message}", error.status) from None
