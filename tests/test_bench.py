"""The bench command: parsing, counting, a tiny run on two ranks, and its errors."""

import json
import sys
import types

import pytest
import torch

from dtensor_muon import cli
from dtensor_muon.bench import report
from dtensor_muon.bench.count import WorkCounter
from dtensor_muon.bench.params import parse_shapes
from dtensor_muon.bench.scaling import count_step
from dtensor_muon.models import model_shapes


def test_shapes_from_text():
    assert parse_shapes("4x6*2,8x4x6") == [(4, 6), (4, 6), (8, 4, 6)]


def test_layers_of_a_model():
    assert len(model_shapes("llama3-8B")) == 224
    one = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]
    assert model_shapes("llama3-8B", 1) == one


def test_flops_are_counted():
    with WorkCounter() as counter:
        torch.mm(torch.zeros(2, 3), torch.zeros(3, 5))
        torch.baddbmm(torch.zeros(4, 2, 5), torch.zeros(4, 2, 3), torch.zeros(4, 3, 5))
    assert counter.flops == 2 * 2 * 3 * 5 * (1 + 4)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_owner_flops_and_bytes_per_rank(world):
    whole = 8 * 5 * (4 * 64 * 64 * 96 + 2 * 64**3)
    flops, sent = count_step([(64, 96)] * 8, "fsdp0", world, "medium")
    assert flops == whole / world
    # bf16, there and back, of the share that leaves the rank
    assert sent == 2 * 2 * 8 * 64 * 96 * (world - 1) / world**2


def test_tiny_run_writes_its_results(tmp_path, capsys):
    flags = ["--shapes", "16x24*2", "--world", "2", "--iterations", "2", "--timeout", "60", "--out", str(tmp_path)]
    assert cli.main(["bench", *flags]) == 0
    written = json.loads((tmp_path / "bench.json").read_text())
    assert written["settings"]["shapes"] == [[16, 24], [16, 24]]
    ours, torchs, adamw = written["results"]
    assert [result["optimizer"] for result in (ours, torchs, adamw)] == ["dtensor_muon", "torch_muon", "torch_adamw"]
    # each rank owns one of the two matrices
    assert ours["gflop"] == pytest.approx(5 * (4 * 16 * 16 * 24 + 2 * 16**3) / 1e9)
    assert torchs["error_to_fp64"] < 5e-2
    assert ours["error_to_fp64"] < 5e-2
    assert adamw["error_to_fp64"] is None
    assert all(result["ms"] > 0 for result in written["results"])
    assert ours["collectives"]["shard_dim_alltoall"] == 2
    assert "dtensor_muon" in capsys.readouterr().out


def test_a_failing_rank_is_reported(tmp_path, capsys):
    assert cli.main(["bench", "--shapes", "15x24", "--world", "2", "--timeout", "60", "--out", str(tmp_path)]) == 1
    assert "15 does not divide by 2 ranks" in capsys.readouterr().err


def test_chart_needs_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not report.write_chart(tmp_path / "x.png", "title", [])


def test_chart_is_drawn(tmp_path, monkeypatch):
    drawn = []
    ignore = lambda *args, **options: None
    axes = types.SimpleNamespace(
        barh=lambda names, times: drawn.append((names, times)),
        bar_label=ignore,
        invert_yaxis=ignore,
        set_xlabel=ignore,
        set_title=ignore,
    )
    figure = types.SimpleNamespace(
        subplots=lambda: axes, savefig=lambda path, dpi: path.write_bytes(b"png")
    )  # stands for matplotlib's, which is an optional extra
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", types.SimpleNamespace(Figure=lambda **options: figure))
    assert report.write_chart(tmp_path / "x.png", "title", [{"optimizer": "a", "ms": 2.0}])
    assert drawn == [(["a"], [2.0])]
    assert (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shapes", "12"], "shapes has '12'; write ROWSxCOLS"),
        (["--model", "llama3-8B", "--layers", "99"], "layers is 99; llama3-8B has 1 to 32"),
        (["--optimizers", "sgd"], "--optimizers has 'sgd'; the choices are dtensor_muon"),
        (["--world", "0"], "--world is 0; it must be at least 1"),
        (["--device", "cuda", "--world", "999"], "this machine has"),
        (["--layout", "hsdp", "--world", "2", "--shapes", "8x8"], "layout 'hsdp' needs an even number of at least 4"),
        (["--speed", "9"], "unknown arguments: --speed 9"),
    ],
)
def test_bad_arguments(flags, message, capsys):
    assert cli.main(["bench", *flags]) == 1
    assert message in capsys.readouterr().err
