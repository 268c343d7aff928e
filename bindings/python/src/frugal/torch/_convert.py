"""A model that exists, with its embeddings in an engine."""

from __future__ import annotations

import weakref
from typing import Any, Dict, Optional, TypeVar

import torch

import frugal

from ._modules import Embedding, EmbeddingBag

T = TypeVar("T", bound=torch.nn.Module)


def convert(model: T, *, trainer: Optional[frugal.Trainer] = None, min_rows: int = 0) -> T:
    """Replaces each torch.nn.Embedding and torch.nn.EmbeddingBag of at least `min_rows` rows in `model`, in place.

    Rows, arguments, dtype, requires_grad and a gradient are kept, and so is what a module has beside its weight: hooks,
    buffers, other parameters, attributes. A module that stands in several places stays one. Make optimizers afterwards,
    since parameters are others, and convert before DistributedDataParallel. Modules that share a weight share a table, and a
    dense layer that has the weight too, as a decoder that is tied to the embedding, has the table's. A subclass, a hook of
    a weight, and a forward that was assigned raise NotImplementedError, and nothing is replaced. Returns the model, or, if
    it is such a module itself, what replaces it.
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
    tied = [
        (module, own, weights[id(parameter)])
        for module in model.modules()
        if module not in found.values()
        for own, parameter in module.named_parameters(recurse=False)
        if id(parameter) in weights
    ]
    made: "dict[int, torch.nn.Module]" = {}
    for name, module in found.items():  # all, before one is replaced: any of them may be refused
        if id(module) not in made:
            made[id(module)] = _made(name, module, trainer, made.get(id(found[weights[id(module.weight)]])))
    for module in {id(module): module for module in found.values()}.values():
        _carry(module, made[id(module)])
    for layer, own, name in tied:
        setattr(layer, own, made[id(found[name])].weight)
    for name, module in found.items():
        if not name:
            return made[id(module)]  # type: ignore[return-value]
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made[id(module)])
    return model


def _check(name: str, module: torch.nn.Module) -> None:
    kind = type(module)
    if kind not in (torch.nn.Embedding, torch.nn.EmbeddingBag):
        raise NotImplementedError(f"{name}: {kind.__name__} is a subclass, whose forward would be lost")
    weight: Any = module._parameters.get("weight")
    if weight is None:
        raise NotImplementedError(f"{name}: its weight is computed of other parameters: remove what does that")
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        raise NotImplementedError(
            f"{name}: its weight has a hook, which tensors of rows would not get: remove it, and change module.weight.grad"
            " after backward(), or give the hook to the module's parameter afterwards"
        )
    for attribute, value in _added(module).items():
        if getattr(value, "__self__", None) is module:
            raise NotImplementedError(f"{name}: {attribute} is a method of the module that is replaced: remove it")


def _added(module: torch.nn.Module) -> Dict[str, Any]:
    """What somebody has given to a module that has no attribute of that name."""
    usual = vars(type(module)(1, 1, device="meta"))
    return {name: value for name, value in vars(module).items() if name not in usual}


# What torch.nn.Module has of others. The handles of hooks know these dicts, which move as they are.
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_PARTS = ("_buffers", "_non_persistent_buffers_set", "_modules")


def _carry(old: Any, new: Any) -> None:
    """Gives a module what another has beside its weight."""
    for attribute, value in _added(old).items():
        object.__setattr__(new, attribute, value)
    for attribute in (*_HOOKS, *_PARTS):
        if attribute in vars(old):
            object.__setattr__(new, attribute, vars(old)[attribute])
    for hook in old._load_state_dict_pre_hooks.values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(new)
    for own, parameter in old._parameters.items():
        if own != "weight":
            new.register_parameter(own, parameter)


def _made(name: str, module: Any, trainer: Optional[frugal.Trainer], first: Optional[Any]) -> torch.nn.Module:
    """`first`: has the table already, as their weight is one."""
    weight: torch.Tensor = module.weight
    rows, table = (weight.detach(), None) if first is None else (None, first.table.name)
    device = weight.device if trainer is None and weight.device.type in ("cpu", "cuda") else None
    new: torch.nn.Module
    if isinstance(module, torch.nn.Embedding):
        new = Embedding(
            module.num_embeddings, module.embedding_dim, module.padding_idx, module.max_norm, module.norm_type,
            module.scale_grad_by_freq, module.sparse, rows, _freeze=not weight.requires_grad,
            dtype=weight.dtype, trainer=trainer, device=device, name=table,
        )  # fmt: skip
    else:
        new = EmbeddingBag(
            module.num_embeddings, module.embedding_dim, module.max_norm, module.norm_type, module.scale_grad_by_freq,
            module.mode, module.sparse, rows, module.include_last_offset, module.padding_idx,
            freeze=not weight.requires_grad, dtype=weight.dtype, trainer=trainer, device=device, name=table,
        )  # fmt: skip
    for attribute in [attribute for attribute in _added(module) if hasattr(new, attribute)]:
        raise NotImplementedError(f"{name}: its attribute {attribute} is another thing in what replaces it: rename it")
    if weight.grad is not None and first is None:
        new.weight.grad = weight.grad
    return new.train(module.training)
