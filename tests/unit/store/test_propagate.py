"""Propagated features: those of PyG's SGConv and of its SIGN transform, and the same bits after partitioning."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import SGConv
from torch_geometric.transforms import SIGN
from typer.testing import CliRunner

import gsplit
from gsplit.cli.main import app
from gsplit.errors import InputError
from gsplit.store.propagate import write_propagated
from gsplit.store.reader import Store, open_store
from gsplit.store.shard import write_shard
from gsplit.store.verify import verify_store

N = 70


def _data(*, weights: bool = False) -> Data:
    """Self-loops, parallel edges and vertices without in-edges."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, N, (2, 500), generator=generator)
    edges[1] = edges[1] // 2 * 2  # odd vertices have no in-edges
    loops = torch.arange(0, N, 7).repeat(2, 1)
    data = Data(x=torch.randn(N, 6, generator=generator).double(), edge_index=torch.cat([edges, loops], 1))
    if weights:
        data.edge_weight = torch.rand(data.num_edges, generator=generator).double()
    return data


def _store(path: Path, *, weights: bool = False) -> Store:
    return gsplit.from_pyg(_data(weights=weights), path)


@pytest.mark.parametrize("weights", [False, True])
def test_three_hops_are_those_of_sgconv(tmp_path: Path, weights: bool) -> None:
    data = _data(weights=weights)
    made = write_propagated(
        _store(tmp_path / "g.gsplit", weights=weights),
        tmp_path / "p.gsplit",
        3,
        edge_weight="edge_weight" if weights else None,
    )
    for hop in (1, 2, 3):
        layer = SGConv(6, 6, hop, bias=False).double()
        layer.lin.weight.data = torch.eye(6).double()
        wanted = layer(data.x, data.edge_index, data.edge_weight).detach().numpy()
        assert np.abs(made.array(f"features/x{hop}") - wanted).max() < 1e-12
    assert np.array_equal(made.array("features/x"), data.x.numpy())
    verify_store(made)


@pytest.mark.filterwarnings("ignore:Sparse")  # of PyG's transform
@pytest.mark.parametrize("weights", [False, True])
def test_without_self_loops_hops_are_those_of_sign(tmp_path: Path, weights: bool) -> None:
    plain = _store(tmp_path / "g.gsplit", weights=weights)
    words = ["propagate", str(plain.path), str(tmp_path / "p.gsplit"), "--hops", "2", "--no-self-loops", "--json"]
    result = CliRunner().invoke(app, [*words, *(["--edge-weight", "edge_weight"] if weights else [])])
    assert result.exit_code == 0, result.output
    made = open_store(tmp_path / "p.gsplit")
    data = _data(weights=weights)
    if not weights:
        data.edge_weight = torch.ones(data.num_edges).double()
    wanted = SIGN(2)(data)
    for hop in (1, 2):
        assert np.abs(made.array(f"features/x{hop}") - wanted[f"x{hop}"].numpy()).max() < 1e-12
    assert made.manifest.provenance[-1].settings["self_loops"] is False


def test_a_partition_does_not_change_the_bits(tmp_path: Path) -> None:
    plain = _store(tmp_path / "g.gsplit")
    parts = gsplit.partition(plain, tmp_path / "p.gsplit", 4, [2], None, batch_size=20)
    assert not np.array_equal(parts.original_ids(), np.arange(N))
    one, other = (write_propagated(store, tmp_path / f"{store.path.stem}2.gsplit", 2) for store in (plain, parts))
    assert np.array_equal(one.array("features/x2"), other.array("features/x2"))
    loaded = next(iter(gsplit.NeighborLoader(one, [2], features=["x", "x1", "x2"], batch_size=10))).x
    assert loaded.size(1) == 18


def test_what_cannot_be_propagated_is_refused(tmp_path: Path) -> None:
    plain = _store(tmp_path / "g.gsplit", weights=True)
    made = write_propagated(plain, tmp_path / "p.gsplit", 1)
    small = gsplit.from_pyg(
        Data(x=torch.zeros(3, 2).half(), edge_index=torch.zeros(2, 1).long()), tmp_path / "h.gsplit"
    )
    typed = HeteroData()
    typed["a"].x = torch.zeros(3, 2)
    typed["a", "to", "a"].edge_index = torch.zeros(2, 1).long()
    for store, hops, options, message in (
        (plain, 0, {}, "hops: expected a number from 1 .got 0"),
        (made, 2, {}, "a store without features/x1 and later hops .got one with features/x1"),
        (small, 1, {}, "features/x: expected float32 or float64 .got float16"),
        (plain, 1, {"edge_weight": "input_position"}, "edges/input_position: expected one float32 or float64 per edge"),
        (plain, 1, {"features": "z"}, "one of the features it has, features/x .got features/z"),
        (write_shard(plain, tmp_path / "s.gsplit", 5, 9), 1, {}, "a whole store of a graph without types .got a shard"),
        (gsplit.from_pyg(typed, tmp_path / "t.gsplit"), 1, {}, "a graph without types .got one with the types a"),
    ):
        with pytest.raises(InputError, match=message):
            write_propagated(store, tmp_path / "n.gsplit", hops, **options)  # type: ignore[arg-type]
