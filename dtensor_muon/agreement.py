"""Whether the ranks of a mesh have the same groups and options; when a plan is made, and at every step after it.

[Note: agreement]
When a plan is made, texts are compared: names, shapes, order and options, so a difference is named at the first step
(the constructor makes no collective). Options, the number of steps and what was loaded may drift apart later. Every
step sends flags for missing gradients anyway; the step count and a fingerprint of the options and step counters ride
along in that reduction (see `presence`), so that no collective is added.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtensor_muon.layout import local_tensor, mesh_of
from dtensor_muon.options import OTHER_KEYS, parameter_names
from dtensor_muon.redistribute import agree, gather_texts


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
            raise_first_difference("have different parameter groups", mine, gather_texts(mesh, text))


def raise_first_difference(what: str, mine: Sequence[str], texts: Mapping[int, str]) -> None:
    """Raises for the first line in which the text of a rank differs from this rank's.

    Raises:
        RuntimeError: They differ; names the line in both versions.
    """
    for rank, other in ((rank, text.split("\n")) for rank, text in texts.items()):
        for index in range(max(len(mine), len(other))):
            pair = [lines[index] if index < len(lines) else "nothing" for lines in (mine, other)]
            if pair[0] != pair[1]:
                raise RuntimeError(
                    f"the ranks {what}; the first difference:\nthis rank: {pair[0]}\nrank {rank}: {pair[1]}\n"
                    "Give every rank the same parameters, in the same order, with the same options, and the same "
                    "checkpoints; if steps were made, go back to the last one."
                )


def options_text(param_groups: Sequence[Mapping[str, Any]], loads: int) -> str:
    """Returns how often state was loaded, and the options of the groups that have sharded parameters, a line each."""
    lines = [
        f"param_groups[{index}]: {describe_options(group)}"
        for index, group in enumerate(param_groups)
        if any(mesh_of(param) is not None for param in group["params"])
    ]
    return "\n".join([*lines, f"state dicts loaded: {loads}"])


def counters_text(named: Iterable[tuple[str, torch.Tensor]], state: Mapping[torch.Tensor, Mapping[str, Any]]) -> str:
    """Returns the step counters in the state of parameters, one line for each run of equal ones.

    A counter that lives on a device is left out: reading it would wait for the device.
    """
    counters = [
        (name, float(step))
        for name, step in ((name, state[param].get("step")) for name, param in named)
        if step is not None and step.device.type == "cpu"
    ]
    lines = []
    for value, run in groupby(counters, key=lambda counter: counter[1]):
        names = [name for name, _ in run]
        lines.append(f"step counter {value:.0f} of {names[0]}" + (f" to {names[-1]}" if len(names) > 1 else ""))
    return "\n".join(lines)


def check_steps(mine: int, *, most: int, fewest: int) -> None:
    """Checks that all ranks have made the same number of steps.

    Raises:
        RuntimeError: They have not; names the numbers.
    """
    if most != fewest:
        raise RuntimeError(
            f"the ranks have made different numbers of steps: this rank {mine}, others {fewest} to {most}; "
            "let every rank call step() equally often, and go back to the last checkpoint"
        )
