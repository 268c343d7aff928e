"""Arrays: the library takes them in place, and refuses those that it cannot take."""

from __future__ import annotations

import array
import ctypes
import gc
import subprocess
import sys
import threading
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np
import pytest

import frugal
from frugal import _buffers
from spying import Spy

ROWS, DIM = 100, 4
KEYS = np.array([7, 42, 7])


class Session:
    """A table, and a trainer inside step 0, whose batch has KEYS."""

    def __init__(self, engine: frugal.Engine) -> None:
        self.engine = engine
        self.table = engine.create_table("t", rows=ROWS, dim=DIM, init=frugal.Uniform(-1, 1))
        self.trainer = engine.create_trainer()
        self.batch = self.trainer.prefetch(0, self.table, KEYS)
        self.trainer.step_begin(0)
        self.expected = self.trainer.lookup(self.batch).copy()


@pytest.fixture
def session(engine: frugal.Engine) -> Session:
    return Session(engine)


# --- Producers of one protocol each, around NumPy arrays ---


class OnlyDLPack:
    """The present DLPack protocol: max_version, copy."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Tuple[int, int]:
        return (1, 0)


class OldDLPack(OnlyDLPack):
    """The old DLPack protocol: only `stream`."""

    def __dlpack__(self, stream: Optional[int] = None) -> Any:  # type: ignore[override]
        return self.array.__dlpack__()


class Interface:
    """An array with __cuda_array_interface__, and changes of that dictionary."""

    def __init__(self, array: Any, **changes: Any) -> None:
        told = array.__array_interface__
        self.array = array
        self.__cuda_array_interface__: Dict[str, Any] = {
            "shape": told["shape"],
            "typestr": told["typestr"],
            "data": told["data"],
            "strides": told["strides"],
            "version": 3,
            **changes,
        }


def from_ctypes(values: Any) -> Any:
    kind: Any = {"f": ctypes.c_float, "i": ctypes.c_int64, "u": ctypes.c_uint64}[values.dtype.kind]
    flat = (kind * values.size)(*values.ravel().tolist())
    return flat


PRODUCERS: Dict[str, Callable[[Any], Any]] = {
    "numpy": lambda a: a,
    "memoryview": memoryview,
    "array": lambda a: array.array({"f": "f", "i": "q", "u": "Q"}[a.dtype.kind], a.ravel().tolist()),
    "ctypes": from_ctypes,
    "bytearray": lambda a: memoryview(bytearray(a.tobytes())).cast("f" if a.dtype.kind == "f" else "q"),
    "dlpack": OnlyDLPack,
    "old dlpack": OldDLPack,
}


def address_of(produced: Any) -> int:
    if isinstance(produced, OnlyDLPack):
        produced = produced.array
    if isinstance(produced, array.array):
        return produced.buffer_info()[0]
    if isinstance(produced, ctypes.Array):
        return ctypes.addressof(produced)
    return int(np.asarray(produced).ctypes.data)


def contents(produced: Any) -> Any:
    return np.array(produced.array if isinstance(produced, OnlyDLPack) else produced).reshape(-1, DIM)


@pytest.mark.parametrize("kind", PRODUCERS)
def test_each_protocol_reaches_the_library_by_its_address(session: Session, spy: Spy, kind: str) -> None:
    produce = PRODUCERS[kind]
    trainer, table = session.trainer, session.table
    for dtype in (np.int64, np.uint64):
        keys = produce(KEYS.astype(dtype))
        batch = trainer.prefetch(1, table, keys)
        note = spy.last()
        assert note.function == b"frugal_prefetch" and note.ops[0].keys == address_of(keys) and note.ops[0].count == 3
        trainer.prefetch_cancel(batch)
    rows = produce(np.zeros((3, DIM), np.float32))
    assert trainer.lookup(session.batch, rows) is rows
    op = spy.last().ops[0]
    assert op.rows_out == address_of(rows) and op.keys is None and op.batch == session.batch.handle
    assert (contents(rows) == session.expected).all()

    grads = produce(np.ones((3, DIM), np.float32))
    trainer.push_grad(session.batch, grads)
    note = spy.last()
    assert note.function == b"frugal_push_grad" and note.ops[0].grads == address_of(grads)

    trainer.lookup(table, keys, rows)
    assert (spy.last().ops[0].keys, spy.last().ops[0].rows_out) == (address_of(keys), address_of(rows))
    found = np.zeros(3, bool)
    session.engine.read(table, keys, rows, found=found, trainer=trainer)
    note = spy.last()
    assert note.function == b"frugal_read" and note.ops[0].found_out == found.ctypes.data and found.all()
    trainer.step_end(0)

    table.get(keys, rows, found=found)
    op = spy.last().ops[0]
    assert (op.keys, op.rows_out, op.found_out) == (address_of(keys), address_of(rows), found.ctypes.data)
    table.put(keys, rows)
    assert (spy.last().ops[0].keys, spy.last().ops[0].grads) == (address_of(keys), address_of(rows))
    table.delete(keys)
    assert spy.last().ops[0].keys == address_of(keys)


@pytest.mark.parametrize("kind", PRODUCERS)
def test_weights_and_offsets_go_by_their_addresses(session: Session, spy: Spy, kind: str) -> None:
    produce = PRODUCERS[kind]
    op = frugal.Op(
        session.table, produce(KEYS), pooling="sum", offsets=produce(np.array([0, 1, 3])),
        weights=produce(np.ones(3, np.float32)), weight_grads=produce(np.zeros(3, np.float32)),
        grads=produce(np.ones((2, DIM), np.float32)), rows=produce(np.zeros((2, DIM), np.float32)),
    )  # fmt: skip
    session.trainer.lookup(op)
    seen = spy.last().ops[0]
    assert (seen.keys, seen.offsets, seen.weights, seen.rows_out) == tuple(
        address_of(a) for a in (op.keys, op.offsets, op.weights, op.rows)
    )
    assert (seen.count, seen.bags, seen.pooling, seen.grads) == (3, 2, 1, None)
    session.trainer.push_grad([op])
    seen = spy.last().ops[0]
    assert (seen.grads, seen.weight_grads_out) == (address_of(op.grads), address_of(op.weight_grads))


def test_one_call_of_the_library_for_a_call(session: Session, spy: Spy) -> None:
    rows = np.zeros((3, DIM), np.float32)
    before = spy.calls()
    session.trainer.lookup(session.batch, rows)
    session.trainer.push_grad(session.batch, rows)
    session.trainer.step_end(0)
    session.trainer.step_begin(1)
    assert spy.calls() - before == 4


@pytest.mark.parametrize("view", ["columns", "every other", "column of one", "flat", "one row", "Fortran of one"])
def test_views_with_contiguous_rows_are_no_copies(session: Session, spy: Spy, view: str) -> None:
    batch, trainer, expected = session.batch, session.trainer, session.expected
    wide = np.full((8, 3 * DIM), 9, np.float32)
    stride = 0
    if view == "columns":
        rows, stride = wide[2:5, DIM : 2 * DIM], wide.strides[0]
    elif view == "every other":
        rows, stride = np.full((6, DIM), 9, np.float32)[::2], 2 * 4 * DIM
    elif view == "flat":
        rows = wide[0][: 3 * DIM]
    else:
        dim = 1 if view != "one row" else DIM
        table = session.table
        if dim == 1:
            session.trainer.step_end(0)
            table = session.engine.create_table("one", rows=ROWS, dim=1, init=frugal.Uniform(-1, 1))
            trainer.step_begin(1)
        keys = KEYS if dim == 1 else KEYS[:1]
        rows = {
            "column of one": wide[:3, 2:3],
            "one row": np.full((9, DIM), 9, np.float32)[::-3][1:2],
            "Fortran of one": np.asfortranarray(np.full((3, 1), 9, np.float32)),
        }[view]
        stride = wide.strides[0] if view == "column of one" else 0
        assert trainer.lookup(table, keys, rows) is rows
        seen = spy.last().ops[0]
        assert (seen.rows_out, seen.row_stride) == (rows.ctypes.data, stride)
        assert (np.asarray(rows) == trainer.lookup(table, keys)).all()
        if view == "column of one":
            line = wide[4:7, 0]  # one dimension with a stride: rows of one element
            assert (trainer.lookup(table, keys, line)[:, None] == rows).all()
            assert spy.last().ops[0].row_stride == wide.strides[0]
        return
    trainer.lookup(batch, rows)
    seen = spy.last().ops[0]
    assert (seen.rows_out, seen.row_stride) == (rows.ctypes.data, stride)
    assert (np.asarray(rows).reshape(3, DIM) == expected).all()
    trainer.push_grad(batch, rows)
    assert (spy.last().ops[0].grads, spy.last().ops[0].row_stride) == (rows.ctypes.data, stride)
    if view == "columns":
        assert (wide == 9).sum() == wide.size - 3 * DIM


def test_int32_keys_alone_are_widened(session: Session, spy: Spy) -> None:
    table = session.table
    for keys in (KEYS.astype(np.int32), array.array("i", KEYS.tolist()), OnlyDLPack(KEYS.astype(np.int32))):
        assert (session.trainer.lookup(table, keys) == session.expected).all()
        assert spy.last().ops[0].keys not in (0, address_of(keys))
    with pytest.raises(frugal.KeyOutOfRange, match="id -1 .*" + str(2**64 - 1)):
        session.trainer.lookup(table, np.array([-1], np.int32))
    out = session.trainer.lookup(frugal.Op(table, KEYS, pooling="sum", offsets=np.array([0, 3], np.int32)))
    assert out.shape == (1, DIM)
    assert session.trainer.lookup(table, np.array([], np.int32)).shape == (0, DIM)


def test_nothing_is_no_error(session: Session) -> None:
    none = np.array([], np.int64)
    for keys in (none, array.array("q"), OnlyDLPack(none), memoryview(bytearray()).cast("q")):
        assert session.trainer.lookup(session.table, keys).shape == (0, DIM)
        session.trainer.push_grad(session.table, keys, np.zeros((0, DIM), np.float32))
    op = frugal.Op(session.table, none, pooling="sum", offsets=np.array([0, 0]))
    assert session.trainer.lookup(op).tolist() == [[0] * DIM]


# --- Refused arrays ---


def bad_rows() -> Iterator[Tuple[str, Any, type, str]]:
    good = np.zeros((3, DIM), np.float32)
    yield "float64", good.astype(np.float64), TypeError, "float32"
    yield "float16", good.astype(np.float16), TypeError, "float32"
    yield "int32", good.astype(np.int32), TypeError, "float32"
    yield "complex", good.astype(np.complex64), TypeError, "float32"
    yield "bool", good.astype(bool), TypeError, "float32"
    yield "object", good.astype(object), TypeError, "float32"
    yield "structured", np.zeros(3, [("a", np.float32, (DIM,))]), TypeError, "float32"
    yield "datetime", np.zeros(3 * DIM, "M8[s]"), TypeError, "no buffer"
    yield "bytes", bytearray(12 * DIM), TypeError, "float32"
    yield "big endian", good.astype(">f4"), TypeError, "byte order"
    yield "list", good.tolist(), TypeError, "array"
    yield "scalar", 1.0, TypeError, "array"
    yield "string", "rows", TypeError, "array"
    yield "too few rows", good[:2], ValueError, "shape"
    yield "too many rows", np.zeros((4, DIM), np.float32), ValueError, "shape"
    yield "transposed shape", np.zeros((DIM, 3), np.float32), ValueError, "shape"
    yield "three dimensions", good.reshape(3, 2, 2), ValueError, "shape"
    yield "no dimension", np.float32(1).reshape(()), ValueError, "shape|read-only"
    yield "flat and short", np.zeros(3 * DIM - 1, np.float32), ValueError, "shape"
    yield "Fortran order", np.asfortranarray(good), ValueError, "contiguous"
    yield "every other element", np.zeros((3, 2 * DIM), np.float32)[:, ::2], ValueError, "contiguous"
    yield "flat with a stride", np.zeros(6 * DIM, np.float32)[::2], ValueError, "contiguous"
    yield "rows backwards", good[::-1], ValueError, "apart"
    yield "columns backwards", good[:, ::-1], ValueError, "contiguous"
    yield "one row for all", np.lib.stride_tricks.as_strided(good, (3, DIM), (0, 4)), ValueError, "apart"
    yield "rows that overlap", np.lib.stride_tricks.as_strided(good, (3, DIM), (4, 4)), ValueError, "apart"
    odd = np.zeros(12 * DIM + 8, np.uint8)
    yield "misaligned", odd[1 : 12 * DIM + 1].view(np.float32).reshape(3, DIM), ValueError, "multiple of 4"
    wide = np.zeros(3 * 18 + 2, np.uint8)
    yield "odd stride", np.ndarray((3, DIM), np.float32, wide, 0, (18, 4)), ValueError, "multiple of 4"
    yield "on a GPU", Interface(good), ValueError, "GPU"
    yield "DLPack float64", OnlyDLPack(good.astype(np.float64)), TypeError, "float32"


ROWS_CASES = list(bad_rows())


@pytest.mark.parametrize("name, rows, kind, message", ROWS_CASES, ids=[case[0] for case in ROWS_CASES])
def test_bad_rows_and_gradients(session: Session, name: str, rows: Any, kind: type, message: str) -> None:
    before = session.engine.stats()
    calls: List[Callable[[], Any]] = [
        lambda: session.trainer.lookup(session.batch, rows),
        lambda: session.trainer.lookup(session.table, KEYS, rows),
        lambda: session.trainer.lookup(frugal.Op(session.table, KEYS, rows=rows)),
        lambda: session.trainer.push_grad(session.batch, rows),
        lambda: session.trainer.push_grad(session.table, KEYS, rows),
        lambda: session.engine.read(session.table, KEYS, rows, trainer=session.trainer),
        lambda: session.table.get(KEYS, rows),
        lambda: session.table.put(KEYS, rows),
    ]
    for call in calls:
        with pytest.raises((TypeError, ValueError), match=message) as raised:
            call()
        assert raised.type is kind, raised.value
    after = session.engine.stats()
    assert after["keys_looked_up"] == before["keys_looked_up"] and after["keys_pushed"] == before["keys_pushed"]
    assert (session.trainer.lookup(session.batch) == session.expected).all()


def read_only(a: Any) -> Any:
    a = a.copy()
    a.flags.writeable = False
    return a


# Before 2.1 NumPy refuses to export a read-only array by DLPack, which had no flag for it.
WRAPPERS: Dict[str, Callable[[Any], Any]] = {"numpy": lambda a: a, "memoryview": memoryview}
if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
    WRAPPERS["dlpack"] = OnlyDLPack


MASKED: Dict[str, Callable[[np.ndarray], Any]] = {
    "masked": lambda a: np.ma.array(a, mask=a == a.flat[0]),
    "nothing masked": np.ma.array,
    "a subclass": lambda a: np.ma.array(a).view(type("Mine", (np.ma.MaskedArray,), {})),
}


@pytest.mark.parametrize("kind", MASKED)
def test_masked_arrays_are_refused(session: Session, kind: str) -> None:
    masked = MASKED[kind]
    table, trainer, engine = session.table, session.trainer, session.engine
    ones = np.ones((3, DIM), np.float32)
    weights, offsets, found = np.ones(3, np.float32), np.array([0, 3]), np.zeros(3, np.uint8)
    pooled = np.ones((1, DIM), np.float32)
    calls: List[Callable[[], object]] = [
        lambda: trainer.lookup(session.batch, masked(ones)),
        lambda: trainer.lookup(session.batch, masked(ones.ravel())),
        lambda: trainer.push_grad(session.batch, masked(ones)),
        lambda: trainer.push_grad(session.batch, masked(ones[:, ::-1])),
        lambda: trainer.lookup(table, masked(KEYS)),
        lambda: trainer.lookup(table, masked(KEYS.astype(np.int32))),
        lambda: trainer.prefetch(1, table, masked(KEYS)),
        lambda: trainer.lookup(frugal.Op(table, KEYS, pooling="sum", offsets=masked(offsets), rows=pooled)),
        lambda: trainer.lookup(frugal.Op(table, KEYS, pooling="sum", offsets=offsets, weights=masked(weights))),
        lambda: engine.read(table, KEYS, found=masked(found), trainer=trainer),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="masked array"):
            call()


class Negative(OnlyDLPack):
    """As torch exports a lazily negated tensor: the elements have the other sign."""

    negative = True

    def is_neg(self) -> bool:
        return self.negative


def test_tensors_with_the_negative_bit_are_refused(session: Session) -> None:
    rows = np.ones((3, DIM), np.float32)
    tensor = Negative(rows)
    with pytest.raises(TypeError, match="grads: .*negative bit.*resolve_neg"):
        session.trainer.push_grad(session.batch, tensor)
    with pytest.raises(TypeError, match="rows: .*negative bit"):
        session.trainer.lookup(session.batch, tensor)
    with pytest.raises(TypeError, match="keys: .*negative bit"):
        session.trainer.lookup(session.table, Negative(KEYS), rows)
    assert (rows == 1).all()
    tensor.negative = False
    session.trainer.lookup(session.batch, tensor)
    assert (rows == session.expected).all()


def test_lazy_tensors_of_torch_are_refused(session: Session) -> None:
    torch = pytest.importorskip("torch")
    rows = torch.ones(3, DIM)
    for tensor in (torch._neg_view(rows), torch.ones(3, DIM, dtype=torch.complex64).conj(), rows.requires_grad_()):
        with pytest.raises(TypeError):
            session.trainer.push_grad(session.batch, tensor)
        with pytest.raises(TypeError):
            session.trainer.lookup(session.batch, tensor)
    session.trainer.push_grad(session.batch, torch._neg_view(rows.detach()).resolve_neg())


@pytest.mark.parametrize("kind", WRAPPERS)
def test_read_only_is_for_inputs(session: Session, kind: str) -> None:
    wrap = WRAPPERS[kind]
    rows = wrap(read_only(np.ones((3, DIM), np.float32)))
    flags = read_only(np.ones(3, np.uint8))
    trainer = session.trainer
    with pytest.raises(ValueError, match="read-only"):
        trainer.lookup(session.batch, rows)
    with pytest.raises(ValueError, match="read-only"):
        session.engine.read(session.table, KEYS, found=flags, trainer=trainer)
    op = frugal.Op(
        session.table, KEYS, pooling="sum", offsets=np.array([0, 3]), weights=np.ones(3, np.float32),
        weight_grads=wrap(read_only(np.ones(3, np.float32))), grads=np.ones((1, DIM), np.float32),
    )  # fmt: skip
    with pytest.raises(ValueError, match="read-only"):
        trainer.push_grad(op)
    trainer.push_grad(session.batch, rows)
    trainer.lookup(session.table, wrap(read_only(KEYS)))


def bad_keys() -> Iterator[Tuple[str, Any, type, str]]:
    for dtype in ("float64", "float32", "uint32", "int16", "uint8", "bool", "complex128"):
        yield dtype, KEYS.astype(dtype), TypeError, "int64"
    yield "big endian", KEYS.astype(">i8"), TypeError, "byte order"
    yield "big endian unsigned", KEYS.astype(">u8"), TypeError, "byte order"
    yield "list", KEYS.tolist(), TypeError, "array"
    yield "integer", 7, TypeError, "array"
    yield "two dimensions", KEYS[None], ValueError, "dimension"
    yield "no dimension", KEYS[0].reshape(()), ValueError, "dimension"
    yield "every other", np.zeros(6, np.int64)[::2], ValueError, "contiguous"
    yield "every other int32", np.zeros(6, np.int32)[::2], ValueError, "contiguous"
    yield "backwards", KEYS[::-1], ValueError, "contiguous"
    yield "one for all", np.broadcast_to(KEYS[:1], 3), ValueError, "contiguous"
    yield "misaligned", np.zeros(32, np.uint8)[4:28].view(np.int64), ValueError, "multiple of 8"
    yield "bytes", b"12345678", TypeError, "int64"
    yield "on a GPU", Interface(KEYS), ValueError, "GPU"


KEYS_CASES = list(bad_keys())


@pytest.mark.parametrize("name, keys, kind, message", KEYS_CASES, ids=[case[0] for case in KEYS_CASES])
def test_bad_keys_and_offsets(session: Session, name: str, keys: Any, kind: type, message: str) -> None:
    rows = np.zeros((3, DIM), np.float32)
    calls: List[Callable[[], Any]] = [
        lambda: session.trainer.prefetch(1, session.table, keys),
        lambda: session.trainer.lookup(session.table, keys, rows),
        lambda: session.trainer.push_grad(session.table, keys, rows),
        lambda: session.engine.read(session.table, keys, rows, trainer=session.trainer),
        lambda: session.table.get(keys, rows),
        lambda: session.table.put(keys, rows),
        lambda: session.table.delete(keys),
        lambda: session.trainer.lookup(frugal.Op(session.table, KEYS, pooling="sum", offsets=keys)),
    ]
    for call in calls:
        with pytest.raises((TypeError, ValueError), match=message) as raised:
            call()
        assert raised.type is kind, raised.value


def test_keys_are_needed(session: Session) -> None:
    with pytest.raises(ValueError, match="keys"):
        session.trainer.prefetch(1, session.table)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="NoneType"):
        session.trainer.push_grad(session.batch, None)  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype, length", [("float64", 3), ("float32", 2), ("float32", 4)])
def test_bad_weights_and_flags(session: Session, dtype: str, length: int) -> None:
    wrong = np.zeros(length, dtype)
    kind = ValueError if dtype == "float32" else TypeError
    arguments: Any = {"pooling": "sum", "offsets": np.array([0, 3]), "grads": np.zeros((1, DIM), np.float32)}
    with pytest.raises(kind, match="weights"):
        session.trainer.lookup(frugal.Op(session.table, KEYS, weights=wrong, **arguments))
    weights = np.ones(3, np.float32)
    with pytest.raises(kind, match="weight_grads"):
        session.trainer.push_grad(frugal.Op(session.table, KEYS, weights=weights, weight_grads=wrong, **arguments))
    with pytest.raises(TypeError, match="found"):
        session.engine.read(session.table, KEYS, found=wrong, trainer=session.trainer)
    with pytest.raises(ValueError, match="found"):
        session.table.get(KEYS, found=np.zeros(2, bool))


def test_nothing_keeps_an_array_after_a_call(session: Session) -> None:
    keys, rows = array.array("q", KEYS.tolist()), bytearray(4 * 3 * DIM)
    view = memoryview(rows).cast("f")
    for _ in range(3):
        session.trainer.lookup(session.table, keys, view)
        with pytest.raises(ValueError):
            session.trainer.lookup(session.table, keys, memoryview(bytearray(4)).cast("f"))
    view.release()
    keys.append(5)  # with an exported buffer both of these raise BufferError
    rows.append(0)
    array_ = np.zeros((3, DIM), np.float32)
    before = sys.getrefcount(array_)
    for _ in range(10):
        session.trainer.lookup(session.batch, array_)
        session.trainer.lookup(session.batch, OnlyDLPack(array_))
    gc.collect()
    assert sys.getrefcount(array_) == before


def test_an_array_cannot_move_during_a_call(session: Session, spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = array.array("f", [0] * 3 * DIM)
    seen: List[str] = []
    real = spy.abi.frugal_lookup

    def lookup(*arguments: Any) -> int:
        gc.collect()
        thread = threading.Thread(target=grow)
        thread.start()
        thread.join()
        return int(real(*arguments))

    def grow() -> None:
        try:
            rows.extend(rows)
        except BufferError as error:
            seen.append(str(error))

    from frugal import _trainer

    monkeypatch.setattr(_trainer, "_lookup", lookup)
    session.trainer.lookup(session.batch, rows)
    assert len(seen) == 1 and len(rows) == 3 * DIM
    assert (contents(rows) == session.expected).all()


def test_outputs_live_although_nobody_names_them(session: Session, spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    """A garbage collection in the middle of a call whose arrays only the call refers to."""
    from frugal import _trainer

    real = spy.abi.frugal_lookup

    def lookup(*arguments: Any) -> int:
        gc.collect()
        junk = [np.full((3, DIM), 5, np.float32) for _ in range(100)]
        status = int(real(*arguments))
        del junk
        return status

    monkeypatch.setattr(_trainer, "_lookup", lookup)
    for _ in range(20):
        out = session.trainer.lookup(session.table, KEYS.astype(np.int32))
        assert (out == session.expected).all()
        (out,) = session.trainer.lookup([frugal.Op(session.table, KEYS + 0)])
        assert (out == session.expected).all()


# --- GPU memory comes by protocols; its refusals can be tested without a GPU ---


def test_cuda_array_interface() -> None:
    keys, rows = KEYS.copy(), np.zeros((3, DIM), np.float32)
    place = _buffers.Place(1, 0x5000)
    pins: List[Any] = []
    assert _buffers.integers(pins, Interface(keys), "keys", place) == (keys.ctypes.data, 3)
    assert _buffers.rows(pins, Interface(rows), 3, DIM, "rows", place, True) == (rows.ctypes.data, 0)
    wide = np.zeros((3, 2 * DIM), np.float32)
    assert _buffers.rows(pins, Interface(wide[:, :DIM]), 3, DIM, "rows", place) == (wide.ctypes.data, 8 * DIM)
    assert _buffers.rows(pins, Interface(rows, stream=0x5000), 3, DIM, "rows", place)[0] == rows.ctypes.data
    default = _buffers.Place(1, 0)
    assert _buffers.rows(pins, Interface(rows, stream=1), 3, DIM, "rows", default)[0] == rows.ctypes.data
    cases: List[Tuple[Dict[str, Any], Any, str]] = [
        ({"stream": 0x6000}, ValueError, "set_stream"),
        ({"mask": keys}, TypeError, "mask"),
        ({"typestr": ">f4"}, TypeError, "byte order"),
        ({"typestr": "<f8"}, TypeError, "float32"),
        ({"data": (rows.ctypes.data, True)}, ValueError, "read-only"),
        ({"shape": (DIM, 3)}, ValueError, "shape"),
    ]
    for changes, kind, message in cases:
        with pytest.raises(kind, match=message):
            _buffers.rows(pins, Interface(rows, **changes), 3, DIM, "rows", place, True)
    with pytest.raises(TypeError, match="int32 in memory of a GPU"):
        _buffers.integers(pins, Interface(keys.astype(np.int32)), "keys", place)
    pins.clear()


class DeviceDLPack(OnlyDLPack):
    """Names another device than the memory's, by writing it into the tensor of the capsule."""

    def __init__(self, array: Any, kind: int, number: int = 0) -> None:
        super().__init__(array)
        self.kind, self.number = kind, number
        self.streams: List[Any] = []

    def __dlpack__(self, stream: Any = None, **arguments: Any) -> Any:
        self.streams.append(stream)
        capsule = self.array.__dlpack__()
        pointer = _buffers._capsule_pointer(capsule, b"dltensor")
        tensor = _buffers._DLTensor.from_address(pointer)
        tensor.device_type, tensor.device_id = self.kind, self.number
        return capsule

    def __dlpack_device__(self) -> Tuple[int, int]:
        return (self.kind, self.number)


def test_dlpack_of_devices() -> None:
    rows = np.zeros((3, DIM), np.float32)
    pins: List[Any] = []
    cuda, pinned, managed, rocm = 2, 3, 13, 10
    assert _buffers.rows(pins, DeviceDLPack(rows, pinned), 3, DIM, "rows")[0] == rows.ctypes.data
    place = _buffers.Place(1, 0x5000)
    array_ = DeviceDLPack(rows, cuda, 1)
    assert _buffers.rows(pins, array_, 3, DIM, "rows", place)[0] == rows.ctypes.data and array_.streams == [0x5000]
    assert _buffers.rows(pins, DeviceDLPack(rows, managed, 1), 3, DIM, "rows", place)[0] == rows.ctypes.data
    for kind, number, where, message in [
        (cuda, 0, _buffers.HOST, "GPU"), (cuda, 0, place, "cuda:0"), (rocm, 1, place, "device type 10"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            _buffers.rows(pins, DeviceDLPack(rows, kind, number), 3, DIM, "rows", where)
    pins.clear()


class Copies(OnlyDLPack):
    def __dlpack__(self, **arguments: Any) -> Any:
        arguments["copy"] = True
        return self.array.__dlpack__(**arguments)


class Refuses(OnlyDLPack):
    def __dlpack__(self, **arguments: Any) -> Any:
        raise BufferError("it is being differentiated")


class NoCapsule(OnlyDLPack):
    def __dlpack__(self, **arguments: Any) -> Any:
        return 5


def test_dlpack_that_cannot_be_used(session: Session) -> None:
    rows = np.zeros((3, DIM), np.float32)
    with pytest.raises(TypeError, match="differentiated"):
        session.trainer.lookup(session.batch, Refuses(rows))
    if np.lib.NumpyVersion(np.__version__) >= "2.1.0":
        with pytest.raises(TypeError, match="copy"):
            session.trainer.lookup(session.batch, Copies(rows))
    with pytest.raises((TypeError, ValueError)):
        session.trainer.lookup(session.batch, NoCapsule(rows))


def test_the_deleter_of_a_tensor_runs_once_after_the_call(session: Session) -> None:
    alive = np.zeros((3, DIM), np.float32)
    before = sys.getrefcount(alive)
    for _ in range(5):
        session.trainer.lookup(session.batch, OnlyDLPack(alive))
        assert sys.getrefcount(alive) == before
        session.trainer.lookup(session.batch, OldDLPack(alive))
        assert sys.getrefcount(alive) == before


def test_without_numpy(run_python: Callable[..., "subprocess.CompletedProcess[str]"]) -> None:
    program = """
import sys
sys.modules["numpy"] = None
from array import array
import frugal
with frugal.Engine() as engine:
    table = engine.create_table("t", rows=10, dim=2, init=frugal.Constant(1), optimizer=frugal.SGD(lr=1.0))
    trainer = engine.create_trainer()
    rows = array("f", [0] * 4)
    with trainer.step(0):
        for keys in (array("q", [1, 2]), array("i", [1, 2])):
            trainer.lookup(table, keys, rows)
            trainer.push_grad(table, keys, rows)
        try:
            trainer.lookup(table, keys)
        except TypeError as error:
            print(error)
    table.get(array("Q", [2, 3]), rows)
    print(rows.tolist())
"""
    ended = run_python(program)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "NumPy is not installed: give an array for the rows\n[-1.0, -1.0, 1.0, 1.0]\n"
