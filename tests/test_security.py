"""Nothing is unpickled, evaluated or imported on the word of a file; what is prepared appears whole or not at all."""

import ast
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from parity import full_tensors

import dtensor_muon
from dtensor_muon import Muon

PACKAGE = Path(dtensor_muon.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "yaml", "runpy", "code"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "Unpickler"}
# imports of a name that is not written in the source: the documented `is_qkv_fn`, and torchtitan's own model folders
COMPUTED_IMPORTS = {"titan/options.py": {"module"}, "titan/specs.py": {"f'torchtitan.models.{name}'"}}


def findings(source, where):
    """What a source does that could run code from a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if isinstance(node.func, ast.Name) and called in FORBIDDEN_CALLS:
                yield called
            if called.split(".")[-1] == "load" and called != "json.load" and keywords.get("weights_only") != "True":
                yield called
            if called.split(".")[-1] == "import_module":
                name = ast.unparse(node.args[0])
                if not isinstance(node.args[0], ast.Constant) and name not in COMPUTED_IMPORTS.get(where, ()):
                    yield f"{called}({name})"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_code_from_files(path):
    assert list(findings(path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).as_posix())) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", "pickle"),
        ("from yaml import load", "yaml"),
        ("torch.load(path)", "torch.load"),
        ("torch.load(path, weights_only=False)", "torch.load"),
        ("x = eval(text)", "eval"),
        ("importlib.import_module(text)", "importlib.import_module(text)"),
        ("torch.load(path, weights_only=True); json.load(f); importlib.import_module('quack'); re.compile('a')", None),
    ],
)
def test_what_the_check_finds(source, found):
    assert list(findings(source, "state.py")) == ([found] if found else [])


def is_plain(value):
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str, torch.dtype)


def test_options_in_a_checkpoint_are_plain_data(tmp_path):
    matrix, vector = torch.nn.Parameter(torch.ones(4, 6)), torch.nn.Parameter(torch.ones(5))
    groups = [
        {"params": [("w", matrix)], "coefficient_type": "custom", "custom_coefficient_sets": [(1.0, 2.0, 3.0)] * 5},
        {"params": [("v", vector)], "optimizer": "adamw", "betas": (0.8, 0.9)},
    ]
    optimizer = Muon(groups, momentum_dtype=torch.bfloat16, qkv_split_shapes=(4, 1, 1), nonfinite="skip")
    matrix.grad, vector.grad = full_tensors([(4, 6), (5,)], 0)
    optimizer.step()
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        assert [key for key, value in group.items() if not is_plain(value)] == []
    assert not is_plain({"is_qkv_fn": print})
    torch.save(saved, tmp_path / "saved.pt")
    optimizer.load_state_dict(torch.load(tmp_path / "saved.pt", weights_only=True))


# ---- torchtitan's TOML and the corpus --------------------------------------------------------------------------------


@pytest.fixture
def tripwire(tmp_path, monkeypatch):
    """A module that can be imported, and whose import is seen."""
    (tmp_path / "tripwire.py").write_text("def function(param):\n    return False\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tripwire", raising=False)
    return lambda: "tripwire" in sys.modules


def test_toml_values_are_neither_evaluated_nor_imported(tripwire):
    options = pytest.importorskip("dtensor_muon.titan.options", reason="torchtitan is not installed")
    texts = [
        "tripwire:function",
        "tripwire",
        "__import__('tripwire')",
        "${tripwire}",
        "!!python/name:tripwire.function",
    ]
    for key, option in options.KEYS.items():
        for text in texts:
            if key.removeprefix("muon_") == "is_qkv_fn" and text == texts[0]:
                continue
            for value in (text, [text], [[text] * 3]):
                with pytest.raises(ValueError, match=key):
                    options._parse(key, value, option)
    # is_qkv_fn names the module "tripwire", without a function
    assert not tripwire()
    assert callable(options._parse("is_qkv_fn", texts[0], options.KEYS["is_qkv_fn"]))
    assert tripwire()


def prepare_and_die(folder, place):
    from dtensor_muon.titan import corpus

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if place == "in the texts":
        lines = []
        corpus.json.dumps = lambda piece, dumps=json.dumps: (
            lines.append(1) or (die() if len(lines) > 500 else dumps(piece))
        )
    elif place == "in the tokenizer":
        corpus._write_tokenizer = lambda path: ((path / "tokenizer.json").write_text("{"), die())
    else:
        corpus._write_tokenizer = lambda path: [(path / name).write_text("{}") for name in TOKENIZER]
        corpus._move_into_place = die
    corpus.prepare(folder)


TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.mark.parametrize("place", ["in the texts", "in the tokenizer", "before the rename"])
def test_killed_writer_leaves_nothing_that_looks_prepared(tmp_path, monkeypatch, place):
    corpus = pytest.importorskip("dtensor_muon.titan", reason="torchtitan is not installed").corpus
    target = tmp_path / "corpus"
    process = multiprocessing.get_context("fork").Process(target=prepare_and_die, args=(target, place))
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == -signal.SIGKILL
    assert not target.exists()
    assert not corpus.is_prepared(target)
    left = list(tmp_path.iterdir())
    assert [path.name.startswith(".corpus-") for path in left] == [True]
    monkeypatch.setattr(corpus, "_write_tokenizer", lambda path: [(path / n).write_text("{}") for n in TOKENIZER])
    assert corpus.prepare(target) == target
    assert corpus.is_prepared(target)
    assert sorted(tmp_path.iterdir()) == sorted([*left, target])
