"""Every wrong input gives one error that says what and what to do, before any collective and with nothing changed."""

import math
import re

import pytest
import torch
from parity import full_tensors, sharded_params
from ranks import on_threads
from simulated import LAYOUTS, Layout, R, S, strided
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.debug import CommDebugMode

from dtensor_muon import Muon
from dtensor_muon.preflight import checked_gradient

FINITE = "it must be a finite number of at least 0"


def matrix(**kwargs):
    return torch.nn.Parameter(torch.ones(4, 3, **kwargs))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, f"lr is -0.1; {FINITE}"),
        ({"lr": math.nan}, f"lr is nan; {FINITE}"),
        ({"lr": math.inf}, f"lr is inf; {FINITE}"),
        ({"lr": "0.1"}, f"lr is '0.1'; {FINITE}"),
        ({"lr": True}, f"lr is True; {FINITE}"),
        ({"lr": torch.tensor(-1.0)}, f"lr is -1.0; {FINITE}"),
        ({"lr": torch.ones(2)}, f"lr is a tensor of shape (2,); {FINITE}"),
        ({"momentum": 1.0}, f"momentum is 1.0; {FINITE} and below 1"),
        ({"momentum": -0.1}, f"momentum is -0.1; {FINITE} and below 1"),
        ({"momentum": math.nan}, f"momentum is nan; {FINITE} and below 1"),
        ({"weight_decay": -0.1}, f"weight_decay is -0.1; {FINITE}"),
        ({"weight_decay": math.nan}, f"weight_decay is nan; {FINITE}"),
        ({"extra_scale_factor": -1}, f"extra_scale_factor is -1; {FINITE}"),
        ({"nesterov": "yes"}, "nesterov is 'yes'; it must be one of True, False"),
        ({"scale_mode": "rms"}, "scale mode is 'rms'; it must be one of 'spectral', 'shape_scaling', 'unit_rms_norm'"),
        (
            {"tp_mode": "gather"},
            "tp_mode is 'gather'; it must be one of 'auto', 'owner', 'duplicated', 'distributed', 'blockwise'",
        ),
        (
            {"fp32_matmul_prec": "low"},
            "fp32_matmul_prec is 'low'; it must be one of 'medium', 'high', 'highest'",
        ),
        (
            {"momentum_dtype": torch.int32},
            "momentum_dtype is torch.int32; it must be a floating point torch.dtype or None",
        ),
        ({"momentum_dtype": "bf16"}, "momentum_dtype is 'bf16'; it must be a floating point torch.dtype or None"),
    ],
)
def test_values(options, message):
    with pytest.raises(ValueError, match="^" + re.escape(f"param_groups[0]: {message}") + "$"):
        Muon([matrix()], **options)
    with pytest.raises(ValueError, match="^" + re.escape(f"param_groups[0]: {message}") + "$"):
        Muon([{"params": [matrix()], **options}])


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"num_ns_steps": 0}, ["num_ns_steps", "0", "at least 1"]),
        ({"num_ns_steps": -1}, ["num_ns_steps", "-1", "at least 1"]),
        ({"coefficient_type": "quartic"}, ["'quartic'", "'simple'", "'polar_express'", "'custom'"]),
        ({"coefficient_type": "cubic5", "num_ns_steps": 4}, ["cubic5", "5", "4"]),
        ({"coefficient_type": "cubic5", "num_ns_steps": 6}, ["cubic5", "5", "6"]),
        ({"coefficient_type": "custom"}, ["custom_coefficient_sets"]),
        ({"coefficient_type": "custom", "custom_coefficient_sets": []}, ["custom_coefficient_sets"]),
        ({"coefficient_type": "custom", "custom_coefficient_sets": [(1, 2)]}, ["custom_coefficient_sets", "(1, 2)"]),
        ({"coefficient_type": "custom", "custom_coefficient_sets": (1, 2, 3)}, ["custom_coefficient_sets"]),
        ({"coefficient_type": "custom", "custom_coefficient_sets": [(1, 2, "3")]}, ["custom_coefficient_sets", "'3'"]),
        (
            {"coefficient_type": "custom", "custom_coefficient_sets": [(1, 2, math.nan)]},
            ["custom_coefficient_sets", "nan"],
        ),
    ],
)
def test_newton_schulz_options(options, parts):
    with pytest.raises(ValueError, match=r"^param_groups\[0\]: ") as caught:
        Muon([matrix()], **options)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"betas": 0.9}, "betas is 0.9; it must be a pair of numbers in [0, 1)"),
        ({"betas": (0.9,)}, "betas is (0.9,); it must be a pair of numbers in [0, 1)"),
        ({"betas": (0.9, 1.0)}, f"betas[1] is 1.0; {FINITE} and below 1"),
        ({"eps": -1e-8}, f"eps is -1e-08; {FINITE}"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd'; it must be one of 'muon', 'adamw', 'adam'"),
    ],
)
def test_adamw_values(options, message):
    with pytest.raises(ValueError, match="^" + re.escape(f"param_groups[0]: {message}") + "$"):
        Muon([{"params": [matrix()], "optimizer": "adamw", **options}])


def test_unknown_option():
    with pytest.raises(ValueError, match=r"^param_groups\[0\] has the unknown option 'beta'; the options are betas, "):
        Muon([{"params": [matrix()], "beta": 0.9}])


@pytest.mark.parametrize("key", ["lr", "weight_decay", "momentum", "extra_scale_factor"])
def test_explicit_zeros_are_kept(key):
    optimizer = Muon([{"params": [matrix()], key: 0.0}], **{"lr": 0.1, "weight_decay": 0.1, "momentum": 0.9})
    assert optimizer.param_groups[0][key] == 0.0
    assert Muon([matrix()], **{key: 0.0}).param_groups[0][key] == 0.0


def test_ignored_options_warn():
    with pytest.warns(UserWarning, match=r"param_groups\[0\]: momentum=0.5 is ignored by optimizer='adamw'"):
        Muon([{"params": [matrix()], "optimizer": "adamw", "momentum": 0.5}])
    with pytest.warns(UserWarning, match=r"param_groups\[0\]: betas=\(0.5, 0.5\) is ignored by optimizer='muon'"):
        Muon([{"params": [matrix()], "betas": (0.5, 0.5)}])


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (
            torch.ones(3),
            "w (shape (3,), torch.float32): Muon works on matrices [m, n] or stacks of them [..., m, n]; "
            'put this parameter into a group with optimizer="adamw"',
        ),
        (
            torch.ones(()),
            "w (shape (), torch.float32): Muon works on matrices [m, n] or stacks of them [..., m, n]; "
            'put this parameter into a group with optimizer="adamw"',
        ),
        (
            torch.ones(2, 2, dtype=torch.complex64),
            "w (shape (2, 2), torch.complex64): the dtype must be real floating point; "
            "leave this parameter out, or convert it",
        ),
        (
            torch.ones(2, 2, dtype=torch.int32),
            "w (shape (2, 2), torch.int32): the dtype must be real floating point; "
            "leave this parameter out, or convert it",
        ),
    ],
)
def test_tensors_that_are_no_matrices(tensor, message):
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        Muon([("w", tensor)])


def test_unnamed_parameters_are_named_by_their_place():
    with pytest.raises(ValueError, match=r"^param_groups\[0\]\['params'\]\[1\] \(shape \(3,\)"):
        Muon([matrix(), torch.ones(3)])


def test_a_bad_group_changes_nothing():
    optimizer = Muon([("a", matrix())])
    with pytest.raises(ValueError, match="Muon works on matrices"):
        optimizer.add_param_group({"params": [("b", matrix()), ("c", torch.ones(3))]})
    assert len(optimizer.param_groups) == 1
    assert len(optimizer.state) == 1


def test_a_parameter_in_two_groups_or_twice_in_one():
    param = matrix()
    already = r"^{} \(shape \(4, 3\), torch.float32\) is in the optimizer already, as {}; list it once$"
    with pytest.raises(ValueError, match=already.format("b", "a")):
        Muon([{"params": [("a", param)]}, {"params": [("b", param)]}])
    with pytest.raises(ValueError, match=already.format("b", "a")):
        Muon([("a", param), ("b", param)])
    with pytest.raises(ValueError, match=already.format("b", "a")):
        Muon([{"params": [("a", param)]}, {"params": [("b", param)], "optimizer": "adamw"}])


def test_things_that_are_no_tensors():
    with pytest.raises(TypeError, match=r"a is a float; a parameter must be a torch.Tensor"):
        Muon([("a", 1.0)])


PLAIN_GRADIENTS = {
    "shape": (torch.ones(4, 2), "has another shape"),
    "dtype": (torch.ones(4, 3, dtype=torch.complex64), "has a dtype that is not real floating point"),
    "sparse": (torch.ones(4, 3).to_sparse(), "is sparse"),
}


@pytest.mark.parametrize(("grad", "problem"), PLAIN_GRADIENTS.values(), ids=PLAIN_GRADIENTS)
@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_plain_gradients(grad, problem, kind, monkeypatch):
    good, bad = matrix(), matrix()
    good.grad = torch.ones(4, 3)
    optimizer = Muon([{"params": [("good", good), ("bad", bad)], "optimizer": kind}])
    # torch refuses most of these when they are set; hooks and other subclasses do not
    monkeypatch.setattr(torch.Tensor, "grad", property(lambda self: grad if self is bad else torch.ones(4, 3)))
    message = rf"^the gradient bad.grad \(shape .*\) of bad \(shape \(4, 3\), torch.float32\) {problem}$"
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(good, torch.ones(4, 3))
    assert not any(value.any() for value in optimizer.state[good].values())


def wrong_gradient(rank, kind, optimizer_name):
    """Returns the message, whether nothing changed, and how many collectives ran."""
    layout = LAYOUTS["fsdp_tp_row"]
    other = Layout((4,), (S(0),), ((0, 0),), ("fsdp",))
    weights = full_tensors([(12, 20), (8, 6)], 0)
    good, bad = sharded_params(rank, [(weight, layout) for weight in weights])
    (elsewhere,) = sharded_params(rank, [(weights[1], other)])
    group = {"params": [good, bad], "param_names": ["good", "layers.3.bad"], "optimizer": optimizer_name}
    optimizer = Muon([group], lr=1.0)
    local = bad.to_local().detach().clone()
    good.grad = good.detach().clone()
    bad.grad = {
        "placements": lambda: DTensor.from_local(torch.ones(4, 6), bad.device_mesh, [S(0), R()], run_check=False),
        "partial": lambda: DTensor.from_local(torch.ones(8, 3), bad.device_mesh, [Partial(), S(1)], run_check=False),
        "mesh": lambda: elsewhere.detach(),
    }[kind]()
    assert bad.grad.shape == bad.shape
    before = good.to_local().clone()
    with CommDebugMode() as counted:
        try:
            optimizer.step()
            message = "no error"
        except ValueError as error:
            message = str(error)
    moments = [value for param in (good, bad) for key, value in optimizer.state[param].items() if key != "step"]
    unchanged = (
        torch.equal(before, good.to_local())
        and torch.equal(local, bad.to_local())
        and not any(moment.to_local().any() for moment in moments)
    )
    return message, unchanged, counted.get_total_counts()


WRONG_GRADIENTS = {
    "placements": (
        "placements (Shard(dim=0), Replicate()), mesh fsdp=2, tp=2",
        "has other placements; reduce it or redistribute it to the parameter's placements before step()",
    ),
    "partial": (
        "placements (Partial(sum), Shard(dim=1)), mesh fsdp=2, tp=2",
        "has other placements; reduce it or redistribute it to the parameter's placements before step()",
    ),
    "mesh": ("placements (Shard(dim=0),), mesh fsdp=4", "lives on another mesh"),
}


@pytest.mark.parametrize("kind", WRONG_GRADIENTS)
@pytest.mark.parametrize("optimizer_name", ["muon", "adamw"])
def test_sharded_gradients(kind, optimizer_name):
    where, problem = WRONG_GRADIENTS[kind]
    message = (
        f"the gradient layers.3.bad.grad (shape (8, 6), torch.float32, {where}) of layers.3.bad (shape (8, 6), "
        f"torch.float32, placements (Shard(dim=0), Shard(dim=1)), mesh fsdp=2, tp=2) {problem}"
    )
    assert on_threads(4, wrong_gradient, kind, optimizer_name) == [(message, True, 0)] * 4


def gradient_on_wrong_kind(rank):
    """A plain gradient on a DTensor: torch refuses the assignment, so it can only come from another subclass."""
    (param,) = sharded_params(rank, [(full_tensors([(8, 6)], 0)[0], LAYOUTS["fsdp0"])])
    try:
        checked_gradient("w", param, torch.ones(8, 6))
    except ValueError as error:
        return str(error)
    return "no error"


def test_plain_gradient_of_a_sharded_parameter():
    for message in on_threads(4, gradient_on_wrong_kind):
        assert message.startswith("the gradient w.grad (shape (8, 6), torch.float32) of w (shape (8, 6)")
        assert message.endswith("must be a DTensor exactly when the parameter is one")


def bad_parameter(rank, kind):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    ones, optimizer_name = torch.ones(4, 3), "adamw" if kind == "partial adamw" else "muon"
    if kind.startswith("partial"):
        tensor = DTensor.from_local(ones, mesh, [S(0), Partial()], run_check=False)
    elif kind == "order":
        tensor = DTensor.from_local(ones, mesh, [strided(0, 3), S(0)], run_check=False)
    elif kind == "one vector per rank":
        tensor = DTensor.from_local(torch.ones(4), mesh, [S(0), R()], run_check=False)
    else:  # 2 + 4 rows instead of 3 + 3
        local = torch.ones(2 + 2 * mesh.get_local_rank("fsdp"), 3)
        tensor = DTensor.from_local(local, mesh, [S(0), R()], run_check=False, shape=(6, 3), stride=(3, 1))
    with CommDebugMode() as counted:
        try:
            Muon([{"params": [("w", tensor)], "optimizer": optimizer_name}])
        except (ValueError, NotImplementedError) as error:
            return type(error), str(error), counted.get_total_counts()
    return None, "no error", 0


@pytest.mark.parametrize(
    ("kind", "error", "start", "end"),
    [
        (
            "partial",
            NotImplementedError,
            "w (shape (8, 3), torch.float32, placements (Shard(dim=0), Partial(sum)), mesh fsdp=2, tp=2): ",
            "redistribute the parameter to Shard or Replicate placements before it reaches the optimizer",
        ),
        (
            "partial adamw",
            NotImplementedError,
            "w (shape (8, 3), torch.float32, placements (Shard(dim=0), Partial(sum)), mesh fsdp=2, tp=2): ",
            "redistribute the parameter to Shard or Replicate placements before it reaches the optimizer",
        ),
        (
            "order",
            NotImplementedError,
            "w (shape (16, 3), torch.float32, placements (_StridedShard(dim=0, sf=3), Shard(dim=0)), mesh fsdp=2, "
            "tp=2): axis 0 has split_factor=3",
            "shard the parameter with parallelize_module, then fully_shard",
        ),
        (
            "one vector per rank",
            ValueError,
            "w (shape (8,), torch.float32, placements (Shard(dim=0), Replicate()), mesh fsdp=2, tp=2): Muon works on",
            'put this parameter into a group with optimizer="adamw"',
        ),
        (
            "cut elsewhere",
            NotImplementedError,
            "w (shape (6, 3), torch.float32, placements (Shard(dim=0), Replicate()), mesh fsdp=2, tp=2): "
            "this rank's shard has shape (2, 3), but its placements give (3, 3)",
            "shard the parameter with parallelize_module, then fully_shard",
        ),
    ],
)
def test_sharded_parameters(kind, error, start, end):
    raised, message, collectives = on_threads(4, bad_parameter, kind)[0]
    assert raised is error
    assert message.startswith(start)
    assert message.endswith(end)
    assert collectives == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [("momentum", 2.0), ("weight_decay", -3.0), ("tp_mode", "zz"), ("scale_mode", "zz"), ("num_ns_steps", 0)],
)
def test_an_option_that_becomes_invalid_later_changes_nothing(key, value):
    param = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = Muon([param])
    param.grad = torch.ones(4, 4)
    optimizer.param_groups[0][key] = value
    with pytest.raises(ValueError, match=r"param_groups\[0\]"):
        optimizer.step()
    assert torch.equal(param, torch.ones(4, 4))
    assert not optimizer.state[param]["momentum_buffer"].any()


def shard_of_a_wrong_size(rank, rows):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("fsdp",))
    sizes = (6, 6, 4)
    local = torch.ones(sizes[rank], 6)
    param = torch.nn.Parameter(
        DTensor.from_local(local, mesh, [S(0)], run_check=False, shape=torch.Size((16, 6)), stride=(6, 1))
    )
    optimizer = Muon([("w", param)], weight_decay=0.5)
    grad = torch.ones(rows, 6)
    param.grad = DTensor.from_local(grad, mesh, [S(0)], run_check=False, shape=torch.Size((16, 6)), stride=(6, 1))
    with pytest.raises(ValueError, match=rf"w.grad .*has a shard of shape \({rows}, 6\) on this rank, the parameter's"):
        optimizer.step()
    assert param.to_local().eq(1).all()


@pytest.mark.parametrize("rows", [1, 5])
def test_a_gradient_shard_of_a_wrong_size_changes_nothing(rows):
    """One row would be broadcast."""
    on_threads(3, shard_of_a_wrong_size, rows)
