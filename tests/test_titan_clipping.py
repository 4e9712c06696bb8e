"""torchtitan's own clipping before a step of Muon: the same as clipping the unsharded gradients."""

import pytest
import torch
from parity import EXACT, TOLERANCE, full_tensors, set_grad, sharded_params
from ranks import on_threads
from simulated import LAYOUTS, Layout, ReferenceMuon, S, relative_error

from dtensor_muon import Muon, clip_grad_norm_

pytest.importorskip("dtensor_muon.titan", reason="torchtitan is not installed")

from torchtitan.distributed import utils as titan

EXPERTS = Layout((2, 2), (S(0), S(0)), ((0, 0), (1, 0)), ("efsdp", "ep"))
MODELS = {
    "fsdp": [((12, 20), LAYOUTS["fsdp0"]), ((10, 9), LAYOUTS["fsdp0"])],
    "fsdp x tp": [((12, 20), LAYOUTS["fsdp_tp_col"]), ((12, 20), LAYOUTS["fsdp_tp_row"])],
    "hsdp": [((12, 20), LAYOUTS["hsdp"]), ((10, 9), LAYOUTS["hsdp"])],
    "experts": [((12, 20), LAYOUTS["fsdp0"]), ((8, 6, 5), EXPERTS)],
}
MAX_NORM = 1.0
SCALES = (1.0, 0.01, 30.0)


def gradients(model, step):
    return [grad * SCALES[step] for grad in full_tensors([shape for shape, _ in model], 40 + step)]


def train_clipped(rank, model, ours):
    weights = full_tensors([shape for shape, _ in model], 0, 0.1)
    layouts = [layout for _, layout in model]
    params = sharded_params(rank, list(zip(weights, layouts, strict=True)))
    optimizer = Muon(params, **EXACT)
    norms = []
    for step in range(len(SCALES)):
        for param, grad, layout in zip(params, gradients(model, step), layouts, strict=True):
            set_grad(rank, param, grad, layout)
        if ours:
            norms.append(clip_grad_norm_(params, MAX_NORM))
        else:
            norms.append(float(titan.clip_grad_norm_(params, MAX_NORM, ep_enabled=EXPERTS in layouts)))
        optimizer.step()
    return norms, [param.detach().to_local().clone() for param in params]


def reference(model, max_norm):
    weights, states, norms = full_tensors([shape for shape, _ in model], 0, 0.1), [{} for _ in model], []
    weights = [weight.double() for weight in weights]
    for step in range(len(SCALES)):
        grads = gradients(model, step)
        norms.append(float(sum(grad.double().square().sum() for grad in grads).sqrt()))
        factor = min(1.0, max_norm / (norms[-1] + 1e-6))
        weights = [
            ReferenceMuon().step(weight, grad * factor, state)
            for weight, grad, state in zip(weights, grads, states, strict=True)
        ]
    return norms, weights


def worst_error(model, results, wanted):
    before = full_tensors([shape for shape, _ in model], 0, 0.1)
    return max(
        relative_error(shard, layout.cut(old, rank), layout.cut(new, rank))
        for rank, (_, shards) in enumerate(results)
        for shard, old, new, (_, layout) in zip(shards, before, wanted, model, strict=True)
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ours", [False, True], ids=["torchtitan's", "this package's"])
def test_clipping_before_a_step_is_that_of_the_unsharded_gradients(name, ours):
    model = MODELS[name]
    results = on_threads(4, train_clipped, model, ours)
    norms, wanted = reference(model, MAX_NORM)
    assert min(norms) < MAX_NORM < max(norms)
    for got, _ in results:
        assert got == pytest.approx(norms, rel=1e-5)  # torch sums in fp32
    assert worst_error(model, results, wanted) <= 3 * TOLERANCE  # three steps
    # the negative control: without clipping the average of the gradients is another one
    assert worst_error(model, results, reference(model, float("inf"))[1]) > 0.01


def test_a_first_update_does_not_depend_on_the_scale_of_the_gradients():
    clipped, free = torch.nn.Parameter(torch.ones(6, 4)), torch.nn.Parameter(torch.ones(6, 4))
    for param, scale in ((clipped, 2.0**-6), (free, 1.0)):
        param.grad = full_tensors([(6, 4)], 0)[0] * scale
        Muon([param], **EXACT).step()
    torch.testing.assert_close(clipped, free, rtol=0, atol=1e-6)
    assert not torch.equal(free, torch.ones(6, 4))
