"""``gsplit import tables --pairs``: tables of vertex pairs in the user's own ids."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from gsplit.cli.main import app
from gsplit.errors import InputError
from gsplit.store.build import build_store
from gsplit.store.importers.tables import tables_source
from gsplit.store.reader import Store, open_store
from gsplit.store.sharded_import import build_shard, shard_paths
from gsplit.store.verify import verify_store

IDS: dict[str, list[Any]] = {
    "dense": [0, 1, 2, 3, 4],
    "sparse": [7, 90, 1_000_000, 5_000_000_000, 12],
    "strings": ["b", "aa", "c", "é", "d"],
}
EDGES = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0)]
PAIRS = [(4, 2), (0, 0), (3, 1), (4, 2)]


def _write(folder: Path, form: str, name: str, columns: dict[str, Any]) -> Path:
    path = folder / f"{name}.{form}"
    table = pa.table(columns)
    if form == "csv":
        pyarrow.csv.write_csv(table, path)
    else:
        pyarrow.parquet.write_table(table, path)
    return path


def _ends(ids: list[Any], pairs: list[tuple[int, int]]) -> dict[str, Any]:
    return {"src": [ids[a] for a, _ in pairs], "dst": [ids[b] for _, b in pairs]}


def _named(store: Store, vertices: Any) -> list[Any]:
    """Vertices as ids of the input."""
    if "name_bytes" in store.names:
        return store.vertex_names(vertices)
    found = store.rows("vertex_ids", vertices) if "vertex_ids" in store.names else np.asarray(vertices)
    return list(found.tolist())


@pytest.mark.parametrize("form", ["csv", "parquet"])
@pytest.mark.parametrize("kind", list(IDS))
def test_pairs_are_mapped_like_edges(tmp_path: Path, form: str, kind: str) -> None:
    ids = IDS[kind]
    edges = _write(tmp_path, form, "edges", _ends(ids, EDGES))
    columns = _ends(ids, PAIRS) | {"label": [1, 0, 1, 5]}
    if form == "parquet":
        columns["negatives"] = [[ids[i], ids[4 - i]] for i in range(4)]
    lists = {"train": _write(tmp_path, form, "train", columns)}
    lists["val"] = _write(tmp_path, form, "val", _ends(ids, PAIRS[:1]))
    store = build_store(tables_source(edges, pairs=lists), tmp_path / "g.gsplit")
    verify_store(store)
    assert store.pair_names == ("train", "val")
    pairs = store.pairs("train")
    assert _named(store, pairs[:, 0]) == columns["src"]
    assert _named(store, pairs[:, 1]) == columns["dst"]
    labels = store.pair_labels("train")
    assert labels is not None and labels.tolist() == [1, 0, 1, 5]
    assert store.pair_labels("val") is None
    negatives = store.pair_negatives("train")
    assert (negatives is not None) == (form == "parquet")
    if negatives is not None:
        assert [_named(store, row) for row in negatives] == columns["negatives"]
    assert store.manifest.provenance[0].settings["pairs"] == {name: file.name for name, file in lists.items()}


def test_an_empty_table_is_an_empty_list(tmp_path: Path) -> None:
    edges = _write(tmp_path, "parquet", "edges", _ends(IDS["dense"], EDGES))
    empty = {"src": pa.array([], pa.int64()), "dst": pa.array([], pa.int64()), "label": pa.array([], pa.float32())}
    table = _write(tmp_path, "parquet", "train", empty)
    store = build_store(tables_source(edges, pairs={"train": table}), tmp_path / "g.gsplit")
    assert store.pairs("train").shape == (0, 2)
    assert store.dtype("pair_labels/train") == "float32"


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"src": ["b"], "dst": ["zz"]}, r"train.parquet: dst: expected ids among the 5 vertices .got 'zz' in row 0"),
        ({"src": [None, "b"], "dst": ["b", "b"]}, r"src: expected ids among .* .got None in row 0"),
        ({"src": [1], "dst": [2]}, "expected ids that are strings"),
        ({"from": ["b"], "dst": ["c"]}, "expected a column src"),
        ({"src": ["b"], "dst": ["c"], "label": ["yes"]}, "label: expected a column of numbers"),
        ({"src": ["b"], "dst": ["c"], "negatives": ["c"]}, "negatives: expected lists"),
        ({"src": ["b"] * 2, "dst": ["c"] * 2, "negatives": [["b"], []]}, "negatives: expected lists of one length"),
        ({"src": ["b"] * 2, "dst": ["c"] * 2, "negatives": [["b", "c"], ["c", "?"]]}, r"'\?' in row 1"),
    ],
)
def test_tables_of_pairs_that_do_not_fit(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    edges = _write(tmp_path, "parquet", "edges", _ends(IDS["strings"], EDGES))
    table = _write(tmp_path, "parquet", "train", columns)
    with pytest.raises(InputError, match=message):
        build_store(tables_source(edges, pairs={"train": table}), tmp_path / "g.gsplit")


def test_hosts_write_all_pairs_into_their_shards(tmp_path: Path) -> None:
    edges = _write(tmp_path, "csv", "edges", _ends(IDS["strings"], EDGES))
    table = _write(tmp_path, "csv", "train", _ends(IDS["strings"], PAIRS))
    whole = build_store(tables_source(edges, pairs={"train": table}), tmp_path / "g.gsplit")
    for host in range(2):
        build_shard(tables_source(edges, pairs={"train": table}), tmp_path / "h.gsplit", host, 2)
    for path in shard_paths(tmp_path / "h.gsplit", 2):
        shard = open_store(path)
        verify_store(shard)
        assert np.array_equal(shard.pairs("train"), whole.pairs("train"))
    build_shard(tables_source(edges, pairs={"train": table}), tmp_path / "i.gsplit", 0, 2)
    with pytest.raises(InputError, match="input"):
        build_shard(tables_source(edges), tmp_path / "i.gsplit", 1, 2)


def test_the_command_takes_pairs(tmp_path: Path) -> None:
    edges = _write(tmp_path, "csv", "edges", _ends(IDS["strings"], EDGES))
    table = _write(tmp_path, "csv", "train", _ends(IDS["strings"], PAIRS))
    output = tmp_path / "g.gsplit"
    command = ["import", "tables", str(edges), str(output), "--json"]
    result = CliRunner().invoke(app, [*command, "--pairs", f"train={table}", "--pairs", f"val={table}"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["pairs"]["val"]["num_pairs"] == len(PAIRS)
    for wrong in (["--pairs", str(table)], ["--pairs", f"a={table}", "--pairs", f"a={table}"]):
        refused = CliRunner().invoke(app, [*command, "--overwrite", *wrong])
        assert refused.exit_code != 0
        assert "--pairs: expected NAME=TABLE, every name once" in refused.output
