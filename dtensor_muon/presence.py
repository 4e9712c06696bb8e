"""What the ranks tell each other at every step: which gradients they miss, their steps, options and step counters.

[Note: missing gradients]
Every rank sends one flag per parameter and step, and only a rank that misses a gradient reads the answer at once: the
others know already, and need not wait for their device.

[Note: replicas]
The ranks of an axis that replicates a parameter must all have its gradient or all miss it: the zero of one that misses
it alone makes replicas part. Those that have it could see that only by waiting for their device. So what concerns every
rank (parted replicas, the number of steps, options, step counters) is copied to the host beside the step, and read when
the next one starts, by when it has long arrived. All ranks read the same numbers at the same step and raise together.
"""

import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_muon.agreement import check_steps, counters_text, fingerprint, raise_first_difference
from dtensor_muon.layout import describe_tensor, infer_layout, local_tensor, mesh_of
from dtensor_muon.redistribute import gather_texts, reduce_over_axes

_EXTREMES = 4  # the largest step count, minus the smallest, the largest fingerprint, minus the smallest


@dataclass(frozen=True, slots=True)
class _Members:
    """The parameters of one mesh.

    Attributes:
        mesh: Their mesh.
        named: In the same order on every rank.
        axes: The axes of more than one rank, those that replicate most parameters first.
        shared: Places in `named` of the parameters that some axis replicates.
        replicates: By axis, which of `shared` it replicates.
        again: Axes that were reduced before another axis could find parted replicas.
    """

    mesh: DeviceMesh
    named: tuple[tuple[str, Tensor], ...]
    axes: tuple[int, ...]
    shared: Tensor
    replicates: dict[int, Tensor]
    again: tuple[int, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh, named: Sequence[tuple[str, Tensor]]) -> "_Members":
        layouts = [infer_layout(param, name) for name, param in named]
        replicating = [{axis.axis for axis in layout.axes if axis.dim is None} for layout in layouts]
        shared = [place for place, axes in enumerate(replicating) if axes]
        every = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
        axes = sorted(every, key=lambda axis: -sum(axis in of_param for of_param in replicating))
        again = {
            before
            for index, axis in enumerate(axes)
            for before in axes[:index]
            for place in shared
            if axis in replicating[place] and before not in replicating[place]
        }
        device = local_tensor(named[0][1]).device
        masks = {axis: torch.tensor([axis in replicating[place] for place in shared], device=device) for axis in axes}
        places = torch.tensor(shared, dtype=torch.int64, device=device)
        return cls(mesh, tuple(named), tuple(axes), places, masks, tuple(sorted(again)))

    def reduce(self, flags: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the maximum of flags over the mesh, and which of `shared` have parted. Collective over the mesh.

        Args:
            flags: 1 or 0 per parameter, whether this rank has its gradient; then numbers of which only the maximum
                counts.
        """
        if not self.shared.numel():
            return reduce_over_axes(self.mesh, self.axes, flags, "max"), flags.new_zeros(0)
        count = self.shared.numel()
        has = flags[self.shared]
        replicas = torch.stack([has, 1 - has])
        parted = torch.zeros_like(has)
        for axis in self.axes:
            sent = torch.cat([flags, parted, replicas.flatten()])
            got = reduce_over_axes(self.mesh, (axis,), sent, "max")
            flags, parted, found = got.split([flags.numel(), count, 2 * count])
            # over an axis that shards, another rank's gradient says nothing about this rank's replicas
            replicas = torch.where(self.replicates[axis], found.view(2, count), replicas)
            parted = torch.maximum(parted, replicas[0] * replicas[1])
        return flags, reduce_over_axes(self.mesh, self.again, parted, "max")


@dataclass(frozen=True, slots=True)
class _Report:
    """What the reduction over one mesh found, on its way to the host."""

    members: _Members
    steps: int
    text: str
    found: Tensor
    arrived: torch.Event | None

    def read(self) -> list[int]:
        if self.arrived is not None:
            self.arrived.synchronize()
        numbers: list[int] = self.found.tolist()
        return numbers


class Presence:
    """Keeps, from one step to the next, what the ranks told each other. See the notes of this module."""

    def __init__(self) -> None:
        self._key: object = None
        self._members: list[_Members] = []
        self._reports: list[_Report] = []

    def absent_here_only(
        self,
        named: Sequence[tuple[str, Tensor]],
        present: Container[Tensor],
        steps: int,
        options: str,
        state: Mapping[Tensor, Mapping[str, Any]],
    ) -> list[Tensor]:
        """Returns the parameters without a gradient on this rank that have one on another rank of their mesh.

        Collective over the meshes. Warns when another replica has the gradient; see `check`.

        Args:
            named: All parameters, in the same order on every rank.
            present: Those that have a gradient on this rank.
            steps: Made by this rank.
            options: `agreement.options_text` of this rank.
            state: Of the optimizer, by parameter.
        """
        self._group(named)
        self._reports = []
        absent: list[Tensor] = []
        for members in self._members:
            text = f"{options}\n{counters_text(members.named, state)}"
            number = fingerprint(text)
            count = len(members.named)
            flags = local_tensor(members.named[0][1]).new_ones(count + _EXTREMES, dtype=torch.int64)
            # one fill each: a copy from a host tensor would wait for the device
            for place, value in enumerate((steps, -steps, number, -number), start=count):
                flags[place].fill_(value)
            missing = [place for place, (_, param) in enumerate(members.named) if param not in present]
            for place in missing:
                flags[place] = 0
            anywhere, parted = members.reduce(flags)
            found, arrived = _to_host(torch.cat([anywhere[count:], parted]))
            self._reports.append(_Report(members, steps, text, found, arrived))
            here = [place for place in missing if anywhere[place]]
            absent += [members.named[place][1] for place in here]
            if here and members.shared.numel():
                _warn_parted(members, here, parted.tolist())
        return absent

    def check(self) -> None:
        """Raises for what the ranks found in the step before. Collective only when texts differ.

        Raises:
            RuntimeError: A gradient was missing on a part of its replicas, or the ranks have made different numbers of
                steps or have different options or step counters. Raised on all ranks of the mesh; the first until
                values are loaded, the others once.
        """
        reports, self._reports = self._reports, []
        found = [(report, report.read()) for report in reports]
        texts = [
            gather_texts(report.members.mesh, report.text) if numbers[2] != -numbers[3] else {}
            for report, numbers in found
        ]
        for (report, numbers), others in zip(found, texts, strict=True):
            check_steps(report.steps, most=numbers[0], fewest=-numbers[1])
            raise_first_difference("have different parameter groups or state", report.text.split("\n"), others)
            if any(numbers[_EXTREMES:]):
                # replicas stay different until other values are loaded
                self._reports = reports
                _check_parted(report.members, numbers[_EXTREMES:])

    def check_replicas(self) -> None:
        """Raises when the step before made replicas part. Not collective.

        Raises:
            RuntimeError: As `check`.
        """
        for report in self._reports:
            _check_parted(report.members, report.read()[_EXTREMES:])

    def _group(self, named: Sequence[tuple[str, Tensor]]) -> None:
        key = [(id(param), mesh_of(param)) for _, param in named]
        if key == self._key:
            return
        by_mesh: dict[DeviceMesh, list[tuple[str, Tensor]]] = {}
        for (name, param), (_, mesh) in zip(named, key, strict=True):
            if mesh is not None and mesh.device_type != "meta" and mesh.size() > 1:
                by_mesh.setdefault(mesh, []).append((name, param))
        self._members = [_Members.of(mesh, members) for mesh, members in by_mesh.items()]
        self._key = key


def _to_host(value: Tensor) -> tuple[Tensor, torch.Event | None]:
    if value.device.type == "cpu":
        return value, None
    copy = value.to("cpu", non_blocking=True)
    return copy, torch.accelerator.current_stream().record_event()


def _parted(members: _Members, parted: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yields place and description of each parameter whose replicas have parted."""
    if not any(parted):
        return
    for place, bad in zip(members.shared.tolist(), parted, strict=True):
        if bad:
            name, param = members.named[place]
            yield place, describe_tensor(name, param)


def _warn_parted(members: _Members, missing: Sequence[int], parted: Sequence[int]) -> None:
    for place, what in _parted(members, parted):
        if place in missing:
            warnings.warn(
                f"{what}: this rank has no gradient, but a replica has one; the next step() or state_dict() raises",
                stacklevel=7,
            )


def _check_parted(members: _Members, parted: Sequence[int]) -> None:
    bad = [what for _, what in _parted(members, parted)]
    if bad:
        raise RuntimeError(
            f"{bad[0]}: in the last step() some of its replicas had a gradient and others had none, so they are not "
            f"equal any more (parameters like this: {len(bad)}). Give every rank of an axis that replicates a "
            "parameter its gradient, or none of them, and go back to the last checkpoint"
        )
