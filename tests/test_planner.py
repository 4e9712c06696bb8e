"""What the planner chooses, for meta parameters on worlds that exist only as a fake process group."""

import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_muon import DeviceProfile, Muon
from dtensor_muon.cost import PROFILES
from dtensor_muon.models import MODELS
from dtensor_muon.plan import Target
from dtensor_muon.planner import PlanSettings


@contextmanager
def fake_world(world):
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def meta_parameter(shape, mesh, placements, dtype=torch.bfloat16):
    local = list(shape)
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            local[placement.dim] = -(-local[placement.dim] // mesh.size(axis))
    return torch.nn.Parameter(
        DTensor.from_local(
            torch.empty(local, device="meta", dtype=dtype), mesh, placements, run_check=False, shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )
    )  # fmt: skip


def model_parameters(model, mesh):
    """FSDP on dim 0, or on dim 1 of expert stacks with fewer experts than ranks, as torchtitan shards them."""
    params = []
    for shape, count in MODELS[model]:
        dim = 1 if len(shape) == 3 and shape[0] < mesh.size() else 0
        strided = [_StridedShard(dim, split_factor=mesh.size(1)), Shard(dim)] if mesh.ndim == 2 else [Shard(dim)]
        params += [meta_parameter(shape, mesh, strided) for _ in range(count)]
    return params


def plans_of(params, **options):
    return list(Muon(params, **options)._planned().plans)


def executed_loads(plans, world):
    """Flops per rank, from the slots that the movers use and the coordinates of every rank."""
    loads = [0.0] * world
    for plan in plans:
        per_matrix = plan.price.flops / plan.matrices_per_owner
        counts = [0] * plan.num_owners
        for slot in plan.slots():
            counts[slot // plan.matrices_per_owner] += 1
        coordinates = {int(rank): where for where, rank in enumerate(plan.layout.mesh.mesh.flatten())}
        sizes = plan.layout.mesh.mesh.shape
        for rank in range(world):
            where = torch.unravel_index(torch.tensor(coordinates[rank]), sizes)
            owner = 0
            for axis in plan.stack_axes:
                owner = owner * axis.size + int(where[axis.axis])
            loads[rank] += counts[owner] * per_matrix
    return loads


@pytest.mark.parametrize(("mesh_shape", "names"), [((64,), ("fsdp",)), ((8, 8), ("fsdp", "tp")), ((512,), ("fsdp",))])
@pytest.mark.parametrize("model", MODELS)
def test_ranks_finish_together(model, mesh_shape, names):
    world = torch.Size(mesh_shape).numel()
    matrices = sum(count * (shape[0] if len(shape) == 3 else 1) for shape, count in MODELS[model])
    if matrices < 4 * world:
        pytest.skip(f"{matrices} matrices on {world} ranks: the bound holds from four matrices a rank")
    with fake_world(world):
        loads = executed_loads(
            plans_of(model_parameters(model, init_device_mesh("meta", mesh_shape, mesh_dim_names=names))), world
        )
    assert max(loads) <= 1.10 * sum(loads) / world


@pytest.mark.parametrize("model", ["llama3-70B", "deepseek-v3"])
def test_plans_4096_ranks_in_seconds(model):
    """The issue's bound is a promise about the planner's complexity: five seconds where it takes half a second."""
    with fake_world(4096):
        params = model_parameters(model, init_device_mesh("meta", (512, 8), mesh_dim_names=("fsdp", "tp")))
        start = time.perf_counter()
        assert plans_of(params)
        elapsed = time.perf_counter() - start
    assert elapsed < 60  # a hang, not a speed test: the measured time stands in docs/performance.md


def one_bucket(shape, count, placements, mesh_shape=(4,), names=("fsdp",), **options):
    with fake_world(torch.Size(mesh_shape).numel()):
        mesh = init_device_mesh("meta", mesh_shape, mesh_dim_names=names)
        optimizer = Muon([meta_parameter(shape, mesh, placements) for _ in range(count)], **options)
        return list(optimizer._planned().plans), optimizer.explain()


def test_many_matrices_are_shared_out_whole():
    (plan,), _ = one_bucket((512, 512), 8, [Shard(0)])
    assert plan.targets == (Target.STACK,)
    assert plan.matrices_per_owner == 2


def test_replicas_do_not_repeat_work():
    (plan,), _ = one_bucket((512, 512), 8, [Replicate(), Shard(0)], (2, 4), ("dp_replicate", "fsdp"))
    assert plan.num_owners == 8
    assert plan.matrices_per_owner == 1


def test_one_very_long_matrix_stays_sharded():
    slow_compute = replace(PROFILES["h100"], bandwidth=1e13, latency=1e-9)
    (plan,), text = one_bucket((256, 65536), 1, [Shard(1)], device_profile=slow_compute)
    assert plan.targets == (Target.LONG,)
    assert "distributed" in text


def test_gram_iteration_where_it_is_cheaper_and_bounded():
    assert one_bucket((4096, 14336), 4, [Shard(0)])[0][0].iteration == "gram"
    assert one_bucket((4096, 4096), 4, [Shard(0)])[0][0].iteration == "plain"
    assert one_bucket((4096, 14336), 4, [Shard(0)], fp32_matmul_prec="highest")[0][0].iteration == "plain"


def test_slow_axis_decides():
    """With a network that is slow beyond reason between replicas, repeating one matrix is cheaper than sharing it."""
    slow = replace(PROFILES["h100"], axis_bandwidth={"dp_replicate": 1e3})
    (plan,), _ = one_bucket(
        (512, 512), 1, [Replicate(), Shard(0)], (2, 2), ("dp_replicate", "fsdp"), device_profile=slow
    )
    assert plan.targets[0] is Target.GATHER


def test_bucket_bytes_bound_every_bucket():
    limit = 40 * 2**20
    plans, _ = one_bucket((1024, 1024), 64, [Shard(0)], max_bucket_bytes=limit)
    assert len(plans) > 1
    assert sum(len(plan.members) for plan in plans) == 64
    for plan in plans:
        assert plan.price.in_flight_bytes <= limit
        assert len(plan.members) % 4 == 0


def test_too_small_bucket_bytes_warn_once_and_take_one_matrix():
    with pytest.warns(UserWarning, match="max_bucket_bytes=1 is less than the .* one at a time") as record:
        plans, _ = one_bucket((64, 64), 6, [Shard(0)], max_bucket_bytes=1)
    assert len(record) == 1
    assert [len(plan.members) for plan in plans] == [1] * 6


def test_explain_names_mode_price_and_runner_up():
    _, text = one_bucket((512, 512), 4, [Shard(0)])
    header, row, total = text.splitlines()
    assert header.split()[:4] == ["bucket", "matrices", "mode", "iteration"]
    assert "512x512" in row
    assert "owner" in row
    assert "distributed, plain:" in row
    assert total.startswith("total")


def test_explain_names_idle_owners():
    _, text = one_bucket((512, 512), 3, [Shard(0)], tp_mode="owner")
    assert "1 of 4" in text.splitlines()[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"matmul_rates": {torch.bfloat16: 1e12}}, "matmul_rates has no torch.float32"),
        ({"bandwidth": 0.0}, "bandwidth is 0.0; it must be a finite number above 0"),
        ({"latency": -1.0}, "latency is -1.0"),
        ({"axis_bandwidth": {"tp": float("nan")}}, r"axis_bandwidth\[tp\] is nan"),
    ],
)
def test_bad_profiles(change, message):
    with pytest.raises(ValueError, match=message):
        replace(PROFILES["cpu"], **change)


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "1GB"])
def test_bad_bucket_bytes(value):
    with pytest.raises(ValueError, match="max_bucket_bytes is"):
        PlanSettings(max_bucket_bytes=value)


def test_measured_profile_has_the_rates_of_this_machine():
    profile = DeviceProfile.measure("cpu")
    assert profile.name == "measured cpu"
    assert profile.matmul_rates[torch.float32] > 1e8
    assert profile.bandwidth == PROFILES["cpu"].bandwidth
