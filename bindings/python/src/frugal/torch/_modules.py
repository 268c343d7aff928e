"""Modules with the arguments of torch.nn's. docs/torch.md says what differs, and which call begins and ends a step."""

from __future__ import annotations

import dataclasses
import sys
import warnings
import weakref
from typing import (
    Any,
    Callable,
    Dict,
    List,
    Literal,
    Mapping,
    NamedTuple,
    NoReturn,
    Optional,
    Sequence,
    Set,
    Tuple,
    TypeVar,
    Union,
    cast,
)

import torch
from torch.compiler import is_compiling

import frugal

from . import _default, _inputs, _native, _ranks, _renorm, _state, _steps, _usual
from ._anchor import Anchor
from ._computed import SHAPE
from ._lookup import EmptyLookup, Feature, Lookup, int64_of, source_of
from ._weight import View, Weight, draw_nothing, saved, write

_POOLING = {"sum": _native.POOL_SUM, "mean": _native.POOL_MEAN}
_MAX = "max"  # of torch.nn.EmbeddingBag alone

# Of torch: they put a parameter of theirs in the place of a module's weight.
_COMPUTE_WEIGHT = {f"torch.nn.utils.{name}" for name in ("weight_norm", "parametrizations")}

_DDP = "torch.nn.parallel.distributed"

_in_fake_mode = _default.in_fake_mode
_in_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active
_get_tracing_state: Callable[[], Any] = torch._C._get_tracing_state

NanPolicy = Literal["reject", "skip", "accept"]

Self = TypeVar("Self", bound="_Module")

# The rows of a feature's keys: keys of a row each, bags of equal length, or keys with the offsets of their bags.
FeatureInput = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]


def _dtype(dtype: Optional[torch.dtype], weight: Optional[torch.Tensor], freeze: bool, bags: bool) -> torch.dtype:
    """Of outputs. Rows are float32."""
    if dtype is None:
        dtype = weight.dtype if weight is not None else torch.get_default_dtype()
    if dtype.is_floating_point:
        return dtype
    if bags or dtype.is_complex or weight is None or weight.dtype.is_floating_point:
        raise _inputs.InputTypeError(
            f"dtype {dtype}: outputs are floating-point numbers, or rows of a weight of integers"
        )
    if not freeze:
        raise _inputs.InputTypeError(
            f"dtype {dtype}: only rows of a floating-point dtype can require gradients; freeze them"
        )
    _inputs.exact(weight)
    return dtype


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class _Module(torch.nn.Module):
    """What is common: tables, and for each a parameter of one element (see _anchor)."""

    _lookup: Lookup
    _by_frequency: Lookup
    _anchors: Tuple[Anchor, ...] = ()
    _now: Tuple[Lookup, Lookup, Tuple[Anchor, ...]]  # the three above: what a forward has, while weight is assigned
    _made: Optional[Tuple[Any, torch.Tensor]] = None  # of what, and the source of outputs, see source_of
    _first: str  # the name of the first of them
    # As torch.nn's modules, these are read in each forward.
    max_norm: Optional[float] = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False

    def _begin(
        self,
        trainer: Optional[frugal.Trainer],
        device: object,
        names: Sequence[Optional[str]],
        dtype: Optional[torch.dtype] = None,
    ) -> torch.device:
        """Comes first when a module is made, of tables with these names. Returns where its keys and outputs are."""
        torch.nn.Module.__init__(self)  # and not that of torch.nn's class, which makes rows
        if _default.in_fake_mode():
            raise NotImplementedError(
                f"{type(self).__name__} cannot be made under FakeTensorMode or make_fx, for an engine has its rows:"
                " make it before"
            )
        # A trainer that is given says where rows are, unless there is a device, too.
        place = _default.place_of(device) if trainer is None or device is not None else None
        if place is not None and place.type == "meta":
            _default.refuse_meta(f"{type(self).__name__} with device meta")
        self._trainer = _default.trainer(device) if trainer is None else trainer
        self._steps = _steps.of(self._trainer)
        if place is not None:
            self._steps.check_device(place, type(self).__name__)
        for table in [self._steps.tables.get(name) for name in names if name]:
            anchor = None if table is None else table.held_anchor()
            if table is None or anchor is None:
                continue
            # (Those of another GPU go along.)
            if place is not None and device is not None and table.device.type != place.type:
                raise ValueError(
                    f"table {table.name!r} exists, on {table.device}, and {type(self).__name__} cannot have it on"
                    f" {place}: leave device out, or move the module that has the table there before"
                )
            if dtype is not None and dtype != anchor.dtype:
                raise ValueError(
                    f"table {table.name!r} exists, with outputs in {anchor.dtype}, and {type(self).__name__} cannot"
                    f" have them in {dtype}: leave dtype out, or give the module that has the table this dtype before"
                )
        if place is None:
            return self._steps.device
        self._steps.move([], place)
        return place

    @property
    def trainer(self) -> frugal.Trainer:
        """The trainer whose steps the module takes part in."""
        return self._trainer

    @property
    def frozen(self) -> bool:
        """Whether forwards read only: no parameter requires a gradient."""
        return not any(anchor.requires_grad for anchor in self._anchors)

    def _hold_anchors(self, dtype: torch.dtype, freeze: bool, place: torch.device) -> None:
        """Makes the tables' anchors parameters of the module."""
        anchors = tuple(table.make_anchor(dtype, not freeze, place) for table in self._lookup.tables)
        for i, anchor in enumerate(anchors):
            self._parameters["weight" if len(anchors) == 1 else f"weight_{i}"] = anchor
        self._anchors = anchors
        self._now = self._lookup, getattr(self, "_by_frequency", self._lookup), anchors
        self._first = next(iter(self._parameters))

    def _check_anchors(self) -> None:
        """An error, if a parameter was written, which changes no rows."""
        for anchor in self._anchors:
            if anchor.is_written():
                anchor.check()

    def _apply(self: Self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # half(), double(), to(): outputs change their dtype, or are on another device from now on.
        old = [(name, a, a.value, a.grad) for name, a in self._parameters.items() if isinstance(a, Anchor)]
        where, shared, is_complex = None, False, False
        for name, anchor, data, _ in old:
            self._parameters[name] = torch.nn.Parameter(data, anchor.requires_grad)  # PyTorch may replace it
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            for name, anchor, data, grad in old:
                new = self._parameters[name]
                assert new is not None
                anchor.grad = None
                shared |= data.device.type == "cpu" and data.is_shared()  # type: ignore[no-untyped-call]
                if new.device != data.device:
                    where = new.device
                is_complex |= new.dtype.is_complex
                anchor.become(data.dtype if new.dtype.is_complex else new.dtype, grad)
                self._parameters[name] = anchor
        if shared:
            raise NotImplementedError(
                f"{type(self).__name__}: share_memory() shares no rows, which an engine has. Processes that train the"
                " same tables attach to a controller: start frugal-controller, and the processes with FRUGAL_SERVICE"
            )
        if is_complex:
            raise NotImplementedError(f"{type(self).__name__}: rows are real numbers, and so are outputs")
        if where is not None:
            if where.type == "meta":
                _default.refuse_meta(f"{type(self).__name__} cannot be moved to meta")
            self._steps.check_device(where, type(self).__name__)
            self._steps.move(self._lookup.tables, where)
        return self

    def _tables(self) -> Dict[str, _steps.Table]:
        """By name in the state_dict."""
        raise NotImplementedError

    def _open(
        self,
        name: str,
        rows: int,
        dim: int,
        optimizer: Optional[frugal.Optimizer],
        init: Optional[frugal.Initializer],
        hashed: bool,
        mean_ranks: bool,
        nan_policy: Any,
        lazy: bool,
    ) -> _steps.Table:
        """Creates a table, or finds the one that another rank or module has made."""
        optimizer = dataclasses.replace(optimizer or frugal.SGD(), mean_ranks=mean_ranks)
        said = {"init": init, "nan_policy": nan_policy, "lazy": lazy}
        init = init or frugal.Normal(0.0, 1.0)
        table = self._steps.table(name, rows, dim, optimizer, init, hashed, nan_policy, lazy and not hashed)
        if table.begins or not table.made_with:
            table.made_with = said
        else:
            self._warn_of_others(table, said)
        return table

    def _warn_of_others(self, table: _steps.Table, said: Dict[str, Any]) -> None:
        """Of what another module has said of the table that this one finds."""
        usual = {"init": None, "nan_policy": "reject", "lazy": False}
        kept = table.made_with
        other = [f"{name}={value!r}" for name, value in said.items() if value not in (usual[name], kept[name])]
        if other:
            warnings.warn(
                f"table {table.name!r} exists: it stays as the module that made it has said, without"
                f" {', '.join(other)}",
                stacklevel=5,
            )

    def _warn_of_found(self, table: _steps.Table, has_weight: bool, stacklevel: int) -> None:
        """Of rows that are not new."""
        if table.begins:
            return
        trained = self._steps.trained(table)
        if trained or (has_weight and self._steps.world_size == 1):
            warnings.warn(
                f"table {table.name!r} exists, {'trained' if trained else 'not trained'}: the module goes on with its"
                " rows" + (", and does not take the weight that it was given" if has_weight else ""),
                stacklevel=stacklevel,
            )

    def _run(self, shape: Sequence[int], tensors: List[Optional[torch.Tensor]], mine: int = 0) -> Any:
        if _get_tracing_state() is not None:
            self._refuse_tracing()
        lookup, by_frequency, anchors = self._now
        dtype = anchors[0].dtype
        graph = torch.is_grad_enabled()
        training = graph and (anchors[0].requires_grad or any([anchor.requires_grad for anchor in anchors[1:]]))
        self._check_anchors()
        if self.max_norm is not None:
            _renorm.renorm(lookup, tensors[0], self.max_norm, self.norm_type, training)
        if training:
            if self.scale_grad_by_freq:
                lookup = by_frequency
            out, moment = lookup.train(self._source(lookup, anchors), shape, tensors, mine)
        else:
            out, moment = lookup.read(shape, tensors)
        if graph:
            for weights in tensors[2::3]:
                if weights is not None and weights.requires_grad:
                    out = lookup.weighted_rows(out, moment, *tensors)
                    break
        return out if dtype is torch.float32 else out.to(dtype)

    def _source(self, lookup: Lookup, anchors: Tuple[Anchor, ...]) -> torch.Tensor:
        """What outputs are computed of, as long as the anchors are as they were."""
        now = lookup.device, *[(id(anchor), anchor.requires_grad, anchor.dtype) for anchor in anchors]
        made = self._made
        if made is None or made[0] != now:
            made = self._made = now, source_of(anchors)
        return made[1]

    def _compiled(self, forward: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """A forward that is being compiled: torch.compile breaks the graph here, for it sees nothing of the library."""
        if torch.compiler.is_exporting():
            self._refuse_tracing()
        out: torch.Tensor = _uncompiled(forward, self, *args)
        return out

    def _watched(self) -> Callable[..., torch.Tensor]:
        """How a forward runs in a transform of torch.func, or traced."""
        if _default.in_fake_mode():
            self._refuse_tracing()
        raise NotImplementedError(
            f"{type(self).__name__} in a transform of torch.func, as grad() and vmap(): the engine, which has its rows,"
            " sees none of it. Look rows up before the transform, or take torch.autograd.grad()"
        )

    def _as_leaf(self, traced: Any, *inputs: Any) -> torch.Tensor:
        """What torch.fx writes down of torch.nn's modules: a call of the module."""
        tracer = traced.tracer
        if tracer.root is self:  # which torch.nn's is written down as a function of its weight
            self._refuse_tracing()
        call: torch.Tensor = tracer.create_proxy("call_module", tracer.path_of_module(self), inputs, {})
        return call

    def _instead_of(self) -> str:
        """The class of torch.nn that serves its rows."""
        return "Embedding" if isinstance(self, torch.nn.Embedding) else "EmbeddingBag"

    def _refuse_tracing(self) -> NoReturn:
        raise RuntimeError(
            f"{type(self).__name__} cannot be traced, scripted or exported, as by make_fx or under FakeTensorMode: its"
            " rows are not in the program. Serve with frugal_read of the engine, or put"
            f" torch.nn.{self._instead_of()}.from_pretrained(module.weight.clone()) in its place, with the same"
            " arguments"
        )

    def _declarations(self, value: Any) -> List[Tuple[Feature, torch.Tensor]]:
        """The keys of an input that a forward will get."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self._check_anchors()
        super()._save_to_state_dict(destination, prefix, keep_vars)  # what a subclass has
        left_out = _state.are_tables_left_out()
        tables = {} if left_out else self._tables()
        held = [table.held_anchor() for table in tables.values()]  # while another thread assigns to weight
        rows = {prefix + name + key: value for name, table in tables.items() for key, value in saved(table).items()}
        del held
        for key in self._anchor_keys(prefix) - rows.keys():
            del destination[key]
        destination.update(rows)
        if keep_vars and not left_out:
            destination.update((prefix + name + "weight", table.anchor) for name, table in self._tables().items())

    def _anchor_keys(self, prefix: str) -> Set[str]:
        return {prefix + name for name, parameter in self._parameters.items() if isinstance(parameter, Anchor)}

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: List[str],
        unexpected_keys: List[str],
        error_msgs: List[str],
    ) -> None:
        self._check_anchors()
        tables = {prefix + name: table for name, table in self._tables().items()}
        if _state.are_tables_left_out():
            tables = {}
        known = {begin + what for begin in tables for what in ("weight", "keys")}
        rows: Dict[str, Any] = {}

        def take(state: Dict[str, Any], *_: Any) -> None:
            rows.update((key, state.pop(key)) for key in known & state.keys())

        missing: List[str] = []
        # What a subclass has. The last of the hooks takes out what PyTorch would give to parameters: others may rename
        # it.
        hook = self._register_load_state_dict_pre_hook(take)  # type: ignore[no-untyped-call]
        try:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing, unexpected_keys, error_msgs
            )
        finally:
            hook.remove()
            cast(Dict[str, Any], state_dict).update(rows)
        for begin, table in tables.items():
            load = table.load()
            if begin + "weight" not in rows:
                missing_keys.append(begin + "weight")
                if load is not None:
                    load.lacks()
                continue
            try:
                loaded, assigns = rows[begin + "weight"], local_metadata.get("assign_to_params_buffers")
                single = isinstance(self, _Single) and not table.hashed
                if assigns and single and isinstance(loaded, torch.nn.Parameter):
                    self.weight = loaded.requires_grad_(table.trains())  # the module's own, as it is in PyTorch
                    continue
                with table.by_all(load):
                    _state.load_rows(self._steps, table, loaded, rows.get(begin + "keys"))
                if assigns and loaded.dtype.is_floating_point:
                    table.anchor.become(loaded.dtype, None)  # outputs have the dtype of what is loaded
            except (ValueError, TypeError, RuntimeError, frugal.Error) as error:
                error_msgs.append(f"{begin}weight: {error}")
        missing_keys += [key for key in missing if key not in self._anchor_keys(prefix)]

    def __prepare_scriptable__(self) -> NoReturn:
        self._refuse_tracing()

    def __copy__(self: Self) -> Self:
        """Of the same table, as copies of torch's modules have the same parameters."""
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        return copy

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied: the engine owns its rows; make another, and load its state_dict"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be pickled: the engine owns its rows; save its state_dict")


class Options(NamedTuple):
    """What torch.nn's modules have no arguments for."""

    trainer: Optional[frugal.Trainer]
    name: Optional[str]
    optimizer: Optional[frugal.Optimizer]
    init: Optional[frugal.Initializer]
    hashed: bool
    mean_ranks: bool
    nan_policy: NanPolicy
    lazy: bool


class _Parameters(Dict[str, Optional[torch.nn.Parameter]]):
    """A module's. A function of torch.nn.utils that computes a weight from a parameter finds it here."""

    table = ""

    def __contains__(self, name: object) -> bool:
        if name == "weight" and sys._getframe(1).f_globals.get("__name__") == "torch.nn.utils.parametrize":
            _refuse_computed(self.table, "a parametrization")
        return super().__contains__(name)


def _refuse_computed(table: str, what: str) -> NoReturn:
    raise NotImplementedError(
        f"table {table!r}: {what} would compute its weight from a parameter, and the engine trains the rows"
        " themselves: change the dense layers so, or write rows to module.weight between steps"
    )


class _Single(_Module):
    """One table."""

    _kind = ""
    _pools = False
    _usual: Optional[Callable[..., Optional[torch.Tensor]]] = None  # see the module of that name
    num_embeddings: int
    embedding_dim: int

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: Optional[int],
        max_norm: Optional[float],
        norm_type: float,
        scale_grad_by_freq: bool,
        sparse: bool,
        pooling: int,
        weight: Optional[torch.Tensor],
        freeze: bool,
        device: object,
        dtype: Optional[torch.dtype],
        table: Options,
    ) -> None:
        _inputs.size(num_embeddings, embedding_dim, empty=not table.hashed)
        _inputs.weight(weight, num_embeddings, embedding_dim)
        said, dtype = dtype, _dtype(dtype, weight, freeze, self._pools)
        place = self._begin(table.trainer, device, [table.name], said)
        if max_norm is not None:
            _renorm.check(self._steps)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = _inputs.padding_idx(padding_idx, num_embeddings, table.hashed)
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        name, alone = table.name or self._steps.name(self._kind), self._steps.world_size == 1
        size = 1 if table.trainer else self._steps.world_size
        with _ranks.in_turn(f"table {name!r}", self._trainer.rank, size) as in_turn:
            self._table = self._open(
                name, num_embeddings, embedding_dim, table.optimizer, table.init, table.hashed, table.mean_ranks,
                table.nan_policy, table.lazy,
            )  # fmt: skip
            self._table.goes |= table.name is None and self._table.begins and alone
            self._make_lookup(pooling)
            self._parameters = _Parameters()
            self._parameters.table = self._table.name
            self._hold_anchors(dtype, freeze, place)
            self.sparse = sparse
            # As torch.nn's modules do, the same numbers from the same seed, where it is not said how rows begin.
            draws = table.trainer is None and table.init is None and not (table.hashed or table.lazy)
            with self._steps.muting(False):
                self._give_rows(weight, draws and (alone or in_turn))
        self._warn_of_found(self._table, weight is not None, 4)

    def _give_rows(self, weight: Optional[torch.Tensor], draws: bool) -> None:
        """Its initial rows, where the table is new."""
        table = self._table
        table.written |= self._steps.world_size > 1  # by another rank, the padding's row, too: it is what it is
        if not table.created:
            if weight is None and draws and self._steps.world_size > 1:
                draw_nothing(table)
        elif weight is not None:
            _state.load_rows(self._steps, table, weight, None)
        elif draws or (type(self).reset_parameters is not _Single.reset_parameters and not table.hashed):
            self.reset_parameters()  # which may be a subclass's own
        elif self.padding_idx is not None and not table.hashed:
            zeros = torch.zeros(1, table.dim, dtype=torch.float32, device="cpu")
            _state.put(self._steps, table, _one_key(self.padding_idx), zeros)

    @property
    def table(self) -> frugal.Table:
        """The engine's table."""
        return self._table.table

    @property
    def sparse(self) -> bool:
        """Whether `weight.grad` is a sparse tensor."""
        # DistributedDataParallel asks for what its reducer gets, and the anchor's gradient is none.
        return self._has_sparse and sys._getframe(1).f_globals.get("__name__") != _DDP

    @sparse.setter
    def sparse(self, value: bool) -> None:
        self._has_sparse = self._anchors[0].sparse = value

    @property
    def weight(self) -> torch.Tensor:
        """The parameter that stands for the table: its rows, of a hashed table in the order of `table.keys()`, are read
        when something is computed of them, and written by assignments and by the functions of torch.nn.init."""
        instead = self._instead()
        if instead is not None:
            return instead
        if sys._getframe(1).f_globals.get("__name__") in _COMPUTE_WEIGHT:
            _refuse_computed(self._table.name, "a parametrization")
        self._check_anchors()
        return self._anchors[0]

    @weight.setter
    def weight(self, value: torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"weight must be a torch.Tensor, not {type(value).__name__}")
        anchor = self._anchors[0]
        if isinstance(value, Anchor):
            if value is not anchor:  # as it is by weight *= 2
                self._share(value.table)
            return
        if not isinstance(value, torch.nn.Parameter):
            raise TypeError(
                f"cannot assign '{value.type()}' as parameter 'weight' (torch.nn.Parameter expected): write rows by"
                " weight.data.copy_(tensor)"
            )
        if isinstance(value, (Weight, View)):  # a Parameter of rows of a table, of which it is a view
            value = torch.nn.Parameter(value.detach().clone(), value.requires_grad)
        if type(value) is not torch.nn.Parameter:
            raise NotImplementedError(
                f"table {self._table.name!r}: a {type(value).__name__} cannot be its weight: give it a"
                " torch.nn.Parameter of the values"
            )
        dtype, grad, requires_grad = anchor.dtype, value.grad, value.requires_grad
        if value.dtype.is_floating_point or not requires_grad:
            dtype = _dtype(None, value, not requires_grad, self._pools)
        before = self._table
        if grad is not None and self._steps.world_size > 1:
            raise NotImplementedError(
                f"table {before.name!r}: the Parameter that is to be its weight has a gradient, of which each rank has"
                " a part: call zero_grad() before"
            )
        table = self._table_of_another() if value.shape == before.shape else before
        copied = value.is_inference() or value.device != table.device
        try:
            write(table, value)
            if not copied:
                table.adopt(value, dtype, requires_grad)
        except BaseException:
            if table is not before:
                self._steps.drop_later(table.table)
            raise
        self._share(table)
        if copied:
            self._anchors[0].requires_grad_(False)  # which integers cannot
            self._anchors[0].become(dtype, None)
            self._anchors[0].requires_grad_(requires_grad)
        self._anchors[0].sparse = self._has_sparse
        self._anchors[0].grad = grad  # that of before went with the parameter of before

    def _adopt(self, value: torch.nn.Parameter, dtype: torch.dtype, requires_grad: bool) -> None:
        """A Parameter, whose rows the table has, is the module's."""
        self._table.adopt(value, dtype, requires_grad)
        self._hold(cast(Anchor, value))
        self._anchors[0].sparse = self._has_sparse

    def _hold(self, anchor: Anchor) -> None:
        self._anchors, self._made = (anchor,), None
        self._parameters[self._first] = anchor
        cast(_Parameters, self._parameters).table = self._table.name
        self._make_lookup(self._pooling())

    def _instead(self) -> Optional[torch.Tensor]:
        """What stands in the place of the rows, as in a torch.func.functional_call, and is no table's."""
        value: Optional[torch.Tensor] = self._parameters.get("weight")
        if value is self._anchors[0]:
            return None
        name, shape = self._table.name, (self.num_embeddings, self.embedding_dim)
        if self._table.hashed:
            raise NotImplementedError(
                f"table {name!r} is hashed: the rows that torch.func.functional_call has for it lack keys"
            )
        if value is None or (tuple(value.shape) == SHAPE and shape != SHAPE):
            raise NotImplementedError(
                f"table {name!r}: what stands in the place of its parameter, as in a transform of torch.func, would"
                f" have no part in the output. Give torch.func.functional_call a tensor of shape {shape}, or leave"
                " frugal's parameters out of those that are given"
            )
        return value

    def _share(self, table: _steps.Table) -> None:
        """The rows are those of another module's table from now on, as of modules that share a Parameter."""
        mine = self._table
        if table.steps is not self._steps or (table.capacity, table.dim, table.hashed) != (
            mine.capacity, mine.dim, mine.hashed,
        ):  # fmt: skip
            raise NotImplementedError(
                f"the weight of table {mine.name!r} cannot be that of table {table.name!r}, which has another shape,"
                " kind of keys or trainer: copy rows with weight.data.copy_()"
            )
        mine.modules.discard(self)
        self._table = table
        old = self._anchors[0]
        self._hold(table.make_anchor(old.dtype, old.requires_grad, old.device))

    def _table_of_another(self) -> _steps.Table:
        """For the rows of another parameter. The parameter of before keeps its rows. Where the table is to stay, it is
        of the new parameter, if no step has trained it."""
        mine = self._table
        stays = mine.hashed or not mine.goes
        # (All ranks find the same: each has made the steps.)
        new = not mine.stepped or mine.awaits_load()
        if stays and len(mine.modules) == 1 and not self._steps.trained(mine) and new:
            return mine
        if stays:
            raise NotImplementedError(
                f"table {mine.name!r} is trained, or another module's, too: another parameter would change its rows for"
                " all who have them. Write them by module.weight.data.copy_(tensor), and keep those of now by"
                " module.weight.clone()"
            )
        said = mine.made_with
        table = self._open(
            self._steps.name(self._kind), mine.capacity, mine.dim, mine.said, said["init"], False, mine.said.mean_ranks,
            said["nan_policy"], said["lazy"],
        )  # fmt: skip
        table.goes, table.device = table.begins, mine.device
        return table

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":  # a parameter would be registered
            object.__setattr__(self, name, value)
            return
        before: Any = self.__dict__.get(name)
        super().__setattr__(name, value)
        if name in ("mode", "padding_idx") and value != before and "_lookup" in self.__dict__:
            try:
                self._make_lookup(self._pooling())
            except Exception:
                super().__setattr__(name, before)
                raise
            if name == "padding_idx":
                self._table.written = True  # the row is what it is

    def __delattr__(self, name: str) -> None:
        if name == "weight":
            _refuse_computed(self._table.name, "what deletes weight, as spectral_norm")
        super().__delattr__(name)

    def register_parameter(self, name: str, param: Optional[torch.nn.Parameter]) -> None:
        if name == "weight_orig":
            _refuse_computed(self._table.name, "pruning")
        if name == "weight" and param is not None:
            self.weight = param
        else:
            super().register_parameter(name, param)

    def _make_lookup(self, pooling: int) -> None:
        padding = _inputs.padding_idx(self.padding_idx, self.num_embeddings, self._table.hashed)
        self._table.modules.add(self)
        kind = EmptyLookup if self._table.empty else Lookup
        lookup = kind(self._steps, [Feature(self._table, pooling, padding, 0)], self.embedding_dim)
        by_frequency = lookup.by_frequency()
        self._lookup, self._by_frequency = lookup, by_frequency
        self._now = lookup, by_frequency, self._anchors
        self.__dict__.pop("_usual", None)

    def _make_usual(self) -> Callable[..., Optional[torch.Tensor]]:
        lookup, _, anchors = self._now
        usual = _usual.forward(lookup, anchors[0], self._first, self._pools) if type(lookup) is Lookup else _usual.never
        self.__dict__["_usual"] = usual
        if self._now[0] is not lookup:  # by another thread, meanwhile
            self.__dict__.pop("_usual", None)
        return usual

    def _pooling(self) -> int:
        return _native.POOL_NONE

    def reset_parameters(self) -> None:
        """Rows of a standard normal distribution, zeros at `padding_idx`."""
        torch.nn.init.normal_(self.weight)
        self._fill_padding_idx_with_zero()

    def _fill_padding_idx_with_zero(self) -> None:
        # With the name that torch.nn's has, for subclasses call it.
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx] = 0.0

    def _tables(self) -> Dict[str, _steps.Table]:
        value: Optional[torch.Tensor] = self._parameters.get("weight")  # which a caller may have set past `weight`
        if isinstance(value, Anchor):
            return {"": value.table}
        return {} if self._instead() is not None else {"": self._table}

    def _declarations(self, value: Any) -> List[Tuple[Feature, torch.Tensor]]:
        if self._table.empty:
            return []
        return [(self._lookup.features[0], _inputs.declared(value, "keys", self._steps.device))]

    def extra_repr(self) -> str:
        text = f"{self.num_embeddings}, {self.embedding_dim}, table={self._table.name!r}"
        if self.padding_idx is not None:
            text += f", padding_idx={self.padding_idx}"
        if self.max_norm is not None:
            text += f", max_norm={self.max_norm}" + ("" if self.norm_type == 2 else f", norm_type={self.norm_type}")
        if self.scale_grad_by_freq:
            text += ", scale_grad_by_freq=True"
        return text + (", frozen" if self.frozen else "")


class Embedding(_Single, torch.nn.Embedding):  # so that isinstance() says so
    """torch.nn.Embedding in an engine: a row for each key, shape of the keys + (embedding_dim,).

    The first arguments are torch.nn.Embedding's. By keyword: `trainer`, whose steps train the rows; `name` of the
    table, by which ranks share it (default: counted in the order of making); `optimizer`, as frugal.Adagrad(lr=0.1)
    (default SGD); `init`, a frugal.Initializer (default Normal(0, 1), as torch's); `hashed`: keys are any 64 bits,
    `num_embeddings` the most rows; `mean_ranks`: gradients are averaged over ranks, else summed.
    """

    __constants__ = torch.nn.Embedding.__constants__
    _kind = "embedding"

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: Optional[int] = None,
        max_norm: Optional[float] = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Optional[torch.Tensor] = None,
        _freeze: bool = False,
        device: object = None,
        dtype: Optional[torch.dtype] = None,
        *,
        trainer: Optional[frugal.Trainer] = None,
        name: Optional[str] = None,
        optimizer: Optional[frugal.Optimizer] = None,
        init: Optional[frugal.Initializer] = None,
        hashed: bool = False,
        mean_ranks: bool = True,
        nan_policy: NanPolicy = "reject",
        lazy: bool = False,
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse,
            _native.POOL_NONE, _weight, _freeze, device, dtype,
            Options(trainer, name, optimizer, init, hashed, mean_ranks, nan_policy, lazy),
        )  # fmt: skip

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of the keys `input`, of any shape."""
        if is_compiling():
            return self._compiled(Embedding.forward, input)
        out = (self._usual or self._make_usual())(self, input, None, None)
        if out is not None:
            return out
        instead = self._instead()
        if instead is not None:
            return torch.nn.functional.embedding(
                input, instead, self.padding_idx, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse
            )
        if _inputs.is_traced(input):
            return self._as_leaf(input, input)
        run = self._watched() if _in_transform() or _in_fake_mode() else self._run
        keys = _inputs.keys(input, "input", self._lookup.device)
        mine = int(keys.data_ptr() != input.data_ptr())
        return run((*input.shape, self.embedding_dim), [keys, None, None], mine)

    @classmethod
    def from_pretrained(
        cls,
        embeddings: torch.Tensor,
        freeze: bool = True,
        padding_idx: Optional[int] = None,
        max_norm: Optional[float] = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        **keywords: Any,
    ) -> "Embedding":
        """A module whose rows begin as the 2-D tensor `embeddings`. Keywords are the constructor's."""
        rows, dim = _inputs.shape(embeddings)
        # By keyword, as torch.nn's does: a subclass may have them in another order.
        return cls(
            num_embeddings=rows, embedding_dim=dim, padding_idx=padding_idx, max_norm=max_norm, norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq, sparse=sparse, _weight=embeddings, _freeze=freeze, **keywords,
        )  # fmt: skip


class EmbeddingBag(_Single, torch.nn.EmbeddingBag):  # so that isinstance() says so
    """torch.nn.EmbeddingBag in an engine: a row for each bag, the sum or mean of its keys' rows.

    The first arguments are torch.nn.EmbeddingBag's, those by keyword Embedding's and `freeze`.
    """

    __constants__ = torch.nn.EmbeddingBag.__constants__
    _kind = "embedding_bag"
    _pools = True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: Optional[float] = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Optional[torch.Tensor] = None,
        include_last_offset: bool = False,
        padding_idx: Optional[int] = None,
        device: object = None,
        dtype: Optional[torch.dtype] = None,
        *,
        trainer: Optional[frugal.Trainer] = None,
        name: Optional[str] = None,
        optimizer: Optional[frugal.Optimizer] = None,
        init: Optional[frugal.Initializer] = None,
        hashed: bool = False,
        mean_ranks: bool = True,
        nan_policy: NanPolicy = "reject",
        lazy: bool = False,
        freeze: bool = False,
    ) -> None:
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse,
            _native.POOL_NONE if mode == _MAX else _pooling(mode), _weight, freeze, device, dtype,
            Options(trainer, name, optimizer, init, hashed, mean_ranks, nan_policy, lazy),
        )  # fmt: skip
        self.mode = mode
        self.include_last_offset = include_last_offset
        self._arange = _inputs.Arange()

    def _pooling(self) -> int:
        return _native.POOL_NONE if self.mode == _MAX else _pooling(self.mode)

    def forward(
        self,
        input: torch.Tensor,
        offsets: Optional[torch.Tensor] = None,
        per_sample_weights: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Bags of the keys `input`: 2-D, a bag in each row, or 1-D with `offsets`. Returns (bags, embedding_dim)."""
        if is_compiling():
            return self._compiled(EmbeddingBag.forward, input, offsets, per_sample_weights)
        try:
            out = (self._usual or self._make_usual())(self, input, offsets, per_sample_weights)
        except _native.InvalidArgument:
            _inputs.check_begins(offsets, input, self._table.name)
            raise
        if out is not None:
            return out
        instead = self._instead()
        if instead is not None:
            return torch.nn.functional.embedding_bag(
                input, instead, offsets, self.max_norm, self.norm_type, self.scale_grad_by_freq, self.mode, self.sparse,
                per_sample_weights, self.include_last_offset, self.padding_idx,
            )  # fmt: skip
        for value in (input, offsets, per_sample_weights):
            if _inputs.is_traced(value):
                return self._as_leaf(value, input, offsets, per_sample_weights)
        run = self._watched() if _in_transform() or _in_fake_mode() else self._run
        keys, ends, weights, mine = _inputs.bags(
            input, offsets, per_sample_weights, mode=self.mode, complete=self.include_last_offset,
            device=self._lookup.device, arange=self._arange, dtype=self._anchors[0].dtype,
        )  # fmt: skip
        if self.mode == _MAX:
            if self.scale_grad_by_freq:
                raise ValueError("max mode does not support scaling the gradient by the frequency")
            return self._max(run, keys, ends)
        return run((ends.shape[0] - 1, self.embedding_dim), [keys, ends, weights], mine)

    def _run(self, shape: Sequence[int], tensors: List[Optional[torch.Tensor]], mine: int = 0) -> Any:
        try:
            return super()._run(shape, tensors, mine)
        except _native.InvalidArgument:
            keys, ends = tensors[:2]
            if ends is not None and not self.include_last_offset:
                _inputs.check_begins(ends[:-1], keys, self._table.name)
            raise

    def _max(self, run: Callable[..., torch.Tensor], keys: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """PyTorch's own maximum of the rows of each key, which are looked up for it."""
        keys = keys.reshape(-1)
        _inputs.check_ends(ends, keys.numel())
        rows = run((keys.numel(), self.embedding_dim), [keys, None, None])
        places, padding = torch.arange(rows.shape[0], dtype=torch.int64, device=rows.device), None
        padded = self._lookup.features[0].padding
        if padded is not None:
            padding = rows.shape[0]
            rows = torch.cat((rows, rows.new_zeros(1, self.embedding_dim)))
            places.masked_fill_(keys.view(torch.int64) == int64_of(padded), padding)
        return torch.nn.functional.embedding_bag(
            places, rows, ends, mode="max", include_last_offset=True, padding_idx=padding
        )

    @classmethod
    def from_pretrained(
        cls,
        embeddings: torch.Tensor,
        freeze: bool = True,
        max_norm: Optional[float] = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: Optional[int] = None,
        **keywords: Any,
    ) -> "EmbeddingBag":
        """A module whose rows begin as the 2-D tensor `embeddings`. Keywords are the constructor's."""
        rows, dim = _inputs.shape(embeddings)
        module = cls(
            num_embeddings=rows, embedding_dim=dim, max_norm=max_norm, norm_type=norm_type,
            scale_grad_by_freq=scale_grad_by_freq, mode=mode, sparse=sparse, _weight=embeddings,
            include_last_offset=include_last_offset, padding_idx=padding_idx, **keywords,
        )  # fmt: skip
        module._anchors[0].requires_grad_(not freeze)  # for which a subclass may have no argument
        return module

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, mode={self.mode!r}"


class TableConfig(NamedTuple):
    """A table of an EmbeddingBagCollection."""

    name: str
    num_embeddings: int
    embedding_dim: int
    features: Sequence[str]  # whose keys are the table's
    mode: str = "sum"
    padding_idx: Optional[int] = None
    optimizer: Optional[frugal.Optimizer] = None
    init: Optional[frugal.Initializer] = None
    hashed: bool = False
    lazy: bool = False


class EmbeddingBagCollection(_Module):
    """Bags of many features over one or more tables: one call of the library for all.

    `tables` are TableConfigs; a feature belongs to one table, a table may have several. The output is one tensor of
    (batch, sum of the features' dims), the features in the order of `feature_names`; `split` makes a dict of views
    of it.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        trainer: Optional[frugal.Trainer] = None,
        mean_ranks: bool = True,
        freeze: bool = False,
        device: object = None,
        nan_policy: NanPolicy = "reject",
    ) -> None:
        tables = tuple(tables)
        place = self._begin(trainer, device, [config.name for config in tables])
        self.embedding_bag_configs = tables
        features: List[Feature] = []
        names: List[str] = []
        self._by_name: Dict[str, _steps.Table] = {}
        width = 0
        for config in self.embedding_bag_configs:
            _inputs.size(config.num_embeddings, config.embedding_dim, empty=False)
            table = self._open(
                config.name, config.num_embeddings, config.embedding_dim, config.optimizer, config.init,
                config.hashed, mean_ranks, nan_policy, config.lazy,
            )  # fmt: skip
            self._by_name[config.name] = table
            self._warn_of_found(table, False, 3)
            padding = _inputs.padding_idx(config.padding_idx, config.num_embeddings, config.hashed)
            if table.created and padding is not None and not config.hashed:
                zeros = torch.zeros(1, config.embedding_dim, dtype=torch.float32, device="cpu")
                _state.put(self._steps, table, _one_key(padding), zeros)
            for feature in config.features:
                features.append(Feature(table, _pooling(config.mode), padding, width))
                names.append(feature)
                width += config.embedding_dim
        if not features:
            raise ValueError("a collection needs a feature")
        if len(set(names)) != len(names) or len(self._by_name) != len(self.embedding_bag_configs):
            raise ValueError(
                f"names are not unique: features {names}, tables {[c.name for c in self.embedding_bag_configs]}"
            )
        self.feature_names = tuple(names)
        self._lookup = Lookup(self._steps, features, width)
        self._hold_anchors(torch.get_default_dtype(), freeze, place)
        self._arange = _inputs.Arange()

    @property
    def dims(self) -> Tuple[int, ...]:
        """Of each feature, in the order of `feature_names`."""
        return tuple(feature.table.dim for feature in self._lookup.features)

    def forward(
        self,
        features: Union[torch.Tensor, Mapping[str, FeatureInput]],
        lengths: Optional[Mapping[str, torch.Tensor]] = None,
        per_sample_weights: Optional[Mapping[str, torch.Tensor]] = None,
    ) -> torch.Tensor:
        """Bags of all features. Returns (batch, sum of dims).

        `features`: one tensor of (features, batch) or (features, batch, length), a key or a bag of equal length for
        each; or for each feature's name a tensor of (batch,) or (batch, length), or a pair (keys, offsets) with offsets
        of batch + 1 numbers, or, with its name in `lengths`, keys alone. `per_sample_weights`: by name, shaped as the
        keys.
        """
        if is_compiling():
            return self._compiled(EmbeddingBagCollection.forward, features, lengths, per_sample_weights)
        for name, anchor in zip(self._parameters, self._anchors):
            if self._parameters[name] is not anchor:
                raise NotImplementedError(
                    f"table {anchor.table.name!r}: another tensor in the place of {name}, as of"
                    " torch.func.functional_call: it would have no part in the output. Leave it out of those that are"
                    " given"
                )
        run = self._watched() if _in_transform() or _in_fake_mode() else self._run
        device = self._lookup.device
        tensors: List[Optional[torch.Tensor]] = []
        mine = 0  # which of them are only here
        batch = -1
        for what, given in (("lengths", lengths), ("per_sample_weights", per_sample_weights)):
            unknown = [] if given is None else [name for name in given if name not in self.feature_names]
            if unknown:
                raise ValueError(f"{what} has {unknown}, the features are {list(self.feature_names)}")
        for name, feature, value in self._inputs(features):
            keys, ends = self._bags(name, value, None if lengths is None else lengths.get(name))
            weights = None
            if per_sample_weights is not None and name in per_sample_weights:
                if feature.pooling != _native.POOL_SUM:
                    raise NotImplementedError(f"per_sample_weights of {name!r} need mode 'sum'")
                weights = _inputs.weights(
                    per_sample_weights[name], keys, f"per_sample_weights of {name!r}", device, self._anchors[0].dtype
                )
            if batch not in (-1, ends.numel() - 1):
                raise ValueError(f"feature {name!r} has {ends.numel() - 1} bags, those before it {batch}")
            batch = ends.numel() - 1
            if isinstance(value, tuple):
                ours = (keys is not value[0]) | (ends.data_ptr() != value[1].data_ptr()) << 1
            else:
                ours = (keys is not value) | 2
            mine |= ours << len(tensors)
            tensors += [keys, ends, weights]
        return run((batch, self._lookup.width), tensors, mine)

    def split(self, output: torch.Tensor) -> Dict[str, torch.Tensor]:
        """Views of an output, by feature."""
        return dict(zip(self.feature_names, torch.split(output, list(self.dims), dim=1)))

    def _inputs(
        self, features: Union[torch.Tensor, Mapping[str, FeatureInput]]
    ) -> List[Tuple[str, Feature, FeatureInput]]:
        values: Sequence[FeatureInput]
        if isinstance(features, torch.Tensor):
            if features.dim() not in (2, 3) or features.shape[0] != len(self.feature_names):
                raise ValueError(
                    f"features has shape {tuple(features.shape)} and must be ({len(self.feature_names)}, batch) or"
                    f" ({len(self.feature_names)}, batch, length)"
                )
            values = features.unbind(0)
        else:
            missing = [name for name in self.feature_names if name not in features]
            if missing or len(features) != len(self.feature_names):
                raise ValueError(f"features {sorted(features)} given, {sorted(self.feature_names)} wanted")
            values = [features[name] for name in self.feature_names]
        return list(zip(self.feature_names, self._lookup.features, values))

    def _bags(
        self, name: str, value: FeatureInput, lengths: Optional[torch.Tensor]
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        device = self._lookup.device
        if isinstance(value, tuple):
            if lengths is not None:
                raise ValueError(f"feature {name!r} has offsets, and lengths too: give one of them")
            keys = _inputs.keys(value[0], f"keys of {name!r}", device)
            return keys, _inputs.offsets(value[1], keys.numel(), True, f"offsets of {name!r}", device)
        keys = _inputs.keys(value, f"feature {name!r}", device)
        if lengths is not None:
            return keys, _inputs.offsets_of_lengths(lengths, f"lengths of {name!r}", device)
        if keys.dim() == 1:
            return keys, self._arange.offsets(torch.Size((keys.numel(), 1)), device)
        if keys.dim() == 2:
            return keys, self._arange.offsets(keys.shape, device)
        raise ValueError(f"feature {name!r} has {keys.dim()} dimensions and must have 1 or 2")

    def _tables(self) -> Dict[str, _steps.Table]:
        return {f"embedding_bags.{name}.": table for name, table in self._by_name.items()}

    def _declarations(self, value: Any) -> List[Tuple[Feature, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            named = value.unbind(0) if value.dim() in (2, 3) else (value,)
            if len(named) != len(self.feature_names):
                raise ValueError(f"{len(named)} features given, {len(self.feature_names)} wanted")
            pairs = list(zip(self.feature_names, self._lookup.features, named))
        else:
            wanted = dict(zip(self.feature_names, self._lookup.features))
            pairs = [(name, wanted[name], tensor) for name, tensor in value.items()]
        return [
            (
                feature,
                _inputs.declared(keys[0] if isinstance(keys, tuple) else keys, f"feature {name!r}", self._steps.device),
            )
            for name, feature, keys in pairs
        ]

    def extra_repr(self) -> str:
        tables = ", ".join(
            f"{config.name}: {config.num_embeddings} x {config.embedding_dim} {config.mode} of {list(config.features)}"
            for config in self.embedding_bag_configs
        )
        return tables + (", frozen" if self.frozen else "")


def _one_key(key: int) -> torch.Tensor:
    return torch.tensor([key], dtype=torch.int64, device="cpu")


def _pooling(mode: str) -> int:
    if mode == _MAX:
        raise NotImplementedError("mode 'max': bags of a collection are summed or averaged")
    if mode not in _POOLING:
        raise ValueError(f"mode is {mode!r} and must be 'sum', 'mean' or 'max'")
    return _POOLING[mode]
