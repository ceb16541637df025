"""Heterogeneous models in one process: equal to PyG on the whole graph, how often rows are exchanged, and refusals."""

import copy
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear, Module, ModuleDict
from torch_geometric.nn import (
    GATConv,
    GCNConv,
    GraphConv,
    HANConv,
    HeteroConv,
    HGTConv,
    LayerNorm,
    RGCNConv,
    SAGEConv,
)
from typed_models import (
    CITED_BY,
    CITES,
    COUNTS,
    FANOUTS,
    MODELS,
    RELATIONS,
    WIDTHS,
    WRITES,
    Fused,
    make_data,
    make_model,
    make_store,
    run_model,
)

import gsplit
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.errors import InputError
from gsplit.graph.types import EdgeType
from gsplit.loading.loader import NeighborLoader
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.typed_batch import TypedBatch
from gsplit.nn.checks.toy_typed import TypedExample
from gsplit.nn.parallelize import forward_plan_of, parallelize
from gsplit.store.in_memory import MemoryStore, typed_store

ALL = [-1, -1]


def _wrap(model: Module, **options: Any) -> Module:
    return parallelize(model.double(), solo_mesh(), graph=make_store(2), **options)


def _batch(fanouts: Any = None, **options: Any) -> TypedBatch:
    loader = NeighborLoader(make_store(4), fanouts or FANOUTS, ("paper", "train"), batch_size=30, **options)
    batch = loader.make_batch(0, 0)
    assert isinstance(batch, TypedBatch)
    return batch


@pytest.mark.parametrize("kind", [*MODELS, "rgat"])
def test_all_neighbours_give_the_outputs_of_pyg_on_the_whole_graph(kind: str) -> None:
    data = make_data()
    model = _wrap(make_model(kind)).eval()
    with torch.no_grad():
        if isinstance(model, Fused):
            whole = data.to_homogeneous(node_attrs=[])
            encoded = model.encode(data.x_dict)
            x = torch.cat([encoded[name] for name in COUNTS])
            wanted = model.run(x, whole.edge_index, whole.edge_type)
        else:
            wanted = model(data.x_dict, data.edge_index_dict)
            wanted = wanted["paper"] if isinstance(wanted, dict) else wanted
        for strategy in ("split", "hybrid(1)"):
            batch = _batch(ALL, strategy=strategy)
            out = run_model(model, batch)
            ids = batch.n_id_dict["paper"][: batch.num_targets]
            assert float((out - wanted[ids]).abs().max()) < 1e-12


class _Upper(Module):
    """Encoders by type and two layers; the upper one is given and called with some relations."""

    def __init__(self, make: Callable[[], Module], relations: Sequence[EdgeType] = RELATIONS) -> None:
        super().__init__()
        self.lins = ModuleDict({name: Linear(width, 8) for name, width in WIDTHS.items()})
        self.lower = HeteroConv({r: GraphConv((8, 8), 8) for r in RELATIONS})
        self.upper = make()
        self.relations = relations

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Tensor:
        h = {name: self.lins[name](x).tanh() for name, x in x_dict.items()}
        h = {name: rows.tanh() for name, rows in self.lower(h, edge_index_dict).items()}
        out: Tensor = self.upper(h, {r: edge_index_dict[r] for r in self.relations})["paper"]
        return out


def _without_root(aggr: str) -> Module:
    layer: Module = HeteroConv({r: SAGEConv((8, 8), 8, aggr=aggr, root_weight=False) for r in RELATIONS})
    return layer


@pytest.mark.parametrize(
    "make, relations",
    [
        *((partial(_without_root, aggr), RELATIONS) for aggr in ("sum", "mean", "max")),
        (lambda: HGTConv(8, 8, (list(COUNTS), list(RELATIONS)), heads=2), [r for r in RELATIONS if r != CITES]),
    ],
)
def test_gradients_are_those_of_pyg_on_the_whole_graph(make: Callable[[], Module], relations: list[EdgeType]) -> None:
    data = make_data()
    plain = _Upper(make, relations).double()
    model = _wrap(copy.deepcopy(plain))
    batch = _batch(ALL)
    out = run_model(model, batch)
    batch.mean(out.square().sum(1)).backward()
    wanted = plain(data.x_dict, data.edge_index_dict)[batch.n_id_dict["paper"][: batch.num_targets]]
    wanted.square().sum(1).mean().backward()
    assert torch.allclose(out, wanted, atol=1e-12)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        ours_grad, wanted_grad = (torch.zeros_like(p) if p.grad is None else p.grad for p in (ours, theirs))
        assert torch.allclose(ours_grad, wanted_grad, atol=1e-12)


class _Counted(Module):
    """Two layers of all relations; rows of a type are read by several relations."""

    def __init__(self) -> None:
        super().__init__()
        self.lins = ModuleDict({name: Linear(width, 4) for name, width in WIDTHS.items()})
        self.convs = torch.nn.ModuleList(HeteroConv({r: SAGEConv(4, 4) for r in RELATIONS}) for _ in range(2))

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Tensor:
        x_dict = {name: self.lins[name](x) for name, x in x_dict.items()}
        for conv in self.convs:
            x_dict = conv(x_dict, edge_index_dict)
        return x_dict["paper"]


def test_rows_are_exchanged_once_per_layer_and_type(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _wrap(_Counted())
    calls = []
    shuffle = Batch.shuffle

    def counted(self: Batch, layer: int, h: Tensor, **options: Any) -> Any:
        calls.append((layer, self.of))
        return shuffle(self, layer, h, **options)

    monkeypatch.setattr(Batch, "shuffle", counted)
    batch = _batch()
    model(batch.x_dict, batch.edge_index_dict)
    assert sorted(calls) == sorted((layer, name) for layer in range(2) for name in COUNTS)


class _Scaled(Module):
    """Calls a layer on rows that nobody keeps: the next ones are likely to get their place in memory, and their id."""

    def __init__(self) -> None:
        super().__init__()
        self.cites = SAGEConv(7, 4)
        self.cited_by = SAGEConv(7, 4)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Tensor:
        out = self.cites(x_dict["paper"] * 2, edge_index_dict[CITES])
        return out + self.cited_by(x_dict["paper"] * 3, edge_index_dict[CITED_BY])  # type: ignore[no-any-return]


def test_rows_that_are_gone_are_not_mistaken_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 9: the cache of mixed rows holds the tensors, so that no other tensor gets their id."""
    shuffle = Batch.shuffle
    seen: list[weakref.ref[Tensor]] = []
    held: list[bool] = []

    def copied(self: Batch, layer: int, h: Tensor, **options: Any) -> Any:
        """As on several ranks: mixed rows are another tensor, which does not keep the local rows."""
        held.append(all(ref() is not None for ref in seen))
        seen.append(weakref.ref(h))
        return tuple(rows.clone() for rows in shuffle(self, layer, h, **options))

    data = make_data()
    model = _wrap(_Scaled())
    monkeypatch.setattr(Batch, "shuffle", copied)
    batch = _batch({relation: [-1] for relation in RELATIONS})
    with torch.no_grad():  # autograd would keep the rows
        out = model(batch.x_dict, batch.edge_index_dict)
        wanted = model(data.x_dict, data.edge_index_dict)[batch.n_id_dict["paper"][: batch.num_targets]]
    assert held == [True, True]
    assert float((out - wanted).abs().max()) < 1e-12


def test_sizes_of_minus_one_come_from_the_graph() -> None:
    """Trap 12: to_hetero needs them; wrapping leaves torch's generator as it was."""
    torch.manual_seed(5)
    model = make_model("to_hetero")
    before = torch.get_rng_state()
    _wrap(model)
    assert torch.equal(before, torch.get_rng_state())
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["conv1.author__writes__paper.lin_l.weight"] == (8, WIDTHS["author"])
    assert shapes["conv1.author__writes__paper.lin_r.weight"] == (8, WIDTHS["paper"])
    with pytest.raises(InputError, match="its size is not known yet"):
        parallelize(SAGEConv(-1, 4), solo_mesh())
    wide = _wrap(make_model("to_hetero"), num_features=dict.fromkeys(COUNTS, 11))
    assert next(wide.parameters()).shape[1] == 11


def test_rgcn_keeps_the_promotion_of_pyg() -> None:
    """Trap 11: RGCNConv starts from zeros of torch's default type; float64 rows stay float64, as in PyG."""
    model = _wrap(make_model("rgcn"))
    assert run_model(model, _batch()).dtype == torch.float64


def test_a_cast_batch_trains() -> None:
    """Trap 8: the rows of a batch are cast with it, and a copy of x_dict is as good."""
    model = parallelize(make_model("sage").float(), solo_mesh(), graph=make_store(2)).eval()
    batch = _batch().cast(torch.float32)
    out = run_model(model, batch)
    copied = model({name: x.clone() for name, x in batch.x_dict.items()}, batch.edge_index_dict)
    assert out.dtype == torch.float32 and torch.equal(out, copied)


class _OneWay(Module):
    """Authors are sources of the second layer, but no layer computes them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = HeteroConv({WRITES: SAGEConv((5, 7), 8), CITES: SAGEConv(7, 8)})
        self.second = HeteroConv({WRITES: SAGEConv((8, 8), 4), CITES: SAGEConv(8, 4)})

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Tensor:
        return self.second(self.first(x_dict, edge_index_dict), edge_index_dict)["paper"]  # type: ignore[no-any-return]


class _Conv(Module):
    """One layer of one relation."""

    def __init__(self, conv: Module, relation: tuple[str, str, str] = CITES) -> None:
        super().__init__()
        self.conv = HeteroConv({relation: conv})
        self.relation = relation

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Tensor:
        return self.conv(x_dict, edge_index_dict)[self.relation[2]]  # type: ignore[no-any-return]


class _Wrong(Module):
    """Calls a layer in its own way."""

    def __init__(self, call: Callable[[Any, dict[str, Tensor], dict[Any, Any]], Tensor]) -> None:
        super().__init__()
        self.conv = SAGEConv((-1, -1), 4)
        self.call = call

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Tensor:
        return self.call(self.conv, x_dict, edge_index_dict)


def _loops_added_late() -> Module:
    model = _Conv(GATConv((5, 7), 4, add_self_loops=False), WRITES)
    next(iter(model.conv.convs.values())).add_self_loops = True  # HeteroConv refuses it when it is made
    return model


class _Normed(Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = LayerNorm(7)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Tensor:
        return self.norm(x_dict["paper"])  # type: ignore[no-any-return]


class _MixesRows(_Conv):
    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[Any, Any]) -> Tensor:
        out = super().forward(x_dict, edge_index_dict)
        return out + out.sum(0)


REFUSED: dict[str, tuple[Callable[[], Module], str]] = {
    "one way": (_OneWay, "rows of author, which no layer below computes.*add a relation into author.*'writes'"),
    "gcn": (lambda: _Conv(GCNConv(7, 4, add_self_loops=False)), "degrees of one relation"),
    "gcn pair": (lambda: _Conv(GCNConv(7, 4, add_self_loops=False, normalize=False), WRITES), "one tensor of rows"),
    "loops": (_loops_added_late, "add_self_loops=False"),
    "han": (lambda: HANConv(WIDTHS, 4, make_data().metadata()), "averages over all vertices of a type"),
    "graph norm": (_Normed, "mode='graph'"),
    "one tensor": (lambda: _Wrong(lambda conv, x, e: conv(x["author"], e[WRITES])), "a pair of tensors"),
    "other type": (
        lambda: _Wrong(lambda conv, x, e: conv((x["paper"], x["paper"]), e[WRITES])),
        "rows of one frontier",
    ),
    "mixes": (lambda: _MixesRows(GraphConv(7, 4)), "depend on its neighbourhood only"),
}


@pytest.mark.filterwarnings("ignore:There exist node types")  # PyG's, which becomes our error one layer later
@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_exact_are_refused(name: str) -> None:
    make, reason = REFUSED[name]
    with pytest.raises(InputError, match=f"(?s){reason}"):
        _wrap(make())


def test_layers_with_types_need_the_graph() -> None:
    with pytest.raises(InputError, match="graph=graph"):
        parallelize(RGCNConv(4, 4, 2), solo_mesh())
    with pytest.raises(InputError, match="one number, without types"):
        parallelize(SAGEConv(4, 4), solo_mesh(), num_features={"paper": 4})
    with pytest.raises(InputError, match="numbers by vertex type"):
        _wrap(make_model("sage"), num_features=4)


class _Plain(Module):
    """Takes fused rows, as models for ``to_homogeneous`` data do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = RGCNConv(3, 4, 1)

    def forward(self, x: Tensor, edge_index: Any, edge_type: Any) -> Tensor:
        return self.conv(x, edge_index, edge_type)  # type: ignore[no-any-return]


def _one_type() -> MemoryStore:
    rng = torch.Generator().manual_seed(0)
    src, dst = torch.randint(0, 40, (2, 200), generator=rng).numpy()
    x = torch.rand(40, 3, generator=rng, dtype=torch.float64).numpy()
    parts = (torch.arange(40) % 3).numpy()
    y = (torch.arange(40) % 4).numpy()
    arrays: dict[str, Any] = {"features/v/x": (x, "float64"), "y/v": (y, "int64")}
    return typed_store({"v": 40}, {("v", "to", "v"): (src, dst)}, {"v": parts}, arrays, {})


@pytest.mark.parametrize("make", [_Plain, lambda: _Conv(SAGEConv(3, 4), ("v", "to", "v"))])
def test_one_type_and_one_relation(make: Callable[[], Module]) -> None:
    """Fused rows and rows of the type are then the same."""
    store = _one_type()
    model = parallelize(make().double(), solo_mesh(), graph=store)
    batch = NeighborLoader(store, [2], ("v", None), batch_size=10).make_batch(0, 0)
    assert isinstance(batch, TypedBatch)
    plain = isinstance(model, _Plain)
    out = model(batch.fused_x, batch.edge_index, batch.edge_type) if plain else run_model_of(model, batch)
    loss = batch.mean(F.cross_entropy(out, batch.y, reduction="none"))
    loss.backward()
    assert forward_plan_of(model).depth == 1 and torch.isfinite(loss)


def test_toy_batches_are_as_deep_as_the_model_however_many_relations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the relations of a layer are parallel."""
    depths = []
    make = TypedExample.batch

    def recorded(self: TypedExample, num_layers: int) -> Any:
        depths.append(num_layers)
        return make(self, num_layers)

    monkeypatch.setattr(TypedExample, "batch", recorded)
    relations = [("a", f"r{number}", "b") for number in range(20)] + [("b", "back", "a")]
    ids = torch.arange(4).numpy()
    arrays: dict[str, Any] = {f"features/{name}/x": (torch.rand(4, 2).double().numpy(), "float64") for name in "ab"}
    store = typed_store(
        dict.fromkeys("ab", 4), dict.fromkeys(relations, (ids, ids)), dict.fromkeys("ab", 0 * ids), arrays, {}
    )
    model = HeteroConv({relation: SAGEConv((2, 2), 2) for relation in relations}).double()
    assert forward_plan_of(parallelize(model, solo_mesh(), graph=store)).depth == 1
    assert depths == [2]
    deep = forward_plan_of(_wrap(make_model("deep")))
    assert deep.depth == 3 and depths == [2, 2, 4]


class _Embedded(Module):
    """Authors have an embedding in place of features."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Embedding(5, 3)
        self.conv = HeteroConv({("author", "writes", "paper"): SAGEConv((3, 4), 2), CITES: SAGEConv(4, 2)})

    def forward(self, batch: TypedBatch) -> Tensor:
        x_dict = {**batch.x_dict, "author": self.rows(batch.n_id_dict["author"])}
        return self.conv(x_dict, batch.edge_index_dict)["paper"]  # type: ignore[no-any-return]


def _few_authors() -> MemoryStore:
    rng = torch.Generator().manual_seed(0)
    papers = torch.randint(0, 20, (2, 60), generator=rng).numpy()
    arrays: dict[str, Any] = {"features/paper/x": (torch.rand(20, 4, generator=rng).double().numpy(), "float64")}
    return typed_store(
        {"author": 5, "paper": 20},
        {WRITES: (papers[0] % 5, papers[1]), CITES: (papers[0], papers[1])},
        {"author": papers[0][:5] % 2, "paper": papers[0][:20] % 2},
        arrays,
        {},
    )


@pytest.mark.filterwarnings("ignore:There exist node types")
def test_an_embedding_has_a_row_for_every_vertex_of_the_graph_only() -> None:
    """Ids of toy batches are below the number of vertices, however few there are."""
    store = _few_authors()
    model = parallelize(_Embedded().double(), solo_mesh(), graph=store)
    batch = NeighborLoader(store, [-1], ("paper", None), batch_size=20).make_batch(0, 0)
    batch.mean(model(batch).sum(1)).backward()
    assert model.rows.weight.grad is not None and bool((model.rows.weight.grad != 0).all())


def test_batch_norm_of_a_type_that_a_mini_batch_does_not_reach() -> None:
    """As in torch: no rows leave the running statistics as they are."""
    model = _wrap(make_model("norm"))
    fanouts = {relation: [0, 2] if relation[0] == "author" else [2, 2] for relation in RELATIONS}
    batch = _batch(fanouts)
    batch.mean(run_model(model, batch).sum(1)).backward()
    norms = dict(model.named_modules())
    author, paper = norms["norms.author"], norms["norms.paper"]
    assert torch.equal(author.running_mean, torch.zeros(8).double()) and torch.equal(author.running_var, torch.ones(8))
    assert bool((paper.running_mean != 0).all()) and author.weight.grad is not None
    assert not author.weight.grad.any()


def run_model_of(model: Module, batch: TypedBatch) -> Tensor:
    out: Tensor = model(batch.x_dict, batch.edge_index_dict)
    return out


@pytest.mark.parametrize("kind", ["sage", "to_hetero", "rgcn"])
def test_verify_and_trainer_take_typed_loaders(kind: str) -> None:
    store = make_store(3)

    def loss(out: Any, y: Tensor) -> Tensor:
        return F.cross_entropy(out["paper"] if isinstance(out, dict) else out, y, reduction="none")

    found = gsplit.verify(make_model(kind), store, FANOUTS, ("paper", "train"), batch_size=20, loss_fn=loss, steps=2)
    assert found.ok and found.largest_gradient > 0
    model = _wrap(make_model(kind))
    before = copy.deepcopy(model.state_dict())
    loader = NeighborLoader(store, FANOUTS, ("paper", "train"), batch_size=20)
    trainer = gsplit.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss_fn=loss)
    assert len(trainer.train_epoch()) == len(loader)
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())
