"""torchtitan's configuration with Muon's keys: what is accepted, what is refused and in which words."""

import dataclasses
import functools
import inspect
import tomllib
from pathlib import Path

import pytest
import torch

titan = pytest.importorskip("dtensor_muon.titan", reason="torchtitan is not installed")

from torchtitan.config import ConfigManager  # noqa: E402

from dtensor_muon import Muon  # noqa: E402
from dtensor_muon.cli import main  # noqa: E402
from dtensor_muon.registry import get_optimizer  # noqa: E402
from dtensor_muon.titan import launch, options  # noqa: E402

CONFIGS = sorted(Path(__file__).parent.parent.joinpath("titan_configs").glob("*.toml"))
JOB = '[job]\ncustom_config_module = "dtensor_muon.titan"\n'


def parse(tmp_path, optimizer="", *flags):
    file = tmp_path / "job.toml"
    file.write_text(f'{JOB}[optimizer]\nname = "Muon"\n{optimizer}')
    return ConfigManager().parse_args([f"--job.config-file={file}", *flags]).optimizer


@functools.cache
def defaults():
    return ConfigManager().parse_args(["--job.custom-config-module=dtensor_muon.titan"]).optimizer


def constructor_options(section):
    return get_optimizer("muon").config_to_options(options.read_options(section))


def test_every_argument_of_muon_is_a_key():
    # a description holds for single weights: it stands in the overrides
    arguments = set(inspect.signature(Muon).parameters) - {"params", "fused"}
    assert set(options.OPTIONS) == arguments
    keys = vars(defaults())
    assert arguments <= set(keys)
    assert {f"muon_{argument}" for argument in arguments} <= set(keys)


def test_a_wrong_type_in_the_file_reaches_the_check(tmp_path):
    with pytest.raises(ValueError, match="muon_lr = 'x' is not valid"):
        options.read_options(parse(tmp_path, 'muon_lr = "x"'))


def test_nothing_set_means_torchtitan_values_and_muon_defaults(tmp_path):
    assert constructor_options(parse(tmp_path)) == {
        "lr": 8e-4, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8,
    }  # fmt: skip


def test_prefixed_key_wins_over_plain_key(tmp_path):
    section = parse(
        tmp_path, "lr = 0.1\nmuon_lr = 0.2\nmomentum = 0.5\nmuon_momentum = 0.25\nnum_ns_steps = 7\nbeta1 = 0.8"
    )
    chosen = constructor_options(section)
    assert (chosen["lr"], chosen["momentum"], chosen["num_ns_steps"], chosen["betas"]) == (0.2, 0.25, 7, (0.8, 0.95))


def test_explicit_zeros_and_false_are_kept(tmp_path):
    section = parse(
        tmp_path, "lr = 0.0\nmuon_weight_decay = 0\nmuon_momentum = 0.0\nmuon_nesterov = false\nadamw_lr = 0.0"
    )
    chosen = constructor_options(section)
    assert (chosen["lr"], chosen["weight_decay"], chosen["momentum"], chosen["nesterov"]) == (0.0, 0.0, 0.0, False)
    assert options.adamw_options(options.read_options(section)) == {"adamw_lr": 0.0}


def test_values_take_the_type_muon_wants(tmp_path):
    toml = """
        momentum_dtype = "bfloat16"
        muon_custom_coefficient_sets = [[3, -4.5, 2], [1.5, -0.5, 0]]
        muon_betas = [0.8, 0.9]
        qkv_split_shapes = [4, 2, 2]
        is_qkv_fn = "operator:truth"
    """
    chosen = constructor_options(parse(tmp_path, toml))
    assert chosen["momentum_dtype"] is torch.bfloat16
    assert chosen["custom_coefficient_sets"] == ((3.0, -4.5, 2.0), (1.5, -0.5, 0.0))
    assert (chosen["betas"], chosen["qkv_split_shapes"]) == ((0.8, 0.9), (4, 2, 2))
    assert chosen["is_qkv_fn"](1) is True


def test_command_line_overrides_the_file(tmp_path):
    flags = ["--optimizer.num-ns-steps", "7", "--optimizer.muon-nesterov", "False", "--optimizer.tp-mode", "owner"]
    flags += ["--optimizer.custom-coefficient-sets", "1", "2", "3", "4", "5", "6"]
    chosen = constructor_options(parse(tmp_path, "num_ns_steps = 3", *flags))
    assert (chosen["num_ns_steps"], chosen["nesterov"], chosen["tp_mode"]) == (7, False, "owner")
    assert chosen["custom_coefficient_sets"] == ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))


NUMBER = "a finite number >= 0"
BAD_VALUES = [
    ('momentum = "abc"', "momentum = 'abc' is not valid; allowed: a number in [0, 1)"),
    ("muon_momentum = 1.0", "muon_momentum = 1.0 is not valid; allowed: a number in [0, 1)"),
    ("muon_lr = nan", f"muon_lr = nan is not valid; allowed: {NUMBER}"),
    ("lr = -1.0", f"lr = -1.0 is not valid; allowed: {NUMBER}"),
    ("lr = true", f"lr = True is not valid; allowed: {NUMBER}"),
    ('weight_decay = "x"', f"weight_decay = 'x' is not valid; allowed: {NUMBER}"),
    ("adamw_lr = -0.1", f"adamw_lr = -0.1 is not valid; allowed: {NUMBER}"),
    ("beta2 = 1.5", "beta2 = 1.5 is not valid; allowed: a number in [0, 1)"),
    ('nesterov = "yes"', "nesterov = 'yes' is not valid; allowed: true or false"),
    ("muon_nesterov = 1", "muon_nesterov = 1 is not valid; allowed: true or false"),
    ("num_ns_steps = 0", "num_ns_steps = 0 is not valid; allowed: a whole number >= 1"),
    ("muon_num_ns_steps = 5.0", "muon_num_ns_steps = 5.0 is not valid; allowed: a whole number >= 1"),
    ('tp_mode = "fast"', "tp_mode = 'fast' is not valid; allowed: one of \"auto\", "),
    ("scale_mode = 3", 'scale_mode = 3 is not valid; allowed: one of "spectral", '),
    ('coefficient_type = "quartic"', 'coefficient_type = \'quartic\' is not valid; allowed: one of "simple", '),
    ('momentum_dtype = "int8"', 'momentum_dtype = \'int8\' is not valid; allowed: one of "float32", '),
    ("betas = [0.9]", "betas = [0.9] is not valid; allowed: two numbers in [0, 1)"),
    ("qkv_split_shapes = [1, 2]", "qkv_split_shapes = [1, 2] is not valid; allowed: three or four whole numbers >= 1"),
    ("custom_coefficient_sets = [[1, 2]]", "custom_coefficient_sets = [[1, 2]] is not valid; allowed: a list of"),
    ('is_qkv_fn = "no_such_module:f"', "is_qkv_fn = 'no_such_module:f' is not valid; allowed: the name of a function"),
    ("early_step_in_backward = true", "early_step_in_backward = true: Muon orthogonalizes same-shape matrices"),
]  # fmt: skip


@pytest.mark.parametrize(("toml", "message"), BAD_VALUES, ids=[toml for toml, _ in BAD_VALUES])
def test_bad_values_name_key_value_and_what_is_allowed(toml, message):
    # torchtitan hands TOML values over as they are, so its slow parser can be left out here
    section = dataclasses.replace(defaults(), **tomllib.loads(toml))
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        options.read_options(section)
    assert f"[optimizer] {message}" in str(error.value)


# ---- the launcher ----------------------------------------------------------------------------------------------------


RANKS = {
    "deepseek_v3_ep_debug": 2, "llama3_8b_fsdp_tp": 64, "llama3_fsdp_tp_debug": 4, "llama3_hsdp_debug": 4,
    "llama3_tiny_cpu": 2, "qwen3_30b_a3b_ep": 64, "gpt_oss_ep_debug": 2, "qwen3_moe_ep_debug": 2,
}  # fmt: skip


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_example_jobs_are_valid(file):
    config = launch.check_job(file, launch.job_arguments(file, []))
    assert config.optimizer.name == "Muon"
    assert config.model.flavor in titan.TRAIN_SPECS[config.model.name].model_args
    if not torch.accelerator.is_available():
        assert launch.default_nproc(config.parallelism) == RANKS[file.stem]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optimizer]\nlearning_rate = 1", "unknown key optimizer.learning_rate; known here: name, lr, beta1"),
        (
            "[optimizer]\nmuon_momentun = 1",
            "unknown key optimizer.muon_momentun; did you mean optimizer.muon_momentum?",
        ),
        ("[optimiser]\nlr = 1", "unknown key optimiser; did you mean optimizer?"),
        ("training = 3", "training = 3 must be a section, [training]"),
        ("[optimizer\nlr", "is not valid TOML: "),
        ('[optimizer]\nname = "Muon"\nmuon_lr = "x"', "[optimizer] muon_lr = 'x' is not valid"),
    ],
)
def test_launcher_refuses_a_bad_file_before_it_starts_anything(tmp_path, capsys, text, message):
    file = tmp_path / "job.toml"
    file.write_text(text)
    assert main(["train", str(file)]) == 1
    assert message in capsys.readouterr().err


def test_launcher_refuses_a_missing_file(tmp_path, capsys):
    assert main(["train", str(tmp_path / "no.toml")]) == 1
    assert "no.toml does not exist; name the job's TOML file" in capsys.readouterr().err


def test_flags_with_a_dot_are_torchtitan_and_the_rest_torchrun():
    flags = [
        "--nnodes=2",
        "--training.steps",
        "5",
        "--rdzv-endpoint",
        "localhost:1",
        "--optimizer.lr=-0.5",
        "--max-restarts",
        "0",
    ]
    launcher, job = launch.split_flags(flags)
    assert launcher == ["--nnodes=2", "--rdzv-endpoint", "localhost:1", "--max-restarts", "0"]
    assert job == ["--training.steps", "5", "--optimizer.lr=-0.5"]


def test_one_node_unless_the_flags_name_others():
    assert "--standalone" in launch.elastic_arguments(2, [])
    several = launch.elastic_arguments(2, ["--nnodes=2", "--rdzv-endpoint=localhost:1"])
    assert "--standalone" not in several
    assert several[-2:] == ["-m", "dtensor_muon.titan.worker"]


def test_config_module_is_added_to_a_job_without_one(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text('[optimizer]\nname = "Muon"')
    assert "--job.custom-config-module=dtensor_muon.titan" in launch.job_arguments(file, [])
    assert not tomllib.loads(file.read_text()).get("job")
    assert launch.check_job(file, launch.job_arguments(file, ["--optimizer.muon-lr=0.5"])).optimizer.muon_lr == 0.5
