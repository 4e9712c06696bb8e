"""The bench command: parsing, counting, a tiny run on two ranks, and its errors."""

import json
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_muon import cli
from dtensor_muon.bench import command, peers, report, worker
from dtensor_muon.bench.count import WorkCounter, plain_flops
from dtensor_muon.bench.local import newton_schulz_table
from dtensor_muon.bench.params import parse_shapes
from dtensor_muon.bench.peers import Fp32Products
from dtensor_muon.bench.scaling import count_step
from dtensor_muon.bench.settings import Settings
from dtensor_muon.bench.suite import CASES, run_suite
from dtensor_muon.models import model_shapes, owner_share


@pytest.fixture
def stub_group():
    """A world of four of which this is rank 0; collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def test_shapes_from_text():
    assert parse_shapes("4x6*2,8x4x6") == [(4, 6), (4, 6), (8, 4, 6)]


def test_layers_of_a_model():
    assert len(model_shapes("llama3-8B")) == 224
    one = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(14336, 4096)] * 2 + [(4096, 14336)]
    assert model_shapes("llama3-8B", 1) == one


def test_the_share_of_one_owner():
    assert owner_share([(4, 6)] * 5 + [(3, 2, 8)], 2) == [(4, 6)] * 3 + [(2, 8)] * 2


def test_flops_are_counted_by_dtype():
    with WorkCounter() as counter:
        torch.mm(torch.zeros(2, 3), torch.zeros(3, 5))
        torch.baddbmm(torch.zeros(4, 2, 5).bfloat16(), torch.zeros(4, 2, 3).bfloat16(), torch.zeros(4, 3, 5).bfloat16())
    assert counter.flops_by_dtype == {torch.float32: 2 * 2 * 3 * 5, torch.bfloat16: 2 * 4 * 2 * 3 * 5}
    assert counter.flops == 2 * 2 * 3 * 5 * (1 + 4)


def test_flops_of_the_plain_iteration():
    assert plain_flops([(6, 4), (3, 4, 6)]) == 4 * 5 * (4 * 4 * 4 * 6 + 2 * 4**3)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("collective", "name", "sent"),
    [
        (lambda x: dist.all_reduce(x), "allreduce", 2 * 3 / 4 * 32),
        (lambda x: dist.all_gather([torch.zeros(8) for _ in range(4)], x), "allgather", 3 * 32),
        (lambda x: dist.all_gather_into_tensor(torch.zeros(32), x), "allgather_base", 3 * 32),
        (lambda x: dist.reduce_scatter_tensor(torch.zeros(2), x), "reduce_scatter_base", 3 / 4 * 32),
        (lambda x: dist.all_to_all_single(torch.zeros(8), x), "alltoall_base", 3 / 4 * 32),
        (lambda x: dist.all_to_all([torch.zeros(2)] * 4, list(x.chunk(4))), "alltoall", 3 / 4 * 32),
        (lambda x: dist.broadcast(x, 0), "broadcast", 32),
    ],
)
def test_collectives_of_peers_are_counted(stub_group, collective, name, sent):
    with WorkCounter() as counter:
        collective(torch.zeros(8))
        dist.barrier()
    assert counter.collectives == {name: 1}
    assert counter.sent_bytes == sent


def test_products_of_peers_in_fp32():
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    with WorkCounter() as counter, Fp32Products():
        y = torch.addmm(x, x, x, beta=2, alpha=3)
    assert y.dtype is torch.bfloat16
    assert counter.flops_by_dtype == {torch.float32: 2 * 8**3}
    torch.testing.assert_close(y.float(), 2 * x.float() + 3 * x.float() @ x.float(), rtol=4e-3, atol=0)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_owner_flops_and_bytes_per_rank(world):
    whole = 8 * 5 * (4 * 64 * 64 * 96 + 2 * 64**3)
    flops, sent = count_step([(64, 96)] * 8, "fsdp0", world, "medium")
    assert flops == whole / world
    # bf16, there and back, of the share that leaves the rank
    assert sent == 2 * 2 * 8 * 64 * 96 * (world - 1) / world**2


def test_scaling_table(capsys):
    assert cli.main(["bench", "--scaling", "--shapes", "64x64*64", "--layout", "hsdp"]) == 0
    _, _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["| 4", "| 8", "| 16", "| 32", "| 64"]
    assert len({line.split(" | ")[2] for line in lines}) == 1


def test_tiny_run_writes_its_results(tmp_path, capsys):
    flags = ["--shapes", "16x24*2", "--world", "2", "--iterations", "2", "--timeout", "60", "--out", str(tmp_path)]
    assert cli.main(["bench", *flags, "--optimizers", "dtensor_muon,torch_muon,torch_adamw"]) == 0
    written = json.loads((tmp_path / "bench.json").read_text())
    assert written["settings"]["shapes"] == [[16, 24], [16, 24]]
    ours, torchs, adamw = written["results"]
    assert [result["optimizer"] for result in (ours, torchs, adamw)] == ["dtensor_muon", "torch_muon", "torch_adamw"]
    # each rank owns one of the two matrices
    assert ours["gflop"] == pytest.approx(5 * (4 * 16 * 16 * 24 + 2 * 16**3) / 1e9)
    assert written["plain_gflop_per_rank"] == pytest.approx(ours["gflop"])
    # half of each rank's half of two bf16 matrices, there and back, and the note on which gradients there are
    assert ours["mb_sent"] * 1e6 == pytest.approx(2 * 2 * 2 * 16 * 24 / 4, abs=64)
    assert len(ours["ms_all"]) == 2
    assert ours["matmul_dtype"] in ("float32", "bfloat16")
    assert 0 < ours["matmul_rate_fraction"] < 1
    assert torchs["error_to_fp64"] < 5e-2
    assert ours["error_to_fp64"] < 5e-2
    assert adamw["error_to_fp64"] is None
    assert adamw["matmul_rate_fraction"] is None
    assert all(result["ms"] > 0 for result in written["results"])
    assert ours["collectives"]["shard_dim_alltoall"] == 2
    assert "dtensor_muon" in capsys.readouterr().out


def test_a_failing_rank_is_reported(tmp_path, capsys):
    flags = ["--shapes", "16x24", "--max-bucket-bytes", "0", "--timeout", "60", "--out", str(tmp_path)]
    assert cli.main(["bench", *flags]) == 1
    assert "ValueError: max_bucket_bytes is 0" in capsys.readouterr().err


def test_a_hang_is_reported(tmp_path, capsys):
    assert cli.main(["bench", "--shapes", "16x24", "--timeout", "0", "--out", str(tmp_path)]) == 1
    assert "no result within --timeout 0 s, the last word was 'starting the ranks'" in capsys.readouterr().err


def test_chart_needs_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not report.write_chart(tmp_path / "x.png", "title", [])


def test_chart_is_drawn(tmp_path, monkeypatch):
    drawn = []
    ignore = lambda *args, **options: None
    axes = types.SimpleNamespace(
        barh=lambda names, times: drawn.append((names, times)),
        bar_label=ignore,
        margins=ignore,
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


@pytest.mark.filterwarnings("ignore:max_bucket_bytes=1 is less")
def test_an_accelerator_run_without_one(stub_group, monkeypatch):
    """What differs off the CPU, on meta tensors: nothing is computed, so nothing can be read back."""
    monkeypatch.setattr(worker, "_synchronize", lambda device: None)
    monkeypatch.setattr(worker, "_reduce", lambda value, device, operation: value)
    monkeypatch.setattr(worker, "_direction_error", lambda *args: 0.0)
    names = ("dtensor_muon", "dtensor_muon_per_matrix", "torch_muon", "torch_adamw")
    lines = []
    results = worker.measure(Settings(((256, 512),) * 4, "plain", 4, "meta", names, 1), lines.append)
    assert [result["matmul_dtype"] for result in results] == ["bfloat16"] * 3 + [None]
    assert results[2]["gflop"] == pytest.approx(plain_flops([(256, 512)] * 4) / 1e9)
    assert results[0]["gflop"] <= results[2]["gflop"]
    assert lines[-1] == "step 1 of 1"


@pytest.mark.parametrize(
    ("flags", "world", "layout", "num_shapes"),
    [
        (["--model", "llama3-8B", "--owner-of", "64"], 1, "plain", 4),
        (["--model", "llama3-8B", "--layers", "2"], 8, "fsdp0", 14),
        (["--world", "4", "--layout", "hsdp"], 4, "hsdp", 16),
    ],
)
def test_arguments_on_a_machine_with_accelerators(tmp_path, monkeypatch, flags, world, layout, num_shapes):
    asked = []
    monkeypatch.setattr(command, "_device_count", lambda device_type: 8)
    monkeypatch.setattr(command, "_machine", lambda device_type: {})
    monkeypatch.setattr(command, "run_ranks", lambda settings, timeout: asked.append(settings) or [])
    assert cli.main(["bench", "--device", "cuda", "--out", str(tmp_path), *flags]) == 0
    [settings] = asked
    assert (settings.world, settings.layout, settings.device_type) == (world, layout, "cuda")
    assert len(settings.shapes) == num_shapes


def test_suite_runs_every_case_beside_the_installed_peers(monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: name)
    row = {"gflop": 1.0, "mb_sent": 2.0, "matmul_rate_fraction": 0.5, "error_to_fp64": None}

    def run_case(settings):
        return [row | {"optimizer": name, "ms": 2.0 + len(name)} for name in settings.optimizers]

    table, cases = run_suite(run_case, "cpu", 1, "medium")
    assert len(cases) == len(CASES)
    lines = table.splitlines()
    assert (
        "| 2 | fsdp0 | 512x512*8,1376x512*4,512x1376*4 | muonium | 9.0 | 1.00 | 1.00 | 0.02 | 2.00 | 50% | - |" in lines
    )
    assert any("64x64*400 | dtensor_muon_per_matrix" in line for line in lines)


def test_iterations_alone():
    header, _, line = newton_schulz_table([(32, 96)] * 2, "cpu", torch.bfloat16, 1).splitlines()
    assert line.startswith("| 32x96 * 2 |")
    assert header.count("|") == line.count("|")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shapes", "12"], "shapes has '12'; write ROWSxCOLS"),
        (["--model", "llama3-8B", "--layers", "99"], "layers is 99; llama3-8B has 1 to 32"),
        (["--optimizers", "sgd"], "--optimizers has 'sgd'; the choices are dtensor_muon"),
        (["--world", "0"], "--world is 0; it must be at least 1"),
        (["--iterations", "0"], "--iterations is 0; it must be at least 1"),
        (["--suite", "--owner-of", "2"], "--suite does not use --owner-of; leave one of them out"),
        (["--newton-schulz", "--world", "2"], "--newton-schulz does not use --world; leave one of them out"),
        (["--layers", "2"], "there is no --model"),
        (["--owner-of", "0"], "shared out to 0 ranks; it must be at least 1"),
        (["--owner-of", "4", "--world", "2"], "--owner-of 4 is one rank with plain tensors; leave out --world 2"),
        (["--device", "cuda", "--world", "999"], "--device cuda: 999 ranks need one device each, this machine has"),
        (["--layout", "hsdp", "--world", "2", "--shapes", "8x8"], "layout 'hsdp' needs an even number of at least 4"),
        (["--shapes", "15x24"], "shape (15, 24), layout 'fsdp0': 15 does not divide by 2 ranks"),
        (["--speed", "9"], "unknown arguments: --speed 9"),
    ],
)
def test_bad_arguments(flags, message, capsys):
    assert cli.main(["bench", *flags]) == 1
    assert message in capsys.readouterr().err


def test_a_peer_that_is_not_installed(monkeypatch, capsys):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    assert "muonium" not in peers.default_optimizers()
    assert cli.main(["bench", "--optimizers", "muonium"]) == 1
    assert "--optimizers has 'muonium', which needs: pip install muonium triton" in capsys.readouterr().err
