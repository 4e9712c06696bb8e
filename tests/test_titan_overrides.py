"""Overrides from TOML: what is accepted, what is refused, and the groups that they make."""

import dataclasses
import tomllib

import pytest
import torch
from routing_models import build_titan_model

pytest.importorskip("dtensor_muon.titan", reason="torchtitan is not installed")

from titan_groups import build, defaults, section, sizes
from torchtitan.config import ConfigManager

from dtensor_muon import FusedDim
from dtensor_muon.cli import main
from dtensor_muon.titan import options

JOB = '[job]\ncustom_config_module = "dtensor_muon.titan"\n[optimizer]\nname = "Muon"\n'
OVERRIDES = """
[[optimizer.muon_overrides]]
match = '\\.wkv_b\\.weight$'
lr = 0.5
fused = { sizes = [128, 128], num_groups = 16, heads = true }

[[optimizer.muon_overrides]]
match = "router|wq"
optimizer = "muon"
nesterov = false
flatten = true
adamw_lr = 0.25
momentum_dtype = "bfloat16"
"""


def parse(tmp_path, toml, *flags):
    """The optimizer section of a job, read by torchtitan's own configuration manager."""
    file = tmp_path / "job.toml"
    file.write_text(JOB + toml)
    return ConfigManager().parse_args([f"--job.config-file={file}", *flags]).optimizer


# ---- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("--optimizer.lr=0.125",)])
def test_array_of_tables_survives_torchtitans_parser(tmp_path, flags):
    config = parse(tmp_path, f"muon_lr = 1.0\n{OVERRIDES}", *flags)
    assert config.lr == (0.125 if flags else 8e-4)
    chosen = options.read_options(config).muon_overrides
    assert [(each.match.pattern, each.options) for each in chosen] == [
        (
            r"\.wkv_b\.weight$",
            {"lr": 0.5, "fused": FusedDim((128, 128), num_groups=16, heads=True)},
        ),
        (
            "router|wq",
            {
                "optimizer": "muon", "nesterov": False, "flatten": True, "adamw_lr": 0.25,
                "momentum_dtype": torch.bfloat16,
            },
        ),
    ]  # fmt: skip


def test_no_table_is_no_override(tmp_path):
    assert options.read_options(parse(tmp_path, "")).muon_overrides == ()


def test_every_argument_of_a_group_is_a_key_of_a_table():
    per_group = set(options.OPTIONS) - set(options.OPTIMIZER_WIDE)
    assert set(options.OVERRIDE_KEYS) == {"match", "optimizer", "fused", "adamw_lr", "adamw_weight_decay"} | per_group


def table(text):
    return f"[[optimizer.muon_overrides]]\n{text}"


FUSED = (
    "a table {sizes = [whole numbers >= 1], num_groups = a whole number >= 1, dim = 0 or 1, heads = true or false} of "
    "which only sizes must be there, or false for one matrix"
)
BAD_TABLES = [
    (table('match = "a"\nlr = "x"'), "muon_overrides[0].lr = 'x' is not valid; allowed: a finite number >= 0"),
    (
        table('match = "a"\nlr = 1') + "\n" + table('match = "b("\nlr = 1'),
        "muon_overrides[1].match = 'b(' is not valid; allowed: a regular expression",
    ),
    (table('match = ""\nlr = 1'), "muon_overrides[0].match = '' is not valid; allowed: a regular expression"),
    (table("lr = 1"), "muon_overrides[0] has no match; give a regular expression for the parameters' names"),
    (table('match = "a"'), "muon_overrides[0] has match = 'a' and no option; give one, or remove the table"),
    (table('match = "a"\nmuon_lr = 1'), "muon_overrides[0] has the unknown key muon_lr; did you mean lr?"),
    (table('match = "a"\nflaten = true'), "muon_overrides[0] has the unknown key flaten; did you mean flatten?"),
    (table('match = "a"\ncompile = true'), "muon_overrides[0] has the unknown key compile; known here: match, "),
    (
        table('match = "a"\noptimizer = "lion"'),
        'muon_overrides[0].optimizer = \'lion\' is not valid; allowed: one of "muon", "adamw"',
    ),
    (
        table('match = "a"\nfused = { sizes = [0] }'),
        f"muon_overrides[0].fused = {{'sizes': [0]}} is not valid; allowed: {FUSED}",
    ),
    (
        table('match = "a"\nfused = { size = [1] }'),
        f"muon_overrides[0].fused = {{'size': [1]}} is not valid; allowed: {FUSED}",
    ),
    (table('match = "a"\nfused = [1, 1]'), f"muon_overrides[0].fused = [1, 1] is not valid; allowed: {FUSED}"),
    (
        '[optimizer.muon_overrides]\nmatch = "a"\nlr = 1',
        "muon_overrides = {'match': 'a', 'lr': 1} is not valid; allowed: an array of tables, each under "
        "[[optimizer.muon_overrides]]",
    ),
    ("[optimizer]\nmuon_overrides = 3", "muon_overrides = 3 is not valid; allowed: an array of tables"),
    ("[optimizer]\nmuon_block_period = 0", "muon_block_period = 0 is not valid; allowed: a whole number >= 1"),
    ("[optimizer]\nmuon_flatten = 1", "muon_flatten = 1 is not valid; allowed: true or false"),
    ("[optimizer]\nblock_lr_multiplier = -1", "block_lr_multiplier = -1 is not valid; allowed: a finite number >= 0"),
]


@pytest.mark.parametrize(("toml", "message"), BAD_TABLES, ids=[toml for toml, _ in BAD_TABLES])
def test_bad_tables_name_place_value_and_what_is_allowed(toml, message):
    config = dataclasses.replace(defaults(), **tomllib.loads(toml)["optimizer"])
    with pytest.raises(ValueError) as error:  # noqa: PT011  # the whole message is compared
        options.read_options(config)
    assert str(error.value).startswith(f"[optimizer] {message}")


def test_launcher_refuses_a_bad_table_before_it_starts_anything(tmp_path, capsys):
    file = tmp_path / "job.toml"
    file.write_text(JOB + table('match = "wq"\nlr = "x"'))
    assert main(["train", str(file)]) == 1
    assert "[optimizer] muon_overrides[0].lr = 'x' is not valid" in capsys.readouterr().err


def test_tables_without_muon_are_reported():
    config = dataclasses.replace(section(table('match = "wq"\nlr = 1')), name="AdamW")
    assert options.keys_without_effect(config) == ("muon_overrides",)


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_first_table_that_matches_wins():
    toml = """
        lr = 1.0
        muon_block_period = 4
        muon_block_lr_multiplier = 0.5
        [[optimizer.muon_overrides]]
        match = 'layers\\.0\\..*wq'
        lr = 0.5
        [[optimizer.muon_overrides]]
        match = 'wq'
        lr = 0.25
        fused = { sizes = [16], heads = true }
        [[optimizer.muon_overrides]]
        match = 'w2'
        optimizer = "adamw"
        """
    with pytest.warns(UserWarning, match=r"override 'muon_overrides\[1\] wq': fused is ignored for 'layers\.0\."):
        groups = build(build_titan_model("llama3"), toml)
    by_name = {name: group for group in groups for name in group["param_names"]}
    rates = {
        name: by_name[f"layers.{name}.weight"]["lr"] for name in ("0.attention.wq", "1.attention.wq", "0.attention.wk")
    }
    assert rates == {"0.attention.wq": 0.5, "1.attention.wq": 0.25, "0.attention.wk": 1.0}
    assert sizes(groups) == {f"layers.{layer}.attention.wq.weight": ((16,), True) for layer in (1, 2, 3)}
    assert by_name["layers.0.feed_forward.w2.weight"]["optimizer"] == "adamw"
    muon = [group for group in groups if group["optimizer"] == "muon"]
    assert {(group["block_period"], group["block_lr_multiplier"]) for group in muon} == {(4, 0.5)}


def test_table_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match=r"override 'muon_overrides\[0\] w_q' matches no trainable parameter"):
        build(build_titan_model("llama3"), '[[optimizer.muon_overrides]]\nmatch = "w_q"\nlr = 1.0')
