"""Prints a plan as a table."""

from collections.abc import Sequence

from dtensor_muon.plan import BucketPlan, MatrixEntry
from dtensor_muon.planner import mode_name

_COLUMNS = (
    "bucket", "matrices", "mode", "iteration", "GFLOP/rank", "MB sent/rank", "predicted ms", "idle owners", "runner-up"
)  # fmt: skip


def explain(plans: Sequence[BucketPlan], entries: Sequence[MatrixEntry]) -> str:
    """Returns one line per bucket: what it holds, how it is computed, what that costs, and the next best choice.

    Flops and bytes are those of the busiest rank in one step; the milliseconds are predicted from the device profile,
    without overlap.

    Args:
        plans: The buckets.
        entries: What they were built from.
    """
    rows = [_COLUMNS, *(_row(plan, entries) for plan in plans)]
    seconds = sum(plan.price.seconds for plan in plans)
    flops, sent = sum(plan.price.flops for plan in plans), sum(plan.price.sent_bytes for plan in plans)
    rows.append(("total", "", "", "", f"{flops / 1e9:.3f}", f"{sent / 1e6:.3f}", f"{seconds * 1e3:.3f}", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _row(plan: BucketPlan, entries: Sequence[MatrixEntry]) -> tuple[str, ...]:
    first = entries[plan.members[0]].name
    name = first if len(plan.members) == 1 else f"{first} (+{len(plan.members) - 1})"
    idle = max(0, plan.num_owners - plan.num_matrices)
    return (
        f"{name} {'x'.join(map(str, plan.layout.shape))}",
        str(len(plan.members) * plan.layout.num_matrices),
        mode_name(plan),
        plan.iteration,
        f"{plan.price.flops / 1e9:.3f}",
        f"{plan.price.sent_bytes / 1e6:.3f}",
        f"{plan.price.seconds * 1e3:.3f}",
        f"{idle} of {plan.num_owners}" if idle else "",
        plan.runner_up,
    )
