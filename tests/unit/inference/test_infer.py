"""Exact inference on one process: every vertex once, with all its neighbours, however the work is cut."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_graph import PLAIN_MODELS, VERTICES, WIDTH, Case, make_model, small_store
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE, SAGEConv

from gsplit import InputError, NeighborLoader, evaluate, evaluate_links, infer, parallelize, verify
from gsplit.distributed.comm.mesh import Mesh, solo_mesh
from gsplit.graph.ownership import Ownership
from gsplit.inference import closure
from gsplit.inference import infer as infer_module
from gsplit.inference.layerwise import flat_mesh, inference_ownership
from gsplit.minibatch.batch import Batch
from gsplit.store.in_memory import MemoryStore


def _full(store: MemoryStore) -> tuple[torch.Tensor, torch.Tensor]:
    """The store's graph in original numbering: features and edges."""
    graph, original = store.graph, store.original_ids()
    dst = original[np.repeat(np.arange(graph.num_vertices), graph.in_degrees())]
    x = torch.empty(VERTICES, WIDTH, dtype=torch.float64)
    x[original] = torch.from_numpy(store.stored_array("features/x")).double()
    return x, torch.from_numpy(np.stack([original[graph.indices], dst]))


@pytest.mark.parametrize("chunks", [(1, 1), (50, 17), (1 << 17, 1 << 15)])
@pytest.mark.parametrize("kind", PLAIN_MODELS)
def test_it_is_the_full_graph_forward(kind: str, chunks: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closure, "CHUNK_EDGES", chunks[0])
    monkeypatch.setattr(closure, "CHUNK_ROWS", chunks[1])
    case = Case(kind, "split", "random", 0.5, "cat" if chunks[0] == 50 else None, "batch_norm")
    store, _ = small_store("random", 1)
    model, plain = parallelize(make_model(case), solo_mesh()), make_model(case).eval()
    x, edges = _full(store)
    want = plain(x, edges)
    got = infer(model, store, edge_weight=None)
    assert np.abs(got - want.detach().numpy()).max() < 1e-11
    assert model.training  # left as it was


def test_results_go_to_a_file_and_nothing_is_left_behind(tmp_path: Path) -> None:
    store, _ = small_store("random", 1)
    model = parallelize(GraphSAGE(WIDTH, 8, 2, 3).double(), solo_mesh())
    (tmp_path / "scratch").mkdir()
    seen: list[tuple[str, int, int | None]] = []
    got = infer(
        model,
        store,
        tmp_path / "out.npy",
        workspace=tmp_path / "scratch",
        progress=lambda *state: seen.append(state),
    )
    assert np.array_equal(np.load(tmp_path / "out.npy"), infer(model, store))
    assert got.shape == (VERTICES, 3)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["out.npy", "scratch"]  # maps have no names
    assert seen[-1] == ("layers", 2, 2)


def test_evaluation_counts_every_target_once() -> None:
    store, _ = small_store("random", 1)
    model = parallelize(make_model(Case("gat", "split", "random", 0.5, None, None)), solo_mesh())
    x, edges = _full(store)
    guess = make_model(Case("gat", "split", "random", 0.5, None, None)).eval()(x, edges).argmax(1).numpy()
    labels = np.empty(VERTICES, np.int64)
    labels[store.original_ids()] = store.stored_array("y")
    targets = store.original_ids()[store.stored_array("targets/train")]
    assert evaluate(model, store, ["train"]) == {"train": pytest.approx(float((guess == labels)[targets].mean()))}


def test_replicas_are_flattened_without_moving_sampling_to_the_device() -> None:
    mesh = replace(solo_mesh("cuda:0", "cpu"), num_replicas=2)
    flat = flat_mesh(mesh)
    assert (flat.device, flat.sample_device, flat.num_replicas) == (mesh.device, torch.device("cpu"), 1)
    assert flat.inputs is mesh.world
    assert flat_mesh(mesh).loading is flat.loading  # not one more process group for every evaluation
    on_device = replace(solo_mesh("cuda:0"), num_replicas=2)
    assert flat_mesh(on_device).sample_device == on_device.device
    assert flat_mesh(on_device).loading.device.type == "cpu"  # ids cross through the host


@pytest.mark.parametrize("num_ranks, cuts", [(2, (0, 10, 90)), (3, (0, 30, 60, 90)), (4, (0, 22, 45, 67, 90))])
def test_ranks_own_the_parts_or_equal_ranges_where_parts_are_fewer(num_ranks: int, cuts: tuple[int, ...]) -> None:
    whole, _ = small_store("random", 1)
    store = MemoryStore(whole.graph, [0, 10, 90], whole.arrays, whole.dtypes)
    mesh = solo_mesh()
    mesh.shuffles.size = num_ranks
    assert inference_ownership(store, mesh, None).boundaries == cuts
    given = Ownership((0, 1, *[90] * (num_ranks - 1)))
    assert inference_ownership(store, mesh, given) is given


def test_a_data_object_is_a_graph_too() -> None:
    torch.manual_seed(0)
    data = Data(
        x=torch.randn(30, WIDTH),
        y=torch.randint(0, 3, (30,)),
        edge_index=torch.randint(0, 30, (2, 90)),
        val_mask=torch.arange(30) % 3 == 0,
    )
    model = parallelize(GraphSAGE(WIDTH, 8, 2, 3), solo_mesh())
    want = model(data.x, data.edge_index).detach()
    assert np.abs(infer(model, data) - want.numpy()).max() < 1e-5
    right = (want.argmax(1) == data.y)[data.val_mask].double().mean()
    assert evaluate(model, data, ["val"]) == {"val": pytest.approx(float(right))}
    assert verify(model, data, [2, 2], "val", batch_size=4, steps=2).ok


def test_targets_without_a_label_are_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    store, _ = small_store("random", 1)
    model = parallelize(make_model(Case("sage", "split", "random", 0.0, None, None)), solo_mesh())
    labels = infer(model, store).argmax(1)[store.original_ids()]  # all right
    targets = store.stored_array("targets/train")
    labels[targets[::2]] = -1
    some = MemoryStore(store.graph, store.part_boundaries, {**store.arrays, "y": labels}, store.dtypes)
    assert evaluate(model, some, ["train"]) == {"train": 1.0}
    assert f"targets/train: {targets[::2].size} without a label are left out" in caplog.text
    none = MemoryStore(store.graph, store.part_boundaries, {**store.arrays, "y": 0 * labels - 1}, store.dtypes)
    with pytest.raises(InputError, match="targets/train: expected at least one label"):
        evaluate(model, none, ["train"])
    unknown = MemoryStore(
        store.graph, store.part_boundaries, {**some.arrays, "targets/test": targets[::2]}, store.dtypes
    )
    assert evaluate(model, unknown, ["train", "test"]) == {"train": 1.0}  # a test set that is to be predicted


class Embedded(torch.nn.Module):
    """Learns a row per vertex, and takes the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv = torch.nn.Embedding(VERTICES, 4), SAGEConv(4, 3)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.conv(self.table(batch.mixed_ids(0)), batch.edge_index)  # type: ignore[no-any-return]


def test_an_embedding_of_the_vertices() -> None:
    store, _ = small_store("random", 1)
    model = parallelize(Embedded().double(), solo_mesh(), num_features=WIDTH)
    _, edges = _full(store)
    want = model.conv(model.table.weight, edges).detach().numpy()
    assert np.abs(infer(model, store) - want).max() < 1e-12


class InPlace(torch.nn.Module):
    """Writes to its input before the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.conv = torch.nn.ReLU(inplace=True), GraphSAGE(WIDTH, 8, 1, 3)

    def forward(self, x: torch.Tensor, edge_index: Any) -> torch.Tensor:
        return self.conv(self.act(x), edge_index)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_features_of_another_type_and_inputs_written_to(dtype: str) -> None:
    store, _ = small_store("random", 1)
    arrays = {**store.arrays, "features/x": store.stored_array("features/x").astype(dtype)}
    half = MemoryStore(store.graph, store.part_boundaries, arrays, {**store.dtypes, "features/x": dtype})
    torch.manual_seed(0)
    model = InPlace().float()
    rows, edges = _full(half)
    want = model(rows.float(), edges).detach().numpy()
    assert np.abs(infer(parallelize(model, solo_mesh()), half) - want).max() < 1e-5


def _half_store() -> MemoryStore:
    """Features in half precision: ``x``, and ``z``, its negative."""
    store, _ = small_store("random", 1)
    x = store.stored_array("features/x").astype("float16")
    arrays = {**store.arrays, "features/x": x, "features/z": -x}
    return MemoryStore(
        store.graph, store.part_boundaries, arrays, store.dtypes | {"features/x": "float16", "features/z": "float16"}
    )


def _in_place(x: Tensor) -> Tensor:
    return x.sub_(1).float()


OWN: list[Callable[[Batch], Tensor]] = [
    lambda batch: batch.x.float(),
    lambda batch: batch.x.to(torch.float32),
    lambda batch: batch.x.to(dtype=torch.float32),
    lambda batch: batch.cast(torch.float32).x,
    lambda batch: batch.x.clone().float(),
]
OTHER: list[Callable[[Batch], Tensor]] = [
    lambda batch: -batch.x.float(),
    lambda batch: (-batch.x).to(torch.float32),
    lambda batch: -batch.cast(torch.float32).x,
    lambda batch: _in_place(batch.x),
    lambda batch: torch.cat([batch.x[:1] + 1, batch.x[1:]]).float(),
    lambda batch: batch.x.float().requires_grad_(),
]


def _trained(call: Callable[[Module, Batch], Tensor]) -> Module:
    torch.manual_seed(0)
    model: Module = parallelize(GraphSAGE(WIDTH, 8, 2, 3), solo_mesh(), num_features=WIDTH)
    for batch in NeighborLoader(_half_store(), [5, 5], "train", batch_size=30, mesh=solo_mesh()):
        call(model, batch).sum()
    return model


@pytest.mark.parametrize("rows", OWN)
def test_rows_of_the_batch_cast_by_hand_are_its_rows(rows: Callable[[Batch], Tensor]) -> None:
    model = _trained(lambda model, batch: model(rows(batch), batch.edge_index))
    torch.manual_seed(0)
    never_called = parallelize(GraphSAGE(WIDTH, 8, 2, 3), solo_mesh(), num_features=WIDTH)
    assert np.array_equal(infer(model, _half_store()), infer(never_called, _half_store()))


@pytest.mark.parametrize("rows", OTHER)
def test_a_model_trained_on_computed_rows_is_not_evaluated_on_stored_ones(rows: Callable[[Batch], Tensor]) -> None:
    model = _trained(lambda model, batch: model(rows(batch), batch.edge_index))
    store = _half_store()
    acts: list[Callable[[], object]] = [
        lambda: infer(model, store),
        lambda: evaluate(model, store, ["train"]),
        lambda: evaluate_links(model, store, torch.tensor([[0, 1], [2, 3]])),
        lambda: verify(model, store, [5, 5], "train"),
        lambda: infer(model, store, features=["x"]),
    ]
    for act in acts:
        with pytest.raises(InputError, match="put the step .* into a module inside the model, or give features="):
            act()
    torch.manual_seed(0)
    on_x = parallelize(GraphSAGE(WIDTH, 8, 2, 3), solo_mesh(), num_features=WIDTH)
    assert np.array_equal(infer(model, store, features="z"), infer(on_x, store, features="z"))


def test_rows_that_were_written_to_before_a_cast_are_not_those_of_the_store() -> None:
    def call(model: Module, batch: Batch) -> Tensor:
        batch.x.sub_(1)
        cast = batch.cast(torch.float32)
        return model(cast.x, cast.edge_index)  # type: ignore[no-any-return]

    with pytest.raises(InputError, match="put the step .* into a module inside the model"):
        infer(_trained(call), _half_store())


ARGUMENTS: list[Callable[[Batch], tuple[Any, ...]]] = [
    lambda batch: (-batch.x.float(), batch.edge_index, batch.x.float()),
    lambda batch: (batch.x.float(), batch.edge_index, -batch.x.float()),
    lambda batch: (batch.x.float(), batch.edge_index, [batch.x]),
    lambda batch: (batch.x.float(), batch.edge_index, batch.y),
    lambda batch: (batch.x.float(), batch.edge_index, {"y": batch.y}),
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_other_tensors_cannot_be_given_again(arguments: Callable[[Batch], tuple[Any, ...]]) -> None:
    class Taking(GraphSAGE):  # type: ignore[misc]
        def forward(self, x: Tensor, edge_index: Any, more: Any = None) -> Any:
            return super().forward(x, edge_index)

    model = parallelize(Taking(WIDTH, 8, 2, 3), solo_mesh(), num_features=WIDTH)
    for batch in NeighborLoader(_half_store(), [5, 5], "train", batch_size=30, mesh=solo_mesh()):
        model(*arguments(batch))
    with pytest.raises(InputError, match=r"put the step .* into a module inside the model\."):
        infer(model, _half_store(), features="z")


def test_a_hook_that_changes_the_rows_is_part_of_the_model() -> None:
    models = [GraphSAGE(WIDTH, 8, 2, 3), GraphSAGE(WIDTH, 8, 2, 3)]
    models[1].load_state_dict(models[0].state_dict())
    models[0].register_forward_pre_hook(lambda module, args: (-args[0], *args[1:]))
    found = []
    for model, name in zip(models, ("x", "z"), strict=True):
        parallelize(model, solo_mesh(), num_features=WIDTH)
        for batch in NeighborLoader(_half_store(), [5, 5], "train", batch_size=30, mesh=solo_mesh()):
            model(batch.cast(torch.float32).x, batch.edge_index)
        found.append(infer(model, _half_store(), features=name))
    assert np.array_equal(found[0], found[1])


def test_what_it_cannot_do_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = small_store("random", 1)
    plain = GraphSAGE(WIDTH, 8, 2, 3).double()
    with pytest.raises(
        InputError, match=r"a wrapped model .got a plain GraphSAGE.*gsplit.parallelize\(model, mesh\) first"
    ):
        infer(plain, store)
    mesh, two = solo_mesh(), solo_mesh()
    two.world.size = 2
    ranks = Mesh(mesh.device, mesh.shuffles, mesh.loading, mesh.inputs, mesh.gradients, two.world, two.control)
    parallelize(plain, mesh)
    monkeypatch.setattr(infer_module, "mesh_of", lambda model: ranks)
    with pytest.raises(InputError, match="out: expected a file, for 2 ranks"):
        infer(plain, store)
    monkeypatch.undo()
    floats = MemoryStore(
        store.graph, store.part_boundaries, {**store.arrays, "y": np.zeros((VERTICES, 2))}, store.dtypes
    )
    with pytest.raises(InputError, match=r"output: expected .2. values per vertex, as y has.*got .3"):
        evaluate(plain, floats, ["train"])
    bits = MemoryStore(store.graph, store.part_boundaries, store.arrays, store.dtypes | {"y": "bfloat16"})
    with pytest.raises(InputError, match="y: expected integers or floats of 16, 32 or 64 bits .got bfloat16"):
        evaluate(plain, bits, ["train"])

    (tmp_path / "f.npy").mkdir()
    for out, got in ((tmp_path / "no" / "o.npy", "a folder that does not exist"), (tmp_path / "f.npy", "a folder")):
        with pytest.raises(InputError, match=f"expected a file in a folder that exists .got {got}"):
            infer(plain, store, out)
    with pytest.raises(InputError, match=r"expected a .npy file .got .csv.*use gsplit.write_predictions"):
        infer(plain, store, tmp_path / "o.csv")
    with pytest.raises(InputError, match="workspace .*no: expected a folder to write in .got no folder"):
        infer(plain, store, workspace=tmp_path / "no")
    empty = {**store.arrays, "targets/val": np.empty(0, np.int64)}
    with pytest.raises(InputError, match="targets/val: expected at least one target"):
        evaluate(plain, MemoryStore(store.graph, store.part_boundaries, empty, store.dtypes), ["val"])

    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = GraphSAGE(WIDTH, 8, 2, 3).double()

        def forward(self, x: Any, edge_index: Any) -> Any:
            return self.inner(x, edge_index), 1

    with pytest.raises(InputError, match=r"the model's output: expected a tensor .got tuple"):
        infer(parallelize(Pair(), mesh), store)
