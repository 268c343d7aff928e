"""Modules with the arguments of torch.nn's. docs/torch.md says what differs, and which call begins and ends a step."""

from __future__ import annotations

import dataclasses
from typing import (
    Any,
    Callable,
    Dict,
    List,
    Mapping,
    NamedTuple,
    NoReturn,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
    Union,
    cast,
)

import torch

import frugal

from . import _inputs, _native, _state, _steps
from ._lookup import Feature, Lookup, ReadingLookup, TrainingLookup

_POOLING = {"sum": _native.POOL_SUM, "mean": _native.POOL_MEAN}

# Without types in torch.
_training_lookup: Callable[..., Any] = TrainingLookup.apply
_reading_lookup: Callable[..., Any] = ReadingLookup.apply

Self = TypeVar("Self", bound="_Module")

# The rows of a feature's keys: keys of a row each, bags of equal length, or keys with the offsets of their bags.
FeatureInput = Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]


_Forward = TypeVar("_Forward", bound=Callable[..., torch.Tensor])


def _uncompiled(forward: _Forward) -> _Forward:
    """torch.compile breaks the graph here: it cannot see what the library does."""
    return cast(_Forward, torch.compiler.disable(forward))  # type: ignore[no-untyped-call]


def _refuse(
    max_norm: Optional[float], norm_type: float, scale_grad_by_freq: bool, dtype: Optional[torch.dtype]
) -> None:
    if max_norm is not None or norm_type != 2.0:
        raise NotImplementedError(
            "max_norm: a lookup does not change rows; weight_bound of the table's optimizer bounds each weight,"
            " clip_norm the gradient of a row"
        )
    if scale_grad_by_freq:
        raise NotImplementedError("scale_grad_by_freq: gradients of a row are summed over its occurrences")
    if dtype not in (None, torch.float32):
        raise NotImplementedError(f"dtype {dtype}: rows are torch.float32")


def _padding(index: Optional[int], rows: int, hashed: bool) -> Optional[int]:
    if index is None:
        return None
    if hashed:
        return index & 0xFFFFFFFFFFFFFFFF  # keys are the 64 bits of an int64
    if not -rows <= index < rows:
        raise ValueError(f"padding_idx {index} is not within the {rows} rows")
    return index % rows


class _Module(torch.nn.Module):
    """What is common: tables, and no parameters."""

    def __init__(self, trainer: frugal.Trainer, device: object, freeze: bool) -> None:
        super().__init__()
        self._steps = _steps.of(trainer)
        self._trainer = trainer
        self._frozen = freeze
        if device is not None and torch.device(device) != self._steps.device:  # type: ignore[call-overload]
            raise ValueError(f"device {device}: the rows come to the trainer's device, {self._steps.device}")
        self._lookup: Lookup

    @property
    def trainer(self) -> frugal.Trainer:
        """The trainer whose steps the module takes part in."""
        return self._trainer

    @property
    def frozen(self) -> bool:
        """Whether forwards read only."""
        return self._frozen

    def requires_grad_(self: Self, requires_grad: bool = True) -> Self:
        """Freezes the rows (False) or lets them train (True). A call on a module above does not come here."""
        self._frozen = not requires_grad
        return self

    def _tables(self) -> Dict[str, _steps.Table]:
        """By name in the state_dict."""
        raise NotImplementedError

    def _open(
        self,
        kind: str,
        name: Optional[str],
        rows: int,
        dim: int,
        optimizer: Optional[frugal.Optimizer],
        init: Optional[frugal.Initializer],
        hashed: bool,
        mean_ranks: bool,
    ) -> _steps.Table:
        """Creates a table, or finds the one that another rank or module has made."""
        optimizer = dataclasses.replace(optimizer or frugal.SGD(), mean_ranks=mean_ranks)
        init = init or frugal.Normal(0.0, 1.0)
        return self._steps.table(name or self._steps.name(kind), rows, dim, optimizer, init, hashed)

    def _run(self, rows: int, tensors: List[Optional[torch.Tensor]]) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return self._lookup.read(rows, tensors)[0]
        if self.training and not self._frozen:
            anchor = self._lookup.features[0].table.anchor
            return cast(torch.Tensor, _training_lookup(anchor, self._lookup, rows, *tensors))
        if any(weights is not None and weights.requires_grad for weights in tensors[2::3]):
            return cast(torch.Tensor, _reading_lookup(self._lookup, rows, self._frozen, *tensors))
        return self._lookup.read(rows, tensors)[0]

    def _declarations(self, value: Any) -> List[Tuple[Feature, torch.Tensor]]:
        """The keys of an input that a forward will get."""
        raise NotImplementedError

    def _save_to_state_dict(self, destination: Dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, table in self._tables().items():
            for key, value in _state.rows(self._steps, table).items():
                destination[f"{prefix}{name}{key}"] = value

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
        known = set()
        for name, table in self._tables().items():
            begin = prefix + name
            known |= {begin + "weight", begin + "keys"}
            if begin + "weight" not in state_dict:
                missing_keys.append(begin + "weight")
                continue
            try:
                _state.load_rows(self._steps, table, state_dict[begin + "weight"], state_dict.get(begin + "keys"))
            except (ValueError, TypeError, RuntimeError, frugal.Error) as error:
                error_msgs.append(f"{begin}weight: {error}")
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in known]

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied: the engine owns its rows; make another, and load its state_dict"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be pickled: the engine owns its rows; save its state_dict")


class _Single(_Module):
    """One table."""

    _kind = ""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: Optional[int],
        pooling: int,
        weight: Optional[torch.Tensor],
        freeze: bool,
        device: object,
        trainer: frugal.Trainer,
        name: Optional[str],
        optimizer: Optional[frugal.Optimizer],
        init: Optional[frugal.Initializer],
        hashed: bool,
        mean_ranks: bool,
    ) -> None:
        super().__init__(trainer, device, freeze)
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.padding_idx = _padding(padding_idx, num_embeddings, hashed)
        self._table = self._open(self._kind, name, num_embeddings, embedding_dim, optimizer, init, hashed, mean_ranks)
        self._lookup = Lookup(self._steps, [Feature(self._table, pooling, self.padding_idx, 0)], embedding_dim)
        if self._table.created:
            if weight is not None:
                _state.load_rows(self._steps, self._table, weight, None)
            elif self.padding_idx is not None and not hashed:
                _state.put(self._steps, self._table, torch.tensor([self.padding_idx]), torch.zeros(1, embedding_dim))

    @property
    def table(self) -> frugal.Table:
        """The engine's table."""
        return self._table.table

    @property
    def weight(self) -> torch.Tensor:
        """A copy of all rows, of a hashed table in the order of `table.keys()`."""
        return _state.rows(self._steps, self._table)["weight"]

    def _tables(self) -> Dict[str, _steps.Table]:
        return {"": self._table}

    def _declarations(self, value: Any) -> List[Tuple[Feature, torch.Tensor]]:
        return [(self._lookup.features[0], _inputs.keys(value, "keys", self._steps.device))]

    def extra_repr(self) -> str:
        text = f"{self.num_embeddings}, {self.embedding_dim}, table={self._table.name!r}"
        if self.padding_idx is not None:
            text += f", padding_idx={self.padding_idx}"
        return text + (", frozen" if self._frozen else "")


class Embedding(_Single):
    """torch.nn.Embedding in an engine: a row for each key, shape of the keys + (embedding_dim,).

    The first arguments are torch.nn.Embedding's. By keyword: `trainer`, whose steps train the rows; `name` of the
    table, by which ranks share it (default: counted in the order of making); `optimizer`, as frugal.Adagrad(lr=0.1)
    (default SGD); `init`, a frugal.Initializer (default Normal(0, 1), as torch's); `hashed`: keys are any 64 bits,
    `num_embeddings` the most rows; `mean_ranks`: gradients are averaged over ranks, else summed.
    """

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
        trainer: frugal.Trainer,
        name: Optional[str] = None,
        optimizer: Optional[frugal.Optimizer] = None,
        init: Optional[frugal.Initializer] = None,
        hashed: bool = False,
        mean_ranks: bool = True,
    ) -> None:
        _refuse(max_norm, norm_type, scale_grad_by_freq, dtype)
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, _native.POOL_NONE, _weight, _freeze, device, trainer, name,
            optimizer, init, hashed, mean_ranks,
        )  # fmt: skip

    @_uncompiled
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of the keys `input`, of any shape."""
        keys = _inputs.keys(input, "input", self._steps.device)
        return self._run(keys.numel(), [keys, None, None]).view(*input.shape, self.embedding_dim)

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
        rows, dim = _shape(embeddings)
        return cls(
            rows, dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, embeddings, freeze, **keywords
        )


class EmbeddingBag(_Single):
    """torch.nn.EmbeddingBag in an engine: a row for each bag, the sum or mean of its keys' rows.

    The first arguments are torch.nn.EmbeddingBag's, those by keyword Embedding's and `freeze`.
    """

    _kind = "embedding_bag"

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
        trainer: frugal.Trainer,
        name: Optional[str] = None,
        optimizer: Optional[frugal.Optimizer] = None,
        init: Optional[frugal.Initializer] = None,
        hashed: bool = False,
        mean_ranks: bool = True,
        freeze: bool = False,
    ) -> None:
        _refuse(max_norm, norm_type, scale_grad_by_freq, dtype)
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, _pooling(mode), _weight, freeze, device, trainer, name,
            optimizer, init, hashed, mean_ranks,
        )  # fmt: skip
        self.mode = mode
        self.include_last_offset = include_last_offset
        self._arange = _inputs.Arange()

    @_uncompiled
    def forward(
        self,
        input: torch.Tensor,
        offsets: Optional[torch.Tensor] = None,
        per_sample_weights: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Bags of the keys `input`: 2-D, a bag in each row, or 1-D with `offsets`. Returns (bags, embedding_dim)."""
        device = self._steps.device
        keys = _inputs.keys(input, "input", device)
        if keys.dim() == 2:
            if offsets is not None:
                raise ValueError("offsets must be None if input is 2-D: each of its rows is a bag")
            ends = self._arange.offsets(keys.shape, device)
        elif keys.dim() == 1:
            if offsets is None:
                raise ValueError("offsets must be given if input is 1-D")
            ends = _inputs.offsets(offsets, keys.numel(), self.include_last_offset, "offsets", device)
        else:
            raise ValueError(f"input has {keys.dim()} dimensions and must have 1 or 2")
        weights = None
        if per_sample_weights is not None:
            if self.mode != "sum":
                raise NotImplementedError(f"per_sample_weights need mode 'sum', not {self.mode!r}")
            weights = _inputs.weights(per_sample_weights, keys, "per_sample_weights", device)
        return self._run(ends.numel() - 1, [keys, ends, weights])

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
        rows, dim = _shape(embeddings)
        return cls(
            rows, dim, max_norm, norm_type, scale_grad_by_freq, mode, sparse, embeddings, include_last_offset,
            padding_idx, freeze=freeze, **keywords,
        )  # fmt: skip

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
        trainer: frugal.Trainer,
        mean_ranks: bool = True,
        freeze: bool = False,
        device: object = None,
    ) -> None:
        super().__init__(trainer, device, freeze)
        self.embedding_bag_configs = tuple(tables)
        features: List[Feature] = []
        names: List[str] = []
        self._by_name: Dict[str, _steps.Table] = {}
        width = 0
        for config in self.embedding_bag_configs:
            table = self._open(
                "table", config.name, config.num_embeddings, config.embedding_dim, config.optimizer, config.init,
                config.hashed, mean_ranks,
            )  # fmt: skip
            self._by_name[config.name] = table
            padding = _padding(config.padding_idx, config.num_embeddings, config.hashed)
            if table.created and padding is not None and not config.hashed:
                _state.put(self._steps, table, torch.tensor([padding]), torch.zeros(1, config.embedding_dim))
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
        self._arange = _inputs.Arange()

    @property
    def dims(self) -> Tuple[int, ...]:
        """Of each feature, in the order of `feature_names`."""
        return tuple(feature.table.dim for feature in self._lookup.features)

    @_uncompiled
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
        device = self._steps.device
        tensors: List[Optional[torch.Tensor]] = []
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
                weights = _inputs.weights(per_sample_weights[name], keys, f"per_sample_weights of {name!r}", device)
            if batch not in (-1, ends.numel() - 1):
                raise ValueError(f"feature {name!r} has {ends.numel() - 1} bags, those before it {batch}")
            batch = ends.numel() - 1
            tensors += [keys, ends, weights]
        return self._run(batch, tensors)

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
        device = self._steps.device
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
                _inputs.keys(keys[0] if isinstance(keys, tuple) else keys, f"feature {name!r}", self._steps.device),
            )
            for name, feature, keys in pairs
        ]

    def extra_repr(self) -> str:
        tables = ", ".join(
            f"{config.name}: {config.num_embeddings} x {config.embedding_dim} {config.mode} of {list(config.features)}"
            for config in self.embedding_bag_configs
        )
        return tables + (", frozen" if self._frozen else "")


def _pooling(mode: str) -> int:
    if mode == "max":
        raise NotImplementedError("mode 'max': bags are summed or averaged")
    if mode not in _POOLING:
        raise ValueError(f"mode is {mode!r} and must be 'sum' or 'mean'")
    return _POOLING[mode]


def _shape(embeddings: torch.Tensor) -> Tuple[int, int]:
    if embeddings.dim() != 2:
        raise ValueError(f"embeddings has {embeddings.dim()} dimensions and must have 2")
    return int(embeddings.shape[0]), int(embeddings.shape[1])
