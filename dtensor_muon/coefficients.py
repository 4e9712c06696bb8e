"""Named Newton-Schulz coefficient sets, with their sources.

A set is a table of triples `(a, b, c)`, one per step: with `A = X X^T`, a step is `X <- a X + (b A + c A^2) X`,
so each singular value `s` of `X` becomes `a s + b s^3 + c s^5`. The numbers are facts from the cited works.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

CoefficientTriple = tuple[float, float, float]

CUSTOM = "custom"


@dataclass(frozen=True, slots=True)
class _CoefficientSet:
    """A table and what happens in the steps after its end."""

    triples: tuple[CoefficientTriple, ...]
    past_the_end: Literal["cycle", "repeat_last", "error"]


_SIMPLE: CoefficientTriple = (3.4445, -4.7750, 2.0315)

_COEFFICIENT_SETS: dict[str, _CoefficientSet] = {
    # K. Jordan, "Muon: An optimizer for hidden layers in neural networks", kellerjordan.github.io/posts/muon
    "simple": _CoefficientSet((_SIMPLE,), "cycle"),
    # leloykun, "muon-opt-coeffs"; used by modded-nanogpt
    "quintic": _CoefficientSet(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        "cycle",
    ),
    # Amsel, Persson, Musco, Gower, "The Polar Express", arXiv 2505.16932: the table for singular values from 1e-3,
    # with the safety factor 1.01 folded in: (a / 1.01, b / 1.01^3, c / 1.01^5) in all but the last triple.
    # Tables with 1.02 and 1.05 folded in go by the same name elsewhere; this is neither of them.
    "polar_express": _CoefficientSet(
        (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        "repeat_last",
    ),
    # Grishina, Smirnov, Rakhuba, "Accelerating Newton-Schulz Iteration for Orthogonalization via Chebyshev-type
    # Polynomials" (CANS), arXiv 2506.10935
    "cans": _CoefficientSet(
        (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        "repeat_last",
    ),
    # Turbo-Muon, "flash-newton-schulz" (made for its almost-orthogonal-layer scaling of the input)
    "aol": _CoefficientSet(
        (
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
        "cycle",
    ),
    # DeepSeek-V4 technical report: eight fast steps, then two that settle on 1
    "deepseekv4": _CoefficientSet((_SIMPLE,) * 8 + ((2.0, -1.5, 0.5),) * 2, "repeat_last"),
    # arXiv 2606.00371: five cubic steps tuned as one composition, meaningless at any other number of steps
    "cubic5": _CoefficientSet(
        (
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ),
        "error",
    ),
}


def get_supported_coefficient_types() -> tuple[str, ...]:
    """Returns the names that `coefficient_type` accepts, `"custom"` last."""
    return (*_COEFFICIENT_SETS, CUSTOM)


def validate_coefficient_type(name: str) -> None:
    """Checks the name of a coefficient set.

    Raises:
        ValueError: `name` is not one of `get_supported_coefficient_types()`.
    """
    if not isinstance(name, str) or name not in get_supported_coefficient_types():
        supported = ", ".join(repr(supported) for supported in get_supported_coefficient_types())
        raise ValueError(f"coefficient_type is {name!r}; it must be one of {supported}")


def get_coefficients(
    coefficient_type: str,
    num_ns_steps: int,
    custom_coefficient_sets: Sequence[CoefficientTriple] | None = None,
) -> tuple[CoefficientTriple, ...]:
    """Returns the triple of every step.

    Past the end of its table, `simple`, `quintic`, `aol` and `custom` start over; `polar_express`, `cans` and
    `deepseekv4` repeat the last triple; `cubic5` has exactly five steps.

    Args:
        coefficient_type: One of `get_supported_coefficient_types()`.
        num_ns_steps: Number of steps, at least 1.
        custom_coefficient_sets: The triples of `"custom"`, which needs them; ignored with a warning otherwise.

    Returns:
        `num_ns_steps` triples `(a, b, c)`.

    Raises:
        ValueError: An unknown name, a number of steps that is not possible, or custom triples of the wrong form.
    """
    validate_coefficient_type(coefficient_type)
    if not isinstance(num_ns_steps, int) or isinstance(num_ns_steps, bool) or num_ns_steps < 1:
        raise ValueError(f"num_ns_steps is {num_ns_steps!r}; it must be an integer of at least 1")
    if coefficient_type == CUSTOM:
        coefficients = _CoefficientSet(_check_custom(custom_coefficient_sets), "cycle")
    else:
        coefficients = _COEFFICIENT_SETS[coefficient_type]
        if custom_coefficient_sets is not None:
            warnings.warn(
                f"custom_coefficient_sets is ignored with coefficient_type={coefficient_type!r}; "
                f"set coefficient_type={CUSTOM!r} to use it",
                stacklevel=2,
            )

    triples, length = coefficients.triples, len(coefficients.triples)
    if coefficients.past_the_end == "error" and num_ns_steps != length:
        raise ValueError(
            f"num_ns_steps is {num_ns_steps}; coefficient_type={coefficient_type!r} must have exactly {length} steps, "
            f"so set num_ns_steps={length} or choose another coefficient_type"
        )
    if coefficients.past_the_end == "repeat_last":
        return tuple(triples[min(step, length - 1)] for step in range(num_ns_steps))
    return tuple(triples[step % length] for step in range(num_ns_steps))


def _check_custom(triples: Sequence[CoefficientTriple] | None) -> tuple[CoefficientTriple, ...]:
    wanted = "a non-empty list of (a, b, c) triples of finite numbers, for example [(3.4445, -4.775, 2.0315)]"
    if triples is None:
        raise ValueError(f"custom_coefficient_sets is missing; coefficient_type={CUSTOM!r} needs {wanted}")
    error = ValueError(f"custom_coefficient_sets is {triples!r}; it must be {wanted}")
    if not isinstance(triples, list | tuple) or not triples:
        raise error
    checked: list[CoefficientTriple] = []
    for triple in triples:
        if not isinstance(triple, list | tuple) or len(triple) != 3 or not all(map(_is_finite_number, triple)):
            raise error
        a, b, c = triple
        checked.append((float(a), float(b), float(c)))
    return tuple(checked)


def _is_finite_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
