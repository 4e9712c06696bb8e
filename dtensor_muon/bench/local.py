"""Times the Newton-Schulz alone, on one device: full products, symmetric products, the Gram iteration."""

import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch

from dtensor_muon.bench.report import markdown
from dtensor_muon.coefficients import get_coefficients
from dtensor_muon.newton_schulz import newton_schulz, work_dtype

_COLUMNS = ("matrices", "dtype", "full products, ms", "plain, ms", "Gram, ms", "plain / full", "Gram / full")


def newton_schulz_table(
    shapes: Sequence[tuple[int, ...]], device_type: str, dtype: torch.dtype, iterations: int
) -> str:
    """Returns a Markdown table of medians; the three forms of a shape are timed in turns.

    Args:
        shapes: Equal ones are one batch.
        device_type: Where, for example `"cuda"`.
        dtype: Of the matrices; they are multiplied in `work_dtype` of it.
        iterations: Timed runs of each form.
    """
    rows = []
    if device_type == "cpu":
        torch.set_num_threads(1)
    for shape, count in Counter(shapes).items():
        x = torch.randn(count, *shape, device=device_type).flatten(0, -3).to(dtype)
        multiplied = work_dtype(dtype, device_type, "plain", min(shape[-2:]))
        forms: tuple[Callable[[], object], ...] = (
            partial(_full_products, x, multiplied),
            partial(newton_schulz, x, coefficient_type="simple", iteration="plain"),
            partial(newton_schulz, x, coefficient_type="simple", iteration="gram"),
        )
        seconds: list[list[float]] = [[], [], []]
        for turn in range(iterations + 1):
            for form, times in zip(forms, seconds, strict=True):
                elapsed = _time(form, device_type)
                if turn:  # the first warms up
                    times.append(elapsed)
        full, plain, gram = (1e3 * statistics.median(times) for times in seconds)
        name = f"{'x'.join(map(str, shape))} * {count}"
        kind = str(multiplied).removeprefix("torch.")
        rows.append(
            (name, kind, f"{full:.1f}", f"{plain:.1f}", f"{gram:.1f}", f"{plain / full:.2f}", f"{gram / full:.2f}")
        )
    return markdown(_COLUMNS, rows)


def _full_products(batch: torch.Tensor, dtype: torch.dtype) -> None:
    """The iteration as its formula says, one matrix and one full product after another."""
    for matrix in batch.to(dtype):
        x = matrix / matrix.norm()
        x = x.mT if x.shape[0] > x.shape[1] else x
        for a, b, c in get_coefficients("simple", 5):
            gram = x @ x.mT
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)


def _time(function: Callable[[], object], device_type: str) -> float:
    if device_type != "cpu":
        torch.accelerator.synchronize()
    start = time.perf_counter()
    function()
    if device_type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - start
