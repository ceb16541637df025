"""Row mixing is found whatever the model's weights and dtype, and the check costs little memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Embedding, Linear, Module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch_geometric.nn import GraphSAGE, SAGEConv

from gsplit import InputError, parallelize
from gsplit.distributed.comm.mesh import solo_mesh
from gsplit.nn.checks.row_independence import has_tables, perturbed_copy

WIDTH, ROWS = 6, 2_000_000
MIXED = "expected every target's output to depend on its neighbourhood only"


class _CountNewBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of all tensors made inside: more than are alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = set(_storages((args, kwargs)))
        out = func(*args, **(kwargs or {}))
        self.num_bytes += sum(size for place, size in _storages(out).items() if place not in known)
        return out


def _storages(values: Any) -> dict[int, int]:
    """Bytes of the tensors' storages by address."""
    tensors = [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.layout == torch.strided]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


class Lookup(Module):
    """Adds a row of a table, by vertex id, to what a layer makes of the features."""

    def __init__(self, offset: int = 0, mix: bool = False, by_weight: bool = False) -> None:
        super().__init__()
        self.table = Embedding(ROWS, 16, padding_idx=ROWS - 1, _weight=torch.zeros(ROWS, 16))
        self.conv = SAGEConv(WIDTH, 16)
        self.offset, self.mix, self.by_weight = offset, mix, by_weight

    def forward(self, batch: Any) -> Tensor:
        h: Tensor = self.conv(batch.x, batch.edge_index)
        ids = batch.n_id[: h.size(0)] + self.offset
        rows = self.table.weight[ids] if self.by_weight else self.table(ids)
        out: Tensor = h + (rows.mean(0) if self.mix else rows)
        return out


@pytest.mark.parametrize("offset", [0, 1_900_000])
def test_an_embedding_of_all_vertices_is_not_copied(offset: int) -> None:
    model = Lookup(offset)
    with _CountNewBytes() as counter:
        parallelize(model, solo_mesh())
    assert counter.num_bytes < 0.1 * model.table.weight.nbytes
    assert type(model.table) is Embedding and model.table.weight.shape == (ROWS, 16)
    assert not model.table.weight.any()


@pytest.mark.parametrize("offset", [0, 1_900_000])
def test_rows_of_an_embedding_that_are_mixed_are_found(offset: int) -> None:
    with pytest.raises(InputError, match=MIXED):
        parallelize(Lookup(offset, mix=True), solo_mesh())


@pytest.mark.parametrize("mix", [False, True])
def test_a_table_that_does_not_work_with_few_rows_is_copied_whole(mix: bool) -> None:
    model = Lookup(1_900_000, mix, by_weight=True)
    with _CountNewBytes() as counter:
        if mix:
            with pytest.raises(InputError, match=MIXED):
                parallelize(model, solo_mesh())
        else:
            parallelize(model, solo_mesh())
    assert model.table.weight.nbytes <= counter.num_bytes < 1.5 * model.table.weight.nbytes


@pytest.mark.parametrize("dtype, copies", [(torch.float64, 1), (torch.float32, 2)])
def test_the_check_makes_one_copy_in_float64(dtype: torch.dtype, copies: int) -> None:
    model = GraphSAGE(WIDTH, 8, 2, 5).to(dtype)
    model.other = Linear(2000, 2000, dtype=dtype)
    with _CountNewBytes() as counter:
        parallelize(model, solo_mesh())
    num_bytes = model.other.weight.nbytes
    assert copies * num_bytes <= counter.num_bytes < (copies + 0.5) * num_bytes


class OneDtype(Module):
    """A row-wise or mixing module that does not run in float64."""

    def __init__(self, mix: bool) -> None:
        super().__init__()
        self.scale, self.mix = torch.nn.Parameter(torch.ones(5)), mix

    def forward(self, h: Tensor) -> Tensor:
        if h.dtype != torch.float32:
            raise TypeError("float32 only")
        return h * self.scale - (h.mean(0) if self.mix else 0.0)


@pytest.mark.parametrize("mix", [False, True])
def test_a_model_that_does_not_run_in_float64_is_checked_in_its_own_dtype(mix: bool) -> None:
    class Model(Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = SAGEConv(WIDTH, 5), OneDtype(mix)

        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            return self.last(self.conv(x, edge_index))  # type: ignore[no-any-return]

    if not mix:
        assert parallelize(Model(), solo_mesh()).last.scale.dtype == torch.float32
        return
    with pytest.raises(InputError, match=MIXED):
        parallelize(Model(), solo_mesh())


def test_recurrent_jumping_knowledge_in_single_precision_is_checked() -> None:
    model = GraphSAGE(WIDTH, 8, 2, 5, jk="lstm")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize(model, solo_mesh())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_copy_has_other_weights_of_the_dtype_asked_for() -> None:
    model = torch.nn.Sequential(Embedding(50, 3, padding_idx=40), Linear(3, 2), torch.nn.BatchNorm1d(2))
    assert has_tables(model, 49) and not has_tables(model, 50)
    small: Any = perturbed_copy(model, torch.float64, 10)
    assert {t.dtype for t in [*small.parameters(), *small.buffers()]} == {torch.float64, torch.int64}
    assert small[0].weight.shape == (10, 3)
    assert torch.equal(small[0](torch.tensor([3, 43])), small[0].weight[[3, 3]])
    moved = (small[1].weight - model[1].weight).detach().abs()
    assert 0.0 < float(moved.max()) < 1.0
    small[2].running_mean.add_(1.0)
    assert not model[2].running_mean.any()  # type: ignore[operator]
    whole: Any = perturbed_copy(model, None, None)
    assert type(whole[0]) is Embedding and whole[0].weight.shape == (50, 3)
    assert whole[0].weight.dtype == torch.float32
