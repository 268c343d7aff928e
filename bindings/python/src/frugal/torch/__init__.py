"""Embedding modules for PyTorch whose rows live in a Frugal engine. docs/torch.md has the rules.

with frugal.Engine(lookahead=10) as engine, engine.create_trainer() as trainer:
    bags = frugal.torch.EmbeddingBag(1000, 16, mode="sum", trainer=trainer)
    tables = frugal.torch.Optimizer(bags)
    for keys, offsets, grad in frugal.torch.Lookahead(loader, lambda batch: {bags: batch[0]}):
        bags(keys, offsets).backward(grad)
        tables.step()
"""

from ._lookahead import Lookahead
from ._modules import Embedding, EmbeddingBag, EmbeddingBagCollection, TableConfig
from ._optimizer import Optimizer
from ._ranks import attach

__all__ = ["Embedding", "EmbeddingBag", "EmbeddingBagCollection", "Lookahead", "Optimizer", "TableConfig", "attach"]
