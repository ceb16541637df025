"""What ``import`` and ``inspect`` say of data with gaps, to people and to programs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from graphs import sample_store
from rich.console import Console

from gsplit.cli.store_view import describe, show
from gsplit.store.build import build_store
from gsplit.store.importers.npz import npz_source
from gsplit.store.shard import write_shard


def _run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-c", "from gsplit.cli.main import main; main()"]
    return subprocess.run([*start, *map(str, words)], capture_output=True, text=True, timeout=300, check=False)


def test_gaps_and_dropped_edges_are_counted_and_shown(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("src,dst\na,b\nb,c\nx,a\nc,y\n")
    (tmp_path / "v.csv").write_text("id,y,f,g\na,0.0,1,2\nb,,nan,inf\nc,2.0,5,6\n")
    words: list[str | Path] = [
        "import",
        "tables",
        tmp_path / "e.csv",
        tmp_path / "g.gsplit",
        "--vertices",
        tmp_path / "v.csv",
    ]
    words += ["--feature-column", "f", "--feature-column", "g"]
    refused = _run(*words)
    assert refused.returncode == 2
    assert "'x' in row 2; edges with such ids in rows 0..3: 2" in refused.stderr.replace("\n", " ")
    done = _run(*words, "--unknown-ids", "drop", "--json")
    document = json.loads(done.stdout)
    assert document["num_classes"] == 3
    assert document["num_unlabelled_vertices"] == 1
    assert document["features"] == {"x": {"dtype": "float32", "shape": [3, 2], "num_not_finite": 2}}
    assert document["provenance"][0]["counts"]["edges_with_unknown_ids_dropped"] == 2
    assert document["notes"] == ["y: whole numbers of float32 imported as classes; missing, stored as -1: 1"]
    screen = " ".join(_run("inspect", tmp_path / "g.gsplit").stdout.split())
    assert "features x float32 3 x 2 (f, g), NaN or infinite: 2" in screen
    assert "classes 3, unlabelled vertices: 1" in screen
    assert "edges with unknown ids dropped 2" in screen


def test_values_are_not_called_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "g.npz", edge_index=np.array([[0], [1]]), y=np.array([0.5, np.nan, 1.25]))
    show(describe(build_store(npz_source(tmp_path / "g.npz"), tmp_path / "g.gsplit")), Console(width=200))
    assert "0 (y holds values, not classes), unlabelled vertices: 1" in capsys.readouterr().out


def test_a_shard_shows_the_counts_of_the_import(tmp_path: Path) -> None:
    document = describe(write_shard(sample_store(tmp_path / "g.gsplit"), tmp_path / "s.gsplit", 10, 20))
    assert (document["num_unlabelled_vertices"], document["features"]["x"]["num_not_finite"]) == (0, 0)
