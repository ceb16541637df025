"""Several hosts build one store: their shards are those that are cut from the store of one host."""

import fcntl
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import gsplit
from gsplit.cli.main import app
from gsplit.errors import InputError, StoreError
from gsplit.files.atomic import try_lock
from gsplit.progress import silent
from gsplit.store import sharded_import
from gsplit.store.build import build_store
from gsplit.store.host_agreement import building
from gsplit.store.importers import arrow
from gsplit.store.importers.arrow import LabelType, TableColumns
from gsplit.store.importers.tables import tables_source
from gsplit.store.reader import Store
from gsplit.store.shard import host_range, write_shard
from gsplit.store.sharded_import import build_shard, shard_paths
from gsplit.store.source import EdgeChunk, EdgeRules, GraphSource, stream_rows
from gsplit.store.verify import verify_store

RNG = np.random.default_rng(1)
N, E = 60, 700
SRC, DST = RNG.integers(0, N, E), RNG.integers(0, N, E) // 2 * 2  # odd vertices have no in-edges
WEIGHT = RNG.random(E).astype(np.float32)
SPARSE = np.sort(RNG.choice(10**12, N, replace=False))
NAMES = np.array([f"v{chr(97 + i % 26)}{i}é" for i in range(N)])
COLUMNS = TableColumns(edge_values=("weight",))


def _edges(folder: Path, order: str, ids: Any) -> Path:
    """A folder of Parquet files as Spark leaves it: three files, small row groups, a marker."""
    by = {
        "sorted": np.lexsort([SRC, DST]),
        "partitioned": np.lexsort([RNG.random(E), DST // 20]),  # files by ranges of destinations, no order inside
        "unsorted": np.arange(E),
    }[order]
    cuts = np.searchsorted(DST[by], [20, 40]) if order != "unsorted" else [200, 500]
    (folder / order).mkdir()
    (folder / order / "_SUCCESS").touch()
    for part, rows in enumerate(np.split(by, cuts)):
        table = pa.table({"src": ids[SRC[rows]], "dst": ids[DST[rows]], "weight": WEIGHT[rows]})
        pq.write_table(table, folder / order / f"part-{part}.parquet", row_group_size=32)
    return folder / order


def _vertices(folder: Path, ids: Any) -> Path:
    columns = {
        "id": ids,
        "y": RNG.integers(0, 5, N),
        "x": list(RNG.random((N, 3)).astype(np.float32)),
        "split": RNG.choice(["train", "test", ""], N),
    }
    pq.write_table(pa.table(columns), folder / "vertices.parquet", row_group_size=16)
    return folder / "vertices.parquet"


def _content(store: Store) -> tuple[Any, dict[str, bytes]]:
    """Everything of a store but when it was made: the manifest, and every file byte for byte."""
    manifest = store.manifest.model_dump()
    for step in manifest["provenance"]:
        step["time"] = None
    files = {str(f.relative_to(store.path)): f.read_bytes() for f in sorted(store.path.rglob("*")) if f.is_file()}
    del files["manifest.json"]
    return manifest, files


def _require_equal(whole: Store, shards: list[Path]) -> None:
    for host, path in enumerate(shards):
        made = gsplit.open(path)
        verify_store(made)
        cut = write_shard(whole, path.with_name("cut.gsplit"), *made.vertex_range, overwrite=True)
        assert host_range(whole, host, len(shards)) == made.vertex_range
        assert _content(made) == _content(cut)
    assert not list(shards[0].parent.glob(".*"))


def _import_all(make: Any, path: Path, hosts: int, rules: EdgeRules | None = None) -> list[Path]:
    for host in reversed(range(hosts)):
        done = build_shard(make(), path, host, hosts, rules=rules)
        assert done.missing == list(range(host))
        assert [shard.exists() for shard in done.shards] == [host == 0] * hosts
    return done.shards


CASES = [
    ("dense", "sorted", 4),
    ("dense", "partitioned", 4),
    ("dense", "unsorted", 3),
    ("sparse", "sorted", 4),
    ("sparse", "partitioned", 3),
    ("names", "unsorted", 4),
]


@pytest.mark.parametrize("kind, order, hosts", CASES)
def test_shards_are_those_cut_from_one_store(tmp_path: Path, kind: str, order: str, hosts: int) -> None:
    ids: Any = {"dense": np.arange(N), "sparse": SPARSE, "names": NAMES}[kind]
    edges, vertices = _edges(tmp_path, order, ids), _vertices(tmp_path, ids)

    def make() -> GraphSource:
        return tables_source(edges, vertices, columns=COLUMNS)

    whole = build_store(make(), tmp_path / "whole.gsplit")
    _require_equal(whole, _import_all(make, tmp_path / "g.gsplit", hosts))


RULES = [
    EdgeRules(drop_self_loops=True),
    EdgeRules(symmetrise=True, drop_self_loops=True),
    EdgeRules(drop_duplicates=True),
]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_rules_and_counts_are_those_of_one_store(tmp_path: Path, rules: EdgeRules) -> None:
    """Half of the vertices, without a table of them; edges of the others are dropped and counted once."""
    edges = _edges(tmp_path, "sorted", np.arange(N))

    def make() -> GraphSource:
        return tables_source(edges, columns=COLUMNS, num_vertices=N // 2, unknown_ids="drop")

    whole = build_store(make(), tmp_path / "whole.gsplit", rules=rules)
    assert 0 < whole.manifest.provenance[0].counts["edges_with_unknown_ids_dropped"] < E
    _require_equal(whole, _import_all(make, tmp_path / "g.gsplit", 4, rules))


def test_ids_that_are_no_vertices_are_counted_once_or_refused(tmp_path: Path) -> None:
    """Mapped ids with gaps, edges without a destination: every row has one host that looks at it."""
    ids = np.arange(N) * 10
    table = pa.table({"src": pa.array(ids[SRC]), "dst": pa.array([None if d == 0 else int(d) * 5 for d in DST])})
    pq.write_table(table.sort_by("dst"), tmp_path / "edges.parquet", row_group_size=8)
    vertices = _vertices(tmp_path, ids)

    def make() -> GraphSource:
        return tables_source(tmp_path / "edges.parquet", vertices, unknown_ids="drop")

    whole = build_store(make(), tmp_path / "whole.gsplit")
    _require_equal(whole, _import_all(make, tmp_path / "g.gsplit", 4))
    pq.write_table(pa.table({"src": [0, 0], "dst": [10, 295]}), tmp_path / "edges.parquet", row_group_size=1)
    sources = [tables_source(tmp_path / "edges.parquet", vertices) for _ in range(4)]
    for host in (0, 2, 3):
        build_shard(sources[host], tmp_path / "h.gsplit", host, 4)
    with pytest.raises(InputError, match="got 295 in row 1;"):
        build_shard(sources[1], tmp_path / "h.gsplit", 1, 4)


@pytest.fixture
def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every batch that is decoded from now on."""
    read = list[int]()
    batches = arrow.TableFile._file_batches

    def counted(self: arrow.TableFile, *words: Any) -> Iterator[tuple[int, Any]]:
        for skipped, batch in batches(self, *words):
            read.append(batch.num_rows)
            yield skipped, batch

    monkeypatch.setattr(arrow.TableFile, "_file_batches", counted)
    return read


def test_sorted_tables_are_read_once_by_all_hosts_together(tmp_path: Path, rows_read: list[int]) -> None:
    edges = _edges(tmp_path, "sorted", np.arange(N))
    _import_all(lambda: tables_source(edges), tmp_path / "g.gsplit", 4)
    assert E <= sum(rows_read) <= E + 3 * 2 * 32  # a row group at each end of a range twice


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("rules", [EdgeRules(), EdgeRules(symmetrise=True)], ids=str)
def test_unsorted_tables_are_read_once_by_all_hosts_together(
    tmp_path: Path, rows_read: list[int], at_once: bool, rules: EdgeRules
) -> None:
    """One after the other, the first decodes everything; at once, each some of it. A third of the ids is unknown."""
    edges, path = _edges(tmp_path, "unsorted", np.arange(N)), tmp_path / "g.gsplit"

    def make() -> GraphSource:
        columns = COLUMNS if not rules.symmetrise else None
        return tables_source(edges, columns=columns, num_vertices=2 * N // 3, unknown_ids="drop")

    whole = build_store(make(), tmp_path / "whole.gsplit", rules=rules)
    rows_read.clear()
    if at_once:
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda host: build_shard(make(), path, host, 3, rules=rules), range(3)))
    else:
        _import_all(make, path, 3, rules)
    assert sum(rows_read) == E
    _require_equal(whole, shard_paths(path, 3))


def test_the_edges_of_a_host_that_died_are_decoded_by_another(tmp_path: Path, rows_read: list[int]) -> None:
    """While the lock of a task is held, others wait for it; once its holder has died, they decode the task."""
    edges, path = _edges(tmp_path, "unsorted", np.arange(N)), tmp_path / "g.gsplit"
    whole = build_store(tables_source(edges), tmp_path / "whole.gsplit")
    build_shard(tables_source(edges), path, 1, 2)
    (exchange,) = (tmp_path / ".g.gsplit.hosts-2").glob("edges-*")
    (exchange / "3").rename(exchange / "3.of-a-host-that-was-killed")
    rows_read.clear()
    waits = threading.Event()
    with ThreadPoolExecutor(1) as pool, (exchange / "3.lock").open("a") as held:
        assert try_lock(held.fileno())

        def progress(stage: str, done: int, total: int | None) -> None:
            if stage == "decode edges with other hosts" and total is not None and done == total - 1:
                waits.set()

        other = pool.submit(build_shard, tables_source(edges), path, 0, 2, progress=progress)
        assert waits.wait(60) and not other.done() and not rows_read
        held.close()
        assert not other.result(60).missing
    assert 0 < sum(rows_read) < E / 4
    _require_equal(whole, shard_paths(path, 2))


def test_edges_of_another_command_or_of_an_older_input_are_not_taken(tmp_path: Path, rows_read: list[int]) -> None:
    edges, path = _edges(tmp_path, "unsorted", np.arange(N)), tmp_path / "g.gsplit"
    for columns in (TableColumns(src="dst", dst="src"), None):  # the first command was a mistake
        build_shard(tables_source(edges, columns=columns), path, 1, 2)
        shutil.rmtree(tmp_path / ".g.gsplit.hosts-2" / "1.gsplit")
    folders = list((tmp_path / ".g.gsplit.hosts-2").glob("edges-*"))
    assert len(folders) == 2 and sum(rows_read) == 2 * E
    rows_read.clear()
    older = tables_source(edges).modified - 5
    for folder in folders:
        for task in range(4):  # of 8, as if decoded before the input was written
            os.utime(folder / str(task) / "counts", (older, older))
    _import_all(lambda: tables_source(edges), path, 2)
    assert E / 3 < sum(rows_read) < 2 * E / 3  # half of the tasks again
    whole = build_store(tables_source(edges), tmp_path / "whole.gsplit")
    _require_equal(whole, shard_paths(path, 2))


def test_without_file_locks_every_host_decodes_all_edges(
    tmp_path: Path, rows_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    edges, path = _edges(tmp_path, "unsorted", np.arange(N)), tmp_path / "g.gsplit"
    whole = build_store(tables_source(edges), tmp_path / "whole.gsplit")
    rows_read.clear()
    monkeypatch.setattr(fcntl, "flock", _no_locks)
    _import_all(lambda: tables_source(edges), path, 2)
    assert sum(rows_read) == 2 * E
    _require_equal(whole, shard_paths(path, 2))


def test_ranges_that_are_given_become_parts(tmp_path: Path) -> None:
    edges = _edges(tmp_path, "unsorted", np.arange(N))
    ranges = [0, 7, 7, 40, N]
    whole = build_store(tables_source(edges), tmp_path / "whole.gsplit")
    for host in range(4):
        done = build_shard(tables_source(edges), tmp_path / "g.gsplit", host, 4, ranges=ranges)
    for host, path in enumerate(done.shards):
        made, cut = gsplit.open(path), write_shard(whole, tmp_path / f"{host}.gsplit", ranges[host], ranges[host + 1])
        verify_store(made)
        (manifest, files), (expected, expected_files) = _content(made), _content(cut)
        assert manifest == expected | {"part_boundaries": ranges}
        assert files == expected_files
    with pytest.raises(InputError, match="ranges: expected 3 numbers for 2 hosts, the last 60, the vertices"):
        build_shard(tables_source(edges), tmp_path / "h.gsplit", 0, 2, ranges=[0, 30, 50])


def test_any_source_can_be_built_by_several_hosts(tmp_path: Path) -> None:
    """One that knows nothing of ranges, with rows in pieces that lie across them."""
    x = RNG.random((N, 2_000_000 // N)).astype(np.float32)
    source = GraphSource(
        "arrays",
        N,
        E,
        lambda: iter([EdgeChunk(SRC, DST)]),
        features={"x": stream_rows(x, "float32")},
        y=stream_rows(SRC[:N], "int64"),
    )
    whole = build_store(source, tmp_path / "whole.gsplit")
    _require_equal(whole, _import_all(lambda: source, tmp_path / "g.gsplit", 3))
    outside = GraphSource("arrays", N, E, lambda: iter([EdgeChunk(SRC, DST + 9)]))
    with pytest.raises(InputError, match=r"edges: expected ids in 0..59 .got the edge"):
        build_shard(outside, tmp_path / "h.gsplit", 0, 3)


def test_more_hosts_than_vertices(tmp_path: Path) -> None:
    pq.write_table(pa.table({"src": [0, 1, 1], "dst": [1, 0, 1]}), tmp_path / "e.parquet")
    whole = build_store(tables_source(tmp_path / "e.parquet"), tmp_path / "whole.gsplit")
    _require_equal(whole, _import_all(lambda: tables_source(tmp_path / "e.parquet"), tmp_path / "g.gsplit", 5))


class _Killed(BaseException):
    pass


def test_a_host_that_dies_can_be_started_again_at_any_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last host is stopped at every file that is put in place; then the same command goes on from there."""
    edges = _edges(tmp_path, "unsorted", np.arange(N))
    whole = build_store(tables_source(edges), tmp_path / "whole.gsplit")
    rename, replace, left = os.rename, os.replace, 0

    def stop_after(move: Any) -> Any:
        def moved(old: Any, new: Any, **options: Any) -> None:
            nonlocal left
            if Path(new).is_relative_to(tmp_path):  # not the compiled kernels
                if not left:
                    raise _Killed
                left -= 1
            move(old, new, **options)

        return moved

    monkeypatch.setattr(os, "rename", stop_after(rename))
    monkeypatch.setattr(os, "replace", stop_after(replace))
    for dies_after in range(20):
        left = 100
        path = tmp_path / f"g{dies_after}.gsplit"
        for host in (1, 2):
            build_shard(tables_source(edges), path, host, 3)
        left = dies_after
        try:
            build_shard(tables_source(edges), path, 0, 3)
        except _Killed:
            left = 100
            for shard in filter(Path.exists, shard_paths(path, 3)):
                verify_store(gsplit.open(shard))
                assert gsplit.open(shard).fingerprint == whole.fingerprint
            again = build_shard(tables_source(edges), path, 0, 3)
            assert not again.missing
            assert all(gsplit.open(shard).fingerprint == whole.fingerprint for shard in again.shards)
            assert not list(tmp_path.glob(".*"))
        else:
            break
    assert dies_after > 6


@pytest.mark.parametrize("locks", [True, False])
def test_hosts_that_finish_at_once_join_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    """With locks none fails; on a file system without them one may, and the shards are there all the same."""
    edges, path = _edges(tmp_path, "sorted", np.arange(N)), tmp_path / "g.gsplit"
    whole = build_store(tables_source(edges), tmp_path / "whole.gsplit")
    join = sharded_import._join
    monkeypatch.setattr(sharded_import, "_join", lambda *_: [0])  # as if another were not built yet
    for host in range(4):
        build_shard(tables_source(edges), path, host, 4)
    if not locks:
        monkeypatch.setattr(fcntl, "flock", _no_locks)
    folder, outputs = tmp_path / ".g.gsplit.hosts-4", shard_paths(path, 4)
    with ThreadPoolExecutor(4) as pool:
        ends = [pool.submit(join, folder, outputs, False, silent) for _ in range(4)]
        failed = [end.exception() for end in ends if end.exception()]
    assert not failed if locks else len(failed) < 4
    assert all(end.result() == [] for end in ends if not end.exception())
    assert [gsplit.open(shard).fingerprint for shard in outputs] == [whole.fingerprint] * 4
    for shard in outputs:
        verify_store(gsplit.open(shard))


@pytest.mark.parametrize("fails, joined", [(2, True), (99, False)])
def test_a_join_that_another_disturbs_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int, joined: bool
) -> None:
    tries: list[int] = []

    def disturbed(*_: Any) -> list[int]:
        tries.append(1)
        if len(tries) <= fails:
            raise FileNotFoundError("taken away by another host")
        return [3]

    monkeypatch.setattr(sharded_import, "_join_once", disturbed)
    if joined:
        assert sharded_import._join(tmp_path, [], False, silent) == [3]
    else:
        with pytest.raises(FileNotFoundError, match="taken away"):
            sharded_import._join(tmp_path, [], False, silent)
    assert len(tries) == min(fails + 1, sharded_import._TRIES)
    assert sharded_import._join(tmp_path / "gone", [], False, silent) == ([3] if joined else [])


def test_a_host_that_is_started_twice_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edges, path = _edges(tmp_path, "sorted", np.arange(N)), tmp_path / "g.gsplit"
    build, tried = sharded_import._build, list[int]()

    def second_comes(*words: Any) -> None:
        if not tried:
            tried.append(1)
            with pytest.raises(InputError, match="one process per host .got host 1 is being built by another process"):
                build_shard(tables_source(edges), path, 1, 2)
            build_shard(tables_source(edges), path, 0, 2)  # another host is welcome
        build(*words)

    monkeypatch.setattr(sharded_import, "_build", second_comes)
    done = build_shard(tables_source(edges), path, 1, 2)
    assert tried and not done.missing and all(shard.exists() for shard in done.shards)
    assert not list(tmp_path.glob(".*"))
    monkeypatch.setattr(fcntl, "flock", _no_locks)
    with building(tmp_path, 1), building(tmp_path, 1):
        pass


def test_a_host_that_looks_whether_another_builds_does_not_stop_it(tmp_path: Path) -> None:
    looking = threading.Event()

    def look() -> None:
        with (tmp_path / "1.lock").open("a") as file:
            assert try_lock(file.fileno())
            looking.set()
            time.sleep(0.3)

    thread = threading.Thread(target=look)
    thread.start()
    assert looking.wait(60)
    with building(tmp_path, 1) as is_locked:
        assert is_locked
    thread.join()


def _no_locks(*_: object) -> None:
    raise OSError("no locks here")


def test_hosts_that_were_told_different_things_are_refused(tmp_path: Path) -> None:
    edges, path = _edges(tmp_path, "unsorted", np.arange(N)), tmp_path / "g.gsplit"
    build_shard(tables_source(edges), path, 0, 2)
    assert build_shard(tables_source(edges), path, 0, 2).was_built
    with pytest.raises(InputError, match="host 1: expected symmetrise as on the other hosts, False .got True"):
        build_shard(tables_source(edges), path, 1, 2, rules=EdgeRules(symmetrise=True))
    with pytest.raises(InputError, match="host 1: expected num_vertices as on the other hosts, 60 .got 70"):
        build_shard(tables_source(edges, num_vertices=70), path, 1, 2)
    with pytest.raises(InputError, match="host: expected a number from 0 below the number of hosts .got host 2 of 2"):
        build_shard(tables_source(edges), path, 2, 2)
    (edges / "part-0.parquet").unlink()
    with pytest.raises(InputError, match="host 1: expected input as on the other hosts"):
        build_shard(tables_source(edges, num_vertices=N), path, 1, 2)
    damaged = tmp_path / ".g.gsplit.hosts-2" / "whole.json"
    damaged.write_text("{}")
    with pytest.raises(InputError, match="whole.json: expected values of the whole graph .got Field required"):
        sharded_import._read_whole(damaged)


def test_hosts_that_take_other_columns_are_refused(tmp_path: Path) -> None:
    """The same columns by a pattern and by their names are the same."""
    (tmp_path / "e.csv").write_text("src,dst,w,v\n0,1,1,2\n1,0,3,4\n")
    (tmp_path / "v.csv").write_text("id,y,f0,f1\n0,1,1,2\n1,0,3,4\n")

    def make(delimiter: str | None = None, **columns: Any) -> GraphSource:
        told = TableColumns(**{"features": ("f*",), "edge_values": ("w",), **columns})
        return tables_source(tmp_path / "e.csv", tmp_path / "v.csv", columns=told, delimiter=delimiter)

    path = tmp_path / "g.gsplit"
    build_shard(make(), path, 0, 2)
    others: list[dict[str, Any]] = [
        {"features": ("f1", "f0")},
        {"edge_values": ("v",)},
        {"src": "dst", "dst": "src"},
        {"label": "f0"},
        {"label_type": LabelType.VALUES},
    ]
    for other in others:
        with pytest.raises(InputError, match="host 1: expected columns as on the other hosts, "):
            build_shard(make(**other), path, 1, 2)
    with pytest.raises(InputError, match="host 1: expected delimiter as on the other hosts, None .got ,"):
        build_shard(make(","), path, 1, 2)
    done = build_shard(make(features=("f0", "f1")), path, 1, 2)
    columns = gsplit.open(done.shards[0]).manifest.provenance[0].settings["columns"]
    assert columns["features"] == ["f0", "f1"] and columns["label"] == "y" and "split" not in columns


def test_an_input_that_changed_after_a_host_was_built_is_refused(tmp_path: Path) -> None:
    edges, path = tmp_path / "e.csv", tmp_path / "g.gsplit"
    edges.write_text("src,dst\n0,1\n1,0\n")
    build_shard(tables_source(edges), path, 0, 2)
    edges.write_text("src,dst\n1,1\n1,0\n")  # of the same size
    later = (tmp_path / ".g.gsplit.hosts-2" / "0.gsplit" / "manifest.json").stat().st_mtime + 5
    os.utime(edges, (later, later))
    for host in (0, 1):
        with pytest.raises(InputError, match="input that was written after host 0 was built.*host 0 again with --over"):
            build_shard(tables_source(edges), path, host, 2)
    os.utime(edges, (later - 3600, later - 3600))  # before both hosts are built
    build_shard(tables_source(edges), path, 0, 2, overwrite=True)
    assert not build_shard(tables_source(edges), path, 1, 2).missing


def test_the_command_says_what_it_counted_and_takes_the_advice_of_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("src,dst\na,b\nb,a\nz,b\na,z\n")
    (tmp_path / "v.csv").write_text("id,f0,more\na,nan,1\nb,3,4\n")

    def run(host: int, *words: str) -> Any:
        files = [str(tmp_path / "e.csv"), str(tmp_path / "g.gsplit"), "--vertices", str(tmp_path / "v.csv")]
        options = ["--feature-column", "f*", "--host", str(host), "--hosts", "2", *words]
        return CliRunner().invoke(app, ["import", "tables", *files, *options])

    assert "--unknown-ids drop" in run(0).stderr
    with building(tmp_path / ".g.gsplit.hosts-2", 1):  # by another process, as it was told before
        assert "expected unknown_ids as on the other hosts, refuse" in run(0, "--unknown-ids", "drop").stderr
    said = run(0, "--unknown-ids", "drop").stdout
    assert "note: not imported: more" in said and "host 0: edges with unknown ids dropped: 1\n" in said
    assert "note: features x: 1 values are NaN or infinite" in said
    assert "expected unknown_ids as on the other hosts, drop" in run(1).stderr  # host 0 is built
    said = run(1, "--unknown-ids", "drop").stdout
    assert "all hosts: edges with unknown ids dropped: 2\n" in said and "all hosts: edges stored: 2\n" in said
    assert "note: features x: 1 values are NaN or infinite" in said


def test_the_command_says_who_is_missing(tmp_path: Path) -> None:
    edges, out = _edges(tmp_path, "sorted", np.arange(N)), tmp_path / "g.gsplit"

    def run(*words: object) -> Any:
        return CliRunner().invoke(app, ["import", "tables", str(edges), str(out), *map(str, words)])

    assert "a shard: expected --host and --hosts (got --host 0, --hosts None)" in run("--host", 0).stderr
    first = run("--host", 1, "--hosts", 2, "--ranges", "0,10,60")
    assert first.exit_code == 0, first.stderr
    assert "host 1: vertices 10 to 60 built in" in first.stdout and "missing: 0" in first.stdout
    assert "--ranges: expected numbers like 15,10,5 (got x)" in run("--host", 0, "--hosts", 2, "--ranges", "x").stderr
    document = json.loads(run("--host", 0, "--hosts", 2, "--ranges", "0,10,60", "--json").stdout)
    assert document["missing_hosts"] == [] and document["vertex_range"] == [0, 10]
    assert [gsplit.open(path).vertex_range for path in document["shards"]] == [(0, 10), (10, 60)]
    again = run("--host", 0, "--hosts", 2)
    assert again.exit_code == 2 and "expected no file or directory of this name" in again.stderr
    with pytest.raises(StoreError, match="NAME.gsplit"):
        build_shard(tables_source(edges), tmp_path / "g", 0, 2)
