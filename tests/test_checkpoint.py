"""Checkpoints: every form that torch has, other layouts, and resumption bit for bit."""

import pytest
import torch
from jobs import Plan, run_job, whole, world_of
from ranks import GlooRanks

FORMS = ("flat", "nested", "raw", "async")


@pytest.fixture(scope="module")
def ranks():
    worlds = {world: GlooRanks(world) for world in (1, 3, 4)}
    yield lambda plan: worlds[world_of(plan.job)].run(run_job, plan)
    for started in worlds.values():
        started.stop()


def assert_equal(got, wanted):
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert got[key].dtype == value.dtype, key
        assert torch.equal(got[key], value), key


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("steps", [0, 2])
def test_every_form_round_trips(ranks, tmp_path, form, steps):
    saved = ranks(Plan("fsdp2_tp2", range(steps), save=str(tmp_path), form=form))
    loaded = ranks(Plan("fsdp2_tp2", load=str(tmp_path), form=form, options={"lr": 0.5}))
    assert_equal(whole("fsdp2_tp2", loaded), whole("fsdp2_tp2", saved))
    assert whole("fsdp2_tp2", saved)["head.step"] == steps
    assert [result["lr"] for result in loaded] == [[0.02, 0.01, 0.003]] * 4


def test_state_has_the_same_keys_on_every_rank(ranks):
    results = ranks(Plan("fsdp4"))
    assert len({tuple(result["values"]) for result in results}) == 1
    assert {"frozen.momentum_buffer", "same.momentum_buffer", "norm.step"} <= set(results[0]["values"])


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("fsdp4", "tp2"),
        ("fsdp4", "fsdp2_tp2"),
        ("fsdp2_tp2", "fsdp3"),
        ("fsdp3", "hsdp"),
        ("hsdp", "plain"),
        ("plain", "fsdp4"),
        ("tp2", "fsdp4"),
        ("ep2", "ep4"),
        ("ep4", "ep2"),
    ],
)
def test_resharding_is_bit_identical(ranks, tmp_path, source, target):
    saved = whole(source, ranks(Plan(source, range(2), save=str(tmp_path))))
    loaded = whole(target, ranks(Plan(target, load=str(tmp_path))))
    assert not any(value.isnan().any() for value in loaded.values())
    assert saved["experts.momentum_buffer"].any()
    assert_equal(loaded, saved)


@pytest.mark.parametrize("job", ["fsdp4", "fsdp2_tp2", "ep2"])
def test_resumption_is_bit_identical(ranks, tmp_path, job):
    straight = ranks(Plan(job, range(20)))
    first = ranks(Plan(job, range(10), save=str(tmp_path)))
    second = ranks(Plan(job, range(10, 20), load=str(tmp_path)))
    for one, two, all_of_it in zip(first, second, straight, strict=True):
        assert one["losses"] + two["losses"] == all_of_it["losses"]
        assert_equal(two["values"], all_of_it["values"])


def test_resumption_without_state_differs(ranks, tmp_path):
    """The negative control: the curve does depend on the state."""
    ranks(Plan("fsdp4", range(10), save=str(tmp_path)))
    with_state = ranks(Plan("fsdp4", range(10, 20), load=str(tmp_path)))
    without = ranks(Plan("fsdp4", range(10, 20)))
    assert with_state[0]["losses"] != without[0]["losses"]
