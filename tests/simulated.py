"""Simulated ranks in one process, hand-cut shards, and a reference optimizer that shares no code with the package."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


@dataclass(frozen=True)
class Layout:
    """A mesh, placements, and the order in which the axes cut a tensor, stated by hand."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]
    cuts: tuple[tuple[int, int], ...]  # (mesh axis, tensor dim), the first cut first
    names: tuple[str, ...] | None = None

    @property
    def world(self) -> int:
        return math.prod(self.mesh)

    def coordinates(self, rank: int) -> tuple[int, ...]:
        return tuple(int(c) for c in torch.unravel_index(torch.tensor(rank), self.mesh))

    def cut(self, full: Tensor, rank: int) -> Tensor:
        """The shard of `rank`, cut with torch.chunk's sizes."""
        where = self.coordinates(rank)
        for axis, dim in self.cuts:
            chunk = -(-full.shape[dim] // self.mesh[axis])
            start = min(where[axis] * chunk, full.shape[dim])
            full = full.narrow(dim, start, min(chunk, full.shape[dim] - start))
        return full.contiguous()

    def lift(self, dims: int) -> "Layout":
        """The same layout for tensors with `dims` more leading dims."""
        moved = []
        for placement in self.placements:
            if isinstance(placement, _StridedShard):
                moved.append(_StridedShard(placement.dim + dims, split_factor=placement.split_factor))
            else:
                moved.append(Shard(placement.dim + dims) if placement.is_shard() else placement)
        return Layout(self.mesh, tuple(moved), tuple((axis, dim + dims) for axis, dim in self.cuts), self.names)


S, R = Shard, Replicate


def strided(dim: int, factor: int) -> _StridedShard:
    return _StridedShard(dim, split_factor=factor)


LAYOUTS: dict[str, Layout] = {
    "fsdp0": Layout((4,), (S(0),), ((0, 0),), ("fsdp",)),
    "fsdp1": Layout((4,), (S(1),), ((0, 1),), ("fsdp",)),
    "fsdp0_of_3": Layout((3,), (S(0),), ((0, 0),), ("fsdp",)),
    "replicate": Layout((4,), (R(),), (), ("dp",)),
    "unnamed0": Layout((4,), (S(0),), ((0, 0),)),
    "tp_row": Layout((4,), (S(1),), ((0, 1),), ("tp",)),
    "fsdp_tp_row": Layout((2, 2), (S(0), S(1)), ((1, 1), (0, 0)), ("fsdp", "tp")),
    "fsdp1_tp_col": Layout((2, 2), (S(1), S(0)), ((1, 0), (0, 1)), ("fsdp", "tp")),
    "fsdp_tp_col": Layout((2, 2), (strided(0, 2), S(0)), ((1, 0), (0, 0)), ("fsdp", "tp")),
    "fsdp_tp_col_3x2": Layout((3, 2), (strided(0, 2), S(0)), ((1, 0), (0, 0)), ("fsdp", "tp")),
    "unnamed_tp_col": Layout((2, 2), (strided(0, 2), S(0)), ((1, 0), (0, 0))),
    "left_to_right": Layout((2, 2), (S(0), S(0)), ((0, 0), (1, 0)), ("a", "b")),
    "hsdp": Layout((2, 2), (R(), S(0)), ((1, 0),), ("dp_replicate", "fsdp")),
    "fsdp_tp_norm": Layout((2, 2), (S(0), R()), ((0, 0),), ("fsdp", "tp")),
    "hsdp_tp_col": Layout((2, 2, 2), (R(), strided(0, 2), S(0)), ((2, 0), (1, 0)), ("dp_replicate", "fsdp", "tp")),
    "hsdp_tp_row": Layout((2, 2, 2), (R(), S(0), S(1)), ((2, 1), (1, 0)), ("dp_replicate", "fsdp", "tp")),
    "size_one_axes": Layout((1, 4, 1), (strided(0, 4), S(0), R()), ((1, 0),), ("dp_shard", "tp", "cp")),
    "one_rank": Layout((1,), (S(0),), (), ("fsdp",)),
}


@contextmanager
def simulated_ranks(world: int) -> Iterator[LocalTensorMode]:
    """Every rank of a world in this process, on real values."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        with LocalTensorMode(world) as mode:
            yield mode
    finally:
        dist.destroy_process_group()


def build_mesh(layout: Layout, device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, layout.mesh, mesh_dim_names=layout.names)


def shard(mode: LocalTensorMode, full: Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """A DTensor whose shards were cut by hand."""
    with mode.disable():
        shards = {rank: layout.cut(full, rank).clone() for rank in range(layout.world)}
    return from_local(mode.rank_map(lambda rank: shards[rank]), full, mesh, layout)


def from_local(local: Tensor, full: Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    return DTensor.from_local(
        local, mesh, layout.placements, run_check=False, shape=full.shape, stride=full.contiguous().stride()
    )


def shards_of(tensor: DTensor) -> list[Tensor]:
    """The shards of all simulated ranks, sharing memory with the tensor."""
    local = tensor.detach().to_local()
    return [local._local_tensors[rank] for rank in sorted(local._local_tensors)]


def reference_orthogonalize(x: Tensor, triples: Sequence[tuple[float, float, float]]) -> Tensor:
    """Newton-Schulz in fp64, written from the formula."""
    x = x.double()
    if x.numel() == 0 or not x.any():
        return torch.zeros_like(x)
    y = x / x.abs().max()
    y = y / y.norm()
    for a, b, c in triples:
        gram = y @ y.mT if y.shape[0] <= y.shape[1] else y.mT @ y
        poly = b * gram + c * gram @ gram
        y = a * y + (poly @ y if y.shape[0] <= y.shape[1] else y @ poly)
    return y


SIMPLE = [(3.4445, -4.7750, 2.0315)] * 5


@dataclass
class ReferenceMuon:
    """Muon of spec sections 2 to 4 on one full tensor in fp64."""

    lr: float = 0.02
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.0
    decoupled: bool = True
    scale: Callable[[int, int], float] = lambda out, inp: math.sqrt(max(out, inp))
    triples: Sequence[tuple[float, float, float]] = tuple(SIMPLE)

    def update(self, grad: Tensor, state: dict[str, Tensor], param: Tensor) -> Tensor:
        """The update before the learning rate, of a matrix or a stack of matrices."""
        grad = grad.double()
        if not self.decoupled:
            grad = grad + self.weight_decay * param.double()
        buffer = state.get("m", torch.zeros_like(grad))
        state["m"] = self.momentum * buffer + (1 - self.momentum) * grad
        x = self.momentum * state["m"] + (1 - self.momentum) * grad if self.nesterov else state["m"]
        rows, cols = x.shape[-2:]
        whole = [
            reference_orthogonalize(matrix, self.triples) for matrix in (x[None] if x.ndim == 2 else x.flatten(0, -3))
        ]
        stacked = torch.stack(whole).reshape(x.shape) if whole else x
        return stacked * (self.scale(rows, cols) if rows and cols else 0.0)

    def step(self, param: Tensor, grad: Tensor, state: dict[str, Tensor]) -> Tensor:
        update = self.update(grad, state, param)
        decayed = param.double() * (1 - self.lr * self.weight_decay if self.decoupled else 1)
        return decayed - self.lr * update


def relative_error(got: Tensor, before: Tensor, wanted: Tensor) -> float:
    """Error of an update beyond the rounding of the stored weights, relative to the update's norm."""
    if wanted.numel() == 0:
        return 0.0
    update = (wanted - before.double()).norm()
    rounding = torch.finfo(got.dtype).eps * (before.double().norm() + wanted.norm())
    error = (got.double() - wanted).norm() - rounding
    return float(error.clamp_min(0) / (update + 1e-30))
