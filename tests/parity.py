"""One training run on sharded parameters, its reference, and the largest error of any update on any rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from ranks import on_threads
from simulated import Layout, ReferenceMuon, build_mesh, from_local, relative_error
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_muon import FusedDim, Muon

# fp32 rounding over five Newton-Schulz steps and a sum in another order; the bound
TOLERANCE = 1e-5
EXACT = {"lr": 0.02, "weight_decay": 0.0, "coefficient_type": "simple", "fp32_matmul_prec": "highest"}

Shape = tuple[int, ...]


# picks the elements of one matrix out of a parameter
Index = tuple[Any, ...]


@dataclass(frozen=True)
class Fused:
    """What a parameter's attribute `fused_dim` says, and the matrices in it, stated by hand."""

    attribute: Any
    matrices: tuple[Index, ...]


@dataclass(frozen=True)
class Case:
    """Parameters with their layouts, and the optimizer's options beside `EXACT`."""

    tensors: tuple[tuple[Shape, Layout], ...]
    options: dict[str, Any] = field(default_factory=dict)
    fused: tuple[Fused | None, ...] = ()
    steps: int = 2
    weight_scale: float = 0.1
    grad_scale: float = 1.0
    param_dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    integer_grads: bool = False

    @property
    def world(self) -> int:
        return max(layout.world for _, layout in self.tensors)

    def weights(self) -> list[Tensor]:
        return [w.to(self.param_dtype) for w in full_tensors(self.shapes, 0, self.weight_scale)]

    def grads(self, step: int) -> list[Tensor]:
        grads = full_tensors(self.shapes, 100 + step, self.grad_scale)
        return [(g.mul(4).round() if self.integer_grads else g).to(self.grad_dtype) for g in grads]

    @property
    def shapes(self) -> list[Shape]:
        return [shape for shape, _ in self.tensors]


def case(layout: Layout, shapes: Sequence[Shape], **options: Any) -> Case:
    return Case(tuple((shape, layout) for shape in shapes), options)


def rows_of_parts(sizes: Sequence[int], groups: int, heads: bool = False) -> list[list[int]]:
    """The rows of each matrix, written from the layout `groups x (sizes)`."""
    total = sum(sizes)
    matrices = []
    for part, size in enumerate(sizes):
        first = sum(sizes[:part])
        per_group = [[group * total + first + row for row in range(size)] for group in range(groups)]
        matrices += per_group if heads else [[row for rows in per_group for row in rows]]
    return matrices


def fused_weight(
    sizes: Sequence[int], groups: int, dim: int = 0, heads: bool = False, given: int | None = None
) -> Fused:
    """A description and its matrices as indices of the last two dims."""
    matrices = [torch.tensor(rows) for rows in rows_of_parts(sizes, groups, heads)]
    indices = tuple((..., rows) if dim else (..., rows, slice(None)) for rows in matrices)
    return Fused(FusedDim(tuple(sizes), given, dim, heads), indices)


def full_tensors(shapes: Sequence[Shape], seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) * scale for shape in shapes]


def reference_of(options: dict[str, Any]) -> ReferenceMuon:
    """The reference for options that it knows."""
    names = {"use_decoupled_weight_decay": "decoupled"}
    known = ("lr", "momentum", "nesterov", "weight_decay", "use_decoupled_weight_decay")
    return ReferenceMuon(**{names.get(key, key): options[key] for key in known if key in options})


def reference_step(
    reference: ReferenceMuon, fused: Fused | None, weight: Tensor, grad: Tensor, state: dict[Any, Any]
) -> Tensor:
    """A step of one parameter, or of the separate parameters that a fused one holds."""
    if fused is None:
        return reference.step(weight, grad, state)
    after = weight.double()
    for place, index in enumerate(fused.matrices):
        after[index] = reference.step(weight[index], grad[index], state.setdefault(place, {}))
    return after


def trajectory(run: Case, reference: ReferenceMuon) -> list[list[tuple[Tensor, Tensor]]]:
    """Weights before (in the parameter's dtype) and after (fp64) each step, by step and parameter."""
    weights, states = run.weights(), [{} for _ in run.tensors]
    descriptions = run.fused or [None] * len(states)
    result = []
    for step in range(run.steps):
        after = [
            reference_step(reference, fused, weight, grad, state)
            for fused, weight, grad, state in zip(descriptions, weights, run.grads(step), states, strict=True)
        ]
        result.append(list(zip(weights, after, strict=True)))
        weights = [weight.to(run.param_dtype) for weight in after]
    return result


_meshes: dict[object, DeviceMesh] = {}


def mesh_of(layout: Layout) -> DeviceMesh:
    """The mesh of a layout; one per process on gloo.

    DTensor caches specs by the value of a mesh, so that a second, equal mesh may find the groups of the first on some
    ranks only.
    """
    if dist.get_backend() != "gloo":
        return build_mesh(layout)
    key = (layout.mesh, layout.names)
    if key not in _meshes:
        _meshes[key] = build_mesh(layout)
    return _meshes[key]


def sharded_params(rank: int, tensors: Sequence[tuple[Tensor, Layout]]) -> list[torch.nn.Parameter]:
    """Parameters cut by hand, on one mesh per mesh shape."""
    meshes = {(layout.mesh, layout.names): layout for _, layout in tensors}
    built = {key: mesh_of(layout) for key, layout in meshes.items()}
    return [
        torch.nn.Parameter(from_local(layout.cut(full, rank).clone(), full, built[layout.mesh, layout.names], layout))
        for full, layout in tensors
    ]


def set_grad(rank: int, param: torch.nn.Parameter, grad: Tensor, layout: Layout) -> None:
    local = layout.cut(grad, rank).clone()
    sharded = from_local(local, grad, param.device_mesh, layout)
    if grad.dtype != param.dtype:
        param.grad_dtype = None
    param.grad = sharded


def train(rank: int, run: Case, path: list[list[tuple[Tensor, Tensor]]]) -> list[list[Tensor]]:
    """The body: trains on this rank's shards, back on the reference's path before each step; returns them after it."""
    layouts = [layout for _, layout in run.tensors]
    params = sharded_params(rank, list(zip(run.weights(), layouts, strict=True)))
    for param, fused in zip(params, run.fused, strict=False):
        if fused is not None:
            param.fused_dim = fused.attribute
    optimizer = Muon(params, **EXACT | run.options)
    results = []
    for step in range(run.steps):
        grads = run.grads(step)
        for index, (param, layout) in enumerate(zip(params, layouts, strict=True)):
            with torch.no_grad():
                param.to_local().copy_(layout.cut(path[step][index][0], rank))
            set_grad(rank, param, grads[index], layout)
        optimizer.step()
        for param, grad, layout in zip(params, grads, layouts, strict=True):
            buffer = optimizer.state[param]["momentum_buffer"]
            assert tuple(param.placements) == tuple(buffer.placements) == layout.placements
            assert buffer.dtype == (run.options.get("momentum_dtype") or run.param_dtype)
            assert torch.equal(param.grad.to_local(), layout.cut(grad, rank))
        results.append([param.detach().to_local().clone() for param in params])
    return results


def worst_error(run: Case, path: list[list[tuple[Tensor, Tensor]]], results: list[list[list[Tensor]]]) -> float:
    """The largest error of an update over ranks, steps and parameters, relative to the update's shard."""
    worst = 0.0
    for rank, of_rank in enumerate(results):
        for expected, got in zip(path, of_rank, strict=True):
            for (before, after), local, (_, layout) in zip(expected, got, run.tensors, strict=True):
                assert local.shape == layout.cut(after, rank).shape
                error = relative_error(local, layout.cut(before, rank), layout.cut(after, rank))
                worst = max(worst, error) if error == error else float("nan")
    return worst


def parity_error(run: Case, reference: ReferenceMuon | None = None, launch: Callable[..., Any] = on_threads) -> float:
    """Trains on every rank of the case's world and returns the largest error."""
    path = trajectory(run, reference or reference_of(EXACT | run.options))
    return worst_error(run, path, launch(run.world, train, run, path))
