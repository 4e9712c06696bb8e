"""What is checked before data moves: shards, gradients, and that all ranks have the same plan."""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from dtensor_muon.agreement import fingerprint, raise_first_difference
from dtensor_muon.layout import (
    ParamLayout,
    describe_tensor,
    infer_layout,
    local_part,
    local_sizes,
    local_tensor,
    mesh_of,
)
from dtensor_muon.plan import BucketPlan, MatrixEntry, describe
from dtensor_muon.redistribute import agree, gather_texts


def check_local_shape(name: str, param: Tensor, layout: ParamLayout) -> None:
    """Checks that this rank's shard has the shape that the layout gives it.

    Raises:
        NotImplementedError: It has another one, so the tensor was cut in a way that the placements do not say.
    """
    if not isinstance(param, DTensor):
        return
    if param.device_mesh.get_coordinate() is None:
        raise NotImplementedError(
            f"{describe_tensor(name, param)}: this rank is not in the parameter's mesh; "
            "give each rank's optimizer only the parameters of its own meshes"
        )
    expected = local_sizes(layout)[1]
    actual = tuple(local_tensor(param).shape)
    if actual != expected:
        raise NotImplementedError(
            f"{describe_tensor(name, param)}: this rank's shard has shape {actual}, but its placements give "
            f"{expected}; shard the parameter with parallelize_module, then fully_shard"
        )


def checked_gradient(name: str, param: Tensor, grad: Tensor) -> Tensor:
    """Returns the local shard of a gradient that fits its parameter.

    A gradient that is replicated (tensor parallelism leaves that of an embedding so) is cut like the parameter.

    Raises:
        ValueError: It is of another kind, mesh, placements or shape, or not real floating point.
    """
    problem = None
    if not grad.is_floating_point():
        problem = "has a dtype that is not real floating point"
    elif grad.is_sparse:
        problem = "is sparse"
    elif grad.shape != param.shape:
        problem = "has another shape"
    elif isinstance(grad, DTensor) != isinstance(param, DTensor):
        problem = "must be a DTensor exactly when the parameter is one"
    elif isinstance(grad, DTensor) and isinstance(param, DTensor):
        if grad.device_mesh != param.device_mesh:
            problem = "lives on another mesh"
        elif all(placement.is_replicate() for placement in grad.placements):
            return local_part(local_tensor(grad), infer_layout(param, name))
        elif _on_real_axes(grad) != _on_real_axes(param):
            problem = "has other placements; reduce it or redistribute it to the parameter's placements before step()"
    if problem is None and local_tensor(grad).shape != local_tensor(param).shape:
        problem = (
            f"has a shard of shape {tuple(local_tensor(grad).shape)} on this rank, the parameter's is "
            f"{tuple(local_tensor(param).shape)}"
        )
    if problem is not None:
        raise ValueError(
            f"the gradient {describe_tensor(name + '.grad', grad)} of {describe_tensor(name, param)} {problem}"
        )
    return local_tensor(grad)


def _on_real_axes(tensor: DTensor) -> list[Placement]:
    mesh = tensor.device_mesh
    return [placement for axis, placement in enumerate(tensor.placements) if mesh.size(axis) > 1]


def check_agreement(plans: Sequence[BucketPlan], entries: Sequence[MatrixEntry], params: Sequence[Tensor]) -> None:
    """Checks on every mesh that all its ranks have the same plan. Collective over the meshes.

    The ranks have the same groups: see `agreement.check_groups`.

    Args:
        plans: The buckets.
        entries: What they were built from.
        params: The parameter of each entry.

    Raises:
        RuntimeError: The plans differ; names the first bucket that does, and both versions of it.
    """
    likes: dict[DeviceMesh, Tensor] = {}
    for param in params:
        mesh = mesh_of(param)
        if mesh is not None and mesh.device_type != "meta" and mesh.size() > 1:
            likes.setdefault(mesh, local_tensor(param))
    for mesh, like in likes.items():
        mine = [f"bucket {describe(plan, entries)}" for plan in plans if plan.layout.mesh == mesh]
        text = "\n".join(mine)
        if not agree(mesh, like, fingerprint(text)):
            raise_first_difference("planned different steps", mine, gather_texts(mesh, text))
