"""The layers of the package, read from its sources: who imports whom, and who touches torch.distributed."""

import ast
from pathlib import Path

import pytest

import dtensor_muon

PACKAGE = Path(dtensor_muon.__file__).parent

# a room imports from rooms to its left only
ORDER = [
    "coefficients",
    "kernels",
    "symmetric",
    "gram",
    "newton_schulz",
    "functional",
    "layout",
    "fused",
    "options",
    "cost",
    "plan",
    "balance",
    "planner",
    "explain",
    "redistribute",
    "distributed_ns",
    "agreement",
    "preflight",
    "presence",
    "nonfinite",
    "clip",
    "state",
    "lane",
    "schedule",
    "members",
    "optimizer",
    "routing",
    "overrides",
    "group_table",
    "param_groups",
    "registry",
    "models",
    "bench",
    "titan",
    "cli",
    "__main__",
]
# some rooms name the types DeviceMesh and DTensor only; in the step, `redistribute` alone moves data
NAMES_TYPES = {"layout", "agreement", "preflight", "presence", "nonfinite", "clip", "state"}
MOVES_DATA = {"redistribute", "bench", "titan"}
DISTRIBUTED = NAMES_TYPES | MOVES_DATA
PRIVATE = {"layout", "redistribute", "bench", "titan"}
# what has no public name: whether the CPU multiplies bf16, and the common class of all convolutions
PRIVATE_NAMES = {
    "newton_schulz": {"torch.cpu._is_avx512_bf16_supported", "torch.ops.mkldnn._is_mkldnn_bf16_supported"},
    "routing": {"torch.nn.modules.conv._ConvNd"},
}
COLLECTIVES = {"redistribute", "full_tensor", "all_reduce", "all_gather_object", "shard_dim_alltoall", "broadcast"}

FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def room_of(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_modules(path):
    """Every module that a file names in an import, with the names taken from it, wherever the import stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ()
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module, tuple(alias.name for alias in node.names)


def attribute_chains(path):
    """Dotted names such as `torch.ops._dtensor.shard_dim_alltoall` that start at an imported `torch` or `dist`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in ("torch", "dist"):
            yield ".".join([node.id, *reversed(parts)])


def test_every_room_is_in_the_order():
    assert sorted({room_of(path) for path in FILES} - set(ORDER)) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_downwards(path):
    room = room_of(path)
    for module, names in imported_modules(path):
        if module == "dtensor_muon":
            # the public names are everything above the step
            assert room in ("titan", "cli", "__main__"), f"{room} imports {names} from the package itself"
        elif module.startswith("dtensor_muon."):
            other = module.split(".")[1]
            assert other == room or ORDER.index(other) < ORDER.index(room), f"{room} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_torch_distributed_only_where_the_design_allows(path):
    names = [module for module, _ in imported_modules(path)] + list(attribute_chains(path))
    used = [name for name in names if name == "torch.distributed" or name.startswith("torch.distributed.")]
    assert not used or room_of(path) in DISTRIBUTED, used


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_private_torch_names_only_where_the_design_allows(path):
    private = {name for name in attribute_chains(path) if any(part.startswith("_") for part in name.split(".")[1:])}
    for module, names in imported_modules(path):
        if module.split(".")[0] == "torch":
            private |= {f"{module}.{name}" for name in names if name.startswith("_")}
            private |= {module} if any(part.startswith("_") for part in module.split(".")) else set()
    # torch's optimizers themselves are written with the _foreach functions
    private = {name for name in private if not name.startswith("torch._foreach_")}
    assert room_of(path) in PRIVATE or private <= PRIVATE_NAMES.get(room_of(path), set())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_one_room_calls_collectives(path):
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert not called & COLLECTIVES or room_of(path) in MOVES_DATA, called & COLLECTIVES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_torchtitan_only_in_its_room(path):
    used = [module for module, _ in imported_modules(path) if module.split(".")[0] == "torchtitan"]
    assert not used or room_of(path) == "titan", used


def test_coefficients_need_no_torch():
    assert not [module for module, _ in imported_modules(PACKAGE / "coefficients.py") if module.startswith("torch")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_bare_asserts(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            documentation = ast.get_docstring(node, clean=False) or ""
            assert node.end_lineno - node.lineno - len(documentation.splitlines()) < 60, node.name
