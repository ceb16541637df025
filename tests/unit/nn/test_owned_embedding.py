"""Owned embeddings in one process: first rows, sparse gradients, files, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from embedding_programs import VERTICES, WIDTH, EmbeddingCase, make_loader, plain_store, typed_graph
from torch_geometric.nn import GraphSAGE
from typed_models import COUNTS

import gsplit
from gsplit import InputError, OwnedEmbedding
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.graph.ownership import Ownership
from gsplit.minibatch.batch import Batch
from gsplit.nn import owned_embedding


def _batch(num_parts: int = 6) -> Batch:
    case = EmbeddingCase("untyped", num_parts=num_parts)
    batch = next(iter(make_loader(case, plain_store(num_parts), solo_mesh())))
    assert isinstance(batch, Batch)
    return batch


def test_first_rows_depend_on_original_ids_only(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = OwnedEmbedding(typed_graph(1), 40, "author", seed=3).weight
    monkeypatch.setattr(owned_embedding, "_ROWS_AT_ONCE", 7)
    parted = OwnedEmbedding(typed_graph(5), 40, "author", seed=3)
    assert not np.array_equal(parted.row_ids, np.arange(COUNTS["author"]))
    assert torch.equal(parted.weight, whole[torch.from_numpy(parted.row_ids)])
    assert not torch.equal(OwnedEmbedding(typed_graph(1), 40, "author", seed=4).weight, whole)
    assert np.unique(whole.detach().numpy()).size == whole.numel()
    rows = OwnedEmbedding(plain_store(1), 300, scale=0.5, dtype=torch.float64).weight.detach()
    assert rows.abs().max() < 0.5
    assert abs(float(rows.mean())) < 0.005
    assert abs(float(rows.std()) - 0.5 / 3**0.5) < 0.003  # of 33,000 numbers


def test_only_rows_of_the_mini_batch_have_gradients_and_change() -> None:
    embedding = OwnedEmbedding(plain_store(6), WIDTH)
    assert "6 columns, vertex type None, 110 of 110 rows" in repr(embedding)
    before = embedding.weight.detach().clone()
    batch = _batch()
    assert batch.x.shape == (batch.blocks[0].num_src, 0)
    rows = embedding(batch)
    assert rows.shape == (batch.blocks[0].num_src, WIDTH)
    optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
    rows.square().sum().backward()
    assert embedding.weight.grad is not None and embedding.weight.grad.is_sparse
    read = np.isin(embedding.row_ids, batch.n_id.numpy())
    assert 0 < read.sum() < VERTICES
    assert torch.equal(embedding.weight.grad.to_dense()[read], 2 * before[read])
    optimizer.step()
    changed = (embedding.weight.detach() != before).any(1).numpy()
    assert np.array_equal(changed, read)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch's Adagrad
def test_a_saved_optimizer_continues_bit_for_bit(tmp_path: Path) -> None:
    def step(embedding: OwnedEmbedding, optimizer: torch.optim.Optimizer) -> None:
        embedding(batch).sin().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    batch = _batch()
    for make in (torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD):
        embedding = OwnedEmbedding(plain_store(6), WIDTH)
        optimizer = make(embedding.parameters(), lr=0.03)
        step(embedding, optimizer)
        embedding.save(tmp_path / "rows", optimizer)
        other = OwnedEmbedding(plain_store(6), WIDTH, seed=9)
        resumed = make(other.parameters())
        other.load(tmp_path / "rows", resumed)
        for _ in range(2):
            step(embedding, optimizer)
            step(other, resumed)
        assert torch.equal(embedding.weight, other.weight), make
    whole = OwnedEmbedding(plain_store(1), WIDTH)
    whole.load(tmp_path / "rows")  # rows are those of the original ids
    saved = np.load(tmp_path / "rows" / "weight.npy")
    assert np.array_equal(whole.weight.detach().numpy(), saved)
    assert [path.name for path in tmp_path.iterdir()] == ["rows"]


def test_other_files_are_refused(tmp_path: Path) -> None:
    embedding = OwnedEmbedding(plain_store(6), WIDTH)
    optimizer = torch.optim.SparseAdam(embedding.parameters())
    before = embedding.weight.detach().clone()
    folder = tmp_path / "rows"
    with pytest.raises(InputError, match="rows that OwnedEmbedding.save wrote"):
        embedding.load(folder)
    embedding.save(folder)
    with pytest.raises(InputError, match=r"\(got rows without the state of an optimizer\)"):
        embedding.load(folder, optimizer)
    with pytest.raises(InputError, match=r"num_columns 6 instead of 5"):
        OwnedEmbedding(plain_store(6), WIDTH - 1).load(folder)
    with pytest.raises(InputError, match=r"vertex_type None instead of author"):
        OwnedEmbedding(typed_graph(1), WIDTH, "author").load(folder)
    saved = json.loads((folder / "state.json").read_text())
    for name, value in (("arrays", ["../weight"]), ("arrays", []), ("num_rows", "many"), ("dtype", 3)):
        (folder / "state.json").write_text(json.dumps({**saved, name: value}))
        with pytest.raises(InputError, match="rows that OwnedEmbedding.save wrote"):
            embedding.load(folder)
    (folder / "state.json").write_text(json.dumps(saved))
    np.save(folder / "weight.npy", np.zeros((3, WIDTH), np.float32))
    with pytest.raises(InputError, match=r"\(got float32 \[3, 6\]\)"):
        embedding.load(folder)
    for content in (b"", b"not an array", (folder / "weight.npy").read_bytes()[:100]):
        (folder / "weight.npy").write_bytes(content)
        with pytest.raises(InputError, match=r"weight\.npy: expected rows that OwnedEmbedding\.save wrote"):
            embedding.load(folder)
    assert torch.equal(embedding.weight, before)


def test_other_uses_are_refused(tmp_path: Path) -> None:
    store = plain_store(6)
    embedding = OwnedEmbedding(store, WIDTH)
    with pytest.raises(InputError, match=r"one of paper, author, field \(got None\)"):
        OwnedEmbedding(typed_graph(1), WIDTH)
    with pytest.raises(InputError, match=r"None, for a graph without types \(got author\)"):
        OwnedEmbedding(store, WIDTH, "author")
    with pytest.raises(InputError, match=r"at least 1 column \(got 0\)"):
        OwnedEmbedding(store, 0)
    with pytest.raises(InputError, match=r"torch.float64 \(got torch.float16\)"):
        OwnedEmbedding(store, WIDTH, dtype=torch.float16)
    with pytest.raises(InputError, match=r"save or load, .* \(got state_dict of 110 of 110 rows\)"):
        embedding.state_dict()
    with pytest.raises(InputError, match=r"\(got load_state_dict of"):
        embedding.load_state_dict({"weight": embedding.weight})
    others = torch.optim.SGD([*embedding.parameters(), torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(InputError, match=r"\(got one of 2 parameters\)"):
        embedding.save(tmp_path / "rows", others)
    momentum = torch.optim.SGD(embedding.parameters(), lr=0.1, momentum=0.9)
    embedding(_batch()).sum().backward()
    momentum.step()
    with pytest.raises(InputError, match=r"dense tensors \(got a sparse momentum_buffer\).*SGD without momentum"):
        embedding.save(tmp_path / "rows", momentum)
    with_momentum = torch.optim.SparseAdam(embedding.parameters())
    with_momentum.state[embedding.weight]["other"] = torch.ones(2)
    with pytest.raises(InputError, match=r"tensors of the shape of the rows \(got \[2\]\)"):
        embedding.save(tmp_path / "rows", with_momentum)


def test_other_batches_are_refused() -> None:
    embedding = OwnedEmbedding(plain_store(6), WIDTH)
    with pytest.raises(InputError, match="one of another graph, or of another partition"):
        embedding(_batch(num_parts=1))
    with pytest.raises(InputError, match="one of another graph"):
        embedding(next(iter(make_loader(EmbeddingCase("sage"), typed_graph(6), solo_mesh()))))
    shifted = OwnedEmbedding(plain_store(6), WIDTH, ownership=Ownership((0, VERTICES)))
    assert shifted(_batch()).shape[1] == WIDTH


class _Inside(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = OwnedEmbedding(plain_store(6), WIDTH)
        self.gnn = GraphSAGE(WIDTH, 8, 2, 4)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.gnn(self.rows(batch), batch.edge_index)  # type: ignore[no-any-return]


def test_an_embedding_inside_the_model_is_refused() -> None:
    with pytest.raises(InputError, match=r"rows \(OwnedEmbedding\): .*rows of one rank.*keep it beside the model"):
        gsplit.parallelize(_Inside(), solo_mesh())


def test_rows_are_not_read_as_features_of_training() -> None:
    embedding = OwnedEmbedding(plain_store(6), WIDTH)
    loader = gsplit.NeighborLoader(plain_store(6), [3, 3], "train", batch_size=14, features=embedding)
    with pytest.raises(InputError, match=r"not trained \(got an OwnedEmbedding\).*pass embedding\(batch\)"):
        next(iter(loader))
    with pytest.raises(InputError, match=r"which the planner can count \(got features=None\)"):
        gsplit.NeighborLoader(plain_store(6), [3, 3], "train", batch_size=14, features=None, strategy="auto")
    with pytest.raises(InputError, match=r"stored features \(got features=None\)"):
        gsplit.NeighborLoader(plain_store(6), [3, 3], "train", batch_size=14, features=None, features_on_disk=True)


def test_stored_features_and_rows_are_joined() -> None:
    """A model may take both: they have the same order."""
    batch = next(iter(make_loader(EmbeddingCase("sage"), typed_graph(6), solo_mesh())))
    papers = OwnedEmbedding(typed_graph(6), 2, "paper", dtype=torch.float64)
    joined = torch.cat([batch.x_dict["paper"], papers(batch)], dim=1)
    assert joined.shape == (batch.n_id_dict["paper"].numel(), 9)
    by_id = papers.weight[np.argsort(papers.row_ids)]
    assert torch.equal(joined[:, 7:], F.embedding(batch.n_id_dict["paper"], by_id))
