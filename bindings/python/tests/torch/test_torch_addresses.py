"""What reaches the ABI are the tensors' own addresses, in one call for each forward and one for all backwards of a
step. Keys, offsets and factors that a backward keeps for the step are copies if the caller made them."""

from __future__ import annotations

from typing import Any

import torch
from torch_support import DIM, ROWS, delivered, integers, sgd

import frugal
import frugal.torch as ft
from frugal.torch import _usual


def test_a_bag_s_tensors_go_by_address(trainer: frugal.Trainer, spy: Any) -> None:
    bags = ft.EmbeddingBag(
        ROWS, DIM, mode="sum", include_last_offset=True, padding_idx=2, trainer=trainer, optimizer=sgd()
    )
    tables = ft.Optimizer(bags)
    everything = torch.randint(0, ROWS, (40,))
    keys, offsets = everything[8:28], torch.tensor([0, 3, 3, 20])
    weights = torch.ones(20, requires_grad=True)
    before = spy.calls()
    out = bags(keys, offsets, weights)
    assert spy.calls() - before == 2  # frugal_step_begin comes before the first lookup of a step
    note = spy.last()
    assert (note.function, note.op_count) == (b"frugal_lookup", 1)
    op = note.ops[0]
    assert (op.keys, op.count) == (everything.data_ptr() + 8 * 8, 20)
    assert (op.bags, op.weights) == (3, weights.data_ptr())
    assert op.offsets == offsets.data_ptr() or _usual.native is not None  # which keeps them for the next calls
    assert op.rows_out == out.data_ptr() and op.row_stride == DIM * 4
    assert (op.padding_key, op.flags) == (2, 1)
    wide = integers(3, 3 * DIM)
    grads = [wide[:, DIM : 2 * DIM]]  # rows that are contiguous and apart
    before = spy.calls()
    delivered(out, grads).backward(integers(3, DIM))
    assert spy.calls() - before == 1  # the rows, for the gradient of weights
    note = spy.last()
    assert (note.function, note.op_count) == (b"frugal_read", 1)
    assert (note.ops[0].keys, note.ops[0].count) == (keys.data_ptr(), 20)
    assert weights.grad is not None
    before = spy.calls()
    tables.step()
    assert spy.calls() - before == 2  # and frugal_step_end
    note = spy.last()
    assert (note.function, note.op_count) == (b"frugal_push_grad", 1)
    op = note.ops[0]
    assert op.grads == wide.data_ptr() + 4 * DIM and op.row_stride == 3 * DIM * 4
    assert (op.count, op.bags, op.padding_key, op.flags) == (20, 3, 2, 1)
    # The caller may write to its own memory between backward and step.
    assert op.keys != keys.data_ptr() and op.offsets != offsets.data_ptr() and op.weights != weights.data_ptr()
    with torch.no_grad():
        before = spy.calls()
        out = bags(keys, offsets)
        assert spy.calls() - before == 1
    note = spy.last()
    assert note.function == b"frugal_read" and note.ops[0].keys == keys.data_ptr()
    assert note.ops[0].rows_out == out.data_ptr()


def test_a_collection_is_one_call(trainer: frugal.Trainer, spy: Any) -> None:
    tables = [ft.TableConfig("a", ROWS, 4, ["x", "y"]), ft.TableConfig("b", ROWS, 8, ["z"])]
    both = ft.EmbeddingBagCollection(tables, trainer=trainer)
    keys = torch.randint(0, ROWS, (3, 5))
    both(keys)
    before = spy.calls()
    out = both(keys)
    assert spy.calls() - before == 1
    note = spy.last()
    assert note.op_count == 3
    for i, column in enumerate((0, 4, 8)):
        op = note.ops[i]
        assert op.keys == keys[i].data_ptr() and op.rows_out == out.data_ptr() + 4 * column and op.row_stride == 64
    grads = [integers(5, 16), integers(5, 16)]
    before = spy.calls()
    at = [grad.data_ptr() for grad in grads]
    again = grads[0].clone()
    given = delivered(out, grads)
    given.backward(again, retain_graph=True)
    given.backward(again)
    assert spy.calls() == before and not grads
    ft.Optimizer(both).step()
    assert spy.calls() - before == 2  # and frugal_step_end
    note = spy.last()
    assert (note.function, note.op_count) == (b"frugal_push_grad", 6)
    assert [note.ops[i].grads - at[0] for i in range(3)] == [0, 16, 32]
    assert [note.ops[i].grads - at[1] for i in range(3, 6)] == [0, 16, 32]


def test_an_embedding_s_tensors_go_by_address(trainer: frugal.Trainer, spy: Any) -> None:
    rows = ft.Embedding(ROWS, DIM, trainer=trainer)
    keys = torch.randint(0, ROWS, (4, 5)).view(torch.uint64)
    out = rows(keys)
    op = spy.last().ops[0]
    assert op.keys == keys.data_ptr() and op.rows_out == out.data_ptr()
    grads = [integers(4, 5, DIM)]
    at = grads[0].data_ptr()
    delivered(out, grads).backward(integers(4, 5, DIM))
    ft.Optimizer(rows).step()
    op = spy.last().ops[0]
    assert op.grads == at and (op.count, op.row_stride) == (20, DIM * 4)
    lookahead = ft.Lookahead([keys], lambda batch: {rows: batch}, trainer=trainer)
    before = spy.calls()
    iteration = iter(lookahead)
    next(iteration)
    note = spy.last()
    assert spy.calls() - before == 1 and note.function == b"frugal_prefetch"
    assert (note.ops[0].keys, note.ops[0].count) == (keys.data_ptr(), 20)
