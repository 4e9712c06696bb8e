"""Whether the ranks of a mesh have the same groups, options and step count.

[Note: agreement]
When a plan is made, texts are compared: names, shapes, order and options, so a difference is named at build. Options
and the number of steps may drift apart later. Every step sends flags for missing gradients anyway; the step count and a
fingerprint of the options ride along in that reduction, and are read once in `STEPS_BETWEEN_CHECKS` steps, so that no
collective and, on other steps, no wait for the device is added.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtensor_muon.layout import local_tensor, mesh_of
from dtensor_muon.options import OTHER_KEYS, parameter_names
from dtensor_muon.redistribute import agree, gather_texts

STEPS_BETWEEN_CHECKS = 100


def describe_options(group: Mapping[str, Any]) -> str:
    """Returns the plain option values of a group as one line; tensors and callables are left out."""
    plain = {
        key: value
        for key, value in group.items()
        if key not in OTHER_KEYS and not isinstance(value, torch.Tensor) and not callable(value)
    }
    return ", ".join(f"{key}={plain[key]!r}" for key in sorted(plain))


def fingerprint(text: str) -> int:
    """Returns a number of 56 bits that depends on nothing but the text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())


def check_groups(param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Checks on every mesh that all its ranks have the same parameters and options. Collective over the meshes.

    Raises:
        RuntimeError: They differ; names the first difference in both versions.
    """
    lines: dict[DeviceMesh, list[str]] = {}
    likes: dict[DeviceMesh, torch.Tensor] = {}
    for index, group in enumerate(param_groups):
        seen: set[DeviceMesh] = set()
        for name, param in zip(parameter_names(group, index), group["params"], strict=True):
            mesh = mesh_of(param)
            if mesh is None or mesh.device_type == "meta" or mesh.size() == 1:
                continue
            own = lines.setdefault(mesh, [])
            likes[mesh] = local_tensor(param)
            if mesh not in seen:
                seen.add(mesh)
                own.append(f"group of optimizer={group['optimizer']!r}: {describe_options(group)}")
            own.append(f"parameter {name} {tuple(param.shape)}")
    for mesh, mine in lines.items():
        text = "\n".join(mine)
        if not agree(mesh, likes[mesh], fingerprint(text)):
            _raise_difference(mine, gather_texts(mesh, text))


def _raise_difference(mine: Sequence[str], texts: Sequence[str]) -> None:
    for other in (text.split("\n") for text in texts):
        for index in range(max(len(mine), len(other))):
            pair = [lines[index] if index < len(lines) else "nothing" for lines in (mine, other)]
            if pair[0] != pair[1]:
                raise RuntimeError(
                    f"the ranks have different parameter groups.\nthis rank:    {pair[0]}\nanother rank: {pair[1]}\n"
                    "Give every rank the same parameters, in the same order, with the same options."
                )


def options_text(param_groups: Sequence[Mapping[str, Any]]) -> str:
    """Returns the options of the groups that have sharded parameters, one line each."""
    return "\n".join(
        f"param_groups[{index}]: {describe_options(group)}"
        for index, group in enumerate(param_groups)
        if any(mesh_of(param) is not None for param in group["params"])
    )


def check_drift(mesh: DeviceMesh, steps: int, text: str, extremes: Sequence[int]) -> None:
    """Compares the steps and options of the ranks. Collective over the mesh when only the options differ.

    Args:
        mesh: Whose ranks are compared.
        steps: Of this rank.
        text: `options_text` of this rank.
        extremes: Largest step count, minus the smallest, largest fingerprint, minus the smallest.

    Raises:
        RuntimeError: They differ; names the step counts or the options.
    """
    most, least, high, low = extremes
    if most != -least:
        raise RuntimeError(
            f"the ranks have made different numbers of steps: this rank {steps}, others {-least} to {most}; "
            "let every rank call step() equally often"
        )
    if high != -low:
        _raise_difference(text.split("\n"), gather_texts(mesh, text))
