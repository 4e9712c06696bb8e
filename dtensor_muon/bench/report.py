"""Prints results as a table, writes them as JSON and as a chart."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COLUMNS = ("optimizer", "ms", "GFLOP", "MB sent", "of matmul rate", "error to fp64", "collectives")


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Returns one line per optimizer; flops and bytes are those of the busiest rank."""
    rows = [_COLUMNS, *(_row(result) for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(result: Mapping[str, Any]) -> tuple[str, ...]:
    error, fraction = result["error_to_fp64"], result["matmul_rate_fraction"]
    return (
        result["optimizer"],
        f"{result['ms']:.2f}",
        f"{result['gflop']:.3f}",
        f"{result['mb_sent']:.3f}",
        "-" if fraction is None else f"{fraction:.0%} ({result['matmul_dtype']})",
        "-" if error is None else f"{error:.1e}",
        ", ".join(f"{name} x{count}" for name, count in result["collectives"].items()) or "none",
    )


def markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [columns, ["---"] * len(columns), *rows])


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes settings and results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_chart(path: Path, title: str, results: Sequence[Mapping[str, Any]]) -> bool:
    """Draws the times as bars; returns False when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    figure = Figure(figsize=(7, 1 + 0.6 * len(results)), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([result["optimizer"] for result in results], [result["ms"] for result in results])
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per step, median of the slowest rank")
    axes.set_title(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True
