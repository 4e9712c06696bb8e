"""Local update math: the scale factor of an update."""

import math

_SCALE_MODES = ("spectral", "shape_scaling", "unit_rms_norm")


def get_muon_scale_factor(size_out: int, size_in: int, mode: str = "spectral") -> float:
    """Returns the factor of an orthogonalized update with `size_out` rows and `size_in` columns.

    Args:
        size_out: Rows of the global logical matrix that was orthogonalized.
        size_in: Its columns.
        mode: `"spectral"` is `sqrt(max(size_out, size_in))` (with `extra_scale_factor=0.2` the update has AdamW's RMS,
            arXiv 2502.16982); `"shape_scaling"` is `sqrt(max(1, size_out / size_in))` (K. Jordan's Muon post);
            `"unit_rms_norm"` is `sqrt(size_out / size_in)` (arXiv 2310.17813).

    Returns:
        The factor; 0 for a matrix without elements.

    Raises:
        ValueError: An unknown mode.
    """
    if mode not in _SCALE_MODES:
        choices = ", ".join(repr(choice) for choice in _SCALE_MODES)
        raise ValueError(f"scale mode is {mode!r}; it must be one of {choices}")
    if size_out == 0 or size_in == 0:
        return 0.0
    if mode == "spectral":
        return math.sqrt(max(size_out, size_in))
    if mode == "shape_scaling":
        return math.sqrt(max(1.0, size_out / size_in))
    return math.sqrt(size_out / size_in)
