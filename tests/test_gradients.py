"""Missing and non-finite gradients, and clipping: all ranks do the same, and nothing waits for nothing."""

import copy
import threading
import warnings
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
from parity import EXACT, full_tensors, set_grad, sharded_params
from ranks import GlooRanks, on_threads
from simulated import LAYOUTS, Layout, R, S
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_muon import Muon, clip_grad_norm_, presence

EXPERTS = Layout((2, 2), (S(0), R()), ((0, 0),), ("ep", "dp"))
TENSORS = [
    ((12, 20), LAYOUTS["fsdp0"]),
    ((12, 20), LAYOUTS["fsdp0"]),
    ((10, 9), LAYOUTS["fsdp_tp_col"]),
    ((3, 6, 5), EXPERTS),
    ((11,), LAYOUTS["fsdp0"]),
    ((7,), LAYOUTS["fsdp_tp_norm"]),
]
SHAPES = [shape for shape, _ in TENSORS]


@pytest.fixture(scope="module")
def gloo():
    ranks = GlooRanks(4)
    yield lambda world, body, *args: ranks.run(body, *args)
    ranks.stop()


def build(rank, **options):
    weights = full_tensors(SHAPES, 0, 0.1)
    params = sharded_params(rank, [(weight, layout) for weight, (_, layout) in zip(weights, TENSORS, strict=True)])
    plain = torch.nn.Parameter(torch.ones(4, 5))
    named = [(f"p{index}", param) for index, param in enumerate(params)]
    groups = [
        {"params": [*named[:4], ("plain", plain)]},
        {"params": named[4:], "optimizer": "adamw"},
    ]
    return params, plain, Muon(groups, **EXACT | options)


def give_grads(rank, params, missing=(), zero=(), seed=1):
    for index, grad in enumerate(full_tensors(SHAPES, seed)):
        layout = TENSORS[index][1]
        if (rank, index) in missing or (None, index) in missing:
            params[index].grad = None
            continue
        set_grad(rank, params[index], grad, layout)
        if (rank, index) in zero:
            params[index].grad.to_local().zero_()


def values_of(params, plain, optimizer):
    tensors = [*params, plain, *(value for state in optimizer.state.values() for value in state.values())]
    return [(t.detach().to_local() if hasattr(t, "to_local") else t.detach()).clone() for t in tensors]


def one_step(rank, missing, zero):
    params, plain, optimizer = build(rank)
    give_grads(rank, params, missing, zero)
    plain.grad = torch.ones(4, 5)
    optimizer.step()
    return values_of(params, plain, optimizer)


PATTERNS = {
    "one rank": [(0, 0)],
    "another rank": [(3, 2)],
    "all but one": [(rank, index) for rank in range(3) for index in range(6)],
    "mixed": [(0, 0), (1, 0), (2, 3), (3, 3), (1, 4), (0, 5), (2, 5), (1, 2)],
    "a rank without any": [(1, index) for index in range(6)],
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_missing_on_some_ranks_counts_as_zero(gloo, pattern):
    missing = PATTERNS[pattern]
    got = gloo(4, one_step, missing, [])
    wanted = gloo(4, one_step, [], missing)
    for mine, theirs in zip(got, wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def skipped_everywhere(rank, indices):
    params, plain, optimizer = build(rank, weight_decay=0.1)
    before = values_of(params, plain, optimizer)
    give_grads(rank, params, [(None, index) for index in indices])
    optimizer.step()
    after = values_of(params, plain, optimizer)
    return [torch.equal(a, b) for a, b in zip(before[:7], after[:7], strict=True)]


@pytest.mark.parametrize("indices", [[0], [0, 1], [2], [3, 4], [5], list(range(6))])
def test_missing_on_all_ranks_is_skipped(indices):
    expected = [index in [*indices, 6] for index in range(7)]
    assert on_threads(4, skipped_everywhere, indices) == [expected] * 4


class HostReads(TorchDispatchMode):
    """Counts what reads a tensor's value on the host, on this thread; `seen_on_all_threads` must be entered around."""

    active = threading.local()

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            self.note(args[0])
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        HostReads.active.reads = self
        return super().__enter__()

    def __exit__(self, *error):
        HostReads.active.reads = None
        return super().__exit__(*error)

    def note(self, tensor):
        # step counters live on the host
        self.count += tensor.dtype != torch.float32 or tensor.ndim > 0

    @staticmethod
    @contextmanager
    def seen_on_all_threads():
        """Methods that never reach the dispatcher for a tensor on the CPU; a report that has arrived may be read."""

        def noted(method):
            def call(tensor, *args, **kwargs):
                # `to(other.device)` is no read; here every device is the CPU
                names = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
                to_host = method is not torch_to or "cpu" in names
                if to_host and (reads := getattr(HostReads.active, "reads", None)) is not None:
                    reads.note(tensor)
                return method(tensor, *args, **kwargs)

            return call

        def unseen(report):
            reads, HostReads.active.reads = getattr(HostReads.active, "reads", None), None
            try:
                return read(report)
            finally:
                HostReads.active.reads = reads

        torch_to, read = torch.Tensor.to, presence._Report.read
        with ExitStack() as stack:
            for name in ("tolist", "cpu", "numpy", "to"):
                stack.enter_context(mock.patch.object(torch.Tensor, name, noted(getattr(torch.Tensor, name))))
            stack.enter_context(mock.patch.object(presence._Report, "read", unseen))
            yield


def host_reads(rank, nonfinite, missing):
    params, _, optimizer = build(rank, nonfinite=nonfinite)
    give_grads(rank, params)
    optimizer.step()
    give_grads(rank, params, missing)
    with HostReads() as reads:
        optimizer.step()
    return reads.count


def count_host_reads(nonfinite, missing):
    with HostReads.seen_on_all_threads():
        return on_threads(4, host_reads, nonfinite, missing)


@pytest.mark.parametrize("read", ["tolist", "cpu", "numpy", "item", "to"])
def test_host_reads_are_seen(read):
    with HostReads.seen_on_all_threads(), HostReads() as reads:
        value = torch.ones(1)
        getattr(value, read)(*["cpu"] * (read == "to"))
        value.to(torch.float64)
    assert reads.count == 1


def test_no_host_synchronization_when_every_gradient_is_there():
    assert count_host_reads("propagate", []) == [0] * 4
    # the negative controls: the counter does see reads
    assert count_host_reads("skip", []) == [1] * 4
    reads = count_host_reads("propagate", [(2, 0)])
    assert reads[2] > 0
    assert reads[:2] == [0, 0]


def steps_of_reads(rank):
    """The number of the step that sent numbers to the host, and of the step that read them, for each read."""
    params, _, optimizer = build(rank)
    number, reads, read = 0, [], presence._Report.read

    def noted(report):
        reads.append((report.steps, number))
        return read(report)

    with mock.patch.object(presence._Report, "read", noted):
        while number < 3:
            number += 1
            give_grads(rank, params)
            optimizer.step()
    return reads


def test_what_concerns_every_rank_is_read_one_step_later(gloo):
    """By then it has arrived; `HostReads` leaves this read out, of a tensor that is on the host already."""
    meshes = 3
    assert gloo(4, steps_of_reads) == [[(1, 2)] * meshes + [(2, 3)] * meshes] * 4


REPLICATED = {
    "hsdp": (LAYOUTS["hsdp"], (12, 20), "muon", [2]),
    "a TP norm": (LAYOUTS["fsdp_tp_norm"], (7,), "adamw", [3]),
    "an expert": (EXPERTS, (3, 6, 5), "muon", [0]),
    "hsdp, another shard is missing too": (LAYOUTS["hsdp"], (12, 20), "muon", [0, 1, 2]),
    "hsdp x tp": (LAYOUTS["hsdp_tp_col"], (12, 20), "muon", [5]),
    "two replicated axes": (
        Layout((2, 2, 2), (R(), S(0), R()), ((1, 0),), ("dp", "fsdp", "tp")),
        (12, 20),
        "muon",
        [4],
    ),
    "axes that no order suits": (Layout((2, 2), (S(0), R()), ((0, 0),), ("a", "b")), (12, 20), "muon", [3]),
}


def replica_misses(rank, layout, shape, optimizer_name, missing, how):
    """Two steps with `missing` in the first; returns the step that raised with its error, and the warnings."""
    other = Layout((2, 2), (R(), S(0)), ((1, 0),), ("a", "b")) if layout.names == ("a", "b") else layout
    layouts = {"p": layout, "q": other}
    params = sharded_params(rank, [(torch.ones(shape), layout) for layout in layouts.values()])
    groups = [{"params": list(zip(layouts, params, strict=True)), "optimizer": optimizer_name}]
    optimizer = Muon(groups, **EXACT)
    saved = copy.deepcopy(optimizer.state_dict())
    messages = []
    for step in range(2):
        for param, layout in zip(params, layouts.values(), strict=True):
            set_grad(rank, param, full_tensors([shape], step)[0], layout)
        if step == 0 and rank in missing:
            params[0].grad = None
        before = [param.detach().to_local().clone() for param in params]
        try:
            if how == "load" and step == 1:
                optimizer.load_state_dict(saved)
            if how == "state_dict" and step == 1:
                optimizer.state_dict()
            else:
                optimizer.step()
        except RuntimeError as error:
            assert all(torch.equal(a, b.to_local()) for a, b in zip(before, params, strict=True))
            messages.append((step, str(error)))
    return messages


@pytest.mark.parametrize("case", REPLICATED)
@pytest.mark.parametrize("how", ["step", "state_dict"])
def test_missing_on_one_replica_raises_on_all_ranks(case, how):
    layout, shape, optimizer, missing = REPLICATED[case]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = on_threads(layout.world, replica_misses, layout, shape, optimizer, missing, how)
    for (step, message), *more in results:
        assert step == 1
        assert not more
        assert message.startswith(f"p (shape {shape}")
        assert "some of its replicas had a gradient and others had none" in message
        assert "parameters like this: 1" in message
    here = [warning for warning in caught if "this rank has no gradient" in str(warning.message)]
    assert here
    assert all(str(warning.message).startswith("p (") and warning.filename == __file__ for warning in here)


@pytest.mark.parametrize("case", ["hsdp", "a TP norm", "hsdp x tp"])
def test_missing_on_all_replicas_of_a_shard_is_fine(case):
    layout, shape, optimizer, missing = REPLICATED[case]
    sharding = {axis for axis, _ in layout.cuts}
    spot = [layout.coordinates(missing[0])[axis] for axis in sharding]
    group = [rank for rank in range(layout.world) if [layout.coordinates(rank)[axis] for axis in sharding] == spot]
    assert on_threads(layout.world, replica_misses, layout, shape, optimizer, group, "step") == [[]] * layout.world


@pytest.mark.filterwarnings("ignore:.*this rank has no gradient")
def test_loading_a_checkpoint_forgets_parted_replicas():
    layout, shape, optimizer, missing = REPLICATED["hsdp"]
    assert on_threads(4, replica_misses, layout, shape, optimizer, missing, "load") == [[]] * 4


def nonfinite_step(rank, mode, where, value):
    params, plain, optimizer = build(rank, nonfinite=mode, weight_decay=0.1)
    before = values_of(params, plain, optimizer)
    give_grads(rank, params)
    plain.grad = torch.ones(4, 5)
    for bad_rank, index in where:
        if rank == bad_rank:
            target = plain.grad if index == 6 else params[index].grad.to_local()
            target.view(-1)[-1] = value
    message = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            optimizer.step()
        except FloatingPointError as error:
            message = str(error)
    after = values_of(params, plain, optimizer)
    message = message or "".join(str(w.message) for w in caught if "infinite" in str(w.message))
    same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    skipped = optimizer.skipped_steps
    give_grads(rank, params)
    plain.grad = torch.ones(4, 5)
    optimizer.step()
    finite = all(bool(value.isfinite().all()) for value in values_of(params, plain, optimizer))
    return {"same": same, "message": message, "skipped": skipped, "finite": finite}


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("where", [[(0, 0)], [(2, 2)], [(1, 3)], [(2, 4)], [(0, 6)], [(1, 1), (2, 5)]], ids=str)
def test_skip_is_agreed_and_changes_nothing(gloo, where, value):
    results = gloo(4, nonfinite_step, "skip", where, value)
    assert all(result["same"] and result["skipped"] == 1 and result["finite"] for result in results)
    for _, index in where:
        name = "plain" if index == 6 else f"p{index}"
        assert name in results[where[0][0]]["message"]
        assert index == 6 or all(name in result["message"] for result in results if index in (0, 1, 4))


@pytest.mark.parametrize("where", [[(0, 0)], [(3, 3)], [(1, 6)]], ids=str)
def test_raise_is_agreed_and_changes_nothing(gloo, where):
    results = gloo(4, nonfinite_step, "raise", where, float("nan"))
    assert all(result["same"] and result["skipped"] == 0 and result["finite"] for result in results)
    assert all("no parameter and no state has been changed" in result["message"] for result in results)


def test_propagate_is_the_default_and_poisons():
    results = on_threads(4, nonfinite_step, "propagate", [(0, 0)], float("inf"))
    assert not any(result["same"] or result["message"] for result in results)
    assert not results[0]["finite"]
    assert Muon([torch.nn.Parameter(torch.ones(2, 2))])._nonfinite == "propagate"


def test_unknown_choice():
    with pytest.raises(ValueError, match="nonfinite is 'ignore'; it must be one of 'propagate', 'skip', 'raise'"):
        Muon([torch.nn.Parameter(torch.ones(2, 2))], nonfinite="ignore")


def test_grad_scaler_skips_and_goes_on():
    param = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = Muon([param], nonfinite="skip", fp32_matmul_prec="highest")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    twin = torch.nn.Parameter(torch.ones(4, 4))
    reference = Muon([twin], fp32_matmul_prec="highest")
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale((param.square() * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if factor == 1.0:
            twin.square().sum().backward()
            reference.step()
            reference.zero_grad()
    assert scaler.get_scale() == 2.0**9
    assert torch.equal(param, twin)


def clip(rank, max_norm, scale, missing):
    params, plain, _ = build(rank)
    give_grads(rank, params, missing)
    plain.grad = full_tensors([(4, 5)], 9)[0]
    for param in (*params, plain):
        if param.grad is not None:
            (param.grad.to_local() if hasattr(param.grad, "to_local") else param.grad).mul_(scale)
    norm = clip_grad_norm_((param for param in [*params, plain]), max_norm)
    return norm, [None if p.grad is None else p.grad.to_local().clone() for p in params], plain.grad


@pytest.mark.parametrize("max_norm", [0.5, 1e6, float("inf")])
@pytest.mark.parametrize("scale", [1.0, 1e30, 1e-30])
def test_clipping_is_that_of_the_unsharded_gradients(max_norm, scale):
    full = [grad * scale for grad in [*full_tensors(SHAPES, 1), *full_tensors([(4, 5)], 9)]]
    norm = sum(grad.double().square().sum() for grad in full).sqrt()
    factor = min(1.0, max_norm / (float(norm) + 1e-6))
    for rank, (got, grads, plain) in enumerate(on_threads(4, clip, max_norm, scale, [])):
        assert type(got) is float
        # sums of fp64 in another order
        assert got == pytest.approx(float(norm), rel=1e-13)
        wanted = [layout.cut(grad, rank) for grad, (_, layout) in zip(full, TENSORS, strict=False)]
        for mine, theirs in zip([*grads, plain], [*wanted, full[-1]], strict=True):
            assert torch.allclose(mine, theirs * factor, rtol=1e-6, atol=0)


def test_clipping_is_the_same_number_on_every_rank(gloo):
    results = gloo(4, clip, 1.0, 1.0, [(0, 0), (1, 4), (2, 3)])
    assert len({norm for norm, _, _ in results}) == 1


@pytest.mark.parametrize("bad", [-1.0, float("nan"), "1"])
def test_bad_max_norm(bad):
    with pytest.raises(ValueError, match=r"max_norm is .*; it must be a number of at least 0"):
        clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], bad)
