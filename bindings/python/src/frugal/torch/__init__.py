"""Embedding modules for PyTorch whose rows live in a Frugal engine. docs/torch.md says what is the same, and what is
not.

bags = frugal.torch.EmbeddingBag(1000, 16, mode="sum")                        # in the place of torch.nn.EmbeddingBag
optimizer = torch.optim.Adagrad(bags.parameters(), lr=0.1)
for keys, offsets, grad in loader:
    bags(keys, offsets).backward(grad)
    optimizer.step()
    optimizer.zero_grad()
"""

from torch._dynamo import trace_rules

from . import _gradient, _hook, _lookup, _usual  # with _hook PyTorch's optimizers step tables from here on
from ._checkpoint import Checkpoints
from ._convert import convert
from ._default import trainer as default_trainer
from ._lookahead import Lookahead
from ._modules import Embedding, EmbeddingBag, EmbeddingBagCollection, TableConfig
from ._optimizer import Optimizer
from ._ranks import attach

_usual.tell(_gradient.Held, _gradient.Part, _gradient.Gradient, _lookup.Lookup, _hook._Count)

__all__ = ["Checkpoints", "Embedding", "EmbeddingBag", "EmbeddingBagCollection", "Lookahead", "Optimizer",
    "TableConfig",
    "attach",
    "convert",
    "default_trainer"]

# torch.compile reads the forward of a module alone, and breaks the graph there. What runs then is left as it is.
for _file in (
    "anchor", "checkpoint", "computed", "convert", "default", "gradient", "hook", "inputs", "lookahead", "lookup",
    "native", "optimizer", "renorm", "state", "steps", "usual", "weight",
):  # fmt: skip
    trace_rules.add(f"{__name__}._{_file}")
