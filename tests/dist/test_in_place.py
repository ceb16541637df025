"""Input rows that ranks of one host read in place: the bits of an exchange, without one."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from recorded_calls import record_calls
from torch import Tensor
from torch_geometric.nn import SAGEConv

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.features.in_place import InPlaceRows
from gsplit.store.build import build_store
from gsplit.store.feature_types import write_with_features
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.store.reader import Store
from gsplit.store.shard import host_range, write_shard
from gsplit_bench.ranks import run_ranks

HIDDEN = 8


@dataclass(frozen=True)
class Case:
    """A loader and a model. ``first``: what the model does with ``batch.x`` before its first layer.

    ``prints_on``, ``caches_on``: the rank that prints ``batch.x``, and the rank with a cache.
    """

    strategy: str = "split"
    first: str = ""
    prefetch: int = 0
    targets: tuple[int, ...] | None = None
    prints_on: int | None = None
    caches_on: int | None = None


class Net(torch.nn.Module):
    """Two SAGE layers, perhaps behind an encoder or a dropout."""

    def __init__(self, width: int, num_classes: int, first: str) -> None:
        super().__init__()
        self.first = first
        self.encoder = torch.nn.Linear(width, width)
        self.convs = torch.nn.ModuleList([SAGEConv(width, HIDDEN), SAGEConv(HIDDEN, num_classes)])

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        if self.first == "encoder":
            x = self.encoder(x).relu()
        if self.first == "dropout":
            x = F.dropout(x, 0.4, self.training)
        out: Tensor = self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)
        return out


@dataclass(frozen=True)
class Step:
    """What a step has computed and counted; ``loaded``: before the model was called.

    ``exchanged``: the collectives of input rows.
    """

    loss: float
    gradients: list[float]
    num_mixed: int
    exchanged: list[str]
    loaded: dict[str, int]
    counts: dict[str, int]

    @property
    def result(self) -> tuple[float, list[float]]:
        return self.loss, self.gradients


def train_steps(mesh: Mesh, paths: list[str], cases: list[Case]) -> list[list[Step]]:
    """Per case: the steps of an epoch, without an optimizer; on this rank's own file if there are several."""
    graph = gsplit.open(paths[mesh.rank % len(paths)])
    return [_train(mesh, graph, case) for case in cases]


def _train(mesh: Mesh, graph: Any, case: Case) -> list[Step]:
    nodes = "train" if case.targets is None else torch.tensor(case.targets)
    loader = gsplit.NeighborLoader(
        graph,
        [3, 3],
        nodes,
        batch_size=40,
        mesh=mesh,
        seed=2,
        strategy=case.strategy,
        prefetch=case.prefetch,
        cache="1MB" if case.caches_on == mesh.rank else 0,
    )
    calls = record_calls(loader._makers[0].step_loader._comm)
    torch.manual_seed(0)
    model = gsplit.parallelize(Net(graph.num_features, graph.num_classes, case.first), mesh)
    steps = []
    for batch in loader:
        loaded = dict(batch.telemetry.counts)
        assert isinstance(batch.x, InPlaceRows) == ("rows_in_place" in loaded)
        if case.prints_on == mesh.rank:
            assert "tensor" in str(batch.x)
        for parameter in model.parameters():
            parameter.grad = None
        x = batch.cast(torch.float32).x
        loss = batch.mean(F.cross_entropy(model(x, batch.edge_index), batch.y, reduction="none"))
        loss.backward()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        gradients = torch.cat([grad.view(-1) for grad in found]).tolist()
        exchanged = [str(call) for call in calls if call.name == "exchange features"]
        counts = dict(batch.telemetry.counts)
        steps.append(Step(float(loss.detach()), gradients, len(batch.x), exchanged, loaded, counts))
        calls.clear()
    return steps


def infer_rows(mesh: Mesh, path: str, first: str) -> tuple[list[Any], int]:
    """The outputs of a model for all vertices, and the number of exchanges of rows."""
    graph = gsplit.open(path)
    calls = record_calls(mesh.loading_groups.inputs)
    torch.manual_seed(0)
    model = gsplit.parallelize(Net(graph.num_features, graph.num_classes, first), mesh)
    out = Path(path).with_name(f"{first}-{mesh.size}-{mesh.replica_shares_host}.npy")
    rows = gsplit.infer(model, graph, out).tolist()
    return rows, len([call for call in calls if call.name == "exchange features"])


FEATURES = 5
on_ranks = pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.weekly)])
STRATEGIES = ["split", "hybrid(1)", "data_cached", "data"]
CASES = [
    *(Case(strategy) for strategy in STRATEGIES),
    *(Case(strategy, targets=(5,)) for strategy in STRATEGIES),  # a mini-batch of one target: ranks without any
    Case(first="encoder"),
    Case(first="dropout"),
    Case(prints_on=0),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("in_place")
    planted = PlantedGraph(600, 4000, num_communities=6, num_features=FEATURES, num_classes=4)
    plain = build_store(synthetic_source(planted), folder / "g.gsplit")
    return gsplit.partition(plain, folder / "p.gsplit", 3, [3, 3], batch_size=40, solver="restream", epochs=1)


@on_ranks
def test_the_bits_are_those_of_an_exchange(num_ranks: int, store: Store) -> None:
    ahead = [replace(case, prefetch=2) for case in CASES]
    near = run_ranks(train_steps, num_ranks, [str(store.path)], [*CASES, *ahead])
    far = run_ranks(train_steps, num_ranks, [str(store.path)], CASES, shared_memory=False)
    for ours, theirs in zip(near, far, strict=True):
        for case, in_place, read, other in zip(CASES, ours, ours[len(CASES) :], theirs, strict=False):
            results = [step.result for step in in_place]
            assert results == [step.result for step in read] == [step.result for step in other], case
            exchanges = num_ranks > 1 and case.strategy != "data"
            assert all(bool(step.exchanged) == exchanges for step in other), case
            assert not any(step.exchanged for step in [*in_place, *read]), case
            assert all(step.loaded["rows_in_place"] == step.num_mixed for step in in_place), case
            assert all(step.loaded["rows_loaded"] == 0 for step in in_place), case
            assert all(step.loaded["rows_loaded"] == step.num_mixed for step in read), case


@pytest.mark.parametrize(("dtype", "num_bytes"), [("float16", 2), ("bfloat16", 2), ("int8", 1)])
@on_ranks
def test_compressed_rows_are_decoded_to_the_bits_of_an_exchange(
    num_ranks: int, dtype: str, num_bytes: int, store: Store, tmp_path: Path
) -> None:
    path = str(write_with_features(store, tmp_path / "c.gsplit", dtype).path)
    cases = [Case(), Case(targets=(5,)), Case(first="encoder"), Case("data_cached")]
    near = run_ranks(train_steps, num_ranks, [path], [*cases, Case(prefetch=2)])
    far = run_ranks(train_steps, num_ranks, [path], cases, shared_memory=False)
    for ours, theirs in zip(near, far, strict=True):
        assert [step.result for step in ours[-1]] == [step.result for step in ours[0]]
        for case, steps, others in zip(cases, ours, theirs, strict=False):
            assert [step.result for step in steps] == [step.result for step in others], case
            assert all(bool(step.exchanged) == (num_ranks > 1) for step in others), case
            assert not any(step.exchanged for step in steps), case
            for step in steps:
                assert step.loaded["rows_in_place"] == step.num_mixed
                assert step.counts["rows_loaded"] == (step.num_mixed if case.first else 0), case
                assert step.counts["bytes_loaded"] == num_bytes * FEATURES * step.counts["rows_loaded"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@on_ranks
def test_inference_reads_the_rows_of_the_first_layer_in_place(
    num_ranks: int, dtype: str, store: Store, tmp_path: Path
) -> None:
    path = str(write_with_features(store, tmp_path / "c.gsplit", dtype).path)
    near = run_ranks(infer_rows, num_ranks, path, "")
    far = run_ranks(infer_rows, num_ranks, path, "", shared_memory=False)
    encoded = run_ranks(infer_rows, num_ranks, path, "encoder")  # no layer reads stored rows
    for (rows, exchanges), (others, all_exchanges), (_, of_encoded) in zip(near, far, encoded, strict=True):
        assert rows == others
        assert (exchanges, all_exchanges, of_encoded) == (1, 1 if num_ranks == 1 else 2, 2)


@on_ranks
def test_telemetry_counts_what_happened(num_ranks: int, store: Store) -> None:
    cases = [Case(), Case("data_cached"), Case(first="encoder"), Case(prints_on=0)]
    near = run_ranks(train_steps, num_ranks, [str(store.path)], cases)
    far = run_ranks(train_steps, num_ranks, [str(store.path)], cases, shared_memory=False)
    alone = run_ranks(train_steps, 1, [str(store.path)], [Case()])[0][0]
    for rank, (ours, theirs) in enumerate(zip(near, far, strict=True)):
        for case, steps, others in zip(cases, ours, theirs, strict=True):
            for step, other in zip(steps, others, strict=True):
                assert step.counts["rows_in_place"] + step.counts["rows_loaded"] == step.num_mixed
                assert step.counts["bytes_loaded"] == 4 * FEATURES * step.counts["rows_loaded"]
                if case.first or case.prints_on == rank:
                    assert step.counts["rows_loaded"] == step.num_mixed
                assert step.counts["input_rows"] == other.counts["input_rows"] == other.counts["rows_loaded"]
                assert step.counts["collectives"] == other.counts["collectives"] - 1
                if case.strategy == "split":
                    received = other.num_mixed - other.counts["input_rows"]
                    assert step.counts["rows_received"] == other.counts["rows_received"] - received
    for number, step in enumerate(alone):  # each input vertex of the mini-batch is that of one rank
        for place in range(2):
            assert sum(rank[place][number].counts["input_rows"] for rank in near) == step.counts["input_rows"]


def test_ranks_that_do_not_hold_all_rows_exchange_them(store: Store, tmp_path: Path) -> None:
    """Ranks with shards, and ranks one of which has a cache, although they are on one host."""
    shards = [str(tmp_path / f"shard-{rank}.gsplit") for rank in range(2)]
    for rank, path in enumerate(shards):
        write_shard(store, Path(path), *host_range(store, rank, 2))
    whole = run_ranks(train_steps, 2, [str(store.path)], [Case(), Case(caches_on=1)])
    cut = run_ranks(train_steps, 2, shards, [Case()])
    for (in_place, cached), (sharded,) in zip(whole, cut, strict=True):
        results = [step.result for step in in_place]
        assert results == [step.result for step in cached] == [step.result for step in sharded]
        assert all(step.exchanged and "rows_in_place" not in step.counts for step in [*cached, *sharded])


def test_replicas_read_in_place(store: Store) -> None:
    (one,) = run_ranks(train_steps, 1, [str(store.path)], [Case()])
    for (steps,) in run_ranks(train_steps, 4, [str(store.path)], [Case()], replicas=2):
        assert all(step.loaded["rows_in_place"] == step.num_mixed and not step.exchanged for step in steps)
        for step, want in zip(steps, one[0], strict=True):
            assert step.loss == pytest.approx(want.loss, abs=1e-5)
