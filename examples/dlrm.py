"""A deep learning recommendation model (DLRM, Naumov et al. 2019) whose embedding tables live in Frugal.

    python dlrm.py                              a planted click model
    python dlrm.py --data train.txt             a file in Criteo's format, tab-separated, also .gz
    python dlrm.py --side both                  also the same model in PyTorch alone, to compare

Dense features go through an MLP, and each categorical feature is a row of a table. A second MLP computes the logit of a
click from the dot products of all of these. torch.optim.Adagrad trains the table, torch.optim.Adam the MLPs. Two things
differ between the sides: the class of the table, and frugal's side has its batches from a Lookahead. The program prints
AUC and logloss on samples that were not trained on. For the planted model the true probability of each sample is known,
so the program also prints the best values that any model can reach.

Criteo's format: a line has a label (0 or 1), 13 integers and 26 categories of 8 hexadecimal digits, separated by tabs.
A field may be empty. Every tenth line is for testing.
"""

# mypy: disable-error-code="no-untyped-call"
# torch gives no types for Tensor.backward.

from __future__ import annotations

import argparse
import gzip
import sys
import time
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    TextIO,
    Tuple,
    cast,
)

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

TEST_EVERY = 10


class Batch(NamedTuple):
    dense: Tensor  # (batch, dense features)
    ids: Tensor  # (categorical features, batch): rows of the table
    label: Tensor  # (batch,)
    logit: Tensor  # (batch,), the planted one; NaN where it is not known


# --- Data ---


class Planted(IterableDataset[Batch]):
    """Samples of a click model that is known.

    The logit is a bias, a weight for each dense feature, one for each category, and the dot products of a short vector
    of each category with those of the other features. Frequencies of categories fall as a power of their rank.

    Of several trainers, each makes its share of the batches: every `ranks`-th from `rank` on, without the first `skip`
    of these.
    """

    dense_features, features, factors = 4, 8, 3

    def __init__(
        self, samples: int, batch: int, rows: int, seed: int, test: bool, rank: int = 0, ranks: int = 1, skip: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weights = torch.randn(self.dense_features, generator=generator) * 0.5
        self.biases = torch.randn(self.features, rows, generator=generator) * 0.5
        self.vectors = torch.randn(self.features, rows, self.factors, generator=generator) * 0.5
        self.samples, self.batch, self.rows = samples, batch, rows
        self.rank, self.ranks, self.skip = rank, ranks, skip
        self.seed = seed * 2 + (2 if test else 1)

    def logit(self, dense: Tensor, categories: Tensor) -> Tensor:
        feature = torch.arange(self.features)[:, None]
        vectors = self.vectors[feature, categories]  # (features, batch, factors)
        total = vectors.sum(0)
        pairs = (total.square() - vectors.square().sum(0)).sum(1) / 2
        return -1.0 + dense @ self.weights + self.biases[feature, categories].sum(0) + pairs

    def __len__(self) -> int:
        return max(self.samples // self.batch // self.ranks - self.skip, 0)

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        for share in range(self.skip + first, self.skip + len(self), every):
            i = share * self.ranks + self.rank
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + i)
            dense = torch.randn(self.batch, self.dense_features, generator=generator)
            u = torch.rand(self.features, self.batch, generator=generator)
            categories = (self.rows * u**2).long().clamp_(max=self.rows - 1)
            logit = self.logit(dense, categories)
            label = (torch.rand(self.batch, generator=generator) < logit.sigmoid()).float()
            yield Batch(dense, categories + torch.arange(self.features)[:, None] * self.rows, label, logit)


class Criteo(IterableDataset[Batch]):
    """Lines of a file in Criteo's format; category c of feature f is row f * rows + c modulo rows."""

    dense_features, features = 13, 26

    def __init__(self, path: str, batch: int, rows: int, test: bool, most: Optional[int]) -> None:
        self.path, self.batch, self.rows, self.test, self.most = path, batch, rows, test, most

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        first, every = (0, 1) if info is None else (info.id, info.num_workers)
        lines: List[Tuple[int, List[str]]] = []
        number = taken = 0
        for i, line in enumerate(self._lines()):
            if (i % TEST_EVERY == TEST_EVERY - 1) is not self.test:
                continue
            if self.most is not None and taken >= self.most:
                break
            taken += 1
            if number % every == first:
                fields = line.rstrip("\n").split("\t")
                if len(fields) != 1 + self.dense_features + self.features:
                    raise ValueError(f"{self.path}, line {i + 1}: {len(fields)} fields, expected 40")
                lines.append((i, fields))
            if taken % self.batch == 0:
                number += 1
                if lines:
                    yield self._parsed(lines)
                    lines = []
        if lines:
            yield self._parsed(lines)

    def _lines(self) -> Iterator[str]:
        opener = gzip.open if self.path.endswith(".gz") else open
        with cast("ContextManager[TextIO]", opener(self.path, "rt", encoding="ascii")) as file:
            yield from file

    def _parsed(self, lines: Sequence[Tuple[int, List[str]]]) -> Batch:
        try:
            label = torch.tensor([float(fields[0]) for _, fields in lines])
            counts = torch.tensor([[float(x or 0) for x in fields[1:14]] for _, fields in lines])
            categories = torch.tensor([[int(x or "0", 16) for x in fields[14:]] for _, fields in lines])
        except ValueError as error:
            first, last = lines[0][0] + 1, lines[-1][0] + 1
            raise ValueError(f"{self.path}, in lines {first} to {last}: {error}") from error
        ids = categories.t() % self.rows + torch.arange(self.features)[:, None] * self.rows
        return Batch(counts.clamp(min=0).log1p(), ids.contiguous(), label, torch.full_like(label, float("nan")))


# --- The model ---


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    layers: List[nn.Module] = []
    for i, (inputs, outputs) in enumerate(zip(sizes, sizes[1:])):
        layers.append(nn.Linear(inputs, outputs))
        if i + 2 < len(sizes):
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """`rows` makes of ids (features, batch) rows (batch, features, dim)."""

    def __init__(self, rows: nn.Module, dense_features: int, features: int, dim: int) -> None:
        super().__init__()
        self.rows = rows
        self.bottom = mlp([dense_features, 64, dim])
        self.top = mlp([dim + (features + 1) * features // 2, 64, 32, 1])
        self.pairs: Tensor
        self.register_buffer("pairs", torch.tril_indices(features + 1, features + 1, -1), persistent=False)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        vectors = torch.cat([bottom[:, None], self.rows(ids)], dim=1)
        dots = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return cast(Tensor, self.top(torch.cat([bottom, dots], dim=1))).squeeze(1)


class Rows(nn.Module):
    """A table of all features' rows. `embedding` is torch.nn.Embedding, or frugal.torch's."""

    def __init__(self, embedding: Callable[..., nn.Module], weight: Tensor) -> None:
        super().__init__()
        self.table = embedding(weight.shape[0], weight.shape[1], sparse=True, _weight=weight)

    def forward(self, ids: Tensor) -> Tensor:
        return cast(Tensor, self.table(ids)).transpose(0, 1)


# --- Measures ---


def auc(score: Tensor, label: Tensor) -> float:
    """The probability that a click's score is above another sample's; ties count half."""
    _, inverse, counts = torch.unique(score, return_inverse=True, return_counts=True)
    ranks = counts.cumsum(0).double() - (counts.double() - 1) / 2  # the mean rank of equal scores
    clicks = label.sum().double()
    others = label.numel() - clicks
    above = ranks[inverse][label > 0.5].sum() - clicks * (clicks + 1) / 2
    return float(above / (clicks * others))


def logloss(logit: Tensor, label: Tensor) -> float:
    return float(nn.functional.binary_cross_entropy_with_logits(logit.double(), label.double()))


class Progress:
    """A bar on stderr."""

    def __init__(self, title: str, steps: Optional[int]) -> None:
        self.title, self.steps, self.began, self.shown = title, steps, time.perf_counter(), 0.0

    def __call__(self, step: int, samples: int, loss: Tensor, last: bool = False) -> None:
        now = time.perf_counter()
        if now - self.shown < 0.2 and not last:
            return
        self.shown = now
        rate = samples / max(now - self.began, 1e-9)
        if self.steps:
            filled = 30 * min(step, self.steps) // self.steps
            bar = f"[{'#' * filled}{'.' * (30 - filled)}] {step}/{self.steps}"
        else:
            bar = f"step {step}"
        end = "\n" if last else ""
        print(
            f"\r{self.title} {bar}  loss {loss.item():.4f}  {rate:,.0f} samples/s ",
            end=end,
            file=sys.stderr,
            flush=True,
        )


# --- Training ---


def train(
    model: DLRM, batches: Iterable[Batch], optimizers: Sequence[torch.optim.Optimizer], progress: Progress
) -> None:
    step = samples = 0
    loss = torch.zeros(())
    for step, batch in enumerate(batches, 1):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.ids), batch.label)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        samples += batch.label.numel()
        progress(step, samples, loss)
    if step == 0:
        raise ValueError("no samples to train on")
    progress(step, samples, loss, last=True)


def test(model: DLRM, batches: Iterable[Batch]) -> Dict[str, Tuple[float, float]]:
    """AUC and logloss of the model, and of the planted logits where they are known."""
    model.eval()
    with torch.no_grad():
        columns = [(model(batch.dense, batch.ids), batch.label, batch.logit) for batch in batches]
    model.train()
    if not columns:
        raise ValueError("no samples to test on: every tenth is taken")
    said, label, planted = (torch.cat(column) for column in zip(*columns))
    if label.min() == label.max():
        raise ValueError(f"all {label.numel()} samples to test on have the label {label[0]:g}: the AUC needs both")
    results = {"model": (auc(said, label), logloss(said, label))}
    if not planted.isnan().any():
        results["optimum"] = (auc(planted, label), logloss(planted, label))
    return results


def datasets(args: argparse.Namespace) -> Tuple[Any, Any]:
    if args.data is not None:
        return (
            Criteo(args.data, args.batch, args.rows or 100_000, test=False, most=args.samples),
            Criteo(args.data, args.batch, args.rows or 100_000, test=True, most=None),
        )
    samples = 1_000_000 if args.samples is None else args.samples
    rows = args.rows or 100
    if samples < args.batch:
        raise ValueError(f"--samples {samples} is less than --batch {args.batch}: that would be no step")
    return (
        Planted(samples, args.batch, rows, args.seed, test=False),
        Planted(max(samples // 10, args.batch), args.batch, rows, args.seed, test=True),
    )


def run(args: argparse.Namespace, side: str) -> Dict[str, Tuple[float, float]]:
    """Trains and tests one side. Both begin with the same numbers and see the same batches."""
    training, testing = datasets(args)
    torch.manual_seed(args.seed)
    weight = (torch.rand(training.features * training.rows, args.dim) - 0.5) * 0.5
    loader: Iterable[Batch] = DataLoader(
        training, batch_size=None, num_workers=args.workers, persistent_workers=args.workers > 0
    )
    steps = len(training) if isinstance(training, Planted) else None
    embedding: Callable[..., nn.Module] = nn.Embedding
    if side == "frugal":
        import frugal.torch

        embedding = frugal.torch.Embedding
    rows = Rows(embedding, weight)
    model = DLRM(rows, training.dense_features, training.features, args.dim)
    dense = torch.optim.Adam([*model.bottom.parameters(), *model.top.parameters()], lr=args.dense_lr)
    tables = torch.optim.Adagrad(rows.parameters(), lr=args.lr)
    if side == "frugal":
        loader = frugal.torch.Lookahead(loader, lambda batch: {rows.table: batch.ids}, depth=args.lookahead)
    for epoch in range(args.epochs):
        train(model, loader, [dense, tables], Progress(f"{side}, epoch {epoch + 1}", steps))
    return test(model, testing)


def main(arguments: Optional[Sequence[str]] = None) -> Dict[str, Tuple[float, float]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a file in Criteo's format; left out: a planted model")
    parser.add_argument("--side", choices=("frugal", "torch", "both"), default="frugal")
    parser.add_argument("--samples", type=int, help="most samples of an epoch (planted: 1,000,000; a file: all)")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--rows", type=int, help="rows of the table for each feature (planted: 100; a file: 100,000)")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1, help="of the tables")
    parser.add_argument("--dense-lr", type=float, default=0.002, help="of the MLPs")
    parser.add_argument("--lookahead", type=int, default=10, help="steps whose keys are declared ahead")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    results: Dict[str, Tuple[float, float]] = {}
    for side in ("frugal", "torch") if args.side == "both" else (args.side,):
        measured = run(args, side)
        results[side] = measured.pop("model")
        results.update(measured)
    print(f"{'':14}{'AUC':>8}{'logloss':>10}")
    for name in ("frugal", "torch", "optimum"):
        if name in results:
            title = "known optimum" if name == "optimum" else name
            print(f"{title:14}{results[name][0]:8.4f}{results[name][1]:10.4f}")
    return results


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"dlrm.py: {error}")
