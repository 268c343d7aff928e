"""Rows and optimizer state of a table as tensors, for state_dict. Between steps."""

from __future__ import annotations

import contextlib
import threading
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from . import _native
from ._steps import Steps, Table

_CHUNK = 65536  # rows that are held twice while state is put in or out


class _Asked(threading.local):
    for_rows = True


_asked = _Asked()


@contextlib.contextmanager
def without_tables() -> Iterator[None]:
    """In it state_dict() and load_state_dict() of this thread leave out what tables have: an engine's checkpoint has
    that."""
    before, _asked.for_rows = _asked.for_rows, False
    try:
        yield
    finally:
        _asked.for_rows = before


def are_tables_left_out() -> bool:
    return not _asked.for_rows


def _empty(rows: int, columns: int) -> torch.Tensor:
    """Memory that the library writes: not as the program's default dtype and device would have it."""
    return torch.empty((rows, columns), dtype=torch.float32, device="cpu")


def keys(table: Table) -> torch.Tensor:
    """All keys, as int64; of a dense table in ascending order."""
    if not table.hashed:
        return torch.arange(table.capacity, dtype=torch.int64, device="cpu")
    with table.steps.still():
        return table.steps.patiently(lambda: _native.table_keys(table.table), table.name)


def rows(steps: Steps, table: Table) -> Dict[str, torch.Tensor]:
    """`weight`, and of a hashed table the `keys` of its rows."""
    with steps.still():
        all_keys = keys(table)
        weight = _empty(all_keys.numel(), table.dim)
        table.get(all_keys, weight, with_state=False)
    return {"weight": weight, "keys": all_keys} if table.hashed else {"weight": weight}


def put(steps: Steps, table: Table, at: torch.Tensor, weight: torch.Tensor) -> None:
    """Writes rows; their optimizer state is a new row's."""
    table.put(_integers(at, "keys"), _floats(weight, "weight"), with_state=False)


def load_rows(steps: Steps, table: Table, weight: torch.Tensor, at: Optional[torch.Tensor]) -> None:
    """Makes `weight` the table's rows, those of the keys `at` of a hashed table, which then has no others. Rows keep
    their optimizer state."""
    weight = _floats(weight, "weight")
    at = _keys_of_load(table, at, weight.shape[0])
    if tuple(weight.shape) != (at.numel(), table.dim):
        raise ValueError(f"weight has shape {tuple(weight.shape)}, the table {(at.numel(), table.dim)}")
    with steps.still():
        table.written = True
        if table.hashed:
            _delete_others(table, at)
        overwrite(table, at, weight)


def overwrite(table: Table, at: torch.Tensor, weight: torch.Tensor) -> None:
    """Gives rows these weights. They keep their optimizer state; rows that come into being have a new row's. What
    another rank has written already, as each rank loads the same file, does not wait for a rank that is in a step."""
    shared = table.steps.world_size > 1 and not table.hashed
    room = _empty(min(at.numel(), _CHUNK), table.dim + table.state_floats)  # once: fresh memory is slow
    for begin, some in _chunks(at):
        part = weight[begin : begin + some.numel()]
        with table.steps.still():
            if shared and _are_there(table, some, part):
                continue
            if not table.state_floats:
                table.put(some, part, with_state=False)
                continue
            both = room[: some.numel()]
            found = table.get(some, both, with_state=True)
            if not bool(found.all()):
                # Rows that come into being have a new row's state; the others get theirs back.
                table.put(some, part, with_state=False)
            if bool(found.any()):
                both[:, : table.dim] = part
                if bool(found.all()):
                    table.put(some, both, with_state=True)
                else:
                    table.put(some[found], both[found], with_state=True)


def _are_there(table: Table, at: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether rows have these bits."""
    rows = _empty(at.numel(), table.dim)
    table.get(at, rows, with_state=False)
    return torch.equal(rows.view(torch.int32), weight.contiguous().view(torch.int32))


def moments(table: Table, widths: Sequence[int]) -> Tuple[List[torch.Tensor], torch.Tensor]:
    """The optimizer state of each row, in tensors of so many of its floats each, and all keys."""
    with table.steps.still():
        all_keys = keys(table)
        parts = [_empty(all_keys.numel(), width) for width in widths]
        if table.state_floats:
            # Once: fresh memory is slow.
            room = _empty(min(all_keys.numel(), _CHUNK), table.dim + table.state_floats)
            for begin, some in _chunks(all_keys):
                both = room[: some.numel()]
                table.get(some, both, with_state=True)
                for part, columns in zip(parts, torch.split(both[:, table.dim :], list(widths), dim=1)):
                    part[begin : begin + some.numel()] = columns
    return parts, all_keys


def optimizer_state(steps: Steps, table: Table) -> Dict[str, torch.Tensor]:
    """`state` of each row, (rows, state floats), and of a hashed table the `keys`."""
    (state,), all_keys = moments(table, [table.state_floats])
    return {"state": state, "keys": all_keys} if table.hashed else {"state": state}


def load_optimizer_state(steps: Steps, table: Table, saved: Dict[str, torch.Tensor]) -> None:
    """Gives rows the optimizer state that `optimizer_state` returned. Rows keep their weights."""
    load_moments(table, [saved["state"]], saved.get("keys"))


def load_moments(table: Table, parts: Sequence[torch.Tensor], at: Optional[torch.Tensor]) -> None:
    """Gives rows the optimizer state that `moments` returned, those of the keys `at` of a hashed table. Rows keep their
    weights."""
    parts = [_floats(part, "state") for part in parts]
    at = _keys_of_load(table, at, parts[0].shape[0])
    widths = [part.shape[1] for part in parts]
    if table.empty:
        return
    if sum(widths) != table.state_floats or any(part.shape[0] != at.numel() for part in parts):
        raise ValueError(
            f"table {table.name!r} has {at.numel()} rows with {table.state_floats} floats of optimizer state, the saved"
            f" one {(parts[0].shape[0], sum(widths))}: is it of the same optimizer?"
        )
    if not table.state_floats:
        return
    with table.steps.still():
        if table.hashed:
            missing = at.numel() - int(torch.isin(at, keys(table)).sum())
            if missing:
                raise ValueError(
                    f"table {table.name!r} lacks {missing} of the {at.numel()} rows that the saved state is of: load"
                    " the model's state first"
                )
        room = _empty(min(at.numel(), _CHUNK), table.dim + table.state_floats)  # once: fresh memory is slow
        for begin, some in _chunks(at):
            both = room[: some.numel()]
            found = table.get(some, both, with_state=True)
            for part, columns in zip(parts, torch.split(both[:, table.dim :], widths, dim=1)):
                columns.copy_(part[begin : begin + some.numel()])
            if bool(found.all()):
                table.put(some, both, with_state=True)
            elif bool(found.any()):
                table.put(some[found], both[found], with_state=True)


def _here(value: object, what: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{what} must be a torch.Tensor, not {type(value).__name__}")
    if value.is_meta:
        raise ValueError(f"{what} is on the meta device, so that it has no values")
    if value.layout != torch.strided:
        raise TypeError(f"{what} must be a dense tensor, not one of layout {value.layout}")
    return value.detach()


def _floats(value: object, what: str) -> torch.Tensor:
    tensor = _here(value, what)
    if tensor.is_complex():
        raise TypeError(f"{what} is of {tensor.dtype}, and rows are torch.float32")
    if tensor.dim() != 2:
        raise ValueError(f"{what} has {tensor.dim()} dimensions and must have 2")
    # Without the class that writes through: it is read.
    return tensor.to(device="cpu", dtype=torch.float32).resolve_neg().contiguous().as_subclass(torch.Tensor)


def _integers(value: object, what: str) -> torch.Tensor:
    tensor = _here(value, what)
    if tensor.is_complex() or tensor.is_floating_point():
        raise TypeError(f"{what} is of {tensor.dtype}: give torch.int64, torch.uint64 or torch.int32")
    if tensor.dtype == torch.uint64:
        tensor = tensor.view(torch.int64)
    return tensor.to(device="cpu", dtype=torch.int64).contiguous()


def _chunks(at: torch.Tensor) -> Iterator[Tuple[int, torch.Tensor]]:
    for begin in range(0, at.numel(), _CHUNK):
        yield begin, at[begin : begin + _CHUNK]


def _keys_of_load(table: Table, at: Optional[torch.Tensor], count: int) -> torch.Tensor:
    if table.hashed:
        if not isinstance(at, torch.Tensor):
            raise ValueError(
                f"table {table.name!r} is hashed: its rows are loaded with their keys, which are not there"
            )
        return _integers(at, "keys")
    if at is not None:
        raise ValueError(f"table {table.name!r} is dense: rows with keys are a hashed table's")
    if count != table.capacity:
        raise ValueError(f"table {table.name!r} has {table.capacity} rows, the saved one {count}")
    return torch.arange(table.capacity, dtype=torch.int64, device="cpu")


def _delete_others(table: Table, at: torch.Tensor) -> None:
    there = keys(table)
    others = there[~torch.isin(there, at)]
    if others.numel() and not table.steps.muted and not table.awaits_load():
        table.steps.patiently(lambda: _native.delete(table.table, others))
