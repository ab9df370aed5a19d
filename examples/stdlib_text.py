"""Real text with a heavy tail, no download: every function of the Python standard library, as bytes."""

from __future__ import annotations

import ast
import sysconfig
import warnings
from pathlib import Path

import torch
from torch.utils.data import Dataset

#: Folders under the standard library that are not the library: installed packages, tests, generated tables.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "__pycache__"}


def functions(root: Path) -> list[bytes]:
    """Return the source of every function below a folder, in the order of the files' names."""
    found: list[bytes] = []
    for path in sorted(root.rglob("*.py")):
        if LEFT_OUT.intersection(path.relative_to(root).parts):
            continue
        source = path.read_bytes()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(source)
        except (SyntaxError, ValueError):
            continue
        lines = source.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(b"".join(lines[node.lineno - 1 : node.end_lineno]))
    return found


class Functions(Dataset[torch.Tensor]):
    """Functions of this Python's standard library, each a (length,) uint8 tensor of at most ``cut`` bytes."""

    def __init__(self, cut: int = 2048, limit: int | None = None) -> None:
        texts = functions(Path(sysconfig.get_paths()["stdlib"]))
        # Spread over the whole library, so that a small part of it has the same mix of lengths.
        chosen = texts if limit is None else texts[:: max(1, len(texts) // limit)][:limit]
        self.texts = [torch.frombuffer(bytearray(text[:cut]), dtype=torch.uint8) for text in chosen]

    @property
    def sizes(self) -> list[int]:
        """Length of every text in bytes."""
        return [len(text) for text in self.texts]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.texts[index]
