"""Killed ranks: the launcher ends, nobody stays behind, and the last good checkpoint continues the same curve."""

import pytest
import torch
from launcher import SAVE_EVERY, WORLD, Kill, alive, last_good, launch, losses

# in the last but one of the steps after which a checkpoint is saved
STEP = 2 * SAVE_EVERY + SAVE_EVERY - 1


def result_of(folder):
    return losses(folder), [torch.load(folder / f"values-{rank}.pt", weights_only=True) for rank in range(WORLD)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted")
    assert launch(folder, None)
    return result_of(folder)


def assert_same(got, wanted):
    assert got[0] == wanted[0]
    for mine, theirs in zip(got[1], wanted[1], strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize(("place", "rank"), [("step", 0), ("write", 1), ("finish", 0), ("async", 1)])
def test_killed_rank_ends_the_job_and_the_next_start_continues_the_curve(tmp_path, uninterrupted, place, rank):
    assert not launch(tmp_path, Kill(rank, STEP, place))
    assert alive(tmp_path) == []
    half_written = tmp_path / f"step-{STEP + 1}"
    if place != "step":
        assert list(half_written.glob("*.distcp"))
    assert not (half_written / ".metadata").exists()
    assert last_good(tmp_path) == STEP + 1 - SAVE_EVERY
    assert launch(tmp_path, None)
    assert (tmp_path / "starts").read_text().count(f" {STEP + 1 - SAVE_EVERY}\n") == WORLD
    assert_same(result_of(tmp_path), uninterrupted)


def test_launcher_restarts_a_killed_job_by_itself(tmp_path, uninterrupted):
    assert launch(tmp_path, Kill(1, STEP, "step"), max_restarts=1)
    assert len((tmp_path / "starts").read_text().splitlines()) == 2 * WORLD
    assert_same(result_of(tmp_path), uninterrupted)
    assert alive(tmp_path) == []
