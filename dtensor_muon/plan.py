"""What a plan says: buckets of same-shape matrices, each with the layout it is computed in. Looks at no rank.

[Note: compute layout]
Every mesh axis of a bucket gets one `Target`. The stack of the bucket's matrices has dims `[matrices, rows, cols]`:

    KEEP    leave the axis as it is: it shards a leading dim (whole experts), or the blocks are computed apart
    STACK   `Shard(d) -> Shard(0)`, or a slice of the stack where the axis replicates: each rank gets whole matrices
    LONG    `Shard(short) -> Shard(long)`: the matrix stays sharded, on its long dim, and Gram sums are reduced
    GATHER  `Shard(d) -> Replicate`: every rank of the axis repeats the work

The modes of the optimizer are the uniform choices (owner: STACK, distributed: LONG, duplicated: GATHER); `auto` takes
the cheapest choice of all. Replicating axes come first, so that the slice shrinks what the others move; then the
sharded ones in the reverse of their order of application (see [Note: order of sharding] in `layout`).

[Note: slots]
The stack of a bucket has the same number of slots for each owner of the STACK axes, one owner's after another's. The
real matrices come first in an owner's slots, so that it computes a prefix; the rest is padding that only travels.
Owners may get different counts, so that remainders and large matrices of other buckets even out over a step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from dtensor_muon.fused import FusedDim
from dtensor_muon.layout import ParamLayout, ShardedAxis
from dtensor_muon.options import MatrixOptions


class Target(Enum):
    """What becomes of a mesh axis while a bucket is computed; see [Note: compute layout]."""

    KEEP = "keep"
    STACK = "stack"
    LONG = "long"
    GATHER = "gather"


MODE_TARGETS = {"owner": Target.STACK, "distributed": Target.LONG, "duplicated": Target.GATHER}


@dataclass(frozen=True, slots=True)
class AssembledSplit:
    """How assembled matrices are taken apart, because their shards cut through the groups of a fused dim.

    Attributes:
        fused: The fused dim.
        scale_mode: Of the parts, which are scaled before they are put together again.
    """

    fused: FusedDim
    scale_mode: str


@dataclass(frozen=True, slots=True)
class MatrixEntry:
    """A parameter, or a part of a fused one, as the planner sees it.

    Attributes:
        name: For messages.
        layout: Where it is stored.
        device_type: Of its local tensor.
        compute_dtype: In which it travels and is multiplied.
        options: How it is orthogonalized.
        split: How it is taken apart once it is assembled; None for one matrix.
    """

    name: str
    layout: ParamLayout
    device_type: str
    compute_dtype: torch.dtype
    options: MatrixOptions
    split: AssembledSplit | None = None


@dataclass(frozen=True, slots=True)
class Price:
    """What a bucket costs the busiest rank.

    Attributes:
        flops: Of its matrix products.
        sent_bytes: That it sends.
        seconds: Predicted from the device profile.
        in_flight_bytes: Its extra memory while the bucket is worked on.
    """

    flops: float
    sent_bytes: float
    seconds: float
    in_flight_bytes: float


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """Same-shape parameters that travel together.

    Attributes:
        members: Indices into the entries that the plan was built from.
        layout: The layout that they share.
        targets: One per axis of `layout.axes`.
        iteration: `"plain"`, `"gram"`, or `"auto"` where the parts of `split` have iterations of their own.
        compute_dtype: In which they travel and are multiplied.
        options: How they are orthogonalized.
        split: How they are taken apart once they are assembled.
        price: Of the busiest rank.
        runner_up: The next best choice and its price, as `explain()` shows them; empty when there was no choice.
        counts: Matrices of each owner, as runs `(matrices, owners)`; empty when all have the same. See [Note: slots].
    """

    members: tuple[int, ...]
    layout: ParamLayout
    targets: tuple[Target, ...]
    iteration: str
    compute_dtype: torch.dtype
    options: MatrixOptions
    split: AssembledSplit | None
    price: Price
    runner_up: str = ""
    counts: tuple[tuple[int, int], ...] = ()

    @property
    def stack_axes(self) -> tuple[ShardedAxis, ...]:
        """The axes that share out the stack, the first to cut it first."""
        return tuple(axis for axis, target in self.moves() if target is Target.STACK)

    @property
    def long_axes(self) -> tuple[ShardedAxis, ...]:
        """The axes over which Gram sums are reduced."""
        return tuple(axis for axis, target in self.moves() if target is Target.LONG)

    @property
    def num_pieces(self) -> int:
        """Ranks that hold a piece of the same matrix while it is computed."""
        return math.prod(axis.size for axis in self.long_axes)

    @property
    def shares_small_work(self) -> bool:
        """Whether the ranks with pieces share out the polynomials; see the note in `distributed_ns`."""
        return self.num_pieces > 1 and self.matrices_per_owner >= self.num_pieces

    @property
    def num_owners(self) -> int:
        """Ranks (or groups of ranks) among which the stack is shared."""
        return math.prod(axis.size for axis in self.stack_axes)

    @property
    def num_matrices(self) -> int:
        """Matrices in the stack of one rank before it moves, the larger count where they are unevenly spread."""
        return len(self.members) * kept_matrices(self.layout)

    @property
    def matrices_per_owner(self) -> int:
        """Slots of one owner."""
        return max((count for count, _ in self.counts), default=-(-self.num_matrices // self.num_owners))

    def moves(self) -> tuple[tuple[ShardedAxis, Target], ...]:
        """Axes with their targets in the order in which they move."""
        return ordered_moves(self.layout, self.targets)

    def slots(self) -> list[int]:
        """Returns the slot of each matrix of the stack."""
        per_owner = self.matrices_per_owner
        if not self.counts:
            return list(range(self.num_matrices))
        counts = [count for count, owners in self.counts for _ in range(owners)]
        return [owner * per_owner + place for owner, count in enumerate(counts) for place in range(count)]


def kept_matrices(layout: ParamLayout) -> int:
    """Returns how many of a parameter's matrices one rank holds (pieces of), the largest count over the ranks."""
    batch = list(layout.shape[:-2])
    for axis in layout.axes:
        if axis.dim is not None and axis.dim < len(batch):
            batch[axis.dim] = -(-batch[axis.dim] // axis.size)
    return math.prod(batch)


def ordered_moves(layout: ParamLayout, targets: Sequence[Target]) -> tuple[tuple[ShardedAxis, Target], ...]:
    """Returns axes and targets in the order in which they move; see [Note: compute layout]."""
    pairs = list(zip(layout.axes, targets, strict=True))
    replicated = [pair for pair in pairs if pair[0].dim is None]
    sharded = [pair for pair in pairs if pair[0].dim is not None]
    return tuple(replicated + sharded[::-1])


def long_dim_of(layout: ParamLayout) -> int:
    """Returns the matrix dim on which Gram sums are split: 0 when there are more rows than columns, else 1."""
    rows, cols = layout.matrix_shape
    return 0 if rows > cols else 1


def describe(plan: BucketPlan, entries: Sequence[MatrixEntry]) -> str:
    """Returns a line that is equal on two ranks exactly when they would run the same collectives and math."""
    layout = plan.layout
    targets = ", ".join(
        f"{axis.name or axis.axis}({axis.size}, dim {axis.dim})->{target.value}" for axis, target in plan.moves()
    )
    names = ", ".join(entries[member].name for member in plan.members)
    return (
        f"{layout.shape} {layout.placements} [{targets}] {plan.iteration} {plan.compute_dtype} {plan.options} "
        f"{plan.split or 'whole'} counts {plan.counts}: {names}"
    )
