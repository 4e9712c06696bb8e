import math
import re

import pytest

from dtensor_muon.coefficients import get_coefficients, get_supported_coefficient_types, validate_coefficient_type

NAMES = ("simple", "quintic", "polar_express", "cans", "aol", "deepseekv4", "cubic5", "custom")
TABLE_LENGTHS = {"simple": 1, "quintic": 5, "polar_express": 8, "cans": 5, "aol": 4, "deepseekv4": 10, "cubic5": 5}
SUPPORTED = "'simple', 'quintic', 'polar_express', 'cans', 'aol', 'deepseekv4', 'cubic5', 'custom'"


def apply(triples, value: float) -> float:
    for a, b, c in triples:
        value = a * value + b * value**3 + c * value**5
    return value


def test_names():
    assert get_supported_coefficient_types() == NAMES
    for name in NAMES:
        validate_coefficient_type(name)


@pytest.mark.parametrize("name", TABLE_LENGTHS)
def test_a_full_table_moves_singular_values_towards_one(name):
    triples = get_coefficients(name, TABLE_LENGTHS[name] if name != "simple" else 5)
    # aol expects its own scaling of the input, which keeps singular values away from 0 and 1
    low, high = (0.06, 0.8) if name == "aol" else (0.02, 0.99)
    values = [apply(triples, low + (high - low) * i / 500) for i in range(501)]
    assert min(values) > 0.6
    assert max(values) < 1.3


def test_polar_express_is_the_table_with_safety_factor_1_01():
    # the published first, seventh and last triples, before the factor (arXiv 2505.16932, singular values from 1e-3)
    published = {
        0: (8.28721201814563, -23.595886519098837, 17.300387312530933),
        6: (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    }
    triples = get_coefficients("polar_express", 8)
    for step, triple in published.items():
        expected = [value / 1.01**power for value, power in zip(triple, (1, 3, 5), strict=True)]
        assert triples[step] == pytest.approx(expected, abs=1e-4)
    assert triples[7] == (1.875, -1.25, 0.375)


@pytest.mark.parametrize("name", ["simple", "quintic", "aol"])
def test_past_the_end_these_start_over(name):
    length = TABLE_LENGTHS[name]
    triples = get_coefficients(name, 2 * length + 1)
    assert triples[length : 2 * length] == triples[:length]
    assert triples[-1] == triples[0]
    assert len(get_coefficients(name, 1)) == 1


@pytest.mark.parametrize("name", ["polar_express", "cans", "deepseekv4"])
def test_past_the_end_these_repeat_the_last(name):
    length = TABLE_LENGTHS[name]
    triples = get_coefficients(name, length + 3)
    assert triples[:length] == get_coefficients(name, length)
    assert set(triples[length:]) == {triples[length - 1]}
    assert triples[length - 1] != triples[0]


def test_cubic5_has_five_steps_without_a_fifth_power():
    assert all(c == 0 for _, _, c in get_coefficients("cubic5", 5))
    with pytest.raises(ValueError, match=r"num_ns_steps is 4; coefficient_type='cubic5' must have exactly 5 steps"):
        get_coefficients("cubic5", 4)


def test_custom_starts_over_and_accepts_integers():
    assert get_coefficients("custom", 3, [[3, -3, 1], (2.0, -1.5, 0.5)]) == (
        (3.0, -3.0, 1.0),
        (2.0, -1.5, 0.5),
        (3.0, -3.0, 1.0),
    )


def test_custom_triples_without_custom_warn():
    with pytest.warns(UserWarning, match="custom_coefficient_sets is ignored with coefficient_type='simple'"):
        assert get_coefficients("simple", 1, [(1.0, 0.0, 0.0)]) == ((3.4445, -4.7750, 2.0315),)


@pytest.mark.parametrize("name", ["quintics", "", None, 5, ["simple"]])
def test_unknown_name(name):
    with pytest.raises(ValueError, match=re.escape(f"coefficient_type is {name!r}; it must be one of {SUPPORTED}")):
        validate_coefficient_type(name)


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "5", None, math.nan])
def test_bad_number_of_steps(steps):
    with pytest.raises(ValueError, match=re.escape(f"num_ns_steps is {steps!r}; it must be an integer of at least 1")):
        get_coefficients("simple", steps)


@pytest.mark.parametrize(
    "triples",
    [[], "abc", 3.0, [1.0, 2.0, 3.0], [(1.0, 2.0)], [(1.0, 2.0, math.nan)], [(1.0, 2.0, math.inf)], [(1, 2, "3")],
     [(True, 0, 0)], {(1.0, 2.0, 3.0)}],
)  # fmt: skip
def test_bad_custom_triples(triples):
    with pytest.raises(ValueError, match=r"custom_coefficient_sets is .*; it must be a non-empty list of \(a, b, c\)"):
        get_coefficients("custom", 5, triples)


def test_missing_custom_triples():
    with pytest.raises(ValueError, match="custom_coefficient_sets is missing; coefficient_type='custom' needs"):
        get_coefficients("custom", 5)
