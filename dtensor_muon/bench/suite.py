"""The cases of docs/performance.md, one after another, as Markdown."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtensor_muon.bench.count import plain_flops
from dtensor_muon.bench.params import DEFAULT_SHAPES, parse_shapes
from dtensor_muon.bench.peers import default_optimizers
from dtensor_muon.bench.report import markdown
from dtensor_muon.bench.settings import Settings

SMALL_SHAPES = "64x64*400"
CASES = (
    (2, "fsdp0", DEFAULT_SHAPES),
    (4, "fsdp0", DEFAULT_SHAPES),
    (4, "hsdp", DEFAULT_SHAPES),
    (4, "fsdp_tp_row", DEFAULT_SHAPES),
    (4, "fsdp_tp_col", DEFAULT_SHAPES),
    (2, "fsdp0", SMALL_SHAPES),
)
_COLUMNS = (
    "ranks", "layout", "shapes", "optimizer", "ms", "x muonium", "GFLOP", "of the plain flops", "MB sent",
    "of matmul rate", "error to fp64",
)  # fmt: skip


def run_suite(
    run_case: Callable[[Settings], list[dict[str, Any]]], device_type: str, iterations: int, precision: str
) -> tuple[str, list[dict[str, Any]]]:
    """Runs all cases.

    Args:
        run_case: Starts the ranks of one case.
        device_type: Where.
        iterations: Timed steps of each optimizer.
        precision: `fp32_matmul_prec` of dtensor_muon.

    Returns:
        The table, and `{"world", "layout", "shapes", "results"}` per case.
    """
    cases, rows = [], []
    for world, layout, text in CASES:
        print(f"{world} ranks, {layout}, {text}", file=sys.stderr)
        shapes = tuple(parse_shapes(text))
        names = default_optimizers()
        if text == SMALL_SHAPES:
            names = ("dtensor_muon", "dtensor_muon_per_matrix", *names[1:])
        results = run_case(Settings(shapes, layout, world, device_type, names, iterations, precision))
        cases.append({"world": world, "layout": layout, "shapes": text, "results": results})
        rows += [(str(world), layout, text, *row) for row in _rows(results, plain_flops(shapes) / world / 1e9)]
    return markdown(_COLUMNS, rows), cases


def _rows(results: Sequence[Mapping[str, Any]], plain_gflop: float) -> list[tuple[str, ...]]:
    peer = next((result["ms"] for result in results if result["optimizer"] == "muonium"), None)
    return [
        (
            result["optimizer"],
            f"{result['ms']:.1f}",
            "-" if peer is None else f"{result['ms'] / peer:.2f}",
            f"{result['gflop']:.2f}",
            f"{result['gflop'] / plain_gflop:.2f}",
            f"{result['mb_sent']:.2f}",
            "-" if result["matmul_rate_fraction"] is None else f"{result['matmul_rate_fraction']:.0%}",
            "-" if result["error_to_fp64"] is None else f"{result['error_to_fp64']:.1e}",
        )
        for result in results
    ]
