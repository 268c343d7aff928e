"""The optimizer of a trainer's tables: its step() is the end of the engine's step."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, Union, overload

import torch

import frugal

from . import _state
from ._modules import _Module
from ._steps import Steps, Table

# What a table's optimizer has for good.
_FIXED = ("initial_accumulator", "mean_ranks")


class Optimizer(torch.optim.Optimizer):
    """Ends the steps of the tables of `modules`: a module, or several, in which those of this package are found.

    One param group for each table: "name", and the fields of its frugal.Optimizer; what they say when step() is called
    holds for that step. `check_inf`: backward looks for infinities and NaNs, which a GradScaler needs.
    """

    # GradScaler calls step() also when it has found an infinity: the engine's step ends then, too.
    _step_supports_amp_scaling = True
    _complete = False  # has its groups

    def __init__(self, modules: Union[torch.nn.Module, Iterable[torch.nn.Module]], *, check_inf: bool = False) -> None:
        roots = [modules] if isinstance(modules, torch.nn.Module) else list(modules)
        tables: Dict[str, Table] = {}
        trainers: Dict[int, Steps] = {}
        for root in roots:
            if not isinstance(root, torch.nn.Module):
                raise TypeError(f"modules must be torch.nn.Modules, not {type(root).__name__}")
            for module in root.modules():
                if isinstance(module, _Module):
                    trainers[id(module._steps)] = module._steps
                    self._trainer = module.trainer
                    for table in module._tables().values():
                        tables[table.name] = table
        if not tables:
            raise ValueError("no module of frugal.torch is among the modules")
        if len(trainers) > 1:
            raise ValueError("the modules are of several trainers: make an optimizer for each")
        (self._steps,) = trainers.values()
        self._tables = list(tables.values())
        self._fields = [tuple(_hyper_parameters(table.optimizer)) for table in self._tables]
        self._told: List[Optional[List[float]]] = [None] * len(self._tables)  # what the engine has been
        groups = [
            {"params": [table.anchor], "name": table.name, **_hyper_parameters(table.optimizer)}
            for table in self._tables
        ]
        super().__init__(groups, _hyper_parameters(self._tables[0].optimizer))
        self._complete = True
        self._steps.check_inf = check_inf
        self._steps.optimizer = weakref.ref(self)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """An error: the groups are the tables, and other parameters are for another optimizer."""
        if self._complete:
            raise TypeError("the param groups are those of the tables: give parameters to an optimizer of torch.optim")
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Optional[Callable[[], float]] = None) -> Optional[float]:
        """Ends the step: the pushed gradients become updates. Begins it, if no forward did."""
        self._check_newest()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._steps.lock:
            factor, skip = self._scaling()
            self._steps.begin()
            if not skip:  # a skipped step uses none, and the factor of this rank is not known
                self._tell_all(factor)
            try:
                self._steps.end(skip)
            except KeyboardInterrupt:
                self._forget_gradients()
                raise
            self._forget_gradients()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throws gradients away that were pushed since the last step(); before a backward there are none. In a world of
        several ranks an error, if there are."""
        self._check_newest()
        self._steps.discard()
        self._forget_gradients()

    def state_dict(self) -> Dict[str, Any]:
        """Optimizer state of each table, the groups, and the number of the next step. Between steps."""
        state = {i: _state.optimizer_state(self._steps, table) for i, table in enumerate(self._tables)}
        groups = [
            {**{key: value for key, value in group.items() if key != "params"}, "params": [i]}
            for i, group in enumerate(self.param_groups)
        ]
        return {"state": state, "param_groups": groups, "step": self._steps.next}

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Takes what `state_dict` returned, of tables of the same names in the same order."""
        groups = state_dict["param_groups"]
        names = [group.get("name") for group in groups]
        if names != [table.name for table in self._tables]:
            raise ValueError(f"the saved tables are {names}, these are {[table.name for table in self._tables]}")
        self._steps.outside()
        step = int(state_dict["step"])
        if step != self._steps.next:
            if self._steps.trainer.engine.committed_step() is not None and any(
                isinstance(table.optimizer, frugal.Adam) for table in self._tables
            ):
                raise ValueError(
                    f"the saved next step is {step}, the engine's {self._steps.next}: Adam's arithmetic uses the"
                    " number; load into an engine that has run no step"
                )
        for i, table in enumerate(self._tables):
            _state.load_optimizer_state(self._steps, table, state_dict["state"][i])
        if self._steps.trainer.engine.committed_step() is None:
            self._steps.next = step
        for group, saved in zip(self.param_groups, groups):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def _forget_gradients(self) -> None:
        for table in self._tables:
            table.anchor.grad = None

    def _tell_all(self, factor: float) -> None:
        wanted = []
        for i, group in enumerate(self.param_groups):
            wanted.append([group[name] for name in self._fields[i]] + [factor])
        if self._steps.trainer.engine.world_size > 1:
            self._steps.shared.say(
                self._steps.next,
                self._steps.rank,
                {table.name: self._values(i, wanted[i]) for i, table in enumerate(self._tables)},
            )
        for i, values in enumerate(wanted):
            if values != self._told[i]:
                self._tell(i, values)

    def _values(self, i: int, wanted: List[Any]) -> Dict[str, float]:
        values = {name: float(value) for name, value in zip(self._fields[i], wanted)}
        values["grad_scale"] *= wanted[-1]
        return values

    def _tell(self, i: int, wanted: List[Any]) -> None:
        """Sets a table's hyper-parameters from this step on."""
        table = self._tables[i]
        values: Dict[str, Any] = dict(self._values(i, wanted))
        if "nesterov" in values:
            values["nesterov"] = bool(values["nesterov"])
        table.table.set_optimizer(self._steps.next, dataclasses.replace(table.optimizer, **values))
        self._told[i] = [*map(float, wanted)]

    def _scaling(self) -> Tuple[float, bool]:
        """What a GradScaler wants: the factor of the gradients, and whether to skip the step."""
        found = getattr(self, "found_inf", None)
        factors = {float(t.anchor.grad) for t in self._tables if t.anchor.grad is not None}
        if found is None:
            if any(factor != 1.0 for factor in factors):
                # An infinity, or unscale_ without the scaler's step().
                return (1.0, True) if not all(map(_finite, factors)) else (min(factors), False)
            return 1.0, False
        if not self._steps.check_inf:
            raise RuntimeError("a GradScaler needs Optimizer(..., check_inf=True): backward then looks for infinities")
        scale = getattr(self, "grad_scale", None)
        if float(found) != 0.0 or not all(map(_finite, factors)):
            return 1.0, True
        factor = min(factors, default=1.0)  # the inverse scale, if unscale_ was called
        if scale is not None:
            factor *= float(torch.as_tensor(scale, dtype=torch.float64).reciprocal().float())
        return factor, False

    def _check_newest(self) -> None:
        newest = self._steps.optimizer
        if newest is not None and newest() is not self:
            raise RuntimeError("a newer Optimizer of the same trainer has taken this one's place")


def _hyper_parameters(optimizer: frugal.Optimizer) -> Dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(optimizer).items() if name not in _FIXED}


def _finite(value: float) -> bool:
    return value - value == 0.0
