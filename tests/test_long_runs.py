"""2,000 steps: nothing grows and replicas stay equal; schedules, gradient accumulation and GradScaler."""

import gc
import os
import resource
from pathlib import Path

import pytest
import torch
from parity import EXACT, full_tensors, set_grad, sharded_params
from ranks import GlooRanks, on_threads
from simulated import LAYOUTS, Layout, R, ReferenceMuon, S
from torch.distributed.tensor import DTensor, Partial
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, SequentialLR

from dtensor_muon import Muon

STEPS = 2000
SHARDED, REPLICATED = Layout((2,), (S(0),), ((0, 0),), ("tp",)), Layout((2,), (R(),), (), ("tp",))
# the first one gets a gradient at every fourth step only, to save time
TENSORS = [((6, 4), SHARDED), ((4, 5), REPLICATED), ((5,), REPLICATED)]
SHAPES = [shape for shape, _ in TENSORS]


@pytest.fixture(scope="module")
def gloo():
    ranks = GlooRanks(2)
    yield ranks.run
    ranks.stop()


def local(tensor):
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def measure():
    """What must not grow: resident memory in MiB, Python objects, open files."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20, len(gc.get_objects()), len(os.listdir("/proc/self/fd"))


def train_long(rank, steps, leak):
    """Returns measures after a fifth of the steps and at the end, the number of plans, the errors, local values."""
    params = sharded_params(rank, [(w, lay) for w, (_, lay) in zip(full_tensors(SHAPES, 0), TENSORS, strict=True)])
    optimizer = Muon([{"params": params[:2]}, {"params": params[2:], "optimizer": "adamw", "lr": 0.05}], **EXACT)
    schedule = SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=10), CosineAnnealingLR(optimizer, steps - 10)], milestones=[10]
    )
    targets = [layout.cut(target, rank) for target, (_, layout) in zip(full_tensors(SHAPES, 1), TENSORS, strict=True)]
    measures, plans, kept = [], set(), []
    for step in range(1, steps + 1):
        for index, (param, target) in enumerate(zip(params, targets, strict=True)):
            param.grad = torch.zeros_like(param) if index or step % 4 == 0 else None
            if param.grad is not None:
                local(param.grad).copy_(local(param) - target)
        optimizer.step()
        schedule.step()
        plans.add(id(optimizer._planned()))
        if leak:
            kept.append((torch.ones(2**15), os.dup(0)))
        if step in (steps // 5, steps):
            measures.append(measure())
    errors = [float((local(param) - target).abs().max()) for param, target in zip(params, targets, strict=True)]
    values = {
        f"{index}.{key}": local(value).clone()
        for index, param in enumerate(params)
        for key, value in {"param": param, **optimizer.state[param]}.items()
    }
    return {"measures": measures, "plans": len(plans), "errors": errors, "values": values}


def grown(result):
    first, last = result["measures"]
    memory, objects, files = (after - before for before, after in zip(first, last, strict=True))
    # the allocator's arenas fill up for some thousand steps (also with gloo alone): 2 MiB or less per 1,000 of them
    return [memory > 6, objects > 50, files != 0]


def test_nothing_grows_in_2000_steps_and_replicas_stay_equal(gloo):
    results = gloo(train_long, STEPS, False)
    assert [grown(result) for result in results] == [[False] * 3] * 2
    assert [result["plans"] for result in results] == [1, 1]
    # the schedule ends at a learning rate of zero
    assert max(error for result in results for error in result["errors"]) < 1e-3
    one, two = (result["values"] for result in results)
    assert one["2.step"] == STEPS
    assert all(torch.equal(one[key], two[key]) for key in one if not key.startswith("0."))
    assert not torch.equal(one["0.param"], two["0.param"])


def test_growth_is_seen(gloo):
    """The negative control: 128 KiB, a tensor and an open file more at every step."""
    assert [grown(result) for result in gloo(train_long, 150, True)] == [[True] * 3] * 2


def train_replicas(rank, apart):
    """Returns the local values after 25 steps on hsdp; gradients are the mean over replicas with data of their own."""
    layout, shapes = LAYOUTS["hsdp"], [(8, 6), (10, 9), (9,)]
    params = sharded_params(rank, [(weight, layout) for weight in full_tensors(shapes, 0)])
    optimizer = Muon([{"params": params[:2]}, {"params": params[2:], "optimizer": "adamw", "lr": 0.05}], **EXACT)
    replica = layout.coordinates(rank)[0]
    for step in range(25):
        for index, (param, shape) in enumerate(zip(params, shapes, strict=True)):
            target = full_tensors([shape], 100 * index + 2 * step + replica)[0]
            error = DTensor.from_local(
                (local(param) - layout.cut(target, rank)) / 2,
                param.device_mesh,
                [R() if apart else Partial(), S(0)],
                run_check=False,
                shape=param.shape,
                stride=param.stride(),
            )
            param.grad = error.redistribute(placements=layout.placements)
        optimizer.step()
    values = [value for param in params for value in (param, *optimizer.state[param].values())]
    return [local(value).clone() for value in values]


def test_replicas_of_hsdp_stay_equal():
    one, two, *others = on_threads(4, train_replicas, False)
    for shard, replica in ((one, others[0]), (two, others[1])):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(shard, replica, strict=True))
    assert not torch.equal(one[0], two[0])
    # the negative control: gradients that nobody averages
    apart = on_threads(4, train_replicas, True)
    assert not torch.equal(apart[0][0], apart[2][0])


SCHEDULES = {
    "linear, then cosine": lambda o: SequentialLR(o, [LinearLR(o, 0.5, total_iters=3), CosineAnnealingLR(o, 5)], [3]),
    # Muon has betas, of its AdamW groups, and torch cycles those rather than the momentum
    "one cycle": lambda o: OneCycleLR(o, max_lr=[0.04, 0.02], total_steps=9, cycle_momentum=False),
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (1 + step)),
}


def train_scheduled(rank, schedule, as_tensor):
    """Returns the rates in use and the shards after every step."""
    shapes, layout = [(8, 4), (8,)], LAYOUTS["fsdp0"]
    params = sharded_params(rank, [(weight, layout) for weight in full_tensors(shapes, 0)])
    # a tensor for each group, because schedulers write into it
    rates = [torch.tensor(EXACT["lr"]) if as_tensor else EXACT["lr"] for _ in params]
    groups = [
        {"params": params[:1], "lr": rates[0]},
        {"params": params[1:], "lr": rates[1], "optimizer": "adamw"},
    ]
    optimizer = Muon(groups, **EXACT)
    scheduler = SCHEDULES[schedule](optimizer)
    path = []
    for step in range(8):
        for param, grad in zip(params, full_tensors(shapes, 10 + step), strict=True):
            set_grad(rank, param, grad, layout)
        group = optimizer.param_groups[0]
        path.append((float(group["lr"]), local(params[0]).clone(), local(params[1]).clone()))
        optimizer.step()
        scheduler.step()
    return path


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule, as_tensor):
    """Rates as they are on a plain parameter of torch.optim.SGD, and weights that follow them."""
    twin = torch.nn.Parameter(torch.ones(1))
    sgd = torch.optim.SGD([{"params": [twin]}, {"params": [torch.nn.Parameter(torch.ones(1))]}], 0.02)
    scheduler = SCHEDULES[schedule](sgd)
    rates, rates_of_vector = [], []
    for _ in range(8):
        rates.append(sgd.param_groups[0]["lr"])
        rates_of_vector.append(sgd.param_groups[1]["lr"])
        sgd.step()
        scheduler.step()
    assert len(set(rates)) > 4
    results = on_threads(4, train_scheduled, schedule, as_tensor)
    (weight, vector), state = full_tensors([(8, 4), (8,)], 0), {}
    weight, vector = weight.double(), torch.nn.Parameter(vector.double())
    adamw = torch.optim.AdamW([vector], betas=(0.9, 0.95), weight_decay=0.0)
    for step, lr in enumerate(rates):
        for rank, path in enumerate(results):
            got_lr, shard, of_vector = path[step]
            assert got_lr == pytest.approx(lr, rel=1e-6)  # a tensor's rate is in fp32
            # fp32 against fp64 over up to eight steps
            torch.testing.assert_close(shard.double(), LAYOUTS["fsdp0"].cut(weight, rank), rtol=0, atol=1e-5)
            wanted = LAYOUTS["fsdp0"].cut(vector.detach(), rank)
            torch.testing.assert_close(of_vector.double(), wanted, rtol=0, atol=1e-5)
        grad, grad_of_vector = full_tensors([(8, 4), (8,)], 10 + step)
        vector.grad = grad_of_vector.double()
        adamw.param_groups[0]["lr"] = rates_of_vector[step]
        adamw.step()
        weight = ReferenceMuon(lr=lr).step(weight, grad, state)


def accumulate(rank, sizes):
    """Two steps over eight samples, cut into micro-batches of these sizes."""
    layout = LAYOUTS["hsdp"]
    (param,) = sharded_params(rank, [(full_tensors([(8, 4)], 0)[0], layout)])
    optimizer = Muon([param], **EXACT)
    for step in range(2):
        # whole numbers, so that sums are the same in any order
        samples = full_tensors([(8, 8, 4)], 20 + step)[0].mul(4).round()
        for batch in samples.split(sizes):
            shard = layout.cut(batch.sum(0) / 8, rank)
            if param.grad is None:
                set_grad(rank, param, batch.sum(0) / 8, layout)
            else:
                param.grad.to_local().add_(shard)
        optimizer.step()
        optimizer.zero_grad()
    return local(param).clone()


def test_gradient_accumulation_does_not_change_a_bit():
    whole, quarters = (on_threads(4, accumulate, sizes) for sizes in (8, 2))
    assert all(torch.equal(one, four) for one, four in zip(whole, quarters, strict=True))
    fewer = on_threads(4, accumulate, [2, 2, 2, 1, 1])
    assert all(torch.equal(one, five) for one, five in zip(whole, fewer, strict=True))


def accumulate_backward(rank, size, forget):
    """Two steps of a linear model under FSDP, over eight samples in micro-batches of this size; returns the shards."""
    shapes, layout = [(8, 6), (8,)], LAYOUTS["fsdp0"]
    params = sharded_params(rank, [(weight, layout) for weight in full_tensors(shapes, 0, 0.3)])
    optimizer = Muon([{"params": params[:1]}, {"params": params[1:], "optimizer": "adamw", "lr": 0.05}], **EXACT)
    for step in range(2):
        inputs, targets = full_tensors([(8, 6), (8, 8)], 40 + step)
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            if forget:
                optimizer.zero_grad()
            weight, bias = (param.full_tensor() for param in params)
            # every rank sees all samples, and full_tensor() sums the gradients of the ranks
            ((x @ weight.T + bias - y).square().sum() / 8 / layout.world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [local(param).clone() for param in params]


def test_accumulated_backward_equals_the_whole_batch():
    whole, quarters = (on_threads(4, accumulate_backward, size, False) for size in (8, 2))
    last = on_threads(4, accumulate_backward, 2, True)
    for one, four, lost in zip(whole, quarters, last, strict=True):
        for mine, theirs, wrong in zip(one, four, lost, strict=True):
            # gradients are fp32 sums in another order; updates are of the size 0.05
            assert torch.allclose(mine, theirs, rtol=0, atol=2e-6)
            assert not torch.allclose(mine, wrong, rtol=0, atol=1e-4)


def scaled(rank, mode, bad, as_scaled):
    """Three steps with GradScaler, an infinite gradient on one rank in the second; returns shards and counts."""
    shapes = [(8, 4), (10, 9), (8,)]
    layouts = [LAYOUTS["fsdp0"], LAYOUTS["fsdp_tp_col"], LAYOUTS["fsdp0"]]
    params = sharded_params(rank, list(zip(full_tensors(shapes, 0), layouts, strict=True)))
    optimizer = Muon([{"params": params[:2]}, {"params": params[2:], "optimizer": "adamw"}], nonfinite=mode, **EXACT)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(3):
        if bad is None and step == 1:
            continue
        scaler.scale(torch.ones(()))
        for param, grad, layout in zip(params, full_tensors(shapes, 30 + step), layouts, strict=True):
            set_grad(rank, param, grad * scaler.get_scale() if as_scaled else grad, layout)
        if step == 1 and rank == bad[0]:
            local(params[bad[1]].grad).view(-1)[0] = torch.inf
        if as_scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
    return [local(param).clone() for param in params], scaler.get_scale(), optimizer._steps


@pytest.mark.parametrize("mode", ["propagate", "skip"])
@pytest.mark.parametrize("bad", [(1, 0), (2, 1), (3, 2)])
def test_grad_scaler_skips_on_all_ranks_when_one_has_an_infinite_gradient(mode, bad):
    wanted = on_threads(4, scaled, mode, None, False)
    for (mine, scale, steps), (theirs, _, _) in zip(on_threads(4, scaled, mode, bad, True), wanted, strict=True):
        assert (scale, steps) == (2.0**9, 2)
        assert all(torch.equal(one, two) for one, two in zip(mine, theirs, strict=True))
