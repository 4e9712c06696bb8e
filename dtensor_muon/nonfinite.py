"""What happens when a gradient is infinite or NaN."""

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_muon.layout import local_tensor, mesh_of
from dtensor_muon.redistribute import any_rank

NONFINITE = ("propagate", "skip", "raise")


def check_nonfinite(value: str) -> None:
    """Checks the argument `nonfinite`.

    Raises:
        ValueError: An unknown value; lists those that are allowed.
    """
    if value not in NONFINITE:
        raise ValueError(f"nonfinite is {value!r}; it must be one of {', '.join(map(repr, NONFINITE))}")


def skips_step(mode: str, named: Sequence[tuple[str, Tensor]], gradients: Mapping[Tensor, Tensor]) -> bool:
    """Returns whether the step must be left out. Collective over the meshes unless `mode` is "propagate".

    All ranks that share a mesh, directly or through other meshes, answer alike. Warns with the names in mode "skip".

    Args:
        mode: `"propagate"`, `"skip"` or `"raise"`.
        named: All parameters, in the same order on every rank.
        gradients: Local gradients of those that have one on any rank.

    Raises:
        FloatingPointError: A gradient is not finite and the mode is "raise". Raised on all these ranks.
    """
    if mode == "propagate":
        return False
    found, names = _find(named, gradients)
    if not found:
        return False
    listed = ", ".join(names) or "a parameter of another rank"
    message = f"gradients that are infinite or NaN: {listed}; no parameter and no state has been changed"
    if mode == "raise":
        raise FloatingPointError(message + '; set nonfinite="skip" to go on without such steps')
    warnings.warn("skipped a step with " + message, stacklevel=6)
    return True


def _find(named: Sequence[tuple[str, Tensor]], gradients: Mapping[Tensor, Tensor]) -> tuple[bool, list[str]]:
    by_mesh: dict[DeviceMesh | None, list[tuple[str, Tensor]]] = {}
    for name, param in named:
        if param in gradients:
            by_mesh.setdefault(mesh_of(param), []).append((name, param))
    flags: dict[DeviceMesh | None, Tensor] = {}
    for mesh, members in by_mesh.items():
        mine = _flags([gradients[param] for _, param in members])
        flags[mesh] = mine if mesh is None else any_rank(mesh, mine)
    if not flags:
        return False, []
    device = next(iter(flags.values())).device
    anywhere = torch.stack([flag.max().to(device) for flag in flags.values()]).max()
    meshes = [mesh for mesh in flags if mesh is not None]
    if len(flags) > 1:
        # what one mesh found must reach ranks that are joined only through others
        for _ in meshes:
            for mesh in meshes:
                anywhere = any_rank(mesh, anywhere.reshape(1)).reshape(())
    if not anywhere.item():
        return False, []
    return True, [
        name
        for mesh, members in by_mesh.items()
        for (name, _), bad in zip(members, flags[mesh].tolist(), strict=True)
        if bad
    ]


def _flags(gradients: Sequence[Tensor]) -> Tensor:
    """Returns 1 for each tensor with an element that is not finite, else 0."""
    filled = [grad if grad.numel() else grad.new_zeros(1) for grad in map(local_tensor, gradients)]
    largest = torch._foreach_norm(filled, torch.inf)
    return torch.stack([norm.isfinite().logical_not() for norm in largest]).to(torch.int32)
