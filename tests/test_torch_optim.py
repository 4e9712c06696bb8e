"""What users of any torch optimizer rely on: closure, schedulers, hooks, copies, pickles, state dicts."""

import copy
import pickle

import pytest
import torch
from parity import full_tensors, set_grad, sharded_params
from ranks import on_threads
from simulated import LAYOUTS

from dtensor_muon import Muon

SHAPES = [(6, 8), (8, 6), (6, 8)]
OPTIONS = {"lr": 0.1, "coefficient_type": "simple", "fp32_matmul_prec": "highest"}


def plain_optimizer(**options):
    """Two matrices in a Muon group, two vectors in an AdamW group, with gradients."""
    matrices = [torch.nn.Parameter(weight) for weight in full_tensors([(6, 8), (8, 6)], 0)]
    vectors = [torch.nn.Parameter(weight) for weight in full_tensors([(5,), (3,)], 1)]
    groups = [
        {"params": matrices, "param_names": ["a.weight", "b.weight"]},
        {"params": vectors, "optimizer": "adamw", "param_names": ["a.bias", "b.bias"]},
    ]
    optimizer = Muon(groups, **OPTIONS | options)
    set_grads(optimizer, 0)
    return optimizer


def params_of(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def set_grads(optimizer, seed):
    params = params_of(optimizer)
    for param, grad in zip(params, full_tensors([param.shape for param in params], 100 + seed), strict=True):
        param.grad = grad.to(param.dtype)


def values(optimizer):
    return [param.detach().clone() for param in params_of(optimizer)]


def assert_same(first, second, steps=2):
    """Both take the same further steps, from the same point."""
    for step in range(steps):
        for optimizer in (first, second):
            set_grads(optimizer, 50 + step)
            optimizer.step()
        for mine, theirs in zip(values(first), values(second), strict=True):
            assert torch.equal(mine, theirs)


def test_closure_is_evaluated_with_gradients_before_the_step():
    optimizer = plain_optimizer()
    before = values(optimizer)
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = sum(param.square().sum() for param in params_of(optimizer))
        loss.backward()
        seen.append([param.detach().clone() for param in params_of(optimizer)])
        return loss

    loss = optimizer.step(closure)
    torch.testing.assert_close(loss.detach(), sum(value.square().sum() for value in before))
    assert all(torch.equal(old, now) for old, now in zip(before, seen[0], strict=True))
    assert not any(torch.equal(old, now) for old, now in zip(before, values(optimizer), strict=True))
    assert optimizer.step() is None


def test_parameters_without_a_gradient_are_left_alone():
    optimizer = plain_optimizer(weight_decay=0.5)
    skipped = params_of(optimizer)[0], params_of(optimizer)[2]
    before = [param.detach().clone() for param in skipped]
    for param in skipped:
        param.grad = None
    optimizer.step()
    assert all(torch.equal(param, old) for param, old in zip(skipped, before, strict=True))
    assert not optimizer.state[skipped[0]]["momentum_buffer"].any()
    assert float(optimizer.state[skipped[1]]["step"]) == 0


def test_zero_grad():
    optimizer = plain_optimizer()
    optimizer.zero_grad(set_to_none=False)
    assert all(not param.grad.any() for param in params_of(optimizer))
    optimizer.zero_grad()
    assert all(param.grad is None for param in params_of(optimizer))
    before = values(optimizer)
    optimizer.step()
    assert all(torch.equal(old, now) for old, now in zip(before, values(optimizer), strict=True))


def test_all_state_exists_after_construction():
    optimizer = plain_optimizer()
    keys = [set(optimizer.state[param]) for param in params_of(optimizer)]
    assert keys == [{"momentum_buffer"}] * 2 + [{"step", "exp_avg", "exp_avg_sq"}] * 2
    optimizer.step()
    assert keys == [set(optimizer.state[param]) for param in params_of(optimizer)]


def test_add_param_group_after_a_step():
    optimizer = plain_optimizer()
    optimizer.step()
    late = torch.nn.Parameter(torch.eye(4))
    options = {"lr": 0.5, "weight_decay": 0.0, "coefficient_type": "quintic"}
    optimizer.add_param_group({"params": [late], "param_names": ["late"], **options})
    assert set(optimizer.state[late]) == {"momentum_buffer"}
    late.grad = torch.eye(4)
    alone = torch.nn.Parameter(torch.eye(4))
    alone.grad = torch.eye(4)
    single = Muon([alone], **OPTIONS | options)
    optimizer.step()
    single.step()
    assert not torch.equal(late, torch.eye(4))
    torch.testing.assert_close(late, alone)


def test_named_parameters():
    module = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(3, 2, bias=False))
    optimizer = Muon(module.named_parameters())
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "1.weight"]
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["0.weight", "1.weight"]


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_lambda_lr(lr):
    scheduled, by_hand = plain_optimizer(lr=lr), plain_optimizer(lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(scheduled, lambda step: 1 / (step + 1))
    for step in range(3):
        for group in by_hand.param_groups:
            group["lr"] = 0.1 / (step + 1)
        for optimizer in (scheduled, by_hand):
            set_grads(optimizer, step)
            optimizer.step()
        scheduler.step()
    for mine, theirs in zip(values(scheduled), values(by_hand), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_one_cycle_lr():
    """Torch cycles `betas` wherever the defaults have them, and leaves `momentum` as it is then."""
    optimizer = plain_optimizer()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=4)
    before, rates, betas = values(optimizer), [], []
    for _ in range(3):
        optimizer.step()
        rates.append([group["lr"] for group in optimizer.param_groups])
        betas.append(optimizer.param_groups[1]["betas"])
        scheduler.step()
    assert not any(torch.equal(old, now) for old, now in zip(before, values(optimizer), strict=True))
    assert len({rate for rate, _ in rates}) == 3
    assert all(first == second for first, second in rates)
    assert len(set(betas)) == 3
    assert optimizer.param_groups[0]["momentum"] == 0.95


def test_options_may_change_between_steps():
    """A new Newton-Schulz option changes the plan; a new decay does not need one."""
    changed, fresh = plain_optimizer(), plain_optimizer(coefficient_type="quintic", weight_decay=0.3)
    changed.step()
    fresh.step()
    for mine, theirs in zip(params_of(changed), params_of(fresh), strict=True):
        mine.data.copy_(theirs.data)
    for group in changed.param_groups:
        group["weight_decay"] = 0.3
    changed.param_groups[0]["coefficient_type"] = "quintic"
    assert_same(changed, fresh)


def test_deepcopy_is_independent_and_goes_on_alike():
    optimizer = plain_optimizer()
    optimizer.step()
    twin = copy.deepcopy(optimizer)
    before = values(twin)
    optimizer.step()
    assert all(torch.equal(old, now) for old, now in zip(before, values(twin), strict=True))
    set_grads(twin, 0)
    twin.step()
    assert_same(optimizer, twin)


def test_pickle_goes_on_alike():
    optimizer = plain_optimizer(lr=torch.tensor(0.1), max_bucket_bytes=2**20)
    optimizer.step()
    assert_same(optimizer, pickle.loads(pickle.dumps(optimizer)))


def test_hooks_run_around_the_step():
    optimizer = plain_optimizer()
    before, seen = values(optimizer), []

    def same_as_before():
        return all(torch.equal(old, now) for old, now in zip(before, values(optimizer), strict=True))

    optimizer.register_step_pre_hook(lambda *_: seen.append(("pre", same_as_before())))
    optimizer.register_step_post_hook(lambda *_: seen.append(("post", same_as_before())))
    optimizer.step()
    assert seen == [("pre", True), ("post", False)]


@pytest.mark.parametrize("momentum_dtype", [None, torch.float32, torch.bfloat16, torch.float64])
def test_state_dict_round_trip(momentum_dtype):
    def optimizer():
        result = plain_optimizer(momentum_dtype=momentum_dtype)
        matrix = torch.nn.Parameter(torch.eye(4, dtype=torch.bfloat16))
        result.add_param_group({"params": [("c.weight", matrix)], "momentum_dtype": momentum_dtype})
        set_grads(result, 0)
        return result

    trained = optimizer()
    trained.step()
    loaded = optimizer()
    for mine, theirs in zip(params_of(loaded), params_of(trained), strict=True):
        mine.data.copy_(theirs.data)
    state = copy.deepcopy(trained.state_dict())
    loaded.load_state_dict(state)
    for mine, theirs in zip(params_of(loaded), params_of(trained), strict=True):
        for key, value in trained.state[theirs].items():
            assert loaded.state[mine][key].dtype == value.dtype
            assert torch.equal(loaded.state[mine][key], value)
    assert_same(loaded, trained)


def test_load_state_dict_hooks_see_and_change_the_momentum():
    matrix = torch.nn.Parameter(torch.eye(4, dtype=torch.bfloat16))
    optimizer = Muon([matrix], momentum_dtype=torch.float32)
    saved, seen = copy.deepcopy(optimizer.state_dict()), []

    def replace_momentum(_, state_dict):
        return {**state_dict, "state": {0: {"momentum_buffer": torch.full((4, 4), 1.001)}}}

    optimizer.register_load_state_dict_pre_hook(replace_momentum)
    optimizer.register_load_state_dict_post_hook(lambda self: seen.append(self.state[matrix]["momentum_buffer"]))
    optimizer.load_state_dict(saved)
    assert torch.equal(seen[0], torch.full((4, 4), 1.001))
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


def test_load_state_dict_brings_options_back():
    trained, other = plain_optimizer(lr=0.3, weight_decay=0.2), plain_optimizer(lr=0.1, coefficient_type="quintic")
    other.step()
    other.load_state_dict(copy.deepcopy(trained.state_dict()))
    assert other.param_groups[0]["lr"] == 0.3
    assert other.param_groups[0]["coefficient_type"] == "simple"
    for mine, theirs in zip(params_of(other), params_of(trained), strict=True):
        mine.data.copy_(theirs.data)
    assert_same(other, trained)


def sharded_round_trip(rank, layout):
    def optimizer():
        params = sharded_params(rank, [(weight.bfloat16(), layout) for weight in full_tensors(SHAPES, 0)])
        return params, Muon(params, **OPTIONS, momentum_dtype=torch.float32)

    (params, trained), (others, loaded) = optimizer(), optimizer()
    for param, grad in zip(params, full_tensors(SHAPES, 1), strict=True):
        set_grad(rank, param, grad, layout)
    trained.step()
    loaded.load_state_dict(trained.state_dict())
    for param, other in zip(params, others, strict=True):
        wanted, got = trained.state[param]["momentum_buffer"], loaded.state[other]["momentum_buffer"]
        assert tuple(got.placements) == tuple(wanted.placements) == layout.placements
        assert got.dtype == torch.float32
        assert torch.equal(got.to_local(), wanted.to_local())
    return list(copy.deepcopy(loaded).state_dict()["state"])


def test_sharded_state_dict_round_trip():
    layout = LAYOUTS["fsdp_tp_col"]
    assert on_threads(layout.world, sharded_round_trip, layout) == [[0, 1, 2]] * 4


def test_repr_names_the_options():
    text = repr(plain_optimizer())
    assert text.startswith("Muon (\nParameter Group 0\n")
    assert "tp_mode: auto" in text


def test_nothing_to_train():
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        Muon([])
    vector = torch.nn.Parameter(torch.ones(3))
    vector.grad = torch.ones(3)
    optimizer = Muon([{"params": []}, {"params": [vector], "optimizer": "adamw", "lr": 0.1}])
    optimizer.step()
    assert not torch.equal(vector, torch.ones(3))


def test_only_tensors_without_elements():
    empty = torch.nn.Parameter(torch.zeros(0, 4))
    empty.grad = torch.zeros(0, 4)
    Muon([empty]).step()
    assert empty.shape == (0, 4)
