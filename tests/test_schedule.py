"""The order of a step's stages, its memory, and that overlap changes nothing."""

from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_muon import Muon, schedule
from dtensor_muon.lane import make_lane

SHAPES = [(192, 256)] * 8 + [(128, 128)] * 4
LIMIT = 5 * 2**20


class PeakMemory(TorchDispatchMode):
    """The most bytes that tensors held at once, beyond the parameters, gradients and state of an optimizer."""

    def __init__(self, optimizer):
        super().__init__()
        self.live, self.peak = {}, 0
        self.known = set()
        for param, state in optimizer.state.items():
            for tensor in (param, param.grad, *state.values()):
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                self.known.add(local.untyped_storage().data_ptr())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if type(tensor) is torch.Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() in self.known:
                    continue
                self.live[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self.live = {key: pair for key, pair in self.live.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return result


class RecordingLane:
    """Stands for a side stream: notes when buckets move and when they are waited for."""

    def __init__(self):
        self.events = []

    @contextmanager
    def beside(self, inputs):
        self.events.append("move")
        yield

    def join(self, result):
        self.events.append("join")


@contextmanager
def one_of(world):
    """Rank 0 of a world whose other ranks send nothing: the sizes are real, the values are not."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
    finally:
        dist.destroy_process_group()


def make_params(shapes, mesh=None):
    generator = torch.Generator().manual_seed(0)
    params = []
    for shape in shapes:
        weight, grad = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
        if mesh is not None:
            cut = [tensor.chunk(mesh.size())[0].clone() for tensor in (weight, grad)]
            weight, grad = (
                DTensor.from_local(t, mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1)) for t in cut
            )
        params.append(torch.nn.Parameter(weight))
        params[-1].grad = grad
    return params


@pytest.mark.parametrize(("world", "limit"), [(1, LIMIT), (1, 2 * LIMIT), (4, LIMIT // 4), (4, LIMIT // 3)])
@pytest.mark.parametrize("overlap", [False, True])
def test_memory_is_bounded_by_two_buckets(world, limit, overlap):
    with one_of(world) as mesh:
        optimizer = Muon(make_params(SHAPES, mesh if world > 1 else None), max_bucket_bytes=limit, tp_mode="owner")
        optimizer.step()
        assert len(optimizer._planned_waves()) >= 2
        if overlap:
            optimizer._lane = RecordingLane()
        with PeakMemory(optimizer) as memory:
            optimizer.step()
    assert 0 < memory.peak <= (2 if overlap else 1) * limit


def test_memory_grows_without_the_bound():
    """The negative control: one bucket of everything holds more than the bound on one."""
    optimizer = Muon(make_params(SHAPES))
    optimizer.step()
    with PeakMemory(optimizer) as memory:
        optimizer.step()
    assert memory.peak > LIMIT


def test_overlap_is_bit_identical_and_moves_the_next_bucket_first():
    results = []
    for lane in (None, RecordingLane()):
        params = make_params(SHAPES)
        optimizer = Muon(params, max_bucket_bytes=3 * 2**20)
        for _ in range(2):
            optimizer._planned_waves()
            optimizer._lane = lane
            optimizer.step()
        results.append([param.detach().clone() for param in params])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    num_waves = len(optimizer._planned_waves())
    assert num_waves > 2
    assert lane.events == (["move"] + ["move", "join"] * (num_waves - 1) + ["join"]) * 2


@pytest.mark.parametrize("limit", [1, 3 * 2**20, None])
def test_a_wave_has_the_memory_of_a_bucket(limit):
    optimizer = Muon(make_params([*SHAPES, (64, 64), (32, 64)]), max_bucket_bytes=limit)
    optimizer.step()
    waves = optimizer._planned_waves()
    assert [bucket.plan for wave in waves for bucket in wave] == list(optimizer._planned().plans)
    needed = [sum(bucket.plan.price.in_flight_bytes for bucket in wave) for wave in waves]
    assert all(len(wave) == 1 or total <= (limit or 2**30) for wave, total in zip(waves, needed, strict=True))
    # the next bucket would not have fitted
    later = [wave[0].plan.price.in_flight_bytes for wave in waves[1:]]
    assert all(total + more > (limit or 2**30) for total, more in zip(needed, later, strict=False))
    assert (len(waves) == 1) == (limit is None)


def test_ranks_wait_for_each_other_twice_a_wave():
    """All buckets of a wave move before the first is computed, and all are computed before the first moves back."""
    names = []

    def noted(name):
        names.append(name.removeprefix("Muon::"))
        return nullcontext()

    with mock.patch.object(schedule, "record_function", noted):
        Muon(make_params(SHAPES)).step()
    assert names == ["prepare", "to_compute"] * 2 + ["compute"] * 2 + ["to_storage", "apply"] * 2


def test_cpu_has_no_lane():
    assert make_lane(torch.device("cpu")) is None
