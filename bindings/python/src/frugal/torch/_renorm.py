"""max_norm: rows of a batch are scaled down in the table before a forward reads them."""

from __future__ import annotations

from typing import Optional

import torch

from . import _state
from ._lookup import Lookup, int64_of
from ._steps import Steps, changed


def check(steps: Steps) -> None:
    """Whether there can be a max_norm."""
    if steps.world_size > 1:
        raise NotImplementedError(
            f"max_norm: rows that {steps.world_size} ranks share cannot be changed by the forward of one; weight_bound"
            " of a frugal optimizer bounds each weight"
        )


def renorm(lookup: Lookup, keys: Optional[torch.Tensor], max_norm: float, norm_type: float, training: bool) -> None:
    """What torch.embedding_renorm_ does to the rows of these keys, in its arithmetic. Rows that a hashed table is about
    to create are written as they would be; a forward that only reads creates none."""
    steps, feature = lookup.steps, lookup.features[0]
    table = feature.table
    assert keys is not None
    check(steps)
    if table.empty:
        return
    keys = torch.unique(keys.view(torch.int64))
    if table.hashed and feature.padding is not None:
        keys = keys[keys != int64_of(feature.padding)]
    one = lookup.rows_of(table)
    changed([table])  # also where no row is above, as PyTorch's does
    with steps.lock, torch.no_grad():
        given = (keys.numel(), table.dim), (keys, None, None)
        rows = one.lookup(*given) if training and table.hashed else one.read(*given)[0]
        norms = torch.linalg.vector_norm(rows, norm_type, dim=1).to(torch.float64)
        above = norms > max_norm
        if bool(above.any()):
            scale = (max_norm / (norms[above] + 1e-7)).to(torch.float32)
            rows = rows[above].mul_(scale[:, None])
            _state.overwrite(table, keys[above].cpu(), rows.cpu())
