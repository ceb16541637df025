"""``gsplit.OwnedEmbedding``: trainable rows of vertices, each held by the rank that owns its vertex.

A replicated ``torch.nn.Embedding`` holds the rows of all vertices on every rank, and a step averages the gradient of
all of them. Here a rank holds the rows of its own vertices. A step looks up those that the mini-batch reads and
exchanges them like hidden rows, along the route of layer 0 (``minibatch.shuffle``); their gradients return to the
owners. The embedding is beside the wrapped model, whose parameters are averaged over ranks:

    authors = gsplit.OwnedEmbedding(graph, 128, "author", mesh=mesh)
    optimizer = torch.optim.SparseAdam(authors.parameters(), lr=0.01)
    out = model({**batch.x_dict, "author": authors(batch)}, batch.edge_index_dict)

The gradient that arrives at an owner is W times that of the loss, for W ranks (``Batch.mean``), so it is divided by W.
Replicas hold equal rows. Each computes the gradients of its share of the mini-batch; owners of the same vertices
exchange them, so all replicas add the same numbers in the same order. Gradients are sparse, so that a torch optimizer
for sparse gradients updates the rows that the mini-batch has read. The result is that of
``torch.nn.Embedding(sparse=True)`` in one process. The rows are in host memory also if the model is on a device; a step
copies those that it reads to the device, and their gradients back.

First rows are keyed by original id, and ``save`` writes rows by original id, so neither depends on the number of ranks
or on the partition.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from gsplit.array_types import Ids
from gsplit.distributed.comm.comm import Call, assert_same_on_all_ranks, run_on_all_ranks
from gsplit.distributed.comm.mesh import Mesh, resolve_mesh
from gsplit.errors import InputError, explain
from gsplit.features.protocol import RowsRead
from gsplit.graph.ownership import Ownership
from gsplit.keys import kernels_torch
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.local_graph import LocalGraph, make_ownership
from gsplit.minibatch.shuffle import exchange_rows
from gsplit.nn.embedding_files import SavedRows, load_optimizer, pack_optimizer, read_rows, write_rows
from gsplit.sampling.minibatch import embedding_key
from gsplit.store.conversion import as_graph_store
from gsplit.telemetry import StepTelemetry

__all__ = ["OwnedEmbedding"]

_ROWS_AT_ONCE = 1 << 14
_WEIGHT = "weight"


class OwnedEmbedding(Module):
    """Trainable rows of the vertices of a graph, or of one vertex type. A rank holds the rows of its own vertices.

    ``embedding_dim``: the columns. ``vertex_type``: needed for a heterogeneous graph. Rows start uniform in
    [-``scale``, ``scale``), by ``seed`` and original id. ``partition`` and ``ownership``: those of the loader, if it
    has them.

    ``embedding(batch)`` are the rows of ``batch.x``, or of ``batch.x_dict[vertex_type]``. The batch is of ``split``,
    ``hybrid(k)`` or ``data_cached``, in which owners read rows. Making an embedding is a collective.
    """

    def __init__(
        self,
        graph: Any,
        embedding_dim: int,
        vertex_type: str | None = None,
        *,
        mesh: Mesh | None = None,
        seed: int = 0,
        scale: float = 1.0,
        dtype: torch.dtype = torch.float32,
        partition: Tensor | Mapping[str, Tensor] | None = None,
        ownership: Ownership | None = None,
    ) -> None:
        super().__init__()
        store = as_graph_store(graph, partition)
        types = store.types
        if (types is None) != (vertex_type is None):
            expected = "None, for a graph without types" if types is None else f"one of {', '.join(types.vertex_types)}"
            raise InputError(explain("vertex_type", expected, vertex_type, "name the type that has no features"))
        if embedding_dim < 1:
            raise InputError(explain("embedding_dim", "at least 1 column", embedding_dim, "choose 64, for example"))
        if dtype not in (torch.float32, torch.float64):
            raise InputError(explain("dtype", "torch.float32 or torch.float64", dtype, "convert the looked-up rows"))
        self.vertex_type = vertex_type
        self.embedding_dim = embedding_dim
        self._mesh = resolve_mesh(mesh, "OwnedEmbedding")
        options = {"dim": embedding_dim, "type": vertex_type, "seed": seed, "scale": scale, "dtype": str(dtype)}
        assert_same_on_all_ranks(self._mesh.control, "OwnedEmbedding", {**options, "graph": store.fingerprint})
        self._local = local = LocalGraph(store, self._mesh, make_ownership(store, self._mesh, ownership))
        self._checked: LocalGraph | None = None  # the graph of the last batch
        original = local.original_ids if local.original_ids.size else np.arange(local.first, local.stop)
        self._types = types
        self._first_row = local.first
        self.num_embeddings = store.num_vertices
        """The number of rows of all ranks."""
        offset = 0
        if types is not None and vertex_type is not None:
            number = types.number(vertex_type)
            self._first_row = types.row_range(vertex_type, local.first, local.stop)[0]
            self.num_embeddings = types.count(vertex_type)
            original = original[types.of_host(np.arange(local.first, local.stop)) == number]
            offset = types.offsets[number]
        keys = original.astype(np.int64)
        self.row_ids: Ids = keys - offset
        """The original ids, in the vertex type, of the rows of this rank."""
        rows = _first_rows(torch.from_numpy(keys), embedding_dim, embedding_key(seed), scale, dtype)
        self.weight = Parameter(rows)

    def extra_repr(self) -> str:
        held = f"{self.weight.size(0)} of {self.num_embeddings} rows on this rank"
        return f"{self.embedding_dim} columns, vertex type {self.vertex_type}, {held}"

    def forward(self, batch: Batch) -> Tensor:
        """The rows of the vertices of ``batch.x`` or ``batch.x_dict``, in their order. Differentiable. A collective."""
        self._check_batch(batch)
        part = batch.part(self.vertex_type)
        ids, route = part.owned_inputs
        rows = (ids if self._types is None else self._types.rows(ids)) - self._first_row
        step = batch.key.step
        found: Tensor = _LookUp.apply(self.weight, rows, self._mesh, step, batch.telemetry)  # type: ignore[no-untyped-call]
        if route is None:
            return found
        mixed, _ = exchange_rows(
            found,
            route,
            self._mesh.shuffles,
            Call("exchange embeddings", step, 0, part.of),
            batch.context.pool,
            batch.telemetry,
            deterministic=batch.context.deterministic,
        )
        return mixed

    def _check_batch(self, batch: Batch) -> None:
        """Refuse batches of other ranks or of another graph, and those whose rows no owner has sent."""
        context = batch.context
        if context.mesh.world is not self._mesh.world and max(context.mesh.size, self._mesh.size) > 1:
            fix = "give the same mesh to OwnedEmbedding and to the loader"
            got = f"one of another mesh, of {context.mesh.size}"
            raise InputError(explain("OwnedEmbedding", f"a batch of its mesh of {self._mesh.size} ranks", got, fix))
        if batch.owned_inputs[1] is None and self._mesh.num_splits > 1:
            expected = "split, hybrid(k) or data_cached, in which owners send rows"
            fix = "change the strategy of the loader"
            raise InputError(explain("OwnedEmbedding", expected, f"strategy={context.strategy!r}", fix))
        graph = context.graph
        if graph is self._checked:
            return
        other = graph.store.fingerprint != self._local.store.fingerprint
        if other or graph.ownership != self._local.ownership:
            got = "one of another graph, or of another partition" if other else f"one with {graph.ownership}"
            fix = "give the same graph, partition and ownership to OwnedEmbedding and to the loader"
            raise InputError(explain("OwnedEmbedding", f"a batch of its graph, {self._local.ownership}", got, fix))
        self._checked = graph

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of one row."""
        return (self.embedding_dim,)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the rows."""
        return self.weight.dtype

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        """Copy rows by original id: ``gsplit.infer(model, graph, features=embedding)``, for graphs without types."""
        if torch.is_grad_enabled():
            fix = "make the loader with features=None and pass embedding(batch) to the model"
            raise InputError(explain("features", "rows that are not trained", "an OwnedEmbedding", fix))
        order, ascending = self._by_id
        places = np.searchsorted(ascending, ids.numpy()).clip(max=max(ascending.size - 1, 0))
        if not ascending.size or not np.array_equal(ascending[places], ids.numpy()):
            fix = "use one replica, and the ownership of training"
            got = f"vertices of other owners among {ids.numel()}"
            raise InputError(explain("OwnedEmbedding", "vertices of this rank", got, fix))
        rows = torch.from_numpy(order[places]).to(self.weight.device)
        out.copy_(self.weight.detach()[rows])
        return RowsRead(rows=ids.numel(), num_bytes=out.nbytes)

    @functools.cached_property
    def _by_id(self) -> tuple[Ids, Ids]:
        """The rows in the order of their original ids, and these ids."""
        order = np.argsort(self.row_ids)
        return order, self.row_ids[order]

    def save(self, path: str | Path, optimizer: Optimizer | None = None) -> None:
        """Write the rows, and the state that an optimizer has of them, by original id. A collective.

        ``path`` is a folder, which is replaced, on a disk that all ranks can write to. A rank writes its own rows.
        """
        arrays = {_WEIGHT: self.weight.detach()}
        saved = self._saved()
        if optimizer is not None:
            saved, states = pack_optimizer(saved, self._check_optimizer(optimizer), self.weight.shape)
            arrays |= states
        write_rows(Path(path), saved, arrays, self.row_ids, self._mesh)

    def load(self, path: str | Path, optimizer: Optimizer | None = None) -> None:
        """Read what ``save`` wrote, on any number of ranks and any partition of the graph. A collective."""

        def read() -> None:
            saved, arrays = read_rows(Path(path), self._saved(), self.row_ids)
            if optimizer is not None:
                load_optimizer(self._check_optimizer(optimizer), saved, arrays, Path(path))
            with torch.no_grad():
                self.weight.copy_(arrays[_WEIGHT])

        run_on_all_ranks(self._mesh.control, "read rows", read)

    def _saved(self) -> SavedRows:
        dtype = str(self.dtype).removeprefix("torch.")
        return SavedRows(self.vertex_type, self.num_embeddings, self.embedding_dim, dtype, [_WEIGHT])

    def _check_optimizer(self, optimizer: Optimizer) -> Optimizer:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if len(parameters) != 1 or parameters[0] is not self.weight:
            fix = "make it as torch.optim.SparseAdam(embedding.parameters())"
            got = f"one of {len(parameters)} parameters"
            raise InputError(explain("optimizer", "an optimizer of this embedding alone", got, fix))
        return optimizer

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> NoReturn:
        raise InputError(_explain_state("state_dict", self))

    def _load_from_state_dict(self, *args: Any, **options: Any) -> NoReturn:
        raise InputError(_explain_state("load_state_dict", self))


class _LookUp(torch.autograd.Function):
    """Rows of this rank's table: weight [num_rows, D], rows [n] to weight[rows] [n, D], on the device of ``rows``.

    Backward: a sparse gradient with g / W at these rows, and what other replicas have for the same vertices.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, mesh: Mesh, step: int, telemetry: StepTelemetry) -> Tensor:
        ctx.rows = rows
        ctx.weight = weight
        ctx.mesh = mesh
        ctx.step = step
        ctx.telemetry = telemetry
        return weight.index_select(0, rows.to(weight.device)).to(rows.device)  # device sync

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        rows = ctx.rows
        values = g / ctx.mesh.size
        if ctx.mesh.num_replicas > 1:
            rows = _gather_from_replicas(rows, ctx.mesh, ctx.step, ctx.telemetry)
            values = _gather_from_replicas(values, ctx.mesh, ctx.step, ctx.telemetry)
        weight = ctx.weight
        places = rows[None].to(weight.device)  # device sync
        values = values.to(weight.device)
        gradient = torch.sparse_coo_tensor(places, values, weight.shape, check_invariants=False)
        return gradient, None, None, None, None


def _gather_from_replicas(rows: Tensor, mesh: Mesh, step: int, telemetry: StepTelemetry) -> Tensor:
    """The rows of the ranks that own the same vertices, replica after replica. A collective of all ranks."""
    call = Call("gather gradients of embeddings", step)
    is_peer = [rank % mesh.num_splits == mesh.split_rank for rank in range(mesh.size)]
    sent = tuple(rows.size(0) if peer else 0 for peer in is_peer)
    received = mesh.world.all_to_all_counts(call, sent)
    found = rows.new_empty(sum(received), *rows.shape[1:])
    copies = rows.expand(mesh.num_replicas, *rows.shape).flatten(0, 1).contiguous()
    mesh.world.all_to_all(call, found, copies, received, sent).wait()
    telemetry.count("bytes_sent", copies.nbytes - rows.nbytes)
    telemetry.count("bytes_received", found.nbytes - rows.nbytes)
    telemetry.count("collectives", 2)
    return found


def _first_rows(ids: Tensor, num_columns: int, key: int, scale: float, dtype: torch.dtype) -> Tensor:
    """Rows that are uniform in [-scale, scale), from the bits of a hash of key, id and column."""
    rows = torch.empty(ids.numel(), num_columns, dtype=dtype)
    columns = torch.arange(num_columns)
    for some, out in zip(ids.split(_ROWS_AT_ONCE), rows.split(_ROWS_AT_ONCE), strict=True):
        words = kernels_torch.mix(kernels_torch.mix(key, some)[:, None], columns)
        out.copy_((words >> 11).double() * (scale / (1 << 52)))  # 53 bits, with the sign: exact in float64
    return rows


def _explain_state(called: str, embedding: OwnedEmbedding) -> str:
    got = f"{called} of {embedding.weight.size(0)} of {embedding.num_embeddings} rows"
    fix = "use embedding.save(path, optimizer) and embedding.load(path, optimizer), on any number of ranks"
    return explain("OwnedEmbedding", "save or load, which write and read rows by original id", got, fix)
