"""Tables: their configuration, and access to rows outside steps."""

from __future__ import annotations

import operator
from ctypes import addressof, byref, c_size_t, c_uint64, sizeof
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Dict, Iterator, NamedTuple, Optional, overload

from . import _abi
from ._buffers import HOST, AnyArray, Array, Pins, find_numpy, found_flags, integers, new_rows
from ._buffers import rows as _rows
from ._lib import lib
from ._ops import choose, uint32, uint64
from ._single import Single
from .config import KINDS, SGD, Constant, Initializer, Optimizer
from .errors import check

if TYPE_CHECKING:
    from typing import Literal

    import numpy
    from numpy.typing import NDArray

    from ._engine import Engine

    FloatArray = NDArray[numpy.float32]
    KeyArray = NDArray[numpy.uint64]
    FlushMode = Literal["auto", "at_once", "deferred", "write_through", "tree_heap"]
    NanPolicy = Literal["reject", "skip", "accept"]

FLUSH_MODES: Dict[str, int] = {
    "auto": _abi.FRUGAL_FLUSH_AUTO,
    "at_once": _abi.FRUGAL_FLUSH_AT_ONCE,
    "deferred": _abi.FRUGAL_FLUSH_DEFERRED,
    "write_through": _abi.FRUGAL_FLUSH_WRITE_THROUGH,
    "tree_heap": _abi.FRUGAL_FLUSH_TREE_HEAP,
}
_NAN_POLICIES: Dict[str, int] = {
    "reject": _abi.FRUGAL_NAN_REJECT,
    "skip": _abi.FRUGAL_NAN_SKIP,
    "accept": _abi.FRUGAL_NAN_ACCEPT,
}


class TableInfo(NamedTuple):
    """What Table.describe returns."""

    rows: int
    """The number of rows that exist now."""
    capacity: int
    """The configured number of rows."""
    value_bytes: int
    """Bytes of a row's elements."""
    state_floats: int
    """Optimizer state of a row, in floats."""
    memory_bytes: int
    """Memory held now."""
    dim: int
    key_space: int
    """0 dense, 1 hashed."""
    optimizer: int
    """The kind, a frugal_optimizer_kind."""
    page_bytes: int
    """The page size that the rows' memory requests."""


@dataclass(frozen=True)
class Memory:
    """The most bytes that a table takes; memory_needed returns it."""

    values: int
    """Host rows."""
    state: int
    """Optimizer state."""
    index: int
    """Of a hashed table: keys and index at their largest. Of a lazy table: existence bytes."""
    window: int
    """The flat index of rows, if updates can be deferred."""
    cache: int
    """One trainer's cache, its index included."""
    total: int


def _name(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__


def _optimizer(optimizer: Optimizer) -> _abi.frugal_optimizer:
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be an Optimizer, as frugal.SGD(lr=0.1), not {_name(optimizer)}")
    return optimizer._struct()


def _numpy() -> Any:
    numpy = find_numpy()
    if numpy is None:
        raise TypeError("NumPy is not installed, and keys come as a NumPy array")
    return numpy


def table_config(
    rows: int, dim: int, hashed: bool, lazy: bool, init: Initializer, optimizer: Optimizer, nan_policy: str
) -> _abi.frugal_table_config:
    if not isinstance(init, Initializer):
        raise TypeError(f"init must be an Initializer, as frugal.Constant(0), not {_name(init)}")
    config = _abi.frugal_table_config()
    lib.frugal_table_config_init(addressof(config))
    config.rows = uint64(rows, "rows")
    config.dim = uint32(dim, "dim")
    config.key_space = _abi.FRUGAL_HASHED if hashed else _abi.FRUGAL_DENSE
    config.flags = _abi.FRUGAL_TABLE_LAZY if lazy else 0
    config.init, config.init_a, config.init_b = init._fields()
    config.optimizer = _optimizer(optimizer)
    config.nan_policy = choose(_NAN_POLICIES, nan_policy, "nan_policy")
    return config


def memory_needed(
    rows: int,
    dim: int,
    *,
    hashed: bool = False,
    lazy: bool = False,
    optimizer: Optimizer = SGD(),
    cache_rows: int = 0,
    flush_mode: FlushMode = "auto",
    staleness: int = 0,
) -> Memory:
    """Returns the bytes that a table would take in an engine of this flush_mode and staleness. It reserves nothing.

    cache_rows: the rows that one trainer's cache would hold for this table.
    """
    engine = _abi.frugal_config()
    lib.frugal_config_init(addressof(engine))
    engine.flush_mode = choose(FLUSH_MODES, flush_mode, "flush_mode")
    engine.staleness = uint64(staleness, "staleness")
    table = table_config(rows, dim, hashed, lazy, Constant(), optimizer, "reject")
    memory = _abi.frugal_memory()
    check(
        lib.frugal_memory_needed(
            addressof(engine), addressof(table), uint64(cache_rows, "cache_rows"), addressof(memory)
        )
    )
    return Memory(*(getattr(memory, field[0]) for field in memory._fields_))


class Table(Single):
    """Rows of one dimension with optimizer state. Engine.create_table makes one, Engine.find_table finds one.

    The engine owns the table. The end of this object does not change it; drop() removes it. get, put, delete, count
    and keys work between steps: they raise Busy while a rank is inside a step, and see every committed step.
    Any thread may use a table.
    """

    __slots__ = ("__weakref__", "_dropped", "_engine", "_handle", "_info", "dim", "name")

    def __init__(self, engine: Engine, handle: int, name: str) -> None:
        self._engine = engine  # lives as long as its tables
        self._handle = handle
        self.name = name
        """The name."""
        self._dropped = False
        self._info = self.describe()
        self.dim = self._info.dim
        """Elements of a row."""

    @property
    def handle(self) -> int:
        """The handle of the ABI."""
        return self._handle

    # Uses only what this object knows: a call of the library might wait for a controller, or be forbidden in a
    # debugger that prints the object.
    def __repr__(self) -> str:
        info: Optional[TableInfo] = getattr(self, "_info", None)
        if info is None:  # describe() failed in the constructor
            return "<frugal.Table>"
        hashed = info.key_space == _abi.FRUGAL_HASHED
        rows = f"at most {info.capacity}" if hashed else f"{info.capacity}"
        optimizer = KINDS.get(info.optimizer, f"optimizer {info.optimizer}")
        end = ", dropped" if self._dropped else "" if self._engine._finalizer.alive else ", closed"
        space = "hashed" if hashed else "dense"
        return f"<frugal.Table {self.name!r}, {rows} rows x {self.dim}, {space}, {optimizer}{end}>"

    def describe(self) -> TableInfo:
        """Returns the table's configuration and size."""
        info = _abi.frugal_table_info()
        info.struct_size = sizeof(info)
        check(lib.frugal_table_describe(self._handle, addressof(info)))
        return TableInfo(*(getattr(info, name) for name in TableInfo._fields))

    def count(self) -> int:
        """Counts the rows that exist."""
        count = c_uint64()
        check(lib.frugal_table_count(self._handle, byref(count)))
        return count.value

    def __len__(self) -> int:
        return self.count()

    def __bool__(self) -> bool:
        return True  # also without rows

    def keys(self) -> KeyArray:
        """Returns the keys of all existing rows as a new NumPy array of uint64, in the rows' internal order."""
        keys: KeyArray = _numpy().empty(self.count(), "uint64")
        cursor, done, got = c_uint64(0), 0, 1
        while done < len(keys) and got:
            got = self._keys(cursor, keys[done:])
            done += got
        return keys[:done]

    def key_chunks(self, most: int = 1 << 16) -> Iterator[KeyArray]:
        """Yields the same keys in new arrays of at most `most` keys, for a table whose keys would fill the memory.

        The program may make any call between two arrays. If rows are created or deleted meanwhile, some keys may be
        missing or come twice.
        """
        most = operator.index(most)
        if most < 1:
            raise ValueError(f"most is {most}, and must be 1 or more")
        return self._key_chunks(_numpy(), most)

    def _key_chunks(self, numpy: Any, most: int) -> Iterator[KeyArray]:
        cursor = c_uint64(0)
        while True:
            keys: KeyArray = numpy.empty(most, "uint64")
            got = self._keys(cursor, keys)
            if not got:
                return
            yield keys[:got]

    def _keys(self, cursor: c_uint64, keys: KeyArray) -> int:
        got = c_size_t()
        check(lib.frugal_table_keys(self._handle, byref(cursor), keys.ctypes.data, len(keys), byref(got)))
        return got.value

    @overload
    def get(
        self,
        keys: Array,
        rows: None = None,
        *,
        found: Optional[Array] = None,
        with_state: bool = False,
        committed: bool = False,
    ) -> FloatArray: ...
    @overload
    def get(
        self,
        keys: Array,
        rows: AnyArray,
        *,
        found: Optional[Array] = None,
        with_state: bool = False,
        committed: bool = False,
    ) -> AnyArray: ...

    def get(
        self,
        keys: Array,
        rows: Optional[Array] = None,
        *,
        found: Optional[Array] = None,
        with_state: bool = False,
        committed: bool = False,
    ) -> Any:
        """Reads rows by their keys; creates nothing. Returns `rows` if given, else a new array.

        For a missing row of a hashed table, the row in `rows` is left as it was (zeros in a new array).
        found: an output, uint8 or bool for each key, that marks the rows that exist.
        with_state: a row is dim floats, then its optimizer state.
        committed: reads the rows as of the last committed step, also while ranks are inside steps. Without it a rank
        inside a step is an error.
        """
        pins: Pins = []
        try:
            address, count = integers(pins, keys, "keys")
            width = self._width(with_state)
            if rows is None:
                rows = new_rows(count, width)
            rows_out, stride = _rows(pins, rows, count, width, "rows", HOST, True)
            found_out = 0 if found is None else found_flags(pins, found, count, "found")
            flags = bool(with_state) * _abi.FRUGAL_WITH_STATE | bool(committed) * _abi.FRUGAL_COMMITTED
            check(lib.frugal_get(self._handle, address, count, flags, rows_out, stride, found_out))
        finally:
            pins.clear()
        return rows

    def put(self, keys: Array, rows: Array, *, with_state: bool = False) -> None:
        """Writes rows, and creates the missing ones. Without with_state they get the optimizer state of new rows.

        If a key comes twice, its last row counts.
        """
        pins: Pins = []
        try:
            address, count = integers(pins, keys, "keys")
            source, stride = _rows(pins, rows, count, self._width(with_state), "rows")
            check(lib.frugal_put(self._handle, address, count, bool(with_state), source, stride))
        finally:
            pins.clear()

    def delete(self, keys: Array) -> int:
        """Deletes rows and returns how many existed. Rows of a dense table return to their initial values."""
        pins: Pins = []
        deleted = c_uint64()
        try:
            address, count = integers(pins, keys, "keys")
            check(lib.frugal_delete(self._handle, address, count, byref(deleted)))
        finally:
            pins.clear()
        return deleted.value

    def set_optimizer(self, first_step: int, optimizer: Optimizer, *, new_state: bool = False) -> None:
        """Sets the hyper-parameters from `first_step` on.

        The kind and initial_accumulator must be the table's. They may differ only between steps, before the table's
        first update and before rows are put with state; then all rows get the state of new rows.
        new_state: the kind and initial_accumulator may differ at any time between steps. All rows get the state of new
        rows, even if neither differs.
        """
        struct = _optimizer(optimizer)
        if new_state:
            struct.flags |= _abi.FRUGAL_OPT_NEW_STATE
        check(lib.frugal_table_set_optimizer(self._handle, uint64(first_step, "first_step"), addressof(struct)))
        self._info = self._info._replace(optimizer=struct.kind)

    def drop(self) -> None:
        """Drops the table and frees its memory. Declared batches lose their parts of this table."""
        check(lib.frugal_table_drop(self._handle))
        self._dropped = True

    def _width(self, with_state: bool) -> int:
        return self.dim + self.describe().state_floats if with_state else self.dim
