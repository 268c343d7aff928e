"""The optimizer of a trainer's tables, with the engine's own kinds: row-wise Adagrad, FTRL, norms of rows, and one step
for all tables whatever gradients there are."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, Iterable, List, Optional, Union, overload

import torch

import frugal

from . import _hook, _state
from ._modules import _Module
from ._steps import Steps, Table, Update, check_loaded, scaled

# What a table's optimizer has for good.
_FIXED = ("initial_accumulator", "mean_ranks")


class Optimizer(torch.optim.Optimizer):
    """Ends the steps of the tables of `modules`: a module, or several, in which those of this package are found.

    One param group for each table: "name", and the fields of its frugal.Optimizer; what they say when step() is called
    holds for that step. While there is one, other optimizers that have a table's parameter leave the table alone.
    """

    # GradScaler calls step() also when it has found an infinity: the engine's step ends then, too.
    _step_supports_amp_scaling = True
    _frugal = True  # the hooks leave it alone
    _complete = False  # has its groups

    def __init__(self, modules: Union[torch.nn.Module, Iterable[torch.nn.Module]]) -> None:
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
        self._kinds = [table.said for table in self._tables]
        groups = [
            {"params": [table.anchor], "name": table.name, **_hyper_parameters(kind)}
            for table, kind in zip(self._tables, self._kinds)
        ]
        super().__init__(groups, _hyper_parameters(self._kinds[0]))
        self._complete = True
        self._shift = 0
        for table in self._tables:
            table.keep(self)

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """An error: the groups are the tables, and other parameters are for another optimizer."""
        if self._complete:
            raise TypeError("the param groups are those of the tables: give parameters to an optimizer of torch.optim")
        super().add_param_group(param_group)

    def __getstate__(self) -> Dict[str, Any]:
        raise TypeError("an Optimizer of tables cannot be copied or pickled: save its state_dict()")

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Optional[Callable[[], float]] = None) -> Optional[float]:
        """Ends the engine's step: gradients become updates. Begins it, if no forward did."""
        self._check_owner()
        check_loaded(self._steps.shared)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor, skip = _hook.scaling(self)
        updates: List[Update] = []
        for table, kind, group in zip(self._tables, self._kinds, self.param_groups):
            gradient = table.anchor.gradient()
            if gradient is not None:
                skip = skip or not gradient.scales()
                gradient.rescale(factor)
            values = {name: type(value)(group[name]) for name, value in _hyper_parameters(kind).items()}
            made = self._counted(dataclasses.replace(kind, **values))
            updates.append(Update(table, gradient, scaled(made, gradient)))
        self._steps.apply(updates, skip)
        for table in self._tables:
            table.anchor.grad = None
        return loss

    def state_dict(self) -> Dict[str, Any]:
        """Optimizer state of each table, the groups, and the number of the next step. Between steps."""
        with self._steps.still():
            state = {i: _state.optimizer_state(self._steps, table) for i, table in enumerate(self._tables)}
            step = self._steps.next + self._shift
        groups = [{**group, "params": [i]} for i, group in enumerate(self._saved_groups())]
        return {"state": state, "param_groups": groups, "step": step}

    def _saved_groups(self) -> List[Dict[str, Any]]:
        return [{key: value for key, value in group.items() if key != "params"} for group in self.param_groups]

    def _without_tables(self) -> Dict[str, Any]:
        """What a checkpoint of the engine lacks."""
        return {"groups": self._saved_groups(), "kinds": _names(self._kinds), "shift": self._shift}

    def _load_without_tables(self, saved: Dict[str, Any]) -> None:
        groups = {group["name"]: (group, kind) for group, kind in zip(saved["groups"], saved["kinds"])}
        names = {table.name for table in self._tables if table.was_restored}
        if names != groups.keys():
            raise ValueError(f"the saved tables are {sorted(groups)}, those of now {sorted(names)}")
        for table, kind in zip(self._tables, _names(self._kinds)):
            was = groups[table.name][1] if table.name in groups else kind
            if was != kind:
                raise ValueError(f"table {table.name!r} was saved with the optimizer {was}, and now has {kind}")
        self._shift = saved["shift"]
        for group in self.param_groups:
            if group["name"] in groups:
                group.update(groups[group["name"]][0])

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Takes what `state_dict` returned, of tables of the same names in the same order."""
        groups = state_dict["param_groups"]
        names = [group.get("name") for group in groups]
        if names != [table.name for table in self._tables]:
            raise ValueError(f"the saved tables are {names}, these are {[table.name for table in self._tables]}")
        step = int(state_dict["step"])
        with self._steps.still():
            for i, table in enumerate(self._tables):
                _state.load_optimizer_state(self._steps, table, state_dict["state"][i])
            if self._steps.trainer.engine.committed_step() is None:
                self._steps.next = step
            self._shift = step - self._steps.next  # an engine's steps go on, wherever the optimizer goes back to
        for group, saved in zip(self.param_groups, groups):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def _counted(self, optimizer: frugal.Optimizer) -> frugal.Optimizer:
        """Adam with the bias correction of our count of steps, where the engine's is another."""
        if not self._shift or not isinstance(optimizer, frugal.Adam) or not optimizer.bias_correction:
            return optimizer
        return _hook.adam_at(optimizer, self._steps.next + self._shift + 1)

    def _check_owner(self) -> None:
        for table in self._tables:
            if table.kept_by() is not self:
                raise RuntimeError(f"a newer Optimizer has taken this one's place as that of table {table.name!r}")


def _names(kinds: List[frugal.Optimizer]) -> List[str]:
    return [type(kind).__name__ for kind in kinds]


def _hyper_parameters(optimizer: frugal.Optimizer) -> Dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(optimizer).items() if name not in _FIXED}
