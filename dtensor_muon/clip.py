"""Clipping by the global norm of gradients that live on several meshes and on none."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_muon.layout import infer_layout, local_tensor
from dtensor_muon.preflight import checked_gradient
from dtensor_muon.redistribute import reduce_over_axes


@torch.no_grad()
def clip_grad_norm_(params: Iterable[Tensor], max_norm: float) -> float:
    """Scales gradients in place so that their 2-norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does.

    The norm is that of the unsharded gradients: shards are summed over the axes that shard, replicas count once, and
    sums are in fp64. Collective over the meshes of the parameters; plain tensors must be the same on all ranks. Waits
    for the device. Parameters of other pipeline stages do not count.

    Args:
        params: The same parameters on every rank of their meshes; a gradient may be None on any rank.
        max_norm: At least 0; `math.inf` only measures.

    Returns:
        The norm before clipping, a Python float. When it is infinite or NaN, the gradients become NaN.

    Raises:
        ValueError: A bad `max_norm`, or a gradient does not fit its parameter.
    """
    if not isinstance(max_norm, int | float) or not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm!r}; it must be a number of at least 0")
    grads: list[Tensor] = []
    squares: dict[tuple[DeviceMesh | None, tuple[int, ...], torch.device], list[Tensor]] = {}
    for index, param in enumerate([params] if isinstance(params, Tensor) else params):
        name = f"params[{index}]"
        layout = infer_layout(param, name)
        axes = tuple(sorted(axis.axis for axis in layout.axes if axis.dim is not None))
        terms = squares.setdefault((layout.mesh, axes, local_tensor(param).device), [])
        if param.grad is None:
            continue
        mine = checked_gradient(name, param, param.grad)
        grads.append(local_tensor(param.grad))
        terms.append(torch.linalg.vector_norm(mine, dtype=torch.float64).square())
    total = 0.0
    for (mesh, axes, device), terms in squares.items():
        square = torch.stack(terms).sum() if terms else torch.zeros((), dtype=torch.float64, device=device)
        if mesh is not None:
            square = reduce_over_axes(mesh, axes, square, "sum")
            # a replica without a gradient must not get another number than the others
            others = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1 and axis not in axes]
            square = reduce_over_axes(mesh, others, square, "max")
        total += square.item()
    norm = math.sqrt(total) if total == total else math.nan
    scale = max_norm / (norm + 1e-6)
    if not scale >= 1:
        torch._foreach_mul_(grads, scale)
    return norm
