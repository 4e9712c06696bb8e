"""Checkpoints: every form that torch has, other layouts, and resumption bit for bit."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from jobs import (
    Net,
    Plan,
    load_checkpoint,
    make_optimizer,
    optimizer_content,
    run_job,
    snapshot,
    train_step,
    whole,
    world_of,
)
from ranks import GlooRanks
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

from dtensor_muon import Muon, saved_part

FORMS = ("flat", "nested", "raw", "async")


@pytest.fixture(scope="module")
def ranks():
    worlds = {world: GlooRanks(world) for world in (1, 3, 4)}
    yield lambda plan, body=run_job, *args: worlds[world_of(plan.job)].run(body, plan, *args)
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
        ("pp2_fsdp2", "plain"),
        ("plain", "pp2_fsdp2"),
        ("fsdp2_tp2", "pp2_fsdp2"),
    ],
)
def test_resharding_is_bit_identical(ranks, tmp_path, source, target):
    saved = whole(source, ranks(Plan(source, range(2), save=str(tmp_path))))
    loaded = whole(target, ranks(Plan(target, load=str(tmp_path))))
    assert not any(value.isnan().any() for value in loaded.values())
    assert saved["experts.momentum_buffer"].any()
    assert_equal(loaded, saved)


@pytest.mark.parametrize(
    ("source", "target"),
    [("fsdp3", "tp2"), ("hsdp", "fsdp4"), ("plain", "hsdp"), ("fsdp4", "fsdp2_tp2"), ("pp2_fsdp2", "plain")],
)
def test_training_goes_on_at_another_layout(ranks, tmp_path, source, target):
    ranks(Plan(source, range(2), save=str(tmp_path)))
    got = whole(target, ranks(Plan(target, range(2, 4), load=str(tmp_path))))
    unsharded = whole("plain", [run_job(0, Plan("plain", range(4)))])
    fresh = whole(target, ranks(Plan(target, range(2, 4))))
    assert got.keys() == unsharded.keys()
    for key, wanted in unsharded.items():
        # updates are fp32 sums in another order; weights are 0.1 to 1, updates 0.02 to 0.2
        assert torch.allclose(got[key].double(), wanted.double(), rtol=1e-5, atol=1e-5), key
    assert not torch.allclose(fresh["wide"], unsharded["wide"], atol=1e-3)
    assert got["head.step"] == 4


@pytest.mark.parametrize("job", ["fsdp4", "fsdp3", "hsdp", "tp2", "plain", "fsdp2_tp2", "ep2", "pp2_fsdp2"])
def test_resumption_is_bit_identical(ranks, tmp_path, job):
    straight = ranks(Plan(job, range(20)))
    first = ranks(Plan(job, range(10), save=str(tmp_path)))
    second = ranks(Plan(job, range(10, 20), load=str(tmp_path)))
    for one, two, all_of_it in zip(first, second, straight, strict=True):
        assert one["losses"] + two["losses"] == all_of_it["losses"]
        assert_equal(two["values"], all_of_it["values"])


DAMAGE = {
    "truncated": lambda data: data[: len(data) // 2],
    "overwritten": lambda data: data[: len(data) // 3] + bytes(2000) + data[len(data) // 3 + 2000 :],
    "empty": lambda data: b"",
}


def refuse(rank, plan, message):
    net = Net(rank, plan.job)
    optimizer = make_optimizer(net)
    train_step(rank, plan.job, net, optimizer, 30)
    before = snapshot(net, optimizer)
    with pytest.raises(CheckpointException, match=message):
        load_checkpoint(net, optimizer, plan.load, plan.form)
    assert_equal(snapshot(net, optimizer), before)
    train_step(rank, plan.job, net, optimizer, 31)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_raises_on_all_ranks_and_changes_nothing(ranks, tmp_path, damage):
    ranks(Plan("fsdp4", range(2), save=str(tmp_path)))
    file = next(tmp_path.glob("__2_*.distcp"))
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    ranks(Plan("fsdp4", load=str(tmp_path)), refuse, r"CheckpointException ranks:dict_keys\(\[")


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_checkpoint_without_its_metadata_is_refused(ranks, tmp_path, damage):
    ranks(Plan("fsdp4", range(2), save=str(tmp_path)))
    metadata = tmp_path / ".metadata"
    content = metadata.read_bytes()
    metadata.unlink()
    if damage == "truncated":
        metadata.write_bytes(content[:100])
    ranks(Plan("fsdp4", load=str(tmp_path)), refuse, "metadata is None")


def rename(net):
    net.register_parameter("renamed", net.wide)
    del net.wide


def resize(net):
    net.wide = torch.nn.Parameter(torch.ones(12, 12))


OTHER_MODELS = {
    "renamed": (rename, r"Missing key in checkpoint state_dict: model\.renamed"),
    "resized": (resize, r"saved torch.Size\(\[10, 12\]\) and current: torch.Size\(\[12, 12\]\) for model\.wide"),
}


@pytest.mark.parametrize("change", OTHER_MODELS)
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_checkpoint_of_another_model_names_the_parameter(tmp_path, change):
    """In one process, without a process group."""
    change, message = OTHER_MODELS[change]
    run_job(0, Plan("plain", range(2), save=str(tmp_path)))
    net = Net(0, "plain")
    change(net)
    optimizer = Muon(
        {"params": [(name, param)], "optimizer": "muon" if param.ndim > 1 else "adamw"}
        for name, param in net.named_parameters()
    )
    before = snapshot(net, optimizer)
    with pytest.raises(CheckpointException, match=message):
        load_checkpoint(net, optimizer, str(tmp_path), "flat")
    assert_equal(snapshot(net, optimizer), before)


def save_older(path, lost):
    """Writes a flat checkpoint without the keys that end so; returns the optimizer's part of it."""
    net = Net(0, "plain")
    optimizer = make_optimizer(net)
    train_step(0, "plain", net, optimizer, 0)
    flat = {key: value for key, value in optimizer_content(net, optimizer, "flat").items() if not key.endswith(lost)}
    dcp.save({"model": net.state_dict(), "optimizer": flat}, checkpoint_id=path)
    return flat


def load_older(path):
    net = Net(0, "plain")
    optimizer = make_optimizer(net, lr=0.5, block_lr_multiplier=0.5)
    flat = optimizer_content(net, optimizer, "flat")
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    content = copy.deepcopy({"model": net.state_dict(), "optimizer": saved_part(flat, saved)})
    dcp.load(content, checkpoint_id=path)
    set_optimizer_state_dict(
        net, optimizer, flat | content["optimizer"], options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    return optimizer, optimizer_content(net, optimizer, "flat")


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_flat_checkpoint_of_an_older_version(tmp_path):
    older = save_older(tmp_path, (".fused", ".flatten", ".block_lr_multiplier"))
    optimizer, loaded = load_older(tmp_path)
    assert [(group["lr"], group["block_lr_multiplier"]) for group in optimizer.param_groups[:2]] == [
        (0.02, 0.5),
        (0.01, 0.5),
    ]
    assert older.keys() < loaded.keys()
    state = {key: value for key, value in older.items() if key.startswith("state.")}
    assert state["state.wide.momentum_buffer"].any()
    assert_equal({key: loaded[key] for key in state}, state)


@pytest.mark.parametrize("lost", ["state.wide.momentum_buffer", "state.norm.exp_avg_sq", "state.head.step"])
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_flat_checkpoint_without_state_is_refused(tmp_path, lost):
    save_older(tmp_path, lost)
    with pytest.raises(CheckpointException, match=f"Missing key in checkpoint state_dict: optimizer.{lost}"):
        load_older(tmp_path)


def test_resumption_without_state_differs(ranks, tmp_path):
    """The negative control: the curve does depend on the state."""
    ranks(Plan("fsdp4", range(10), save=str(tmp_path)))
    with_state = ranks(Plan("fsdp4", range(10, 20), load=str(tmp_path)))
    without = ranks(Plan("fsdp4", range(10, 20)))
    assert with_state[0]["losses"] != without[0]["losses"]
