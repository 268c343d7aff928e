"""Optimizers and initial values of tables. docs/arithmetic.md has the equations and their sources.

Default hyper-parameters are those of the optimizer of the same name in torch.optim. Momentum has the lr of SGD.
The `momentum` of Momentum, and the defaults of RowWiseAdagrad (as Adagrad's) and FTRL, are this package's own.
frugal_optimizer_init of the C library has other defaults: lr 0.01 and eps 1e-8 for all.
"""

from __future__ import annotations

from ctypes import addressof
from dataclasses import dataclass, fields
from typing import ClassVar, Tuple

from . import _abi
from ._lib import lib

__all__ = [
    "FTRL",
    "SGD",
    "Adagrad",
    "Adam",
    "Constant",
    "Initializer",
    "Momentum",
    "Normal",
    "Optimizer",
    "RMSProp",
    "RowWiseAdagrad",
    "TruncatedNormal",
    "Uniform",
    "Xavier",
]


@dataclass(frozen=True)
class Optimizer:
    """The hyper-parameters that all optimizers have. Pass them by name."""

    lr: float = 1e-3
    weight_decay_l2: float = 0.0
    """Adds weight_decay_l2 * w to the gradient."""
    weight_decay: float = 0.0
    """Decoupled weight decay: w -= lr * weight_decay * w after the update."""
    clip_value: float = 0.0
    """Clips each element of the gradient to [-c, c]; 0: off."""
    clip_norm: float = 0.0
    """Clips the row's gradient to an L2 norm of at most c; 0: off."""
    weight_bound: float = 0.0
    """Clips each weight to [-b, b] after the update; 0: off."""
    grad_scale: float = 1.0
    """Multiplies the summed gradient."""
    mean_ranks: bool = False
    """Divides the sum over ranks by world_size."""

    _kind: ClassVar[int] = -1

    def _struct(self) -> _abi.frugal_optimizer:
        if self._kind < 0:
            raise TypeError("Optimizer is what optimizers have in common: use SGD, Adagrad, Adam, ...")
        struct = _abi.frugal_optimizer()
        lib.frugal_optimizer_init(addressof(struct))
        struct.kind = self._kind
        flags = 0
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "mean_ranks":
                flags |= _abi.FRUGAL_OPT_MEAN_RANKS if value else 0
            elif field.name == "nesterov":
                flags |= _abi.FRUGAL_OPT_NESTEROV if value else 0
            elif field.name == "bias_correction":
                flags |= 0 if value else _abi.FRUGAL_OPT_NO_BIAS_CORRECTION
            else:
                setattr(struct, field.name, value)
        struct.flags = flags
        return struct


@dataclass(frozen=True)
class SGD(Optimizer):
    """Plain gradient descent; no state."""

    _kind: ClassVar[int] = _abi.FRUGAL_SGD


@dataclass(frozen=True)
class Momentum(Optimizer):
    """SGD with momentum; dim floats of state."""

    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False

    _kind: ClassVar[int] = _abi.FRUGAL_MOMENTUM


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad; dim floats of state."""

    lr: float = 1e-2
    eps: float = 1e-10
    initial_accumulator: float = 0.0
    """State of a new row; fixed by the table's first update."""

    _kind: ClassVar[int] = _abi.FRUGAL_ADAGRAD


@dataclass(frozen=True)
class RowWiseAdagrad(Optimizer):
    """Adagrad with one float of state a row."""

    lr: float = 1e-2
    eps: float = 1e-10
    initial_accumulator: float = 0.0
    """State of a new row; fixed by the table's first update."""

    _kind: ClassVar[int] = _abi.FRUGAL_ROWWISE_ADAGRAD


@dataclass(frozen=True)
class Adam(Optimizer):
    """Lazy Adam; 2 x dim floats of state."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    bias_correction: bool = True
    """Corrects by the step number + 1. Without it lr is used as given: the caller counts steps and corrects lr."""

    _kind: ClassVar[int] = _abi.FRUGAL_ADAM


@dataclass(frozen=True)
class RMSProp(Optimizer):
    """RMSProp; dim floats of state."""

    lr: float = 1e-2
    rho: float = 0.99
    eps: float = 1e-8

    _kind: ClassVar[int] = _abi.FRUGAL_RMSPROP


@dataclass(frozen=True)
class FTRL(Optimizer):
    """FTRL-proximal; 2 x dim floats of state."""

    lr: float = 1e-2
    ftrl_lambda1: float = 0.0
    ftrl_lambda2: float = 0.0
    ftrl_beta: float = 1.0
    initial_accumulator: float = 0.0
    """State n of a new row; fixed by the table's first update."""

    _kind: ClassVar[int] = _abi.FRUGAL_FTRL


KINDS = {kind._kind: kind.__name__ for kind in (SGD, Momentum, Adagrad, RowWiseAdagrad, Adam, RMSProp, FTRL)}


class Initializer:
    """Initial values of rows. Its classes are Constant, Uniform, Normal, TruncatedNormal and Xavier."""

    def _fields(self) -> Tuple[int, float, float]:
        raise TypeError("Initializer is what initial values have in common: use Constant, Uniform, Normal, ...")


@dataclass(frozen=True)
class Constant(Initializer):
    """Every element is `value`."""

    value: float = 0.0

    def _fields(self) -> Tuple[int, float, float]:
        return _abi.FRUGAL_INIT_CONSTANT, self.value, 0.0


@dataclass(frozen=True)
class Uniform(Initializer):
    """Uniform in [low, high)."""

    low: float
    high: float

    def _fields(self) -> Tuple[int, float, float]:
        return _abi.FRUGAL_INIT_UNIFORM, self.low, self.high


@dataclass(frozen=True)
class Normal(Initializer):
    """Normal with mean `mean` and standard deviation `std`."""

    mean: float = 0.0
    std: float = 1.0

    def _fields(self) -> Tuple[int, float, float]:
        return _abi.FRUGAL_INIT_NORMAL, self.mean, self.std


@dataclass(frozen=True)
class TruncatedNormal(Initializer):
    """As Normal, but within mean +- 2 std."""

    mean: float = 0.0
    std: float = 1.0

    def _fields(self) -> Tuple[int, float, float]:
        return _abi.FRUGAL_INIT_TRUNCATED_NORMAL, self.mean, self.std


@dataclass(frozen=True)
class Xavier(Initializer):
    """Uniform in +- gain * sqrt(6 / (fan_in + dim)). With fan_in 0, fan_in is the table's number of rows."""

    gain: float = 1.0
    fan_in: float = 0.0

    def _fields(self) -> Tuple[int, float, float]:
        return _abi.FRUGAL_INIT_XAVIER, self.gain, self.fan_in
