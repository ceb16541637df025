"""Exact inference by vertex type in one process: equal to PyG however the work is cut, tables by type, refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import HeteroConv, RGCNConv, SAGEConv
from typed_graphs import academic
from typed_models import CITES, COUNTS, RELATIONS, WIDTHS, make_data, make_model, make_store

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError
from gsplit.inference import closure
from gsplit.inference.typed_layerwise import TypedLayerwisePass
from gsplit.nn.parallelize import parallelize
from gsplit.store.in_memory import MemoryStore


@pytest.mark.parametrize("kind", ["sage", "hgt", "to_hetero", "deep"])
def test_small_chunks_give_the_outputs_of_the_whole_graph(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closure, "CHUNK_EDGES", 50)
    monkeypatch.setattr(closure, "CHUNK_ROWS", 17)
    data = make_data()
    model = parallelize(make_model(kind), solo_mesh(), graph=make_store(2)).eval()
    with torch.no_grad():
        wanted = model(data.x_dict, data.edge_index_dict)
    wanted = wanted["paper"] if isinstance(wanted, dict) else wanted
    assert np.abs(gsplit.infer(model, make_store(4), vertex_type="paper") - wanted.numpy()).max() < 1e-12


def test_rows_that_several_relations_read_are_collected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """14 modules with 28 inputs read 3 types at 2 layers; those of the first layer are stored features."""
    made = []
    make = TypedLayerwisePass._new_map

    def recorded(self: TypedLayerwisePass, name: str, *rest: Any) -> Any:
        made.append(name)
        return make(self, name, *rest)

    monkeypatch.setattr(TypedLayerwisePass, "_new_map", recorded)
    model = parallelize(_Two().double(), solo_mesh(), graph=make_store(2))
    gsplit.infer(model, make_store(4), vertex_type="paper")
    inputs = [name for name in made if "-in " in name]
    assert sorted(name.rpartition(" ")[2] for name in inputs) == ["author", "field", "paper"]
    assert len(made) == 3 + 2 * len(RELATIONS)


class _Fused(Module):
    """Takes rows of all types as one tensor, and edges with their types."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = RGCNConv(3, 3, len(RELATIONS))

    def forward(self, x: Tensor, edge_index: Any, edge_type: Any) -> Tensor:
        return self.conv(x, edge_index, edge_type)  # type: ignore[no-any-return]


def _of_one_width() -> MemoryStore:
    """A graph whose types all have features of one width."""
    store = make_store(2)
    arrays = {f"features/{of}/x": np.asarray(store.stored_array(f"features/{of}/x"))[:, :3] for of in WIDTHS}
    return replace(store, arrays=store.arrays | arrays)


FUSED: dict[str, tuple[bool, Callable[[Any], Tensor]]] = {
    "the property": (True, lambda batch: batch.fused_x),
    "by hand": (True, lambda batch: batch.to_homogeneous(batch.x_dict)),
    "cast": (True, lambda batch: batch.fused_x.float()),
    "negative": (False, lambda batch: -batch.fused_x),
    "negative, cast": (False, lambda batch: (-batch.fused_x).float()),
    "written to": (False, lambda batch: batch.fused_x.sub_(1)),
    "of other rows": (False, lambda batch: batch.to_homogeneous({of: 2 * x for of, x in batch.x_dict.items()})),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_rows_of_the_batch_are_its_rows(name: str) -> None:
    is_of_batch, rows = FUSED[name]
    _check_call(_Fused(), is_of_batch, lambda batch: (rows(batch), batch.edge_index, batch.edge_type))


DICTS: dict[str, tuple[bool, Callable[[Any], tuple[Any, Any]]]] = {
    "the properties": (True, lambda batch: (batch.x_dict, batch.edge_index_dict)),
    "copied and cast": (
        True,
        lambda batch: ({of: x.float() for of, x in batch.x_dict.items()}, {**batch.edge_index_dict}),
    ),
    "one type changed": (
        False,
        lambda batch: ({**batch.x_dict, "author": -batch.x_dict["author"]}, batch.edge_index_dict),
    ),
    "a relation left out": (False, lambda batch: (batch.x_dict, {CITES: batch.edge_index_dict[CITES]})),
    "written to": (False, lambda batch: ({of: x.mul_(2) for of, x in batch.x_dict.items()}, batch.edge_index_dict)),
}


@pytest.mark.parametrize("name", DICTS)
def test_rows_by_type_are_those_of_the_batch(name: str) -> None:
    is_of_batch, arguments = DICTS[name]
    _check_call(HeteroConv({of: SAGEConv((3, 3), 3) for of in RELATIONS}), is_of_batch, arguments)


def _check_call(model: Module, is_of_batch: bool, arguments: Callable[[Any], tuple[Any, ...]]) -> None:
    """Outputs of a model that was called in some way, or a refusal."""
    store = _of_one_width()
    parallelize(model.double(), solo_mesh(), graph=store)
    wanted = gsplit.infer(model, store, vertex_type="paper")
    batch = next(iter(gsplit.NeighborLoader(store, [5], ("paper", "train"), batch_size=20, mesh=solo_mesh())))
    called = arguments(batch)
    dtypes = {rows.dtype for rows in (called[0].values() if isinstance(called[0], dict) else [called[0]])}
    model.to(dtypes.pop())
    model(*called)
    model.double()
    if is_of_batch:
        assert np.array_equal(gsplit.infer(model, store, vertex_type="paper"), wanted)
    else:
        with pytest.raises(InputError, match=r"put the step .* into a module inside the model\."):
            gsplit.infer(model, store, vertex_type="paper")


class _Two(Module):
    """Two layers of all relations on stored features."""

    def __init__(self) -> None:
        super().__init__()
        hidden = dict.fromkeys(WIDTHS, 4)
        self.convs = torch.nn.ModuleList(
            HeteroConv({r: SAGEConv((w[r[0]], w[r[2]]), 4) for r in RELATIONS}) for w in (WIDTHS, hidden)
        )

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Tensor:
        for conv in self.convs:
            x_dict = conv(x_dict, edge_index_dict)
        return x_dict["paper"]


def test_predictions_have_the_ids_of_the_type(tmp_path: Path) -> None:
    graph = academic()
    store = graph.build(tmp_path / "g.gsplit")
    model = parallelize(_Papers(), solo_mesh(), graph=store)
    out = gsplit.infer(model, store, vertex_type="paper")
    assert out.shape == (50, 4)
    written = gsplit.write_predictions(model, store, tmp_path / "p.csv", only="test", vertex_type="paper")
    lines = (tmp_path / "p.csv").read_text().splitlines()
    wanted = np.sort(graph.targets["paper/test"])
    assert written.num_rows == wanted.size and written.columns == ("class",)
    assert [tuple(map(int, line.split(","))) for line in lines[1:]] == [(i, out[i].argmax()) for i in wanted]
    scores = gsplit.evaluate(model, store, ["paper/test", "paper/train"], metrics=("accuracy", "f1_macro"))
    assert set(scores) == {"paper/test", "paper/test f1_macro", "paper/train", "paper/train f1_macro"}
    assert scores["paper/test"] == pytest.approx((out.argmax(1) == graph.arrays["y/paper"])[wanted].mean())


class _Papers(Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = HeteroConv({("paper", "cites", "paper"): SAGEConv(5, 4)})

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> dict[str, Tensor]:
        return self.conv(x_dict, edge_index_dict)  # type: ignore[no-any-return]


class _TwoTensors(Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv((7, 7), 4)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Tensor:
        x = x_dict["paper"]
        return self.conv((x, 2 * x), edge_index_dict[CITES])  # type: ignore[no-any-return]


def test_what_cannot_be_inferred_is_refused() -> None:
    store = make_store(2)
    model = parallelize(make_model("sage"), solo_mesh(), graph=store)
    with pytest.raises(InputError, match="vertex_type: expected one of paper, author, field .got None"):
        gsplit.infer(model, store)
    with pytest.raises(InputError, match="one of paper, author, field .got venue"):
        gsplit.infer(model, store, vertex_type="venue")
    with pytest.raises(InputError, match="targets of one vertex type .got train"):
        gsplit.evaluate(model, store, ["train"])
    with pytest.raises(InputError, match=r"the model's output: expected \[90"):
        gsplit.infer(model, store, vertex_type="author")
    two = parallelize(_TwoTensors().double(), solo_mesh(), graph=store)
    with pytest.raises(InputError, match="the same rows as sources and destinations"):
        gsplit.infer(two, store, vertex_type="paper")
    assert COUNTS["author"] == 90
