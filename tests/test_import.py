from __future__ import annotations

import ast
import doctest
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import chronica_hvd as chronica
from chronica_hvd import _core

WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["horovod"] = None
import chronica_hvd as chronica

cost = chronica.CostModel(per_size2=0.5)
print(chronica.plan([5, 3, 8, 1], ranks=2, batch_size=2, cost=cost).fingerprint)
timer = chronica.StepTimer()
timer.start(samples=1)
timer.stop()
assert timer.drain()["samples"].tolist() == [1]
assert chronica.World(rank=0, size=2).size == 2
assert chronica.Plan.__name__ == "Plan"
for name in ("BatchSampler", "DataLoader", "DistributedOptimizer", "average", "flops"):
    try:
        getattr(chronica, name)
    except ImportError as error:
        print(error)
"""

WITHOUT_HOROVOD = """
import sys
sys.modules["horovod"] = None
import chronica_hvd as chronica

sampler = chronica.BatchSampler([5, 3, 8, 1], 2, num_replicas=2, rank=1, shuffle=False)
print(list(chronica.DataLoader([5, 3, 8, 1], batch_sampler=sampler, collate_fn=sum)))
try:
    chronica.BatchSampler([5, 3, 8, 1], 2)
except RuntimeError as error:
    print(error)
"""


def run(program: str) -> list[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )


def test_planning_needs_neither_torch_nor_horovod() -> None:
    fingerprint, *errors, _ = run(WITHOUT_TORCH)
    cost = chronica.CostModel(per_size2=0.5)
    assert fingerprint == chronica.plan([5, 3, 8, 1], ranks=2, batch_size=2, cost=cost).fingerprint
    assert len(errors) == 5
    assert all("torch" in error for error in errors)


def test_a_sampler_given_by_hand_needs_no_horovod() -> None:
    sums, error, _ = run(WITHOUT_HOROVOD)
    sampler = chronica.BatchSampler([5, 3, 8, 1], 2, num_replicas=2, rank=1, shuffle=False)
    assert sums == str([sum([5, 3, 8, 1][i] for i in batch) for batch in sampler])
    assert "Horovod does not import" in error
    assert "build-horovod" in error


def test_importing_does_not_import_torch() -> None:
    loaded = run("import sys, chronica_hvd; print({'torch', 'horovod'} & set(sys.modules))")
    assert loaded[0] == "set()"


def test_flops_is_there_after_importing_the_package() -> None:
    assert run("import chronica_hvd; print(chronica_hvd.flops.estimate.__name__)")[0] == "estimate"


def test_public_names() -> None:
    assert set(chronica.__all__) <= set(dir(chronica))
    for name in chronica.__all__:
        described = getattr(chronica, name).__doc__
        # A dataclass without a docstring gets its signature as one.
        assert described, name
        assert not described.startswith(f"{name}("), name
    namespace: dict[str, object] = {}
    exec("from chronica_hvd import *", namespace)
    assert set(namespace) - {"__builtins__"} == set(chronica.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Sampler'"):
        _ = chronica.Sampler


@pytest.mark.parametrize("module", [chronica, chronica.flops])
def test_the_example_in_the_docstring(module: types.ModuleType) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


def test_the_stub_names_what_the_extension_has() -> None:
    stub = ast.parse((Path(chronica.__file__).parent / "_core.pyi").read_text())
    functions = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    assert functions | set(classes) == {name for name in dir(_core) if not name.startswith("_")}
    for name, node in classes.items():
        compiled = getattr(_core, name)
        methods = [method for method in node.body if isinstance(method, ast.FunctionDef)]
        assert {method.name for method in methods} - {"__init__"} == {n for n in dir(compiled) if n[0] != "_"}
        for method in methods:
            is_property = "property" in {d.id for d in method.decorator_list if isinstance(d, ast.Name)}
            assert is_property == isinstance(vars(compiled)[method.name], property), method.name


def parameters(node: ast.FunctionDef) -> list[str]:
    """Return the names in order, with a star before those that are only taken by keyword."""
    only = [argument.arg for argument in node.args.kwonlyargs]
    return [argument.arg for argument in node.args.args] + (["*", *only] if only else [])


@pytest.mark.parametrize(
    "name", ["assign", "permutation", "StepTimer.__init__", "StepTimer.start", "StepTimer.stop", "StepTimer.drain"]
)
def test_the_stub_names_the_parameters_of_the_extension(name: str) -> None:
    stub = (Path(chronica.__file__).parent / "_core.pyi").read_text()
    *owner, function = name.split(".")
    body = ast.parse(stub).body
    compiled = _core
    if owner:
        (body,) = (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner[0])
        compiled = getattr(_core, owner[0])
    (node,) = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == function)
    member = getattr(compiled, function)
    if isinstance(member, types.MethodDescriptorType):
        shown = f"def {function}{member.__text_signature__.replace('$', '')}"
    else:
        shown = f"def {member.__doc__.splitlines()[0]}"
    (described,) = ast.parse(f"{shown}: ...").body
    assert isinstance(described, ast.FunctionDef)
    assert parameters(node) == parameters(described)
    if isinstance(member, types.MethodDescriptorType):
        assert list(map(ast.dump, node.args.defaults)) == list(map(ast.dump, described.args.defaults))


def test_the_source_folder_without_extension_says_what_to_do(tmp_path: Path) -> None:
    shutil.copytree(Path(chronica.__file__).parent, tmp_path / "chronica_hvd", ignore=shutil.ignore_patterns("*.so"))
    # -S: without site-packages, so that the installed extension is not found either.
    run = subprocess.run(
        [sys.executable, "-S", "-c", "import chronica_hvd"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.stderr.splitlines()[-1].endswith(
        "it is the source folder, not the installed package. Run from another folder, or install for development: "
        "pip install --editable ."
    )
