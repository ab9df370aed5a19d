from __future__ import annotations

import ast
import doctest
import inspect
import subprocess
import sys
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
chronica.World(rank=0, size=2)
for name in ("BatchSampler", "DataLoader", "DistributedOptimizer", "average"):
    try:
        getattr(chronica, name)
    except ImportError as error:
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
    assert len(errors) == 4
    assert all("torch" in error for error in errors)


def test_importing_does_not_import_torch() -> None:
    assert run("import sys, chronica_hvd; print('torch' in sys.modules)")[0] == "False"


def test_public_names() -> None:
    assert set(chronica.__all__) <= set(dir(chronica))
    for name in chronica.__all__:
        assert inspect.getdoc(getattr(chronica, name)), name
    with pytest.raises(AttributeError, match="has no attribute 'Sampler'"):
        _ = chronica.Sampler


def test_the_example_in_the_docstring() -> None:
    results = doctest.testmod(chronica)
    assert results.attempted > 0
    assert results.failed == 0


def test_the_stub_names_what_the_extension_has() -> None:
    stub = ast.parse((Path(chronica.__file__).parent / "_core.pyi").read_text())
    functions = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    assert functions | set(classes) == {name for name in dir(_core) if not name.startswith("_")}
    for name, node in classes.items():
        methods = {method.name for method in node.body if isinstance(method, ast.FunctionDef)} - {"__init__"}
        assert methods == {member for member in dir(getattr(_core, name)) if not member.startswith("_")}
