"""dlrm.py on several ranks: DistributedDataParallel for the dense layers, a Frugal controller for the tables.

    python dlrm_ddp.py --ranks 2                         starts a controller, and a process for each rank
    python dlrm_ddp.py --ranks 2 --threads               ranks as threads of one process: the same bits
    frugal-controller /tmp/tables &
    FRUGAL_SERVICE=/tmp/tables torchrun --nproc-per-node 2 --max-restarts 3 dlrm_ddp.py --resume FOLDER

The tables are in the controller's shared memory. A rank reads their rows there, and submits its gradients there, which
DistributedDataParallel neither sends nor sums. Gradients of the dense layers are summed in the order of the ranks, in
processes and in threads. So both give the same bits; --hash prints hashes that prove it.

With --resume rank 0 saves the dense layers in FOLDER in each step. Ranks that start again continue after the last
committed step of the tables.
"""

# mypy: disable-error-code="no-untyped-call"
# torch gives no types for Tensor.backward.

# No `from __future__ import annotations`: DistributedDataParallel reads those of its hooks.

import argparse
import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, cast

import frugal
import frugal.torch as ft
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import dlrm

# --- Ranks ---


class Processes:
    """The ranks of a process group."""

    def __init__(self) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()

    def gather(self, tensor: Tensor) -> List[Tensor]:
        """Every rank's tensor, in the order of the ranks."""
        parts = [torch.empty_like(tensor) for _ in range(self.count)]
        dist.all_gather(parts, tensor)
        return parts

    def barrier(self) -> None:
        dist.barrier()


class Threads:
    """A rank that is one of several threads."""

    def __init__(self, rank: int, tensors: List[Optional[Tensor]], together: threading.Barrier) -> None:
        self.rank, self.count = rank, len(tensors)
        self._tensors, self._together = tensors, together

    def gather(self, tensor: Tensor) -> List[Tensor]:
        """Every rank's tensor, in the order of the ranks."""
        self._tensors[self.rank] = tensor
        self.barrier()
        parts = [part.clone() for part in self._tensors if part is not None]
        self.barrier()
        return parts

    def barrier(self) -> None:
        self._together.wait()


Ranks = Any  # Processes or Threads


def mean(parts: Sequence[Tensor]) -> Tensor:
    """The reduction of dense gradients: summed in the order of the ranks, then divided."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total / len(parts)


def reduce_bucket(
    ranks: Ranks,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """The same as a hook of DistributedDataParallel, whose buckets are gradients laid end to end."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(mean(ranks.gather(bucket.buffer())))
    return done


# --- Saving ---


class Saved:
    """Dense layers after each of the last two steps.

    They are saved before the tables' step ends, so they exist when it is committed. After a crash between the two, the
    tables are one step older than the last file. So the file of the step before is kept.
    """

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer

    def put(self, step: int) -> None:
        path = self.folder / f"dense.{step % 2}"
        part = path.with_suffix(".part")
        torch.save({"step": step, "model": self.dense(), "optimizer": self.optimizer.state_dict()}, part)
        part.replace(path)

    def get(self, step: int) -> None:
        for path in (self.folder / "dense.0", self.folder / "dense.1"):
            if path.exists():
                saved = torch.load(path, weights_only=True)
                if saved["step"] == step:
                    self.model.load_state_dict(saved["model"], strict=False)  # without the tables
                    self.optimizer.load_state_dict(saved["optimizer"])
                    return
        raise ValueError(f"{self.folder} has no dense layers of step {step}, the last one of the controller's tables")

    def dense(self) -> Dict[str, Tensor]:
        parameters = self.model.named_parameters()
        return {name: parameter.detach() for name, parameter in parameters if not name.startswith("rows.")}


# --- A rank ---


def train(ranks: Ranks, trainer: frugal.Trainer, args: argparse.Namespace) -> Optional[Dict[str, Any]]:
    """Trains as one rank. Rank 0 returns the measures, and with --hash the hashes."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with building:
        torch.manual_seed(args.seed)  # all ranks begin with the same layers and rows
        weight = (torch.rand(dlrm.Planted.features * args.rows, args.dim) - 0.5) * 0.5
        # Other processes map the optimizer's state, so that its kind is said when the table is made.
        embedding = functools.partial(ft.Embedding, trainer=trainer, name="rows", optimizer=frugal.Adagrad(lr=args.lr))
        rows = dlrm.Rows(embedding, weight)
        model = dlrm.DLRM(rows, dlrm.Planted.dense_features, dlrm.Planted.features, args.dim)
    layers = [*model.bottom.parameters(), *model.top.parameters()]
    dense = torch.optim.Adam(layers, lr=args.dense_lr)
    tables = ft.Optimizer(rows)
    saved = None if args.resume is None else Saved(Path(args.resume), model, dense)
    committed = trainer.engine.committed_step()
    if committed is not None:
        if saved is None:
            raise ValueError(
                f"the controller's tables are trained already, up to step {committed}: go on with --resume"
            )
        saved.get(committed)
    step = 0 if committed is None else committed + 1
    ranks.barrier()  # all ranks have made the tables, and have read the same committed step
    forward: nn.Module = model
    if isinstance(ranks, Processes):
        forward = DistributedDataParallel(model, broadcast_buffers=False)
        forward.register_comm_hook(ranks, reduce_bucket)
    planted = args.samples, args.batch, args.rows, args.seed
    data = dlrm.Planted(*planted, test=False, rank=ranks.rank, ranks=ranks.count, skip=step)
    loader: Iterable[dlrm.Batch] = DataLoader(data, batch_size=None, num_workers=args.workers)
    steps = len(data)
    progress = dlrm.Progress(f"{ranks.count} ranks", steps) if ranks.rank == 0 else None
    for i, batch in enumerate(ft.Lookahead(loader, lambda batch: {rows.table: batch.ids}, trainer=trainer), 1):
        loss = nn.functional.binary_cross_entropy_with_logits(forward(batch.dense, batch.ids), batch.label)
        dense.zero_grad()
        tables.zero_grad()
        loss.backward()
        if isinstance(ranks, Threads):
            for parameter in layers:
                parameter.grad = mean(ranks.gather(cast(Tensor, parameter.grad)))
        dense.step()
        if saved is not None and ranks.rank == 0:
            saved.put(step)
        tables.step()
        step += 1
        if progress is not None:
            progress(i, i * args.batch * ranks.count, loss, last=i == steps)
    ranks.barrier()  # the last step is committed
    results: Optional[Dict[str, Any]] = None
    if ranks.rank == 0:
        tested = max(args.samples // 10, args.batch), *planted[1:]
        results = dict(dlrm.test(model, dlrm.Planted(*tested, test=True)))
        if args.hash:
            results["tables"], results["dense"] = hashes(model, tables)
    ranks.barrier()  # the other ranks stay until rank 0 has tested
    return results


building = threading.Lock()  # torch has one generator for all threads


def hashes(model: dlrm.DLRM, tables: ft.Optimizer) -> Tuple[str, str]:
    """Hashes of the rows with their optimizer state, and of the dense layers."""
    rows = [value for name, value in model.state_dict().items() if name.startswith("rows.")]
    rows += [state["state"] for state in tables.state_dict()["state"].values()]
    return digest(rows), digest([*model.bottom.parameters(), *model.top.parameters()])


def digest(tensors: Iterable[Tensor]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


# --- Starting them ---


def process_rank(args: argparse.Namespace, meeting: str = "env://") -> Optional[Dict[str, Any]]:
    """This process is a rank, as torchrun's environment says."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # torchrun's store outlives ranks that start again. Without a prefix, new ranks may find addresses of earlier ones,
    # and fail, or wait for them.
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store, _, _ = next(dist.rendezvous(meeting, rank, world_size))  # type: ignore[attr-defined]
    store = dist.PrefixStore(start, store)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        with ft.attach(args.service, lookahead=args.lookahead) as trainer:
            return train(Processes(), trainer, args)
    finally:
        dist.destroy_process_group()


def spawned_rank(rank: int, args: argparse.Namespace, meeting: str, results: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.ranks))
    results.put(process_rank(args, meeting))


def processes(args: argparse.Namespace) -> Dict[str, Any]:
    """Starts the ranks, and a controller if no address was given."""
    with contextlib.ExitStack() as stack:
        if not args.service:
            args.service = stack.enter_context(controller(args.controller))
        meeting = f"file://{stack.enter_context(tempfile.TemporaryDirectory())}/meeting"
        results = torch.multiprocessing.get_context("spawn").SimpleQueue()
        spawn: Any = getattr(torch.multiprocessing, "spawn")  # noqa: B009; it has no types
        spawn(spawned_rank, (args, meeting, results), nprocs=args.ranks)
        return next(result for result in (results.get() for _ in range(args.ranks)) if result is not None)


@contextlib.contextmanager
def controller(program: Optional[str]) -> Iterator[str]:
    """Starts a controller; yields its address."""
    program = program or shutil.which("frugal-controller")
    if program is None:
        raise OSError("frugal-controller is not on the PATH: say where it is with --controller")
    with tempfile.TemporaryDirectory() as folder:
        address = os.path.join(folder, "tables")
        process = subprocess.Popen([program, address], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            if not process.stdout.readline():  # "serving ADDRESS"
                raise OSError(f"{program} has not started")
            yield address
        finally:
            process.terminate()
            process.communicate()


def threads(args: argparse.Namespace) -> Dict[str, Any]:
    """The ranks as threads of this process, on an engine in it."""
    tensors: List[Optional[Tensor]] = [None] * args.ranks
    together = threading.Barrier(args.ranks)
    results: List[Dict[str, Any]] = []
    failures: List[BaseException] = []

    def run(rank: int) -> None:
        try:
            with engine.create_trainer(rank) as trainer:
                result = train(Threads(rank, tensors, together), trainer, args)
            if result is not None:
                results.append(result)
        except BaseException as error:
            failures.append(error)
            together.abort()
            engine.close()

    with frugal.Engine(world_size=args.ranks, lookahead=args.lookahead, service="") as engine:
        ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(args.ranks)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
    if failures:
        raise failures[0]
    return results[0]


def main(arguments: Optional[Sequence[str]] = None) -> Optional[Dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="to start, where torchrun has not")
    parser.add_argument("--threads", action="store_true", help="ranks are threads of this process")
    parser.add_argument("--service", help="address of a controller; left out: FRUGAL_SERVICE of the environment")
    parser.add_argument("--controller", help="the program to start where there is no address (frugal-controller)")
    parser.add_argument("--resume", metavar="FOLDER", help="save the dense layers there, and go on from there")
    parser.add_argument("--hash", action="store_true", help="print SHA-256 of the tables and of the dense layers")
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=1024, help="of each rank")
    parser.add_argument("--rows", type=int, default=100, help="rows of the table for each feature")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1, help="of the tables")
    parser.add_argument("--dense-lr", type=float, default=0.002, help="of the MLPs")
    parser.add_argument("--lookahead", type=int, default=10, help="steps whose keys are declared ahead")
    parser.add_argument("--workers", type=int, default=0, help="processes that load data, of each rank")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(arguments)
    if args.service is None:
        args.service = os.environ.get("FRUGAL_SERVICE")
    ranks = int(os.environ.get("WORLD_SIZE", args.ranks))
    if args.samples < args.batch * ranks:
        raise ValueError(
            f"--samples {args.samples} is less than --batch {args.batch} of {ranks} ranks: that is no step"
        )
    if args.resume is not None:
        os.makedirs(args.resume, exist_ok=True)
    if "RANK" in os.environ:
        results = process_rank(args)
    else:
        results = (threads if args.threads else processes)(args)
    if results is None:
        return None  # rank 0 prints them
    print(f"{'':14}{'AUC':>8}{'logloss':>10}")
    for name, title in (("model", f"{ranks} ranks"), ("optimum", "known optimum")):
        print(f"{title:14}{results[name][0]:8.4f}{results[name][1]:10.4f}")
    for name in ("tables", "dense") if args.hash else ():
        print(f"{name:7}{results[name]}")
    return results


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as error:
        sys.exit(f"dlrm_ddp.py: {error}")
