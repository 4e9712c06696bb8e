"""What the documents say about the tests: that each exists, and how many cases it has."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted(ROOT.glob("docs/*.md"))
TEST = re.compile(r"`(tests/\w+\.py)::(\w+)`(?: \| (\d+) \|)?")


def named_tests(document):
    """File, test and number of cases (None where none is given) of every test that a document names."""
    for file, name, cases in TEST.findall(document.read_text(encoding="utf-8")):
        yield file, name, int(cases) if cases else None


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_tests_exist(document):
    for file, name, _ in named_tests(document):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def test_numbers_of_cases(request):
    """Of the files that this run has collected whole; all of them when the whole suite runs."""
    if request.config.option.keyword or any("::" in argument for argument in request.config.args):
        pytest.skip("only a part of the tests is selected")
    counts: dict[tuple[str, str], int] = {}
    for item in request.session.items:
        key = (item.path.relative_to(ROOT).as_posix(), item.function.__name__)
        counts[key] = counts.get(key, 0) + 1
    collected = {file for file, _ in counts}
    stated = {
        (file, name): cases
        for document in DOCUMENTS
        for file, name, cases in named_tests(document)
        if cases is not None and file in collected
    }
    assert {key: counts[key] for key in stated} == stated


def test_documents_name_tests():
    """The negative control: the pattern still finds the tables."""
    found = [entry for document in DOCUMENTS for entry in named_tests(document)]
    assert len([cases for _, _, cases in found if cases is not None]) > 30
