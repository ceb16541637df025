"""The columns of a table keep their names up to inference, where others in their places are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from gsplit.cli.main import app
from gsplit.store.manifest import MAX_WORD
from gsplit.store.reader import open_store
from gsplit.store.shard import write_shard

NUM_VERTICES = 60


def _run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def _table(path: Path, columns: list[str], words: list[str]) -> Path:
    """An import of the same papers, with columns in the order given."""
    values = {name: np.random.default_rng(place).random(NUM_VERTICES) for place, name in enumerate(["age", "sum"])}
    lines = [",".join(["id", "label", "split", *columns])]
    for v in range(NUM_VERTICES):
        split = "train" if v % 2 else "test"
        lines.append(",".join([f"p{v}", str(v % 3), split, *(f"{values[name[:3]][v]:.4f}" for name in columns)]))
    path.with_suffix(".vertices.csv").write_text("\n".join(lines))
    edges = "\n".join(
        ["src,dst", *(f"p{v},p{(v * 7 + k) % NUM_VERTICES}" for v in range(NUM_VERTICES) for k in (1, 2))]
    )
    path.with_suffix(".edges.csv").write_text(edges)
    words = ["--vertices", str(path.with_suffix(".vertices.csv")), "--split-column", "split", *words]
    done = _run("import", "tables", str(path.with_suffix(".edges.csv")), str(path), "--label-column", "label", *words)
    assert done.exit_code == 0, done.stderr
    return path


def test_swapped_columns_are_refused_at_inference(tmp_path: Path) -> None:
    named = ["--feature-column", "*u*", "--feature-column", "age"]  # in this order
    first = _table(tmp_path / "first.gsplit", ["age", "sum"], named)
    assert open_store(first).manifest.feature_columns == ["sum", "age"]
    assert "float32 60 x 2 (sum, age)" in _run("inspect", str(first)).stdout
    run, parts = tmp_path / "run", tmp_path / "parts.gsplit"
    words = ["--hidden", "4", "--fanout", "2", "--batch-size", "30", "--epochs", "1", "--evaluate-every", "0"]
    assert _run("partition", str(first), str(parts), "--parts", "2", "--fanout", "2").exit_code == 0
    assert open_store(parts).manifest.feature_columns == ["sum", "age"]
    shard = write_shard(open_store(parts), tmp_path / "shard.gsplit", 0, 10)
    assert shard.manifest.feature_columns == ["sum", "age"]
    assert _run("train", str(parts), *words, "--out", str(run)).exit_code == 0
    swapped = _table(
        tmp_path / "swapped.gsplit", ["age", "sum"], ["--feature-column", "age", "--feature-column", "sum"]
    )
    refused = _run("infer", str(swapped), "--weights", str(run), "--out", str(tmp_path / "o.npy"))
    assert refused.exit_code == 2
    said = "expected sum as column 0 of the features, as in training (got age). Fix: import with --feature-column"
    assert said in refused.stderr
    other = _table(tmp_path / "other.gsplit", ["sum", "age"], named)
    outs = []
    for store in (first, other):
        out = tmp_path / f"{store.stem}.npy"
        assert _run("infer", str(store), "--weights", str(run), "--out", str(out)).exit_code == 0
        outs.append(np.load(out))
    np.testing.assert_array_equal(outs[0], outs[1])


def test_names_that_are_too_long_to_keep_are_left_out(tmp_path: Path) -> None:
    long = "sum" + "m" * MAX_WORD
    made = _table(tmp_path / "long.gsplit", ["age", long], ["--feature-column", "age", "--feature-column", long])
    assert open_store(made).manifest.feature_columns == []


def test_a_manifest_with_another_number_of_names_is_refused(tmp_path: Path) -> None:
    made = _table(tmp_path / "made.gsplit", ["age", "sum"], ["--feature-column", "age"])
    text = (made / "manifest.json").read_text()
    assert '"feature_columns": [\n  "age"\n ]' in text
    (made / "manifest.json").write_text(text.replace('"age"\n ]', '"age",\n  "sum"\n ]'))
    with pytest.raises(ValueError, match="feature_columns: 2 names for the . columns of features/x"):
        open_store(made)
