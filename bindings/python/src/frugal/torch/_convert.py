"""A model that exists, with its embeddings in an engine."""

from __future__ import annotations

from typing import Any, Optional, TypeVar

import torch

import frugal

from ._modules import Embedding, EmbeddingBag

T = TypeVar("T", bound=torch.nn.Module)


def convert(model: T, *, trainer: Optional[frugal.Trainer] = None, min_rows: int = 0) -> T:
    """Replaces each torch.nn.Embedding and torch.nn.EmbeddingBag of at least `min_rows` rows in `model`, in place.

    Rows, arguments, dtype and requires_grad are kept; a module that stands in several places stays one. Make optimizers
    afterwards, since parameters are others, and convert before DistributedDataParallel. A subclass, and a weight that two
    modules share (as of a decoder that is tied to the embedding), raise NotImplementedError, and nothing is replaced. Returns
    the model, or, if it is such a module itself, what replaces it.
    """
    found = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and module.num_embeddings >= min_rows:
            _check(name, module)
            found[name] = module
    weights: "dict[int, str]" = {}
    for name, module in found.items():
        first = weights.setdefault(id(module.weight), name)
        if found[first] is not module:
            raise NotImplementedError(f"{first} and {name} share a weight, which two modules with tables cannot")
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            first = weights.get(id(parameter), name)
            if first != name and found[first] is not module:
                raise NotImplementedError(
                    f"{name}.{own} is the weight of {first}, which would not be tied to it any more: untie them, or leave"
                    f" {first} out"
                )
    made: "dict[int, torch.nn.Module]" = {}
    for module in found.values():  # all, before one is replaced: any of them may be refused
        if id(module) not in made:
            made[id(module)] = _made(module, trainer)
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


def _made(module: Any, trainer: Optional[frugal.Trainer]) -> torch.nn.Module:
    weight: torch.Tensor = module.weight
    device = weight.device if trainer is None and weight.is_cuda else None
    new: torch.nn.Module
    if isinstance(module, torch.nn.Embedding):
        new = Embedding(
            module.num_embeddings, module.embedding_dim, module.padding_idx, module.max_norm, module.norm_type,
            module.scale_grad_by_freq, module.sparse, weight.detach(), _freeze=not weight.requires_grad,
            dtype=weight.dtype, trainer=trainer, device=device,
        )  # fmt: skip
    else:
        new = EmbeddingBag(
            module.num_embeddings, module.embedding_dim, module.max_norm, module.norm_type, module.scale_grad_by_freq,
            module.mode, module.sparse, weight.detach(), module.include_last_offset, module.padding_idx,
            freeze=not weight.requires_grad, dtype=weight.dtype, trainer=trainer, device=device,
        )  # fmt: skip
    return new.train(module.training)
