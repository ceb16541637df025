"""The figure of partition quality: drawn from rows, also where some failed; without matplotlib it says so."""

import sys
from pathlib import Path
from typing import Any

import pytest

from gsplit.errors import MissingDependencyError
from gsplit_bench.partition import save_partitions


def _document(parts: int) -> dict[str, Any]:
    figures = {"cross_edge_share": 0.1, "rows_shuffled_per_input": 0.3, "edge_imbalance": 1.1, "vertex_imbalance": 1.2}
    good = [{"parts": parts, "objective": objective, "solver": "metis", **figures} for objective in ("gsplit", "edge")]
    random = {"parts": parts, "objective": "random", "solver": "random", **figures, "cross_edge_share": 0.75}
    return {
        "rows": [
            *good,
            random,
            {"parts": parts, "objective": "gsplit", "solver": "mtkahypar", "error": "not installed"},
        ]
    }


def test_it_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "f.png"
    save_partitions({"one": _document(4), "two": _document(8)}, path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"the package matplotlib .*gsplit\[report\]"):
        save_partitions({"one": _document(4)}, tmp_path / "f.png")
