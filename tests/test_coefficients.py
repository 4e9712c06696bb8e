"""Coefficient tables: values, rules past the end, and what is refused."""

import pytest

from dtensor_muon import get_supported_coefficient_types, validate_coefficient_type
from dtensor_muon.coefficients import get_coefficients

NAMES = ("simple", "quintic", "polar_express", "cans", "aol", "deepseekv4", "cubic5", "custom")
LENGTHS = {"simple": 1, "quintic": 5, "polar_express": 8, "cans": 5, "aol": 4, "deepseekv4": 10}


def scalar_iteration(value, triples):
    for a, b, c in triples:
        value = a * value + b * value**3 + c * value**5
    return value


def test_supported_names():
    assert get_supported_coefficient_types() == NAMES


@pytest.mark.parametrize(
    ("name", "step", "triple"),
    [
        ("simple", 0, (3.4445, -4.7750, 2.0315)),
        ("quintic", 0, (4.0848, -6.8946, 2.9270)),
        ("quintic", 4, (2.8366, -3.0525, 1.2012)),
        ("polar_express", 0, (8.2051, -22.9019, 16.4607)),
        ("polar_express", 7, (1.8750, -1.2500, 0.3750)),
        ("cans", 4, (2.2737, -1.6447, 0.4162)),
        ("aol", 3, (2.7215, -3.0494, 1.3169)),
        ("deepseekv4", 7, (3.4445, -4.7750, 2.0315)),
        ("deepseekv4", 8, (2.0, -1.5, 0.5)),
    ],
)
def test_values_of_the_papers(name, step, triple):
    assert get_coefficients(name, step + 1)[step] == triple


@pytest.mark.parametrize(("name", "length"), LENGTHS.items())
def test_past_the_end(name, length):
    triples = get_coefficients(name, length + 3)
    continued = triples[:3] if name in ("simple", "quintic", "aol") else (triples[length - 1],) * 3
    if name == "simple":
        continued = triples[:1] * 3
    assert triples[length:] == continued


# aol is made for inputs that its own scaling has brought close to orthogonal: it flips the sign of values near 1
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("custom", "aol")])
def test_every_set_brings_ordinary_singular_values_near_one(name):
    triples = get_coefficients(name, {"cubic5": 5, "deepseekv4": 10}.get(name, 8))
    for value in (0.05, 0.2, 0.5, 0.9):
        assert 0.6 < scalar_iteration(value, triples) < 1.4


def test_cubic5_has_five_steps_only():
    assert len(get_coefficients("cubic5", 5)) == 5
    assert all(c == 0 for _, _, c in get_coefficients("cubic5", 5))
    with pytest.raises(ValueError, match=r"num_ns_steps is 4; coefficient_type='cubic5' must have exactly 5 steps"):
        get_coefficients("cubic5", 4)


def test_custom_starts_over():
    first, second = (3, -3, 1), (2.0, -1.5, 0.5)
    assert get_coefficients("custom", 3, [first, second]) == (first, second, first)


@pytest.mark.parametrize(
    "triples", [None, [], [(1.0, 2.0)], [(1.0, 2.0, "3")], [(1.0, 2.0, float("nan"))], 3, [1, 2, 3]]
)
def test_custom_of_the_wrong_form(triples):
    with pytest.raises(ValueError, match=r"custom_coefficient_sets is .*\(a, b, c\) triples of finite numbers"):
        get_coefficients("custom", 2, triples)


def test_custom_triples_without_custom_warn():
    with pytest.warns(UserWarning, match="custom_coefficient_sets is ignored with coefficient_type='simple'"):
        get_coefficients("simple", 1, [(1.0, 2.0, 3.0)])


@pytest.mark.parametrize("steps", [0, -1, 2.0, True, "5"])
def test_bad_number_of_steps(steps):
    with pytest.raises(ValueError, match=r"num_ns_steps is .*; it must be an integer of at least 1"):
        get_coefficients("simple", steps)


@pytest.mark.parametrize("name", ["Quintic", "", None, 3])
def test_unknown_name(name):
    with pytest.raises(ValueError, match=r"coefficient_type is .*; it must be one of 'simple', 'quintic'"):
        validate_coefficient_type(name)
