"""Files of predictions join with the tables that a graph came from, whatever its ids and its parts."""

import csv
import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit import InputError, write_predictions
from gsplit.cli.training_view import describe_predictions
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.inference import infer as infer_module
from gsplit.inference import prediction_table
from gsplit.inference.prediction_table import PredictionTable, check_request
from gsplit.run.config import TrainSettings
from gsplit.run.preflight import choose_what
from gsplit.run.results import InferenceResult
from gsplit.store.build import build_store
from gsplit.store.importers.arrow import TableColumns
from gsplit.store.importers.tables import tables_source
from gsplit.store.protocol import OriginalOrder
from gsplit.store.reader import Store
from gsplit.store.shard import write_shard

N = 120


def _ids(kind: str) -> list[Any]:
    order = np.random.default_rng(2).permutation(N).tolist()  # rows of the vertex table are in no order
    ids: dict[str, list[Any]] = {
        "strings": [f"user, {i:03d}" for i in order],
        "sparse": [7 * i - 50 for i in order],
        "dense": order,
    }
    return ids[kind]


def _store(kind: str, folder: Path, *, partitioned: bool) -> tuple[Store, dict[Any, int]]:
    """A store from tables, and the class of every id: its vertex's own feature says it."""
    ids, rng = _ids(kind), np.random.default_rng(1)
    ends = rng.integers(0, N, (2, 600))
    pq.write_table(pa.table({"src": [ids[s] for s in ends[0]], "dst": [ids[d] for d in ends[1]]}), folder / "e.parquet")
    classes = rng.integers(0, 3, N)
    split = np.where(np.arange(N) % 5 == 0, "test", "train")
    table = {"id": ids, "y": classes, "split": split, **{f"x{k}": (classes == k).astype(float) for k in range(3)}}
    pq.write_table(pa.table(table), folder / "v.parquet")
    columns = TableColumns(features=("x0", "x1", "x2"))
    store = build_store(tables_source(folder / "e.parquet", folder / "v.parquet", columns=columns), folder / "g.gsplit")
    if partitioned:
        store = gsplit.partition(store, folder / "p.gsplit", 4, [3], batch_size=50, epochs=1)
        assert store.is_renumbered
    return store, dict(zip(ids, classes.tolist(), strict=True))


def _plain_model(num_outputs: int = 3) -> Any:
    """Says of each vertex what its own features are."""
    model = GraphSAGE(3, num_outputs, 1, root_weight=True)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        model.convs[0].lin_r.weight.copy_(torch.eye(3)[:num_outputs])
    return model


def _model(num_outputs: int = 3) -> Any:
    return gsplit.parallelize(_plain_model(num_outputs), solo_mesh())


@pytest.mark.parametrize("kind", ["strings", "sparse", "dense"])
@pytest.mark.parametrize("partitioned", [False, True])
def test_tables_join_by_the_ids_of_the_import(
    kind: str, partitioned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prediction_table, "_CHUNK_ROWS", 50)  # three chunks
    store, classes = _store(kind, tmp_path, partitioned=partitioned)
    made = write_predictions(_model(), store, tmp_path / "p.parquet")
    assert (made.what, made.num_rows, made.columns) == ("classes", N, ("class",))
    found = pq.read_table(made.path).to_pydict()
    assert found["id"] == sorted(classes)  # ascending
    assert dict(zip(found["id"], found["class"], strict=True)) == classes
    made = write_predictions(_model(), store, tmp_path / "p.csv", what="both", only="test")
    assert made.columns == ("class", "output_0", "output_1", "output_2")
    with made.path.open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    tested = sorted(_ids(kind)[::5])
    assert [row["id"] for row in rows] == list(map(str, tested))
    for vertex, row in zip(tested, rows, strict=True):
        assert int(row["class"]) == classes[vertex]
        assert [float(row[f"output_{k}"]) for k in range(3)] == [float(k == classes[vertex]) for k in range(3)]
    left = {path.name for path in tmp_path.iterdir()} - {"e.parquet", "v.parquet", "g.gsplit", "p.gsplit"}
    assert left == {"p.parquet", "p.csv"}


def test_arrays_hold_outputs_or_classes_by_original_id(tmp_path: Path) -> None:
    store, classes = _store("dense", tmp_path, partitioned=True)
    made = write_predictions(_model(), store, tmp_path / "p.npy")
    assert (made.what, made.columns) == ("outputs", ("output_0", "output_1", "output_2"))
    want = np.array([classes[vertex] for vertex in range(N)])
    assert np.array_equal(np.load(made.path), np.eye(3, dtype=np.float32)[want])
    assert write_predictions(_model(), store, made.path, what="classes").columns == ("class",)
    assert np.array_equal(np.load(made.path), want)


def test_names_of_classes_and_a_single_output(tmp_path: Path) -> None:
    store, classes = _store("strings", tmp_path, partitioned=False)
    made = write_predictions(_model(), store, tmp_path / "p.parquet", what="both", class_names=["a", "b", "c"])
    assert made.columns == ("class", "output_a", "output_b", "output_c")
    found = pq.read_table(made.path).to_pydict()
    assert found["class"] == ["abc"[classes[vertex]] for vertex in found["id"]]
    made = write_predictions(_model(1), store, tmp_path / "one.parquet", what="outputs")
    assert made.columns == ("output",)
    assert pq.read_table(made.path).to_pydict()["output"] == [float(classes[vertex] == 0) for vertex in sorted(classes)]


def test_outputs_that_are_not_finite_have_no_class(tmp_path: Path) -> None:
    store, classes = _store("dense", tmp_path, partitioned=False)
    lost, names = [vertex for vertex in range(N) if classes[vertex] == 1], ["a", "b", "c"]

    class OfClassOne(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _plain_model()

        def forward(self, x: Any, edge_index: Any) -> torch.Tensor:
            out = self.inner(x, edge_index)
            return torch.where(out[:, 1:2] == 1, float("nan"), out)

    broken = gsplit.parallelize(OfClassOne(), solo_mesh())
    made = write_predictions(broken, store, tmp_path / "p.npy", what="classes")
    want = [-1 if vertex in lost else classes[vertex] for vertex in range(N)]
    assert np.load(made.path).tolist() == want and made.num_without_class == len(lost)
    for what, named in (("classes", None), ("both", names)):
        for end in ("parquet", "csv"):
            made = write_predictions(broken, store, tmp_path / f"p.{end}", what=what, class_names=named)  # type: ignore[arg-type]
            assert made.num_without_class == len(lost)
            if end == "parquet":
                found = pq.read_table(made.path).to_pydict()["class"]
                assert found == [None if c < 0 else names[c] if named else c for c in want]
            else:
                with made.path.open(newline="") as stream:
                    said = [row["class"] for row in csv.DictReader(stream)]
                assert said == ["" if c < 0 else names[c] if named else str(c) for c in want]
    result = InferenceResult(made, 1)
    said_of_it = f"\nno class in {len(lost)} rows: the model's outputs there are NaN or infinite"
    assert describe_predictions(result, store).endswith(said_of_it)
    assert result.as_dict()["rows_without_class"] == len(lost)


@pytest.mark.parametrize(
    "kind, hint", [("strings", "ids are strings"), ("sparse", "ids are mapped numbers"), ("dense", "")]
)
def test_the_command_says_where_the_ids_are(kind: str, hint: str, tmp_path: Path) -> None:
    store, _ = _store(kind, tmp_path, partitioned=False)
    said = describe_predictions(InferenceResult(write_predictions(_model(), store, tmp_path / "p.npy"), 1), store)
    wanted = f"{tmp_path / 'p.npy'}: 120 x 3, outputs; row v is original vertex v"
    assert said == wanted + (f"; {hint}: a .parquet or .csv table holds them" if hint else "")
    made = write_predictions(_model(), store, tmp_path / "c.npy", what="classes")
    assert describe_predictions(InferenceResult(made, 1), store).startswith(f"{made.path}: 120, classes; row v is")


def test_a_model_without_classes_writes_values(tmp_path: Path) -> None:
    for loss, table, array in (("cross_entropy", "classes", "outputs"), ("mse", "outputs", "outputs")):
        settings = TrainSettings(loss=loss)
        assert choose_what(settings, tmp_path / "p.csv", None) == table
        assert choose_what(settings, tmp_path / "p.npy", None) == array
        assert choose_what(settings, tmp_path / "p.csv", "outputs") == "outputs"
    with pytest.raises(InputError, match="--what: expected outputs, for a model trained with bce .got both"):
        choose_what(TrainSettings(loss="bce"), tmp_path / "p.csv", "both")


def test_half_precision_is_written_as_a_table_reads_it(tmp_path: Path) -> None:
    store, classes = _store("dense", tmp_path, partitioned=False)
    for dtype in (torch.float16, torch.bfloat16):
        made = write_predictions(_model().to(dtype), store, tmp_path / "p.csv", what="both")
        with made.path.open(newline="") as stream:
            rows = list(csv.DictReader(stream))
        assert [int(row["class"]) for row in rows] == [classes[vertex] for vertex in range(N)]


@pytest.mark.parametrize("kind, id_type", [("strings", "string"), ("sparse", "int64"), ("dense", "int64")])
def test_no_rows_have_the_types_of_all_rows(kind: str, id_type: str, tmp_path: Path) -> None:
    store, _ = _store(kind, tmp_path, partitioned=False)
    none, ids = np.empty(0, np.int64), np.empty(0, np.int64)
    for end in ("parquet", "csv"):
        table = PredictionTable("classes", (), none, ids)
        table.write(tmp_path / f"p.{end}", OriginalOrder(store, tmp_path))
    found = pq.read_table(tmp_path / "p.parquet")
    assert (found.num_rows, [str(field.type) for field in found.schema]) == (0, [id_type, "int64"])
    outputs = PredictionTable("outputs", (), np.empty((0, 2), np.float32), ids)
    outputs.write(tmp_path / "o.parquet", OriginalOrder(store, tmp_path))
    assert pq.read_table(tmp_path / "o.parquet").num_columns == 3


def test_a_full_disk_is_told_with_the_name_of_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = _store("dense", tmp_path, partitioned=False)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for name in ("p.csv", "p.parquet"):
        with pytest.raises(InputError, match=f"{name}: expected room for the table .got No space left on device"):
            write_predictions(_model(), store, tmp_path / name)
    assert not list(tmp_path.glob("p.*"))


def test_two_processes_do_not_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, classes = _store("dense", tmp_path, partitioned=False)
    out, partial = tmp_path / "p.npy", tmp_path / "p.npy.partial"
    partial.write_bytes(b"left by a process that was killed" * 1000)
    write_rows, refused = infer_module._write_rows, list[bool]()

    def second_comes(*words: Any, **options: Any) -> Any:
        if not refused:
            refused.append(True)
            with pytest.raises(InputError, match="a file that no other process writes .got p.npy.partial is locked"):
                gsplit.infer(_model(), store, out)
        return write_rows(*words, **options)

    monkeypatch.setattr(infer_module, "_write_rows", second_comes)
    found = gsplit.infer(_model(), store, out)
    assert refused
    assert np.array_equal(found, np.eye(3, dtype=np.float32)[[classes[vertex] for vertex in range(N)]])
    assert not partial.exists()
    monkeypatch.setattr(fcntl, "flock", _no_locks)
    assert np.array_equal(gsplit.infer(_model(), store, out), found)


def _no_locks(*_: object) -> None:
    raise OSError("no locks here")


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for name, got in (("p.xlsx", ".xlsx"), ("p", "a name without a suffix")):
        with pytest.raises(InputError, match=rf"expected a name that ends in .parquet, .csv or .npy .got {got}"):
            check_request(tmp_path / name, None, None)
    with pytest.raises(InputError, match="what: expected one of classes, outputs, both .got logits"):
        check_request(tmp_path / "p.csv", "logits", None)
    with pytest.raises(InputError, match="expected classes or outputs of all vertices .got both classes and outputs"):
        check_request(tmp_path / "p.npy", "both", None)
    with pytest.raises(InputError, match="got the targets test, whose rows would have no id.*a .parquet or .csv table"):
        check_request(tmp_path / "p.npy", None, "test")
    store, _ = _store("strings", tmp_path, partitioned=False)
    with pytest.raises(InputError, match=r"the model's output: expected a column per class .got shape \[120, 1\]"):
        write_predictions(_model(1), store, tmp_path / "p.csv")
    with pytest.raises(InputError, match="class names: expected 3, one per output .got 2"):
        write_predictions(_model(), store, tmp_path / "p.csv", class_names=["a", "b"])
    for names in ([1, 2, 3], "abc", 3):
        with pytest.raises(InputError, match="class names: expected a string for every class .got "):
            write_predictions(_model(), store, tmp_path / "p.csv", class_names=names)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="one of the targets it has, targets/test, targets/train .got targets/tset"):
        write_predictions(_model(), store, tmp_path / "p.csv", only="tset")
    shard = write_shard(store, tmp_path / "s.gsplit", 0, 50)
    with pytest.raises(InputError, match="expected the ids of all vertices for a table .got a shard"):
        write_predictions(_model(), shard, tmp_path / "p.csv")

    class Deep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = GraphSAGE(3, 4, 1)

        def forward(self, x: Any, edge_index: Any) -> torch.Tensor:
            return self.inner(x, edge_index).reshape(-1, 2, 2)  # type: ignore[no-any-return]

    deep = gsplit.parallelize(Deep(), solo_mesh())
    with pytest.raises(InputError, match=r"expected numbers in one row per vertex .got shape \[120, 2, 2\]"):
        write_predictions(deep, store, tmp_path / "p.csv", what="outputs")
    assert not list(tmp_path.glob("p.*"))  # nothing is left
