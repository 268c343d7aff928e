"""examples/dlrm_ddp.py: ranks as processes and threads train the same bits, also after a crash. frugal.torch.attach."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, List

import pytest
import torch
import torch.distributed as dist

import frugal
import frugal.torch as ft
from frugal.torch import _default, _ranks

import forked

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"
SMALL = ["--samples", "20000", "--batch", "500", "--hash"]

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch.distributed is not in this build")

# dlrm_ddp.py whose rank 1 is killed in a backward, when rank 0 may be anywhere in the step.
CRASHES = """
import os, signal, sys
sys.path.insert(0, sys.argv.pop(1))
import dlrm_ddp
steps, mean = 0, dlrm_ddp.mean
def crashes(parts):
    global steps
    steps += 1
    if steps == 7 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return mean(parts)
dlrm_ddp.mean = crashes
dlrm_ddp.main()
"""


def hashes(command: List[str], **variables: str) -> List[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    ended = subprocess.run(
        [sys.executable, *command, *SMALL], capture_output=True, text=True, timeout=1200, env=environment
    )  # under a sanitizer each of its processes takes a minute to import torch
    assert ended.returncode == 0, ended.stderr
    found = [line for line in ended.stdout.splitlines() if line.startswith(("tables", "dense"))]
    assert len(found) == 2 and found[0] != found[1], ended.stdout
    return found


def test_processes_train_the_bits_of_threads(controller_program: Path, controller: Any, tmp_path: Path) -> None:
    example = str(EXAMPLES / "dlrm_ddp.py")
    threads = hashes([example, "--threads"])
    assert hashes([example, "--controller", str(controller_program), "--workers", "1"]) == threads
    program = tmp_path / "crashes.py"
    program.write_text(CRASHES)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    resumed = [*torchrun, str(program), str(EXAMPLES), "--resume", str(tmp_path / "saved")]
    assert hashes(resumed, FRUGAL_SERVICE=controller.address) == threads


# What a program of one of two ranks begins and ends with: `modules` is torch.nn or frugal.torch.
BEGIN = """
import copy, os, sys, time
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
modules = torch.nn
if sys.argv[2] == "frugal":
    import frugal.torch as modules
"""
END = """
dist.barrier()
dist.destroy_process_group()
"""

# Each rank draws from a seed of its own; the rows are rank 0's, and what is drawn after them follows each rank's seed.
# In the middle of the training another optimizer begins anew, and all ranks load what rank 0 has saved. In the last
# steps a rank does not use a table. Rank 0 saves alone while the other waits for it in the next step, and both in the
# middle of one.
DRAWS = """
torch.manual_seed(rank)
if rank == 0:
    time.sleep(0.5)  # the other one is there before
given = torch.full((3, 2), float(rank))
model = torch.nn.ModuleList([
    modules.Embedding(40, 6, padding_idx=1), modules.EmbeddingBag(3, 2, _weight=given),
    modules.EmbeddingBag(20, 3), torch.nn.Linear(11, 1),
])
def forward(keys, unused):
    bags = model[2](keys[:, None] % 20)
    return model[3](torch.cat([model[0](keys), model[1](keys[:, None] % 3), bags.detach() if unused else bags], 1))
model.forward = forward
with torch.no_grad():
    for module in model:
        if isinstance(module, torch.nn.Embedding):
            module.weight.data.normal_(0.0, 0.02)
        elif isinstance(module, torch.nn.EmbeddingBag):
            torch.nn.init.xavier_uniform_(module.weight)
            module.weight.mul_(0.5)
drawn = torch.rand(1)
ddp = torch.nn.parallel.DistributedDataParallel(
    model, find_unused_parameters=True, gradient_as_bucket_view=sys.argv[4] == "True"
)
for parameter in model.parameters():  # as some scripts do by hand
    dist.broadcast(parameter.data, 0)
    with torch.no_grad():
        dist.broadcast(parameter, 0)
dist.barrier()
found = [*(m.weight.detach().clone() for m in model), drawn]
optimizer = torch.optim.Adagrad(ddp.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(10 + rank)
for step in range(6):
    if step == 2:
        optimizer = torch.optim.Adagrad(ddp.parameters(), lr=0.2)
    if step == 3:
        file = f"{sys.argv[3]}/saved by {sys.argv[2]}"
        if rank == 0:
            torch.save([model.state_dict(), optimizer.state_dict()], file)
        dist.barrier()
        saved = torch.load(file)
        ddp.module.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    optimizer.zero_grad()
    if step == 1 and rank == 0:
        dist.barrier()
        saved_alone = copy.deepcopy(optimizer.state_dict()["state"])
    out = ddp(torch.randint(0, 40, (9,), generator=generator), step > 3 and step % 2 == rank)
    if step == 1 and rank == 1:
        dist.barrier()
        saved_alone = {}
    out.square().mean().backward()
    if step == 1:
        saved_inside = copy.deepcopy(optimizer.state_dict()["state"])
    optimizer.step()
dist.barrier()
found += [m.weight.detach().clone() for m in model]
found += [state["sum"] for saved in (saved_inside, saved_alone) for state in saved.values()]
torch.save(found, f"{sys.argv[3]}/{sys.argv[2]}{rank}")
"""


def of_two_ranks(source: str, controller: Any, folder: Path, *arguments: str) -> List[List[Any]]:
    """What two processes have found with torch.nn and with frugal.torch: of each, what each rank has saved."""
    program = folder / "program.py"
    program.write_text(BEGIN + source + END)
    for whose in ("torch", "frugal"):
        environment = {**os.environ, "WORLD_SIZE": "2"}
        if whose == "frugal":
            environment["FRUGAL_SERVICE"] = controller.address
        command = [str(program), str(folder / f"store of {whose}"), whose, str(folder), *arguments]
        assert forked.run(command, [{**environment, "RANK": str(rank)} for rank in range(2)]) == [0, 0]
    return [[torch.load(folder / f"{whose}{rank}") for rank in range(2)] for whose in ("torch", "frugal")]


@pytest.mark.parametrize("views", [False, True])
def test_ranks_begin_and_load_as_distributed_data_parallel_s(controller: Any, tmp_path: Path, views: bool) -> None:
    for theirs, ours in zip(*of_two_ranks(DRAWS, controller, tmp_path, str(views))):
        assert len(ours) == len(theirs) >= 14 and all(torch.equal(a, b) for a, b in zip(ours[:5], theirs))
        for mine, expected in zip(ours[5:], theirs[5:]):
            torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


# Each rank writes to its copies of the rows, in each step in another way, and one of them comes later.
WRITES = """
torch.manual_seed(0)
model = torch.nn.Sequential(modules.Embedding(12, 4), torch.nn.Flatten(), torch.nn.Linear(8, 1))
table = model[0]
with torch.no_grad():
    table.weight.data = table.weight.data * 0.5
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adagrad(ddp.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(10 + rank)
def normalize():
    table.weight.data = torch.nn.functional.normalize(table.weight.data)
def scale_rows():
    table.weight[2] *= 0.5
def scale_view():
    table.weight[3:6].mul_(0.5)
def set_rows():
    table.weight[torch.tensor([0, 7])] = 0.25
def refused():
    for write in (lambda: table.weight.copy_(torch.ones(3, 4)), lambda: table.weight.add_(torch.ones(5))):
        try:
            write()
        except RuntimeError as error:
            assert "expand" in str(error) or "must match the size" in str(error), error
    if sys.argv[2] == "frugal":
        for sums in (table.weight, table.weight.data):
            try:
                dist.all_reduce(sums)
            except NotImplementedError as error:
                assert "all_reduce cannot write weight. Ranks that share a table" in str(error), error
            else:
                raise AssertionError("all_reduce of rows is lost")
parameter = next(table.parameters())
writes = [
    lambda: table.weight.mul_(0.5), lambda: table.weight.data.add_(1.0), normalize, scale_rows, scale_view, set_rows,
    refused, lambda: table.weight.copy_(table.weight * 0.5), lambda: parameter.data.clamp_(-0.1, 0.1),
    lambda: parameter.mul_(2.0),
    lambda: torch.nn.init.uniform_(table.weight), lambda: torch._foreach_mul_([table.weight, table.weight], [0.5, 0.5]),
    lambda: torch.mul(table.weight, 0.5, out=table.weight),
]
found = []
for step, write in enumerate([*writes, *writes]):
    late = step % 2 == rank
    def change():
        if late:
            time.sleep(0.02)
        with torch.no_grad():
            write()
    optimizer.zero_grad()
    if step < len(writes):
        change()
    ddp(torch.randint(0, 12, (5, 2), generator=generator)).square().mean().backward()
    if step >= len(writes):
        change()
    optimizer.step()
    found.append(table.weight.detach().clone())
torch.save([*found, torch.rand(1)], f"{sys.argv[3]}/{sys.argv[2]}{rank}")
"""


def test_writes_that_all_ranks_make_are_made_once(controller: Any, tmp_path: Path) -> None:
    for theirs, ours in zip(*of_two_ranks(WRITES, controller, tmp_path)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# A Parameter of the caller's is a module's weight, and an optimizer's, and that of a layer that is tied to it.
PARAMETERS = """
torch.manual_seed(0)
model = torch.nn.ModuleList([modules.Embedding(12, 4), modules.Embedding(6, 4), torch.nn.Linear(4, 12, bias=False)])
given = torch.nn.Parameter(torch.full((6, 4), float(rank)))
optimizer = torch.optim.Adagrad([given, model[2].weight], lr=0.1)
model[1].weight = given
model[0].weight = model[2].weight
with torch.no_grad():
    torch.nn.init.uniform_(model[2].weight, -0.5, 0.5)
model.forward = lambda keys: model[2](model[0](keys) * model[1](keys % 6))
ddp = torch.nn.parallel.DistributedDataParallel(model)
generator = torch.Generator().manual_seed(10 + rank)
for step in range(5):
    optimizer.zero_grad()
    ddp(torch.randint(0, 12, (5,), generator=generator)).square().mean().backward()
    optimizer.step()
dist.barrier()
if sys.argv[2] == "frugal":
    def assign():
        model[1].weight = torch.nn.Parameter(torch.ones(6, 4))
    trained = torch.nn.Embedding(6, 4)
    trained(torch.tensor([1])).sum().backward()
    for call, what in ((assign, "is trained"), (lambda: modules.convert(trained), "zero_grad")):
        try:
            call()
        except NotImplementedError as error:
            assert what in str(error), error
        else:
            raise AssertionError("not refused")
    assert type(trained) is torch.nn.Embedding
    dist.barrier()
torch.save([given.detach().clone(), model[2].weight.detach().clone()], f"{sys.argv[3]}/{sys.argv[2]}{rank}")
"""


def test_parameters_that_ranks_assign_are_the_tables(controller: Any, tmp_path: Path) -> None:
    for theirs, ours in zip(*of_two_ranks(PARAMETERS, controller, tmp_path)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# An optimizer's state goes to another one, as it is and out of the first, and is reset.
STATES = """
torch.manual_seed(0)
model = torch.nn.ModuleList([modules.Embedding(12, 4), modules.Embedding(12, 4)])
model.forward = lambda keys: model[0](keys) * model[1](keys)
ddp = torch.nn.parallel.DistributedDataParallel(model)
found = []
def train(optimizer):
    for step in range(2):
        optimizer.zero_grad()
        ((rank + 1) * ddp(torch.arange(12)).square().mean()).backward()
        optimizer.step()
    found.append([[parameter.detach().clone() for parameter in model.parameters()], saved(optimizer)])
def saved(optimizer):
    states = copy.deepcopy(optimizer.state_dict()["state"])
    return [{name: value for name, value in state.items() if name != "step"} for state in states.values()]
for kind in (torch.optim.Adagrad, lambda *a, **k: torch.optim.SGD(*a, momentum=0.9, **k)):
    first = kind(model.parameters(), lr=0.1)
    train(first)
    second, third = [kind(model.parameters(), lr=0.05) for _ in range(2)]
    for parameter in model.parameters():
        second.state[parameter] = first.state[parameter]
    train(second)
    for parameter in model.parameters():
        third.state[parameter] = second.state.pop(parameter)
    found.append(saved(third))
    train(third)
    for state in third.state.values():
        for name in state:
            state[name].zero_()
    train(third)
torch.save(found, f"{sys.argv[3]}/{sys.argv[2]}{rank}")
"""


def test_ranks_move_an_optimizer_s_state(controller: Any, tmp_path: Path) -> None:
    for theirs, ours in zip(*of_two_ranks(STATES, controller, tmp_path)):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# Between a backward and a step that never comes, ranks roll back to what was saved before.
ROLLED_BACK = """
def make(seed):
    torch.manual_seed(seed)
    model = torch.nn.ModuleList([modules.Embedding(12, 4), modules.EmbeddingBag(6, 4), torch.nn.Linear(4, 1)])
    model.forward = lambda keys: model[2](model[0](keys) + model[1](keys[:, None] % 6))
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    return model, ddp, torch.optim.Adagrad(ddp.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(10 + rank)
def backward(ddp):
    if generator.get_state()[0] % 2 == rank:
        time.sleep(0.02)
    ddp(torch.randint(0, 12, (5,), generator=generator)).square().mean().backward()
def train(ddp, optimizer):
    for _ in range(2):
        optimizer.zero_grad()
        backward(ddp)
        optimizer.step()
found = []
for seed in range(3):
    model, ddp, optimizer = make(seed)
    train(ddp, optimizer)
    dist.barrier()
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    train(ddp, optimizer)
    if seed == 1:
        backward(ddp)  # and a gradient that stays for the next step
    else:
        ddp(torch.arange(rank + 1))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    found.append([parameter.detach().clone() for parameter in model.parameters()])
    train(ddp, optimizer)
    found.append([parameter.detach().clone() for parameter in model.parameters()])
torch.save(found, f"{sys.argv[3]}/{sys.argv[2]}{rank}")
"""


def test_ranks_load_in_the_middle_of_a_step(controller: Any, tmp_path: Path) -> None:
    for theirs, ours in zip(*of_two_ranks(ROLLED_BACK, controller, tmp_path)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# The state that one rank loads lacks a table, before the first step that of rank 0, which the other waits for.
LACKS = """
import warnings
if sys.argv[2] == "frugal":
    from frugal.torch import _ranks
    _ranks.WORD_MS = 0
    warnings.simplefilter("ignore")  # of waits
torch.manual_seed(0)
model = torch.nn.ModuleList([modules.Embedding(12, 4), modules.Embedding(6, 4)])
def load(whose, value):
    state = {name: torch.full_like(rows, value) for name, rows in model.state_dict().items()}
    if rank in whose:
        del state["1.weight"]
    try:
        missing = model.load_state_dict(state, strict=False).missing_keys
        assert missing == (["1.weight"] if rank in whose else []), missing
    except RuntimeError as error:
        assert whose and rank not in whose and sys.argv[2] == "frugal", error
        said = f"the state that rank {whose[0]} has loaded lacks table 'embedding_1', and that of rank {rank} has it"
        assert said in str(error), error
    else:
        assert not whose or rank in whose or sys.argv[2] == "torch" or len(whose) == 2, "no error"
    dist.barrier()
load([0], 1.0)
load([0, 1], 2.0)
load([], 3.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
(model[0](torch.tensor([rank])) * model[1](torch.tensor([rank]))).sum().backward()
optimizer.step()
for whose in ([1], [0], [0, 1]):
    load(whose, 4.0)
load([], 5.0)
with torch.no_grad():
    model[1].weight.mul_(2.0)
dist.barrier()
torch.save([each.weight.detach().clone() for each in model], f"{sys.argv[3]}/{sys.argv[2]}{rank}")
"""


def test_ranks_whose_states_lack_a_table_do_not_wait(controller: Any, tmp_path: Path) -> None:
    for theirs, ours in zip(*of_two_ranks(LACKS, controller, tmp_path)):
        torch.testing.assert_close(ours, theirs)


# Rank 0 has begun the next step, and rank 1 reads the state of a hashed table, for which that step must end.
HASHED = """
options = {"hashed": True} if sys.argv[2] == "frugal" else {}
model = modules.Embedding(12, 4, **options)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.5)
def train():
    optimizer.zero_grad()
    model(torch.arange(6)).sum().backward()
for step in range(2):
    train()
    optimizer.step()
if rank == 0:
    train()
dist.barrier()
if rank == 1 and sys.argv[2] == "frugal":
    import frugal
    for state_dict in (model.state_dict, optimizer.state_dict):
        try:
            state_dict()
        except frugal.Busy as error:
            assert "another rank has begun step" in str(error) and "barrier" in str(error), error
        else:
            raise AssertionError("not refused")
dist.barrier()
if rank == 1:
    train()
optimizer.step()
dist.barrier()
state = model.state_dict()["weight"], optimizer.state_dict()["state"]
dist.barrier()
torch.save([], f"{sys.argv[3]}/{sys.argv[2]}{rank}")
"""


def test_a_rank_waits_for_no_step_that_cannot_end_without_it(controller: Any, tmp_path: Path) -> None:
    of_two_ranks(HASHED, controller, tmp_path)


# What would share or average a table once more, and what takes a caller's gradient for one of all ranks.
REFUSED = """
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer
def make():
    model = torch.nn.Sequential(modules.Embedding(6, 4), torch.nn.Linear(4, 1))
    averager = PeriodicModelAverager(period=1, warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    model(torch.arange(6)).sum().backward()
    return model, averager, optimizer
model, averager, optimizer = make()
calls = {
    "an optimizer of its own": lambda: optimizer.step(),
    "nothing to average": lambda: averager.average_parameters(model.parameters()),
    "ignored_params": lambda: fully_shard(make()[0], mesh=init_device_mesh("cpu", (2,))),
    "same number of steps": lambda: Join([torch.nn.parallel.DistributedDataParallel(model)]),
    "2 ranks have a part": lambda: model[0].weight.grad.copy_(torch.tensor(5.0)),
}
for said, call in calls.items():
    if sys.argv[2] == "torch":
        continue
    try:
        call()
    except NotImplementedError as error:
        assert said in str(error), error
    else:
        raise AssertionError(said)
Join([torch.nn.parallel.DistributedDataParallel(model)], throw_on_early_termination=True)
torch.save([], f"{sys.argv[3]}/{sys.argv[2]}{rank}")
"""


def test_what_ranks_share_already_says_what_to_do(controller: Any, tmp_path: Path) -> None:
    of_two_ranks(REFUSED, controller, tmp_path)


# No rank clips a gradient that ranks share, nor has what a reducer has put in its place: also one that did not use the
# table, whose gradient a reducer makes.
CLIPPED = """
torch.manual_seed(0)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = modules.Embedding(6, 4), torch.nn.Linear(4, 1)
    def forward(self, keys, uses):
        return self.head(self.table(keys) if uses else torch.ones(2, 4))
ddp = torch.nn.parallel.DistributedDataParallel(
    Model(), find_unused_parameters=True, gradient_as_bucket_view=sys.argv[4] == "True"
)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
clips = [
    lambda: torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0),
    lambda: torch.nn.utils.clip_grad_value_(ddp.parameters(), 1.0),
]
for used in (2, 1, 0, 2):
    for to_none in (True, False):
        optimizer.zero_grad(set_to_none=to_none)
        ddp(torch.arange(2), used == 2 or used == rank).sum().backward()
        for clip in clips if sys.argv[2] == "frugal" else []:
            try:
                clip()
            except NotImplementedError as error:
                assert "2 ranks share" in str(error) and "frugal optimizer" in str(error), error
            else:
                raise AssertionError("not refused")
        assert ddp.module.table.weight.grad.shape == (6, 4)
        optimizer.step()
dist.barrier()
torch.save(ddp.module.table.weight.detach().clone(), f"{sys.argv[3]}/{sys.argv[2]}{rank}")
"""


@pytest.mark.parametrize("views", [False, True])
def test_no_rank_clips_what_ranks_share(controller: Any, tmp_path: Path, views: bool) -> None:
    for theirs, ours in zip(*of_two_ranks(CLIPPED, controller, tmp_path, str(views))):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# A Function of a caller's gets the parameter, and its result is looked up, or is the loss.
FUNCTIONS = """
torch.manual_seed(0)
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight * 2
    @staticmethod
    def backward(ctx, grad):
        return grad * 2
model = torch.nn.ModuleList([modules.Embedding(6, 4), modules.Embedding(6, 4), torch.nn.Linear(4, 1)])
def forward(keys):
    rows = torch.nn.functional.embedding(keys, Doubled.apply(model[1].weight))
    return model[2](model[0](keys) + rows).square().mean() + Doubled.apply(model[0].weight).square().mean()
model.forward = forward
ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=sys.argv[4] == "True")
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    ddp(torch.tensor([rank, 2, 3])).backward()
    optimizer.step()
dist.barrier()
torch.save([parameter.detach().clone() for parameter in model.parameters()], f"{sys.argv[3]}/{sys.argv[2]}{rank}")
"""


@pytest.mark.parametrize("views", [False, True])
def test_a_function_of_a_caller_s_trains_what_ranks_share(controller: Any, tmp_path: Path, views: bool) -> None:
    for theirs, ours in zip(*of_two_ranks(FUNCTIONS, controller, tmp_path, str(views))):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# Ranks that do not set the same: of the steps 0, 1, ..., in the last one. The rank that comes later is refused, and can
# step when it has set what the other one has.
RATES = """
torch.manual_seed(0)
model = torch.nn.ModuleList([modules.Embedding(6, 4), modules.EmbeddingBag(6, 4, mode="sum"), torch.nn.Linear(4, 1)])
model.forward = lambda keys: model[2](model[0](keys) + model[1](keys[:, None]))
ddp = torch.nn.parallel.DistributedDataParallel(model)
how = sys.argv[4]
if how.startswith("Adam"):
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.1)
else:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
group = optimizer.param_groups[0]
def step(first):
    optimizer.zero_grad()
    ddp(torch.tensor([1, 2, 3 + rank])).square().sum().backward()
    for each in (first, 1 - first) if number else (rank,):  # the first step takes both ranks
        if rank == each:
            optimizer.step()
        dist.barrier()
for number in range(4):
    if how == "schedule":
        group["lr"] = 0.1 / (number + 1)
    step(number % 2)
refused = ""
if rank == 1 and modules is not torch.nn:
    others = {name: group[name] for name in ("lr", "momentum", "betas") if name in group}
    if how == "momentum":
        group["momentum"] = 0.5
    elif how == "Adam's betas":
        group["betas"] = 0.5, 0.999
    else:
        group["lr"] = 0.01
    real, optimizer.step = optimizer.step, lambda: None
    step(0)
    optimizer.step = real
    try:
        optimizer.step()
    except ValueError as error:
        refused = str(error)
    group.update(others)
    optimizer.step()
else:
    step(0)
step(1)
dist.barrier()
torch.save([refused, *(p.detach().clone() for p in model.parameters())], f"{sys.argv[3]}/{sys.argv[2]}{rank}")
"""


@pytest.mark.parametrize("how", ["constant", "schedule", "momentum", "Adam's rate", "Adam's betas"])
def test_ranks_that_set_other_hyper_parameters_are_refused(controller: Any, tmp_path: Path, how: str) -> None:
    theirs, ours = of_two_ranks(RATES, controller, tmp_path, how)
    assert ours[0][0] == "" and ": rank 1 says" in ours[1][0] and "all ranks must say the same" in ours[1][0]
    values = {"momentum": "momentum=0.5, rank 0 momentum=0.9", "constant": "lr=0.01, rank 0 lr=0.1;"}
    assert values.get(how, "rank 0") in ours[1][0]
    for expected, mine in zip(theirs, ours):
        for a, b in zip(expected[1:], mine[1:]):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


# One rank in turn has a gradient of a table. It is multiplied, and the learning rate goes back and forth.
IN_TURN = """
torch.manual_seed(0)
model = torch.nn.ModuleList([modules.Embedding(6, 4), modules.Embedding(6, 4), torch.nn.Linear(4, 1)])
model.forward = lambda keys, both: model[2](model[0](keys) + model[1](keys) if both else model[0](keys))
ddp = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
rates, factors = (0.1, 0.2, 0.1, 0.1, 0.4, 0.1, 0.1), (0.5, 1.0, 0.5, 1.0, 1.0, 0.25, 1.0)
for step, (rate, factor) in enumerate(zip(rates, factors)):
    optimizer.param_groups[0]["lr"] = rate
    optimizer.zero_grad()
    ddp(torch.tensor([1, 2, 3 + rank]), step % 2 == rank).square().sum().backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)
    optimizer.step()
dist.barrier()
torch.save([parameter.detach().clone() for parameter in model.parameters()], f"{sys.argv[3]}/{sys.argv[2]}{rank}")
"""


# The gradients of several backwards, of which each is reduced, and some do not use the table on one rank, or on both.
REDUCED_AGAIN = """
torch.manual_seed(0)
model = torch.nn.ModuleList([modules.Embedding(6, 4), torch.nn.Linear(4, 1)])
model.forward = lambda keys, used: model[1](model[0](keys) if used else torch.ones(2, 4))
if sys.argv[4] == "replicate":
    from torch.distributed._composable.replicate import replicate
    ddp = replicate(model, find_unused_parameters=True)
else:
    ddp = torch.nn.parallel.DistributedDataParallel(
        model, find_unused_parameters=True, gradient_as_bucket_view=sys.argv[4] == "views"
    )
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
steps = [[(1, 0), (1, 0)], [(0, 1), (1, 0), (0, 1)], [(1, 0), (0, 0)], [(0, 0), (0, 1), (0, 0), (1, 1)], [(0, 1)]]
for step, uses in enumerate(steps):
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    for at, used in enumerate(uses):
        ddp(torch.tensor([at, 4 + rank]), used[rank]).square().sum().backward()
    optimizer.step()
dist.barrier()
torch.save([parameter.detach().clone() for parameter in model.parameters()], f"{sys.argv[3]}/{sys.argv[2]}{rank}")
"""


@pytest.mark.parametrize("how", ["copies", "views", "replicate"])
def test_gradients_are_reduced_again_where_a_rank_has_none(controller: Any, tmp_path: Path, how: str) -> None:
    for theirs, ours in zip(*of_two_ranks(REDUCED_AGAIN, controller, tmp_path, how)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# A rank makes a module after its step, while the other is inside the same one, and then in the next.
MODULES_LATER = """
store = dist.distributed_c10d._get_default_store()
table = modules.Embedding(6, 4)
optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
if sys.argv[2] == "frugal":
    import frugal
    create = frugal.Engine.create_table
    def create_table(*args, **options):
        try:
            return create(*args, **options)
        except frugal.Busy:
            store.set("busy", "")
            raise
    frugal.Engine.create_table = create_table
    loss = table(torch.tensor([rank])).sum()
    dist.barrier()
    if rank == 1:
        store.wait(["busy"])
    loss.backward()
    optimizer.step()
    later = modules.Embedding(3, 2)
    refused = "?"
    dist.barrier()
    if rank == 1:
        table(torch.tensor([1]))
    dist.barrier()
    if rank == 0:
        try:
            modules.Embedding(4, 2)
        except frugal.Busy as error:
            refused = str(error)
    assert rank == 1 or "after step()" in refused, refused
    dist.barrier()
    optimizer.step()
    assert later.weight.shape == (3, 2)
torch.save(0, f"{sys.argv[3]}/{sys.argv[2]}{rank}")
"""


def test_a_rank_makes_a_module_while_another_ends_its_step(controller: Any, tmp_path: Path) -> None:
    of_two_ranks(MODULES_LATER, controller, tmp_path)


# A group of some ranks is refused, but not where the parameter is left out.
GROUPS = """
model = torch.nn.Sequential(modules.Embedding(6, 4), torch.nn.Linear(4, 1))
parallel = torch.nn.parallel.DistributedDataParallel
alone = [dist.new_group([number]) for number in range(2)][rank]
refused = False
try:
    parallel(model, process_group=alone)
except NotImplementedError as error:
    refused = "group of 1 ranks" in str(error) and "'0.weight'" in str(error)
parallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
parallel(model, process_group=alone)(torch.arange(2)).sum().backward()
torch.save(refused, f"{sys.argv[3]}/{sys.argv[2]}{rank}")
"""


def test_a_group_of_some_ranks_reduces_no_table(controller: Any, tmp_path: Path) -> None:
    assert of_two_ranks(GROUPS, controller, tmp_path) == [[False, False], [True, True]]


# Without a reducer a rank counts its own steps. Both have a gradient in the first step, one in the second.
COUNTS = """
import warnings
table = modules.Embedding(6, 4)
Optimizer = getattr(torch.optim, sys.argv[4])
optimizer = Optimizer(table.parameters(), lr=0.1)
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    for step in range(5):
        optimizer.zero_grad()
        if step != 1 or rank == 0:
            table(torch.arange(2)).sum().backward()
        optimizer.step()
said = [str(warning.message) for warning in told if "counts steps" in str(warning.message)]
assert all("rank 1 had no gradient" in text and sys.argv[4] in text for text in said), said
torch.save(len(said), f"{sys.argv[3]}/{sys.argv[2]}{rank}")
"""


@pytest.mark.parametrize("kind, told", [("Adam", 1), ("Adagrad", 0)])
def test_a_rank_that_counts_its_steps_alone_is_told(controller: Any, tmp_path: Path, kind: str, told: int) -> None:
    assert of_two_ranks(COUNTS, controller, tmp_path, kind) == [[0, 0], [0, told]]


# One rank alone uses a table in the first step, in which it gets its kind of optimizer.
FIRST = """
torch.manual_seed(0)
model = torch.nn.ModuleList([modules.Embedding(6, 4), torch.nn.Linear(4, 1)])
model.forward = lambda keys, used: model[1](model[0](keys) if used else torch.ones(3, 4))
ddp = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
optimizer = torch.optim.Adagrad(ddp.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    if int(sys.argv[4]) != rank:
        dist.barrier()
    loss = ddp(torch.tensor([1, 2, 3 + rank]), rank == step % 2).square().sum()
    if int(sys.argv[4]) == rank:
        dist.barrier()
    loss.backward()
    optimizer.step()
dist.barrier()
torch.save([parameter.detach().clone() for parameter in model.parameters()], f"{sys.argv[3]}/{sys.argv[2]}{rank}")
"""


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_without_a_gradient_in_the_first_step(controller: Any, tmp_path: Path, first: int) -> None:
    for theirs, ours in zip(*of_two_ranks(FIRST, controller, tmp_path, str(first))):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_ranks_that_have_a_gradient_in_turn(controller: Any, tmp_path: Path) -> None:
    for theirs, ours in zip(*of_two_ranks(IN_TURN, controller, tmp_path)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# What a communication hook does to gradients, which the step averages. It is for those of the other layers.
HOOKED = """
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks
DDP = torch.nn.parallel.DistributedDataParallel
torch.manual_seed(0)
def halves(state, bucket):
    future = dist.all_reduce(bucket.buffer().div_(4), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])
model = torch.nn.Sequential(modules.Embedding(6, 4), torch.nn.Linear(4, 1))
if sys.argv[2] == "frugal":
    noop = debugging_hooks.noop_hook
    for hook in (noop, default_hooks.fp16_compress_wrapper(noop)):
        try:
            DDP(model).register_comm_hook(None, hook)
        except NotImplementedError as error:
            assert "communication hook" in str(error) and "'0.weight'" in str(error), error
        else:
            raise AssertionError("not refused")
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
def train(hook):
    ddp = DDP(model)
    ddp.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        ddp(torch.tensor([rank, 2, 3])).square().mean().backward()
        if hook is halves and sys.argv[2] == "torch":
            model[0].weight.grad.mul_(2)
        optimizer.step()
train(halves)
DDP._set_params_and_buffers_to_ignore_for_model(model, [])
train(default_hooks.allreduce_hook)
train(default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
dist.barrier()
torch.save([parameter.detach().clone() for parameter in model.parameters()], f"{sys.argv[3]}/{sys.argv[2]}{rank}")
"""


def test_a_communication_hook_is_not_for_tables(controller: Any, tmp_path: Path) -> None:
    for theirs, ours in zip(*of_two_ranks(HOOKED, controller, tmp_path)):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("what", ["table 'none of 0'", "state of table 'none of 0'"])
def test_a_rank_waits_for_nothing_that_rank_0_has_not_made(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = getattr(dist, "HashStore")()  # not among its types
    store.set_timeout(timedelta(milliseconds=1))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(_ranks, "_group", lambda: (1, 2))
    with pytest.raises(RuntimeError, match=f"^{what}: rank 0 has not made it"):
        with _ranks.in_turn(what, 1, 2):
            raise AssertionError
    monkeypatch.setattr(_ranks, "_turns", {})
    monkeypatch.setattr(_ranks, "_group", lambda: (0, 2))
    with pytest.raises(ZeroDivisionError):
        with _ranks.in_turn(what, 0, 2):
            raise ZeroDivisionError
    monkeypatch.setattr(_ranks, "_turns", {})
    monkeypatch.setattr(_ranks, "_group", lambda: (1, 2))
    with pytest.raises(RuntimeError, match=f"^{what}: rank 0 could not make it"):
        with _ranks.in_turn(what, 1, 2):
            raise AssertionError


def test_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    store = getattr(dist, "HashStore")()
    monkeypatch.setattr(_ranks, "_key", lambda name: (store, name))
    monkeypatch.setattr(_ranks, "WORD_MS", 0)
    told: List[int] = []

    def come() -> None:
        told.append(store.add("here", 1))

    _ranks.meet("here", 2, come)  # as the other rank, which comes while this one waits
    assert told == [2]
    _ranks.meet("there", 1, come)
    store.set_timeout(timedelta(milliseconds=1))
    with pytest.raises(RuntimeError, match="nowhere: 1 of 2 ranks have come"):
        _ranks.meet("nowhere", 2, lambda: None)


def test_a_rank_that_uses_a_gpu_without_one_for_tables_is_on_the_cpu(
    controller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRUGAL_SERVICE", controller.address)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    trainer = _default._open(torch.device("cpu"))
    assert "on cpu" in repr(trainer)
    trainer.close()


def test_a_rank_of_another_number_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ranks, "_group", lambda: (1, 2))
    assert _ranks.are_told(1, 2) and not _ranks.are_told(0, 1) and not _ranks.are_told(0, 3)
    with pytest.raises(RuntimeError, match="rank 0 of the tables is rank 1 of torch.distributed"):
        _ranks.are_told(0, 2)


def attached(service: str, rank: int, lr: float = 0.5, weight: float = 1.0) -> Any:
    trainer = frugal.Engine(world_size=2, lookahead=4, service=service, timeout=60).create_trainer(rank)
    rows = torch.full((20, 4), weight)
    bags = ft.EmbeddingBag(
        20, 4, mode="sum", trainer=trainer, optimizer=frugal.Adagrad(lr=lr), name="t", _weight=rows
    )
    return trainer, bags, ft.Optimizer(bags)


def test_ranks_of_several_engines_share_tables(controller: Any) -> None:
    ranks = [attached(controller.address, rank) for rank in range(2)]
    keys = torch.tensor([[1, 2], [3, 1]])
    for _ in range(2):
        for _, bags, _ in ranks:
            bags(keys).sum().backward()
        for _, _, tables in ranks:
            tables.step()
    (_, first, tables), (_, second, others) = ranks
    assert not torch.equal(first.weight[1], torch.ones(4)) and torch.equal(first.weight[0], torch.ones(4))
    # One saves, or loads, for all; others see it.
    saved, state = first.state_dict(), tables.state_dict()
    assert torch.equal(second.state_dict()["weight"], saved["weight"])
    assert torch.equal(others.state_dict()["state"][0]["state"], state["state"][0]["state"])
    second.load_state_dict({"weight": saved["weight"] * 2})
    with torch.no_grad():  # an evaluation between steps
        assert torch.equal(first(keys), second(keys))
        assert torch.equal(first(keys)[0], saved["weight"][1] * 2 + saved["weight"][2] * 2)
    with warnings.catch_warnings():  # Tables of now are new on the rank that comes second, too.
        warnings.simplefilter("error")
        for trainer, _, _ in ranks:
            ft.Embedding(20, 4, trainer=trainer, name="later", _weight=torch.ones(20, 4))
    for trainer, _, _ in ranks:
        trainer.close()
    # Who comes back finds the table, and does not begin it again; nor may it mean another one.
    with pytest.warns(UserWarning, match="'t' exists, trained: the module goes on with its rows"):
        _, third, _ = attached(controller.address, 0, weight=5.0)
    assert torch.equal(third.weight, saved["weight"] * 2)
    with pytest.raises(ValueError, match="all must say the same"):
        attached(controller.address, 1, lr=0.25)


def test_what_ranks_say_is_compared_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = getattr(dist, "HashStore")()  # which torch does not export to mypy
    monkeypatch.setattr(_ranks, "_key", lambda name: (store, name))

    def say(board: _ranks.Board, step: int, **rates: float) -> None:
        said = {name: {"lr": rate} for name, rate in rates.items()}
        board.say(step, said, _ranks.write([(numbers, [name]) for name, numbers in said.items()]))

    first, second = [_ranks.Board("here", rank, 3) for rank in range(2)]
    say(first, 0, a=0.1, b=0.1)
    say(second, 0, b=0.1)  # of the tables that both have
    for step in range(1, 3):
        say(second, step, b=0.2)
        with pytest.raises(ValueError, match="table 'b', step .: rank 0 says lr=0.1, rank 1 lr=0.2; all ranks must"):
            say(first, step, a=0.1, b=0.1)
        say(first, step, a=0.5, b=0.2)
    say(second, 4, b=0.3)  # another step
    say(first, 3, a=0.1, b=0.1)
    say(first, 4, a=0.1, b=0.3)
    say(first, 5, a=0.1)
    first.forget()
    say(second, 5, a=0.2)
    store.set("said by rank 2 at here", f"{'0' * 32} /dev/null")  # as in another PID namespace
    with pytest.warns(UserWarning, match="rank 0 cannot read /dev/null of rank 2"):
        say(first, 6, a=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        say(first, 7, a=0.2)


def test_ranks_that_cannot_compare_rates_are_told_once(controller: Any) -> None:
    (first, bags, tables), (second, more, others) = [attached(controller.address, rank) for rank in range(2)]
    keys = torch.tensor([[1, 2]])

    def step() -> None:
        for module in (bags, more):
            module(keys).sum().backward()
        for optimizer in (tables, others):
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    for optimizer in (tables, others):
        optimizer.param_groups[0]["lr"] = 0.25
    with pytest.warns(UserWarning, match="nothing compares them with those of the other ranks") as told:
        step()
    assert len(told) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for optimizer in (tables, others):
            optimizer.param_groups[0]["lr"] = 0.125
        step()
    for trainer in (first, second):
        trainer.close()


def test_attach_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "FRUGAL_SERVICE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)

    def attach() -> None:
        with ft.attach(lookahead=3) as trainer:
            assert (trainer.rank, trainer.engine.world_size, trainer.engine.lookahead) == (0, 1, 3)

    with pytest.raises(RuntimeError, match="RANK is not in the environment"):
        attach()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="FRUGAL_SERVICE"):
        attach()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(RuntimeError, match="several machines"):
        attach()
    monkeypatch.setenv("WORLD_SIZE", "1")
    attach()


def test_attach_is_the_rank_that_torchrun_says(controller: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("FRUGAL_SERVICE", controller.address)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    with ft.attach() as trainer:
        assert (trainer.rank, trainer.engine.service) == (1, controller.address)
        with pytest.raises(frugal.Exists):
            with ft.attach():
                pytest.fail("the rank has a trainer")
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        with ft.attach(controller.address) as other:
            assert other.rank == 1
            with pytest.raises(frugal.PeerLost):
                trainer.step_begin(0)
