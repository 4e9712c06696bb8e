"""The cures for machines without an accelerator, and the corpus, one by one."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("dtensor_muon.titan", reason="torchtitan is not installed")

from dtensor_muon.titan import corpus, cpu

on_cpu = pytest.mark.skipif(cpu.has_accelerator(), reason="the cures apply only without an accelerator")


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:return_lse is deprecated")
def test_dense_attention_equals_flex_attention(masked):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 128, 16, generator=generator) for heads in (4, 2, 2))
    mask = None
    if masked:
        mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < 20), 2, None, 128, 128, device="cpu")
    arguments = {"block_mask": mask, "scale": 0.3, "enable_gqa": True, "return_lse": True}
    output, lse = flex_attention(q, k, v, **arguments)
    dense_output, dense_lse = cpu.dense_flex_attention(q, k, v, **arguments)
    torch.testing.assert_close(dense_output, output)  # fp32, sums of 128 terms in another order
    torch.testing.assert_close(dense_lse, lse)


@on_cpu
def test_masks_of_flex_attention_are_made_without_compiling():
    from torchtitan.models.attention import create_attention_mask

    with torch.compiler.set_stance("fail_on_recompile"):
        mask = create_attention_mask(lambda b, h, i, j: i >= j, 1, None, 128, 128, device="cpu")
    assert mask.to_dense().shape == (1, 1, 1, 1)


@on_cpu
def test_histc_counts_integers_as_integers():
    experts = torch.tensor([0, 3, 3, 1, 3])
    counts = torch.histc(experts, bins=5, min=0, max=5)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [1, 1, 0, 3, 0]
    torch.testing.assert_close(torch.histc(experts.float(), bins=5, min=0, max=5), counts.float())


@on_cpu
def test_torchtitan_sees_a_cpu_and_no_stand_in_stays():
    from torchtitan.models.moe.kernels import generate_permute_indices
    from torchtitan.tools.utils import device_module, device_type

    assert device_type == "cpu"
    assert device_module.get_device_properties("cpu:0").total_memory > 0
    assert device_module.Stream is torch.cpu.Stream  # the rest is torch.cpu's
    assert all(hasattr(sys.modules[name], "__file__") for name in ("triton", "triton.language") if name in sys.modules)
    indices, sizes, _ = generate_permute_indices(torch.tensor([2, 0, 1, 1]), 2, 2, 32, 8)
    assert sizes.tolist() == [8, 8]
    assert indices[:3].tolist() == [0, 1, 2]


@on_cpu
def test_torchtitan_imported_first_is_reported(monkeypatch):
    monkeypatch.delitem(sys.modules, cpu.KERNELS_MODULE)
    with pytest.raises(RuntimeError, match="Start the job with `python -m dtensor_muon train"):
        cpu.prepare_import()


@pytest.mark.parametrize(
    ("parallel", "async_mode", "message"),
    [
        (2, "disabled", "parallelism.context_parallel_degree = 2: context parallelism does not run"),
        (1, "async_with_pinned_mem", 'checkpoint.async_mode = "async_with_pinned_mem": there is no pinned memory'),
    ],
)
@on_cpu
def test_what_cannot_run_on_cpu_is_refused(parallel, async_mode, message):
    from dtensor_muon.titan import TRAIN_SPECS

    job = SimpleNamespace(
        parallelism=SimpleNamespace(context_parallel_degree=parallel), checkpoint=SimpleNamespace(async_mode=async_mode)
    )
    with pytest.raises(ValueError, match="without an accelerator") as error:
        TRAIN_SPECS["llama3"].parallelize_fn(torch.nn.Linear(1, 1), None, job)
    assert message in str(error.value)


# ---- the corpus ------------------------------------------------------------------------------------------------------


def test_corpus_is_real_python_and_its_tokenizer_is_torchtitans(tmp_path, capsys):
    from torchtitan.components.tokenizer import HuggingFaceTokenizer

    folder = corpus.prepare(tmp_path / "corpus")
    assert "ready: " in capsys.readouterr().out
    texts = [json.loads(line)["text"] for line in (folder / "data.json").open(encoding="utf-8")]
    assert corpus.MIN_BYTES < sum(map(len, texts)) < 2 * corpus.MAX_BYTES
    assert any("def __init__(self" in text for text in texts)
    tokenizer = HuggingFaceTokenizer(str(folder))
    assert tokenizer.get_vocab_size() == corpus.VOCAB_SIZE
    tokens = tokenizer.encode(texts[0], add_bos=True, add_eos=True)
    assert (tokens[0], tokens[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert tokenizer.decode(tokens) == texts[0]
    before = (folder / "data.json").stat()
    assert corpus.prepare(folder) == folder  # nothing is done twice
    assert (folder / "data.json").stat() == before
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]  # no temporary folder stays


def test_corpus_leaves_a_foreign_folder_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"exists but is not a prepared corpus.*Remove it or name another folder"):
        corpus.prepare(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "MIN_BYTES", 10**12)
    with pytest.raises(FileNotFoundError, match="Install Python with its standard library"):
        corpus.prepare(tmp_path / "corpus")
    assert not list(tmp_path.iterdir())
