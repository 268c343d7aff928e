"""The same training script with torch.nn's modules and with this package's: nothing but the class differs, and the rows
are the same within what float32 allows.

Every sample has every row, for PyTorch's momentum, Adam and weight decay move all rows at every step, and this package
moves those that have a gradient. test_rows_without_a_gradient compares the others with PyTorch's sparse forms.
"""

# mypy: disable-error-code="no-untyped-call,import-not-found,import-untyped,misc"
# torch says no types of Tensor.backward, and the frameworks may not be there.

from __future__ import annotations

import copy
import importlib
import os
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Type

import pytest
import torch
from torch.amp.grad_scaler import GradScaler

import frugal
import frugal.torch as ft

import forked

ROWS, DIM, SAMPLES, BATCH = 12, 6, 48, 8

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: Dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005),
}
KINDS = {
    "sgd": frugal.SGD(),
    "momentum": frugal.Momentum(),
    "adagrad": frugal.Adagrad(),
    "adam": frugal.Adam(),
    "adamw": frugal.Adam(),
    "rmsprop": frugal.RMSProp(),
}
MORE: Dict[str, Make] = {
    "sgd, decay": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1),
    "sgd, maximize": lambda p: torch.optim.SGD(p, lr=0.001, maximize=True),
    "sgd, foreach": lambda p: torch.optim.SGD(p, lr=0.05, foreach=True),
    "sgd, fused": lambda p: torch.optim.SGD(p, lr=0.05, fused=True),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.8, nesterov=True, weight_decay=0.01),
    "adagrad, decays": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, weight_decay=0.01),
    "adagrad, accumulated": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3, eps=1e-3),
    "adam, betas": lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.5, 0.9), eps=1e-3, weight_decay=0.01),
    "adam, foreach": lambda p: torch.optim.Adam(p, lr=0.02, foreach=True),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.02, fused=True),
    "adam, a tensor as rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.02)),
    "rmsprop, decay": lambda p: torch.optim.RMSprop(p, lr=0.005, alpha=0.9, eps=1e-4, weight_decay=0.01),
    "groups": lambda p: torch.optim.SGD([{"params": [q], "lr": 0.01 * (i + 1)} for i, q in enumerate(p)], lr=0.1),
}


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what rows of frugal do without a gradient, and of the frameworks
        yield


class Samples(torch.utils.data.Dataset[Dict[str, torch.Tensor]]):
    """Bags of all rows and some more of them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        more = torch.randint(0, ROWS, (SAMPLES, 4), generator=generator)
        self.keys = torch.cat([torch.arange(ROWS).expand(SAMPLES, ROWS), more], 1)
        self.labels = torch.randn(SAMPLES, generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Dict[str, torch.Tensor]:
        return {"keys": self.keys[i], "labels": self.labels[i]}


def loader() -> Any:
    return torch.utils.data.DataLoader(Samples(), batch_size=BATCH)


class Model(torch.nn.Module):
    bags: Any

    def __init__(self, kind: Type[Any], **arguments: Any) -> None:
        super().__init__()
        self.bags = kind(ROWS, DIM, mode="sum", **arguments)
        self.top = torch.nn.Linear(DIM, 1)

    def forward(self, keys: torch.Tensor, labels: torch.Tensor) -> Dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.top(self.bags(keys)).squeeze(1), labels)}


class Of32(Model):
    """Keys and no bags."""

    def __init__(self, kind: Type[Any]) -> None:
        torch.nn.Module.__init__(self)
        self.rows = {torch.nn.EmbeddingBag: torch.nn.Embedding, ft.EmbeddingBag: ft.Embedding}[kind](ROWS, DIM)
        self.top = torch.nn.Linear(DIM, 1)

    def bags(self, keys: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.rows(keys.to(torch.int32)).sum(1)
        return out


def plain(model: Any, make: Make) -> None:
    optimizer = make(model.parameters())
    for _ in range(2):
        for batch in loader():
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()


def gradients_kept_as_zeros(model: Any, make: Make) -> None:
    optimizer = make(model.parameters())
    for batch in loader():
        optimizer.zero_grad(set_to_none=False)
        model(**batch)["loss"].backward()
        optimizer.step()


def closures(model: Any, make: Make) -> None:
    optimizer = make(model.parameters())
    for batch in loader():

        def closure() -> Any:
            optimizer.zero_grad()
            loss = model(**batch)["loss"]
            loss.backward()
            return loss

        assert torch.is_tensor(optimizer.step(closure))


def accumulation(model: Any, make: Make) -> None:
    optimizer = make(model.parameters())
    for i, batch in enumerate(loader()):
        (model(**batch)["loss"] / 3).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()


def never_zeroed(model: Any, make: Make) -> None:
    """A gradient that is not zeroed is used again, and grows."""
    optimizer = make(model.parameters())
    for _, batch in zip(range(3), loader()):
        (model(**batch)["loss"] / 8).backward()
        optimizer.step()


def skipped_batches(model: Any, make: Make) -> None:
    optimizer = make(model.parameters())
    for i, batch in enumerate(loader()):
        model(**batch)["loss"].backward()
        if i % 2:
            optimizer.step()
        model.zero_grad()


def clipping(model: Any, make: Make) -> None:
    optimizer = make(model.parameters())
    for batch in loader():
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm > 0.5
        optimizer.step()


def clipping_of_others(model: Any, make: Make) -> None:
    optimizer = make(model.parameters())
    for batch in loader():
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=float("inf"), foreach=False)
        optimizer.step()


def clipping_of_values(model: Any, make: Make) -> None:
    optimizer = make(model.parameters())
    for batch in loader():
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()


def scaled(model: Any, make: Make) -> None:
    optimizer = make(model.parameters())
    scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for i, batch in enumerate(loader()):
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        scaler.scale(loss * float("inf") if i == 2 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2048.0


def scaled_and_clipped(model: Any, make: Make) -> None:
    optimizer = make(model.parameters())
    scaler = GradScaler("cpu", init_scale=1024.0)
    for i, batch in enumerate(loader()):
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        scaler.scale(loss * float("nan") if i == 2 else loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()


def scheduled(model: Any, optimizer: Any, schedule: Any) -> None:
    for _ in range(2):
        for batch in loader():
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
            schedule.step()


def schedules(model: Any, make: Make) -> None:
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9),
        ],
        [3],
    )
    scheduled(model, optimizer, schedule)


def schedules_of_momentum(model: Any, make: Make) -> None:
    optimizer = make(model.parameters())
    with_momentum = any(optimizer.param_groups[0].get(name) for name in ("momentum", "betas"))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=12, cycle_momentum=with_momentum)
    scheduled(model, optimizer, schedule)


def schedules_by_loss(model: Any, make: Make) -> None:
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    for batch in loader():
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        schedule.step(loss.item())


def freezing(model: Any, make: Make) -> None:
    optimizer = make(model.parameters())
    for i, batch in enumerate(loader()):
        if i in (2, 4):
            for parameter in model.bags.parameters():
                parameter.requires_grad = i == 4
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()


def freezing_from_above(model: Any, make: Make) -> None:
    optimizer = make(model.parameters())
    for i, batch in enumerate(loader()):
        model.requires_grad_(i != 3)
        if i != 3:
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()


def evaluation_trains(model: Any, make: Make) -> None:
    """eval() is of dropout and the like: gradients come as ever."""
    optimizer = make(model.parameters())
    for batch in loader():
        model.eval()
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
        with torch.no_grad():
            model(**batch)


def two_optimizers(model: Any, make: Make) -> None:
    sparse, dense = make(model.bags.parameters()), torch.optim.Adam(model.top.parameters())
    for i, batch in enumerate(loader()):
        sparse.zero_grad()
        dense.zero_grad()
        model(**batch)["loss"].backward()
        if i != 2:
            sparse.step()
        dense.step()


def added_later(model: Any, make: Make) -> None:
    optimizer = make(model.top.parameters())
    for i, batch in enumerate(loader()):
        if i == 2:
            optimizer.add_param_group({"params": list(model.bags.parameters())})
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        if i < 2:
            for parameter in model.bags.parameters():
                parameter.grad = None
        optimizer.step()


def gradients_of_something_else(model: Any, make: Make) -> None:
    """torch.autograd.grad leaves the parameters' gradients alone."""
    optimizer = make(model.parameters())
    for batch in loader():
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        torch.autograd.grad(loss, list(model.top.parameters()), retain_graph=True)
        loss.backward(inputs=list(model.top.parameters()), retain_graph=True)
        loss.backward(inputs=list(model.parameters()))
        optimizer.step()


def resumed(model: Any, make: Make) -> None:
    """Back to what was saved, in the run that goes on."""
    optimizer = make(model.parameters())
    saved: Any = None
    for i, batch in enumerate(loader()):
        if i == 2:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
    model.load_state_dict(saved[0])
    optimizer = make(model.parameters())
    optimizer.load_state_dict(saved[1])
    for batch in loader():
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()


def saved_while_accumulating(model: Any, make: Make) -> None:
    optimizer = make(model.parameters())
    for i, batch in enumerate(loader()):
        model(**batch)["loss"].backward()
        model.state_dict()
        optimizer.state_dict()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()


def a_shared_module(model: Any, make: Make) -> None:
    """A forward twice before a backward, and a backward twice."""
    optimizer = make(model.parameters())
    for batch in loader():
        optimizer.zero_grad()
        loss = model(**batch)["loss"] / 8 + model(batch["keys"].flip(0), batch["labels"])["loss"] / 4
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()


def autocast(model: Any, make: Make) -> None:
    optimizer = make(model.parameters())
    scaler = GradScaler("cpu", init_scale=16.0)
    for batch in loader():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch)["loss"]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def lightning(model: Any, make: Make, **options: Any) -> None:
    L = importlib.import_module("lightning")
    options.setdefault("max_epochs", 2)

    base: Any = L.LightningModule

    class Module(base):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Dict[str, torch.Tensor], i: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch)["loss"]
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = make(self.parameters())
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Module(), loader())


def lightning_clipped(model: Any, make: Make) -> None:
    lightning(model, make, gradient_clip_val=0.5, accumulate_grad_batches=2)


def accelerate(model: Any, make: Make) -> None:
    found = importlib.import_module("accelerate")
    accelerator = found.Accelerator(cpu=True, gradient_accumulation_steps=2)
    module, optimizer, batches = accelerator.prepare(model, make(model.parameters()), loader())
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))
    for _ in range(2):
        for batch in batches:
            with accelerator.accumulate(module):
                accelerator.backward(module(**batch)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(module.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()


def hugging_face(model: Any, make: Make) -> None:
    transformers = importlib.import_module("transformers")
    import tempfile

    optimizer = make(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=BATCH,
            num_train_epochs=2,
            gradient_accumulation_steps=2,
            max_grad_norm=0.5,
            report_to=[],
            disable_tqdm=True,
            save_strategy="epoch",
            dataloader_pin_memory=False,
            remove_unused_columns=False,
        )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        trainer = transformers.Trainer(model, arguments, train_dataset=Samples(), optimizers=(optimizer, schedule))
        trainer.train()


LOOPS: List[Callable[[Any, Make], None]] = [
    plain, gradients_kept_as_zeros, closures, accumulation, never_zeroed, skipped_batches, clipping, clipping_of_others,
    clipping_of_values, scaled, scaled_and_clipped, schedules, schedules_of_momentum, schedules_by_loss, freezing,
    freezing_from_above, evaluation_trains, two_optimizers, added_later, gradients_of_something_else, resumed,
    saved_while_accumulating, a_shared_module, autocast,
]  # fmt: skip
if os.environ.get("FRUGAL_FRAMEWORKS"):  # ./dev test --all, which installs them
    LOOPS += [lightning, lightning_clipped, accelerate, hugging_face]


def compare(loop: Callable[[Any, Make], None], make: Make, model: Any = Model) -> None:
    torch.manual_seed(11)
    start = model(torch.nn.EmbeddingBag).state_dict()
    start = {name: value.clone() * 0.3 for name, value in start.items()}
    ends = []
    for kind in (torch.nn.EmbeddingBag, ft.EmbeddingBag):
        trained = model(kind)
        trained.load_state_dict(start)
        torch.manual_seed(12)
        loop(trained, make)
        ends.append({name: value.detach().clone() for name, value in trained.state_dict().items()})
    theirs, ours = ends
    tolerance: Dict[str, Any] = {"rtol": 5e-6, "atol": 2e-6}
    assert theirs.keys() == ours.keys() == start.keys()
    for name, value in theirs.items():
        assert not torch.equal(value, start[name])
        torch.testing.assert_close(ours[name], value, **tolerance, msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_only_the_class_differs(loop: Callable[[Any, Make], None], optimizer: str) -> None:
    if (loop, optimizer) == (added_later, "adagrad"):
        return  # torch's Adagrad has no state for parameters that come later
    compare(loop, OPTIMIZERS[optimizer])


@pytest.mark.parametrize("optimizer", MORE)
def test_hyper_parameters_are_torch_s(optimizer: str) -> None:
    compare(plain, MORE[optimizer])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_embeddings_too(optimizer: str) -> None:
    compare(plain, OPTIMIZERS[optimizer], Of32)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "sparse adam"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_rows_without_a_gradient_rest(optimizer: str, accumulated: int) -> None:
    """As with sparse gradients of torch.nn."""
    makers = {**OPTIMIZERS, "sparse adam": lambda p: torch.optim.SparseAdam(list(p), lr=0.02)}
    start = torch.randn(50, DIM)
    ends = []
    for kind in (torch.nn.EmbeddingBag, ft.EmbeddingBag):
        bags = kind(50, DIM, mode="mean", sparse=True)
        bags.load_state_dict({"weight": start})
        made = makers[optimizer](bags.parameters())
        generator = torch.Generator().manual_seed(3)
        for i in range(12):
            keys = torch.randint(0, 50, (9,), generator=generator)
            out = bags(keys, torch.tensor([0, 2, 2, 5]))
            (out * torch.randn(out.shape, generator=generator)).sum().backward()
            if i % accumulated == accumulated - 1:
                made.step()
                made.zero_grad()
        ends.append(bags.state_dict()["weight"].clone())
    torch.testing.assert_close(ends[1], ends[0], rtol=5e-6, atol=2e-6)


WITHOUT: Dict[str, Make] = {
    "adamax": lambda p: torch.optim.Adamax(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "lbfgs": lambda p: torch.optim.LBFGS(list(p)),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "centered": lambda p: torch.optim.RMSprop(p, centered=True),
    "rmsprop with momentum": lambda p: torch.optim.RMSprop(p, momentum=0.9),
}


@pytest.mark.parametrize("optimizer", WITHOUT)
def test_what_has_no_counterpart_is_named(optimizer: str) -> None:
    model = Model(ft.EmbeddingBag)
    before = model.state_dict()["bags.weight"].clone()
    with pytest.raises(NotImplementedError):
        closures(model, WITHOUT[optimizer])
    assert torch.equal(model.state_dict()["bags.weight"], before)


def test_a_table_in_no_optimizer_rests() -> None:
    model = Model(ft.EmbeddingBag)
    before = model.state_dict()["bags.weight"].clone()
    optimizer = torch.optim.SGD(model.top.parameters(), lr=0.1)
    for batch in loader():
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()
    assert torch.equal(model.state_dict()["bags.weight"], before)


# Ranks in processes: the same program with either class; rank 0 saves what each optimizer has trained, or what kept it
# from that.
RANKS = """
import datetime, os, sys, traceback
import torch, torch.distributed as dist
import frugal.torch as ft
folder, store, which, how, given, out = sys.argv[1:]
sys.path.insert(0, folder)
import test_torch_frameworks as t
kind = {"torch": torch.nn.EmbeddingBag, "frugal": ft.EmbeddingBag}[which]
rank = int(os.environ["RANK"])
dist.init_process_group(
    "gloo", init_method="file://" + store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=20)
)


def train(name):
    make = t.OPTIMIZERS[name]
    torch.manual_seed(11)
    start = {name: value.clone() * 0.3 for name, value in t.Model(torch.nn.EmbeddingBag).state_dict().items()}
    # By a name of its own: the controller keeps the tables of the run before.
    model = t.Model(kind, **({"optimizer": t.KINDS[name], "name": name} if given == "given" else {}))
    model.load_state_dict(start)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = make(parallel.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=how == "scaled")
    for i, batch in enumerate(t.loader()):
        if i % 2 != rank:
            continue
        loss = parallel(**batch)["loss"]
        scaler.scale(loss * float("inf") if how == "scaled" and i == 2 else loss).backward()
        if how == "clipped":
            torch.nn.utils.clip_grad_norm_(parallel.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    dist.barrier()
    return model.state_dict()


ends = {}
for name in os.environ["OPTIMIZERS"].split():
    try:
        ends[name] = train(name)
    except Exception as error:
        traceback.print_exc()
        ends[name] = {"error": f"{type(error).__name__}: {error}"}
        break
    dist.barrier()
if rank == 0:
    torch.save(ends, out)
dist.destroy_process_group()
"""


def ranks(
    tmp_path: Path, kind: str, how: str, optimizers: Iterable[str], service: str, given: str = "not given"
) -> Dict[str, Any]:
    program, out = tmp_path / "ranks.py", tmp_path / f"{kind}.pt"
    program.write_text(RANKS)
    environment = {
        **os.environ,
        "FRUGAL_SERVICE": service,
        "OPTIMIZERS": " ".join(optimizers),
        "WORLD_SIZE": "2",
    }
    store = tmp_path / f"store of {kind}, {given}"
    command = [str(program), str(Path(__file__).parent), str(store), kind, how, given, str(out)]
    statuses = forked.run(command, [{**environment, "RANK": str(rank)} for rank in range(2)], 200)
    assert statuses == [0, 0] and out.exists()
    found: Dict[str, Any] = torch.load(out)
    return found


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch.distributed is not in this build")
@pytest.mark.parametrize("how", ["plain", "scaled", "clipped"])
def test_ranks_of_ddp(controller: Any, tmp_path: Path, how: str) -> None:
    theirs = ranks(tmp_path, "torch", how, OPTIMIZERS, controller.address)
    if how == "clipped":
        # The norm of all ranks' gradient is right, or refused, as everything that follows in these ranks.
        ours = ranks(tmp_path, "frugal", how, ["sgd"], controller.address)
        if "error" in ours["sgd"]:
            assert ours["sgd"]["error"].startswith("NotImplementedError"), ours
            return
    else:
        ours = ranks(tmp_path, "frugal", how, OPTIMIZERS, controller.address)
        last = list(ours)[-1]
        if "error" in ours[last]:
            # A table that other processes have mapped cannot change its kind: the message says to give it before.
            assert "give the optimizer when the table is created" in ours[last]["error"], ours[last]
            ours = ranks(tmp_path, "frugal", how, OPTIMIZERS, controller.address, "given")
    for optimizer, end in ours.items():
        assert "error" not in end, f"{optimizer}: {end['error']}"
        assert end.keys() == theirs[optimizer].keys()
        for name, value in theirs[optimizer].items():
            torch.testing.assert_close(
                end[name], value, rtol=5e-6, atol=2e-6, msg=lambda said: f"{optimizer}, {name}: {said}"
            )
    assert how == "clipped" or list(ours) == list(OPTIMIZERS)
