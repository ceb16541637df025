"""Tables on object storage are imported as those on a disk, and predictions are written there."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError
from gsplit.files.objects import ObjectFile, ObjectFolder
from gsplit.files.places import is_file, write_whole
from gsplit.store.build import build_store
from gsplit.store.importers.arrow import TableColumns
from gsplit.store.importers.tables import tables_source
from gsplit.store.reader import Store
from gsplit_bench.s3_server import BUCKET, FaultyProxy

FAULTS = {"slow down": 0.05, "error": 0.05, "cut": 0.05}


def _write_tables(folder: Path) -> None:
    """Edges in two Parquet files beside a marker file, vertices in CSV."""
    generator = np.random.default_rng(0)
    (folder / "edges").mkdir(parents=True)
    for number in range(2):
        ends = {name: generator.integers(0, 50, 300) for name in ("src", "dst")}
        pyarrow.parquet.write_table(pa.table(ends), folder / "edges" / f"part-{number}.parquet")
    (folder / "edges" / "_SUCCESS").write_text("")
    rows = [f"{vertex},{vertex % 3},{vertex / 8},{'train' if vertex % 2 else 'test'}" for vertex in range(50)]
    (folder / "v.csv").write_text("\n".join(["id,y,f0,split", *rows]) + "\n")


@pytest.fixture
def both(s3_proxy: FaultyProxy, tmp_path: Path) -> tuple[Store, Store, str]:
    """The same tables imported from the disk and from object storage, and where the latter are."""
    _write_tables(tmp_path / "t")
    url = f"s3://{BUCKET}/{tmp_path.name}"
    for file in (tmp_path / "t").rglob("*"):
        if file.is_file():
            write_whole(Path(url) / file.relative_to(tmp_path / "t"), [file.read_bytes()])
    s3_proxy.shares = FAULTS
    stores = []
    for name, place in (("local", tmp_path / "t"), ("remote", Path(url))):
        source = tables_source(place / "edges", place / "v.csv", columns=TableColumns(features=["f0"]))
        stores.append(build_store(source, tmp_path / f"{name}.gsplit"))
        assert source.modified > 1e9
    s3_proxy.shares = {}
    return stores[0], stores[1], url


def test_tables_are_imported_and_predictions_written(both: tuple[Store, Store, str], tmp_path: Path) -> None:
    local, remote, url = both
    assert local.fingerprint == remote.fingerprint
    assert {name: entry.sha256 for name, entry in local.manifest.arrays.items()} == {
        name: entry.sha256 for name, entry in remote.manifest.arrays.items()
    }
    model = gsplit.parallelize(GraphSAGE(1, 8, 1, 3), solo_mesh())
    made = gsplit.write_predictions(model, remote, f"{url}/p.parquet", workspace=tmp_path)
    gsplit.write_predictions(model, remote, tmp_path / "p.parquet")
    found = pyarrow.parquet.read_table(ObjectFile(ObjectFolder(url), "p.parquet"))
    assert found.equals(pyarrow.parquet.read_table(tmp_path / "p.parquet"))
    assert made.num_rows == found.num_rows == 50
    assert not list(tmp_path.glob("*.partial"))
    for write in (gsplit.infer, gsplit.write_predictions):
        with pytest.raises(InputError, match="expected a .parquet or .csv table on object storage"):
            write(model, remote, f"{url}/p.npy")
    assert not is_file(Path(url) / "p.npy")
    with pytest.raises(InputError, match="expected a table, or a folder of them .got no such"):
        tables_source(Path(f"{url}/none.parquet"))
    with pytest.raises(FileNotFoundError, match="no such object"):
        ObjectFile(ObjectFolder(url), "none")
