"""A model that exists, with its embeddings in an engine."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, TypeVar

import torch

import frugal

from ._anchor import Anchor
from ._modules import Embedding, EmbeddingBag
from ._steps import is_in_use

T = TypeVar("T", bound=torch.nn.Module)


def convert(model: T, *, trainer: Optional[frugal.Trainer] = None, min_rows: int = 0) -> T:
    """Replaces each torch.nn.Embedding and torch.nn.EmbeddingBag of at least `min_rows` rows in `model`, in place: the
    object stays, and its class is another.

    Rows, arguments, dtype, requires_grad and a gradient are kept, and so is what a module has besides: hooks,
    buffers, other parameters, attributes. A module that stands in several places stays one, and is of its class as
    before for isinstance(). Each weight stays the object that it is, so that an optimizer that has it trains the table,
    and a decoder that is tied to it stays tied. Convert before DistributedDataParallel. A subclass that has more than
    an __init__, and a forward that was assigned, raise NotImplementedError, a weight that the graph of a forward has
    kept RuntimeError, and nothing is replaced. Returns the model.
    """
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (Embedding, EmbeddingBag)):
            continue  # it is converted
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.num_embeddings >= min_rows:
            _check(name, module)
            found[name] = module
    weights: "dict[int, str]" = {}
    for name, module in found.items():
        weights.setdefault(id(module.weight), name)
    # Each module becomes another and stays the same object, wherever else the model has it. What it was stands in.
    before: "dict[int, Any]" = {}
    try:
        for name, module in found.items():
            if id(module) not in before:
                before[id(module)] = _copy_of(module)
                first = found[weights[id(before[id(module)].weight)]]
                _become(name, module, before[id(module)], trainer, None if first is module else first)
    except BaseException:
        for module in found.values():
            if id(module) in before:
                _set(module, type(before[id(module)]), vars(before[id(module)]))
        raise
    modules: List[Any] = list({id(module): module for module in found.values()}.values())
    for module in modules:
        _carry(before[id(module)], module)
    for module in modules:
        weight = before[id(module)].weight
        if isinstance(weight, Anchor):
            module.weight = weight  # another module's, too
            continue
        grad = weight.grad
        module._adopt(weight, weight.dtype, weight.requires_grad)
        if grad is not None:
            weight.grad = grad
    return model


def _copy_of(module: Any) -> Any:
    copy = object.__new__(type(module))
    vars(copy).update(vars(module))
    return copy


def _set(module: Any, kind: type, attributes: Dict[str, Any]) -> None:
    module.__class__ = kind
    vars(module).clear()
    vars(module).update(attributes)


def _check(name: str, module: torch.nn.Module) -> None:
    name = name or "the model itself"
    weight: Any = module._parameters.get("weight")
    if weight is None:
        raise NotImplementedError(
            f"{name}: its weight is computed of other parameters: remove what does that, as"
            " torch.nn.utils.parametrize.remove_parametrizations(module, 'weight')"
        )
    kind, base = type(module), _base(module)
    between = kind.__mro__[: kind.__mro__.index(base)]
    own = {what for each in between for what in vars(each)} - _OF_ANY_CLASS
    if own:
        raise NotImplementedError(
            f"{name}: {kind.__name__} is a subclass of torch.nn.{base.__name__} whose {', '.join(sorted(own))} would be"
            f" lost: derive it from frugal.torch.{base.__name__}, which is made as it is, or convert() the other parts"
            " of the model"
        )
    if not isinstance(weight, Anchor):
        _check_parameter(name, weight)
    for attribute, value in _added(module).items():
        if getattr(value, "__self__", None) is module:
            raise NotImplementedError(f"{name}: {attribute} is a method of the module that is replaced: remove it")


def _check_parameter(name: str, weight: Any) -> None:
    if type(weight) is not torch.nn.Parameter:
        raise NotImplementedError(
            f"{name}: its weight is a {type(weight).__name__}, which a table's cannot be: give the module a"
            " torch.nn.Parameter"
        )
    if weight._post_accumulate_grad_hooks:
        raise NotImplementedError(
            f"{name}: its weight has a hook of accumulated gradients, which would be lost: remove it, and register it"
            " with module.weight afterwards"
        )
    if is_in_use(weight):
        raise RuntimeError(
            f"{name}: its weight is in use, as by the graph of a forward or a compiled function: convert before, or"
            " delete what has it"
        )


# What a class may have and yet be nothing but another name: how it is made, which is over, and what it says.
_OF_ANY_CLASS = {
    "__init__", "__module__", "__qualname__", "__doc__", "__annotations__", "__annotate_func__", "__firstlineno__",
    "__annotations_cache__", "__static_attributes__", "__parameters__", "__orig_bases__", "__dict__", "__weakref__",
    "__slots__", "extra_repr", "__repr__",
}  # fmt: skip


def _kind(ours: Any, old: torch.nn.Module) -> Any:
    """Of what replaces a module: for isinstance() it is of a subclass's class as before."""
    theirs = type(old)
    return ours if theirs is _base(old) else type(theirs.__name__, (ours, theirs), {})


def _base(module: torch.nn.Module) -> Any:
    return torch.nn.Embedding if isinstance(module, torch.nn.Embedding) else torch.nn.EmbeddingBag


def _added(module: torch.nn.Module) -> Dict[str, Any]:
    """What a caller has given to a module that has no attribute of that name."""
    usual = vars(_base(module)(1, 1, device="meta"))
    return {name: value for name, value in vars(module).items() if name not in usual}


# What torch.nn.Module has of others. The handles of hooks know these dicts, which move as they are.
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_PARTS = ("_buffers", "_non_persistent_buffers_set", "_modules")


def _carry(old: Any, new: Any) -> None:
    """Gives a module what another has but its weight."""
    for attribute, value in _added(old).items():
        object.__setattr__(new, attribute, value)
    for attribute in (*_HOOKS, *_PARTS):
        if attribute in vars(old):
            object.__setattr__(new, attribute, vars(old)[attribute])
    for own, parameter in old._parameters.items():
        if own != "weight":
            new.register_parameter(own, parameter)


def _become(name: str, module: Any, old: Any, trainer: Optional[frugal.Trainer], first: Optional[Any]) -> None:
    """`old`: what the module was. `first`: has the table already, as their weight is one."""
    weight: torch.Tensor = old.weight
    rows, table = (weight.detach(), None) if first is None else (None, first.table.name)
    if isinstance(weight, Anchor):
        rows, table, trainer = None, weight.table.name, weight.trainer
    device = weight.device if trainer is None and weight.device.type in ("cpu", "cuda") else None
    if isinstance(old, torch.nn.Embedding):
        _set(module, _kind(Embedding, old), {})
        Embedding.__init__(
            module, old.num_embeddings, old.embedding_dim, old.padding_idx, old.max_norm, old.norm_type,
            old.scale_grad_by_freq, old.sparse, rows, _freeze=not weight.requires_grad,
            dtype=weight.dtype, trainer=trainer, device=device, name=table,
        )  # fmt: skip
    else:
        _set(module, _kind(EmbeddingBag, old), {})
        EmbeddingBag.__init__(
            module, old.num_embeddings, old.embedding_dim, old.max_norm, old.norm_type, old.scale_grad_by_freq,
            old.mode, old.sparse, rows, old.include_last_offset, old.padding_idx,
            freeze=not weight.requires_grad, dtype=weight.dtype, trainer=trainer, device=device, name=table,
        )  # fmt: skip
    for attribute in [attribute for attribute in _added(old) if hasattr(module, attribute)]:
        raise NotImplementedError(f"{name}: its attribute {attribute} is another thing in what replaces it: rename it")
    if weight.grad is not None and not isinstance(weight, Anchor) and module._steps.world_size > 1:
        raise NotImplementedError(
            f"{name}: its weight has a gradient, of which each rank has a part: call zero_grad() before"
        )
    module.train(old.training)
