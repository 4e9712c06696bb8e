"""State dicts: what loads, what is filled in, and errors that leave the optimizer as it was."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from parity import full_tensors, sharded_params
from ranks import on_threads
from simulated import LAYOUTS

from dtensor_muon import Muon, convert_heavy_ball

OLDER = Path(__file__).parent / "data" / "older_version.pt"


def make(names=("layer.weight", "layer.bias"), shape=(4, 6), swap=False, **options):
    matrix, vector = torch.nn.Parameter(torch.ones(shape)), torch.nn.Parameter(torch.ones(5))
    groups = [
        {"params": [(names[0], matrix)], "lr": 0.5},
        {"params": [(names[1], vector)], "optimizer": "adamw", "lr": 0.25},
    ]
    return Muon(groups[::-1] if swap else groups, **options)


def trained(**options):
    optimizer = make(**options)
    train(optimizer)
    return optimizer


def train(optimizer, steps=2):
    for step in range(steps):
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param, grad in zip(params, full_tensors([param.shape for param in params], step), strict=True):
            param.grad = grad.to(param.dtype)
        optimizer.step()


def test_checkpoint_of_an_older_version():
    """The file was written before fused weights; an option `cautious`, which never was one, is added here."""
    optimizer = make(flatten=False, block_lr_multiplier=0.5)
    saved = torch.load(OLDER, weights_only=True)
    for group in saved["param_groups"]:
        group["cautious"] = False
    with pytest.warns(UserWarning, match="written by another version") as caught:
        optimizer.load_state_dict(saved)
    assert [str(warning.message) for warning in caught] == [
        "the checkpoint was written by another version or optimizer; it has no block_lr_multiplier, block_period, "
        "flatten, full_lr_multiplier, fused: this optimizer's values stay; it has cautious, which this version does "
        "not know: ignored"
    ]
    matrix, vector = optimizer.param_groups[0]["params"][0], optimizer.param_groups[1]["params"][0]
    assert torch.equal(optimizer.state[matrix]["momentum_buffer"], saved["state"][0]["momentum_buffer"])
    assert torch.equal(optimizer.state[vector]["exp_avg_sq"], saved["state"][1]["exp_avg_sq"])
    assert optimizer.state[vector]["step"] == 3
    first = optimizer.param_groups[0]
    assert (first["lr"], first["momentum"], first["block_lr_multiplier"]) == (0.02, 0.9, 0.5)
    assert "cautious" not in first
    train(optimizer)


def test_own_checkpoint_loads_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make().load_state_dict(trained().state_dict())


def test_state_of_torch_optimizers_loads_as_it_is():
    weights, grads = full_tensors([(4, 6)], 0), full_tensors([(4, 6)] * 3, 1)
    mine, theirs = torch.nn.Parameter(weights[0].clone()), torch.nn.Parameter(weights[0].clone())
    theirs_optimizer = torch.optim.Muon([theirs], lr=0.1)
    for grad in grads[:2]:
        theirs.grad = grad.clone()
        theirs_optimizer.step()
    optimizer = Muon([mine])
    with pytest.warns(UserWarning, match="ns_coefficients, ns_steps"):
        optimizer.load_state_dict(theirs_optimizer.state_dict())
    theirs.grad = mine.grad = grads[2].clone()
    theirs_optimizer.step()
    optimizer.step()
    buffers = [o.state[p]["momentum_buffer"] for o, p in ((optimizer, mine), (theirs_optimizer, theirs))]
    assert torch.equal(*buffers)
    assert optimizer.param_groups[0]["lr"] == 0.1

    vector = torch.nn.Parameter(torch.ones(5))
    vector.grad = torch.ones(5)
    adamw = torch.optim.AdamW([vector])
    adamw.step()
    optimizer = Muon([{"params": [vector], "optimizer": "adamw"}])
    with pytest.warns(UserWarning, match="amsgrad"):
        optimizer.load_state_dict(adamw.state_dict())
    assert all(torch.equal(optimizer.state[vector][key], value) for key, value in adamw.state[vector].items())


def test_state_in_the_style_of_emerging_optimizers_loads_as_it_is():
    """Group keys as Megatron-LM leaves them around its `momentum_buffer`, an exponential average."""
    buffers = full_tensors([(4, 6), (6, 4)], 0)
    group = {
        **{"lr": 0.1, "momentum": 0.9, "use_nesterov": True, "weight_decay": 0.05, "use_decoupled_weight_decay": True},
        **{"split_qkv": False, "is_qkv_fn": None, "qkv_split_shapes": None, "fp32_matmul_prec": "high"},
        **{"coefficient_type": "simple", "num_ns_steps": 6, "scale_mode": "unit_rms_norm", "extra_scale_factor": 0.2},
        **{"tp_mode": "duplicated", "wd_mult": 1.0, "lr_mult": 1.0, "pre_wd_mult": 1.0, "pre_lr_mult": 1.0},
        **{"is_expert_parallel": False, "is_decoupled_lr": False, "max_lr": 0.1, "min_lr": 0.0, "params": [0, 1]},
    }
    saved = {"state": {i: {"momentum_buffer": b.clone()} for i, b in enumerate(buffers)}, "param_groups": [group]}
    params = [torch.nn.Parameter(torch.ones(buffer.shape)) for buffer in buffers]
    optimizer = Muon(params)
    with pytest.warns(UserWarning, match="is_decoupled_lr, is_expert_parallel, lr_mult, .* does not know: ignored"):
        optimizer.load_state_dict(saved)
    for param, buffer in zip(params, buffers, strict=True):
        assert torch.equal(optimizer.state[param]["momentum_buffer"], buffer)
    loaded = optimizer.param_groups[0]
    kept = ("lr", "momentum", "weight_decay", "num_ns_steps", "scale_mode", "extra_scale_factor", "tp_mode")
    assert {key: loaded[key] for key in kept} == {key: group[key] for key in kept}
    train(optimizer)


@pytest.mark.parametrize("key", ["momentum", "momentum_buffer"])
@pytest.mark.parametrize("explicit", [True, False])
def test_heavy_ball_momentum(key, explicit):
    average = torch.zeros(4, 6, dtype=torch.float64)
    ball = average.clone()
    for grad in full_tensors([(4, 6)] * 5, 0):
        average = average.lerp(grad.double(), 0.1)
        ball = 0.9 * ball + grad
    group = {"params": [0], "lr": 0.1} | ({} if explicit else {"momentum": 0.9})
    saved = {"state": {0: {key: ball}}, "param_groups": [group]}
    before = copy.deepcopy(saved)
    converted = convert_heavy_ball(saved, momentum=0.9 if explicit else None, key=key)
    assert torch.allclose(converted["state"][0]["momentum_buffer"], average, rtol=1e-14, atol=1e-15)
    assert saved["param_groups"] == before["param_groups"]
    assert torch.equal(saved["state"][0][key], ball)
    matrix = torch.nn.Parameter(torch.ones(4, 6, dtype=torch.float64))
    optimizer = Muon([matrix])
    with pytest.warns(UserWarning, match="another version or optimizer"):
        optimizer.load_state_dict(converted)
    assert torch.equal(optimizer.state[matrix]["momentum_buffer"], converted["state"][0]["momentum_buffer"])


def test_heavy_ball_needs_its_coefficient():
    saved = {"state": {0: {"momentum": torch.ones(2, 2)}}, "param_groups": [{"params": [0]}]}
    with pytest.raises(ValueError, match=r"param_groups\[0\]: momentum is None; give the coefficient"):
        convert_heavy_ball(saved, key="momentum")


def test_checkpoint_before_the_first_step_of_a_torch_optimizer():
    optimizer = trained()
    empty = {**copy.deepcopy(optimizer.state_dict()), "state": {}}
    optimizer.load_state_dict(empty)
    assert not any(value.any() for state in optimizer.state.values() for value in state.values())
    assert [len(state) for state in optimizer.state.values()] == [1, 3]


def state_of(saved, place):
    return saved["state"][place]


BAD = {
    "shape": (
        lambda s: state_of(s, 0).update(momentum_buffer=torch.ones(3, 6)),
        r"momentum_buffer \(shape \(3, 6\), torch.float32\) of layer.weight .* has another shape",
    ),
    "broadcastable": (
        lambda s: state_of(s, 1).update(exp_avg_sq=torch.ones(1)),
        r"exp_avg_sq .* of layer.bias .* has another shape",
    ),
    "integer": (
        lambda s: state_of(s, 0).update(momentum_buffer=torch.ones(4, 6, dtype=torch.int32)),
        r"momentum_buffer .* of layer.weight .* does not fit the dtype torch.float32 without a loss",
    ),
    "fp64": (
        lambda s: state_of(s, 1).update(exp_avg=torch.ones(5, dtype=torch.float64)),
        r"exp_avg .* of layer.bias .* does not fit the dtype torch.float32 without a loss",
    ),
    "no tensor": (
        lambda s: state_of(s, 0).update(momentum_buffer=1.0),
        "momentum_buffer of layer.weight .* is a float",
    ),
    "missing key": (
        lambda s: state_of(s, 1).pop("step"),
        r"state of layer.bias .* has the keys \['exp_avg', 'exp_avg_sq'\]",
    ),
    "unknown key": (lambda s: state_of(s, 0).update(row=1), "state of layer.weight .* has the keys"),
    "missing state": (lambda s: s["state"].pop(1), "no state for layer.bias"),
    "unknown parameter": (lambda s: s["state"].update({7: {}}), "state for the parameter 7"),
    "bad step": (lambda s: state_of(s, 1).update(step=-1), "step of layer.bias .* is -1"),
    "bad option": (lambda s: s["param_groups"][0].update(lr="fast"), r"checkpoint's param_groups\[0\]: lr is 'fast'"),
    "renamed": (
        lambda s: s["param_groups"][1].update(param_names=["other.bias"]),
        r"param_groups\[1\]\['params'\]\[0\] is other.bias in the checkpoint, layer.bias in this optimizer",
    ),
    "groups": (lambda s: s["param_groups"].pop(), "1 parameter groups, this optimizer 2"),
    "parameters": (
        lambda s: s["param_groups"][0]["params"].append(9),
        r"param_groups\[0\] has 2 parameters in the checkpoint, 1 in this optimizer .*layer.weight",
    ),
    "swapped": (
        lambda s: s.update(copy.deepcopy(trained(swap=True).state_dict())),
        r"is layer.bias in the checkpoint, layer.weight in this optimizer",
    ),
    "swapped without names": (
        lambda s: (s["param_groups"].reverse(), [group.pop("param_names") for group in s["param_groups"]]),
        r"param_groups\[0\] \(layer.weight\) is of optimizer='adamw' in the checkpoint, 'muon' here",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_changes_nothing(case):
    damage, message = BAD[case]
    saved = copy.deepcopy(trained().state_dict())
    damage(saved)
    optimizer = trained(coefficient_type="simple")
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for place, state in before["state"].items():
        assert all(torch.equal(after["state"][place][key], value) for key, value in state.items())


def test_lower_precision_is_widened():
    saved = copy.deepcopy(trained().state_dict())
    saved["state"][0]["momentum_buffer"] = saved["state"][0]["momentum_buffer"].bfloat16()
    optimizer = make()
    optimizer.load_state_dict(saved)
    buffer = optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum_buffer"]
    assert torch.equal(buffer, saved["state"][0]["momentum_buffer"].float())


def load_local_state(rank, make_bad):
    layout = LAYOUTS["fsdp0"]
    (param,) = sharded_params(rank, [(torch.ones(8, 4), layout)])
    optimizer = Muon([param])
    saved = optimizer.state_dict()
    buffer = saved["state"][0]["momentum_buffer"]
    bad = {
        "local": buffer.to_local(),
        "full": torch.zeros(8, 4),
        "replicated": buffer.redistribute(placements=LAYOUTS["replicate"].placements),
    }[make_bad]
    with pytest.raises(ValueError, match=r"load it with torch.distributed.checkpoint") as error:
        optimizer.load_state_dict({**saved, "state": {0: {"momentum_buffer": bad}}})
    assert optimizer.state[param]["momentum_buffer"] is buffer
    return str(error.value).split(" of ")[1].split(" (")[0]


@pytest.mark.parametrize("bad", ["local", "full", "replicated"])
def test_state_with_other_placements(bad):
    assert on_threads(4, load_local_state, bad) == ["param_groups[0]['params'][0]"] * 4


def test_meta_parameters_get_their_state_on_first_use():
    matrix = torch.nn.Parameter(torch.ones(4, 6, device="meta"))
    optimizer = Muon([matrix])
    assert optimizer.state_dict()["state"] in ({}, {0: {}})
    real = torch.nn.Parameter(torch.ones(4, 6))
    torch.utils.swap_tensors(matrix, real)
    assert optimizer.state_dict()["state"][0]["momentum_buffer"].device.type == "cpu"


def test_loading_onto_meta_raises_and_loads_after_materialization():
    matrix = torch.nn.Parameter(torch.ones(4, 6, device="meta"))
    optimizer = Muon([("layer.weight", matrix)])
    saved = Muon([("layer.weight", torch.nn.Parameter(torch.ones(4, 6)))])
    train(saved)
    with pytest.raises(ValueError, match=r"layer.weight \(shape \(4, 6\).* is on the meta device, .* materialize"):
        optimizer.load_state_dict(saved.state_dict())
    torch.utils.swap_tensors(matrix, torch.nn.Parameter(torch.ones(4, 6)))
    optimizer.load_state_dict(saved.state_dict())
    buffers = [next(iter(each.state.values()))["momentum_buffer"] for each in (optimizer, saved)]
    assert torch.equal(*buffers)
