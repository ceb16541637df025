"""Exact inference: the outputs of all vertices from all their neighbours, in bounded memory, on any number of ranks.

The model is not taken apart. It runs on rows of this rank's vertices, chunk by chunk, with every layer's outputs read
from a memory map; where a layer's outputs are not there yet, its inputs are collected instead. For each layer, in the
order in which the model calls them:

    collect   run the model on all row chunks up to this layer and keep what it would be given
    evaluate  for chunks of destinations with all their in-edges: a mini-batch of one layer, like those of training,
              whose input rows are the collected ones; keep the layer's outputs

and at last run the model through. Everything between two layers is row-wise (wrapping has checked that), so each chunk
is computed as on the full graph. Held in memory: a chunk. On disk: every layer's outputs for the rank's own vertices.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Module

from gsplit.batch import Batch, EdgeHandle, WeightHandle
from gsplit.distributed.comm import Call, SoloComm, run_on_rank_zero
from gsplit.distributed.mesh import Mesh, solo_mesh
from gsplit.errors import InputError, explain
from gsplit.features.mapped import MappedRows, torch_dtype
from gsplit.kernels.buffers import BufferPool
from gsplit.nn.calls import LayerCall, call_model, dtype_of, rows_of, substitute
from gsplit.nn.forward_pass import ForwardPass, ForwardPlan
from gsplit.nn.parallelize import forward_plan_of, override_forward_pass
from gsplit.ownership import Ownership, own_parts
from gsplit.progress import Progress, silent
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.neighbor import make_sampler
from gsplit.sampling.targets import local_stored_targets
from gsplit.store.memory import MemoryStore
from gsplit.store.reader import Store
from gsplit.strategies.split import SplitMaker
from gsplit.strategies.vertex_data import VertexData, gcn_factors
from gsplit.telemetry import Telemetry

__all__ = ["evaluate", "infer"]

CHUNK_EDGES = 1 << 17
CHUNK_ROWS = 1 << 15
_KEY = StepKey(0, 0, 0)


class _Reached(Exception):  # noqa: N818
    """The model has come to the layer whose inputs are wanted."""


class _Replay(ForwardPass):
    """Answers layers from stored outputs, and stops at the one whose inputs are wanted."""

    def __init__(
        self, batch: Batch, plan: ForwardPlan, outputs: dict[str, MappedRows], ids: Tensor, wanted: str | None
    ) -> None:
        super().__init__(batch, plan)
        self._outputs, self._ids, self._wanted = outputs, ids, wanted
        self.call: LayerCall = ((), {})

    def enter_layer(self, name: str, layer: Module, call: LayerCall) -> LayerCall:
        """Give a stored layer nothing to do."""
        if name == self._wanted:
            self.call = call
            raise _Reached
        self.inside = name
        h = rows_of(call)
        row = h.new_zeros(1, *h.shape[1:])  # one vertex with a self-loop: there are layers that fail on nothing
        rows = row if name in self._plan.single_input else (row, row)
        return substitute(call, rows, torch.zeros(2, 1, dtype=torch.int64, device=h.device), h.new_ones(1))

    def leave_layer(self, out: Any) -> Any:
        """What the layer gave for these rows."""
        name, self.inside = self.inside, None
        assert name is not None
        return self._outputs[name].take(self._ids).to(self.batch.x.device)


class _Run:
    """One inference of one model on this rank's vertices. Every rank makes the same calls in the same order."""

    def __init__(
        self,
        model: Module,
        store: Store | MemoryStore,
        mesh: Mesh,
        ownership: Ownership | None,
        features: str,
        workspace: str | Path | None,
        progress: Progress,
    ) -> None:
        if mesh.num_replicas > 1:  # every rank its own vertices: replicas share nothing here
            mesh = Mesh(mesh.device, mesh.world, mesh.world, mesh.gradients, mesh.world)
        self._model, self._mesh, self._plan, self._progress = model, mesh, forward_plan_of(model), progress
        self._ownership = ownership or own_parts(store.part_boundaries, mesh.num_splits, store.part_loads)
        self.first, self.stop = self._ownership.range_of(mesh.split_rank)
        self.graph = store.graph.restrict(self.first, self.stop)
        original = np.asarray(store.original_ids(self.first, self.stop)) if "original_ids" in store.names else None
        self.original = np.arange(self.first, self.stop) if original is None else original
        self._sampler = make_sampler(self.graph, self.original, mesh.device)
        name = f"features/{features}"
        self._x = MappedRows(name, store.stored_array(name), torch_dtype(store.dtype(name)), store.vertex_range[0])
        self._workspace, self._dtype = workspace, dtype_of(model)
        self._outputs: dict[str, MappedRows] = {}
        self._factors = gcn_factors(self.graph)

    def _new_map(self, name: str, rows: Tensor) -> tuple[npt.NDArray[Any], MappedRows]:
        """A map for rows like these of all own vertices, in a file without a name: whatever ends us, it is gone."""
        bits = rows[:0].view(torch.uint16) if rows.dtype == torch.bfloat16 else rows[:0]
        shape, dtype = (self.stop - self.first, *rows.shape[1:]), bits.cpu().numpy().dtype
        array: npt.NDArray[Any] = np.empty(shape, dtype)
        if array.size:
            with tempfile.TemporaryFile(dir=self._workspace) as file:
                array = np.memmap(file, dtype, "w+", shape=shape)
        return array, MappedRows(name, array, rows.dtype, self.first)

    def _row_chunks(self) -> Iterator[tuple[int, int]]:
        """At least one, so that a rank without vertices learns the shapes."""
        for low in range(self.first, max(self.stop, self.first + 1), CHUNK_ROWS):
            yield low, min(low + CHUNK_ROWS, self.stop)

    def _replay(self, low: int, high: int, wanted: str | None) -> tuple[_Replay, Any]:
        """The model on some own vertices, up to a layer or through; returns what it gave, None if it was stopped."""
        ids = torch.arange(low, high)
        x = self._x.take(ids).to(self._mesh.device, self._dtype)
        batch = _rows_only(x, self._plan.depth)
        step = _Replay(batch, self._plan, self._outputs, ids, wanted)
        with override_forward_pass(self._model, step):
            try:
                return step, call_model(self._model, batch)
            except _Reached:
                return step, None

    def outputs(self) -> Iterator[tuple[int, Tensor]]:
        """Outputs of all own vertices, in chunks of rows, each with its first vertex. Collective until the first."""
        for number, name in enumerate(self._plan.layer_of):
            self._progress("layers", number, len(self._plan.layer_of))
            self._outputs[name] = self._evaluate(name, *self._collect(name))
        self._progress("layers", len(self._plan.layer_of), len(self._plan.layer_of))
        for low, high in self._row_chunks():
            _, out = self._replay(low, high, None)
            if not isinstance(out, Tensor):
                fix = "let forward return one tensor with a row per vertex"
                raise InputError(explain("the model's output", "a tensor", type(out).__name__, fix))
            yield low, out

    def _collect(self, name: str) -> tuple[MappedRows, LayerCall]:
        """The inputs of a layer for all own vertices, and how the model calls it."""
        probe, _ = self._replay(self.first, self.first, name)  # also on ranks without vertices
        h = rows_of(probe.call)
        if h is probe.batch.x and h._version == 0:
            return self._x, probe.call  # the stored features themselves, not written to
        array, rows = self._new_map(f"{name}-in", h)
        for low, high in self._row_chunks():
            step, _ = self._replay(low, high, name)
            _write(array[low - self.first : high - self.first], rows_of(step.call))
        return rows, probe.call

    def _evaluate(self, name: str, inputs: MappedRows, call: LayerCall) -> MappedRows:
        """A layer's outputs for all own vertices, from chunks of destinations with all their in-edges. A collective."""
        weighted = any(isinstance(value, WeightHandle) for value in [*call[0], *call[1].values()])
        maker = SplitMaker(
            sampler=self._sampler,
            ownership=self._ownership,
            data=VertexData(inputs, None, None, self._factors if weighted else None),
            mesh=self._mesh,
            telemetry=Telemetry(),
            num_neighbors=[-1],
            deterministic=True,
        )
        layer = self._model.get_submodule(name)
        plan = ForwardPlan(1, {name: 0}, frozenset({name}) & self._plan.single_input, (), ())
        cuts = _cut_by_edges(self.graph.indptr)
        ours = (len(cuts) - 1,) * self._mesh.num_splits
        rounds = max(self._mesh.loading.all_to_all_counts(Call("count chunks"), ours))
        array: npt.NDArray[Any] | None = None
        for number in range(rounds):  # all ranks: as many rounds as the rank with most chunks needs
            low, high = (cuts[number], cuts[number + 1]) if number + 1 < len(cuts) else (0, 0)
            batch = maker.make(torch.arange(self.first + low, self.first + high), _KEY, high - low).cast(self._dtype)
            step = ForwardPass(batch, plan)
            args, kwargs = step.enter_layer(
                name, layer, substitute(call, batch.x, EdgeHandle(batch), WeightHandle(batch))
            )
            out = step.leave_layer(layer(*args, **kwargs))
            if array is None:
                array, rows = self._new_map(f"{name}-out", out)
            _write(array[low:high], out)
        return rows


def _write(target: npt.NDArray[Any], rows: Tensor) -> None:
    rows = rows.detach().cpu()
    target[...] = (rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy()


def _rows_only(x: Tensor, depth: int) -> Batch:
    """A batch of rows and no edges, for a model whose layers are answered from elsewhere."""
    return Batch(
        x=x,
        labels=None,
        n_id=torch.empty(0, dtype=torch.int64),
        blocks=(None,) * depth,  # type: ignore[arg-type]
        indices=(),
        batch_size=x.size(0),
        global_batch_size=x.size(0),
        key=_KEY,
        comm=SoloComm(),
        world=SoloComm(),
        strategy="split",
        telemetry=Telemetry(),
        pool=BufferPool(x.device),
        scales=(),
    )


def _cut_by_edges(indptr: npt.NDArray[np.int64]) -> list[int]:
    """Rows cut into chunks of at most CHUNK_EDGES edges and CHUNK_ROWS rows, but at least one row; one chunk at least.

    >>> _cut_by_edges(np.array([0, 3, 5, 9]))
    [0, 3]
    """
    cuts, num_rows = [0], indptr.size - 1
    while cuts[-1] < num_rows or len(cuts) == 1:
        low = cuts[-1]
        high = int(np.searchsorted(indptr, indptr[low] + CHUNK_EDGES, side="right")) - 1
        cuts.append(min(max(high, low + 1), low + CHUNK_ROWS, num_rows))
    return cuts


@contextmanager
def _evaluating(model: Module) -> Iterator[None]:
    """Evaluation mode, no gradients; afterwards as it was."""
    modes = {name: module.training for name, module in model.named_modules()}
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for name, module in model.named_modules():
            module.training = modes[name]


def infer(
    model: Module,
    graph: Store | MemoryStore,
    out: str | Path | None = None,
    *,
    mesh: Mesh | None = None,
    ownership: Ownership | None = None,
    features: str = "x",
    workspace: str | Path | None = None,
    progress: Progress = silent,
) -> npt.NDArray[Any]:
    """The model's outputs for all vertices with all their neighbours, row v for original vertex v. A collective.

    With ``out``, a ``.npy`` file that every rank can write to: owners write their rows into it, and a memory map of it
    is returned. Without, one process gets an array in memory. ``workspace`` is where activations are kept meanwhile:
    about the width of all layers' outputs together, in floats, per vertex. The model must have been wrapped.
    """
    mesh = mesh or solo_mesh()
    if out is None and mesh.size > 1:
        fix = "give out=, a .npy file that all ranks can write to"
        raise InputError(explain("out", f"a file, for {mesh.size} ranks", "none", fix))
    path = None if out is None else Path(out)
    partial = None if path is None else path.with_name(f"{path.name}.partial")
    if path is not None:
        run_on_rank_zero(mesh.world, "check output", lambda: _check_file(path))
    try:
        with _evaluating(model):
            result = _write_all(_Run(model, graph, mesh, ownership, features, workspace, progress), partial, mesh)
        if path is None or partial is None:
            return result
        del result  # written
        _meet(mesh, "finish output")
        run_on_rank_zero(mesh.world, "rename output", lambda: _rename(partial, path))
        return np.load(path, mmap_mode="r", allow_pickle=False)  # type: ignore[no-any-return]
    finally:
        if partial is not None and mesh.rank == 0:
            partial.unlink(missing_ok=True)


def _check_file(path: Path) -> None:
    if not path.parent.is_dir() or path.is_dir():
        got = "a folder" if path.is_dir() else "a folder that does not exist"
        raise InputError(explain(path, "a file in a folder that exists", got, "choose another place"))


def _rename(partial: Path, path: Path) -> None:
    partial.rename(path)


def _write_all(run: _Run, partial: Path | None, mesh: Mesh) -> npt.NDArray[Any]:
    """Outputs of own vertices to their places in original order. A collective."""
    result: npt.NDArray[Any] | None = None
    for low, rows in run.outputs():
        values = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy(force=True)
        if result is None:
            result = _make_result(partial, (run.graph.num_vertices, *values.shape[1:]), values.dtype, mesh)
        result[run.original[low - run.first :][: values.shape[0]]] = values
    assert result is not None
    return result


def _meet(mesh: Mesh, what: str) -> None:
    mesh.world.all_reduce(Call(what), torch.zeros(1, device=mesh.device)).wait()  # all ranks: as a barrier


def _make_result(path: Path | None, shape: tuple[int, ...], dtype: np.dtype[Any], mesh: Mesh) -> npt.NDArray[Any]:
    """Where results go: an array, or a file that rank 0 makes and all open. A collective."""
    if path is None:
        return np.empty(shape, dtype)
    make = lambda: np.lib.format.open_memmap(path, mode="w+", dtype=dtype, shape=shape).flush()  # noqa: E731
    run_on_rank_zero(mesh.world, "make output", make)
    return np.load(path, mmap_mode="r+", allow_pickle=False)  # type: ignore[no-any-return]


def evaluate(
    model: Module,
    graph: Store | MemoryStore,
    names: list[str],
    *,
    mesh: Mesh | None = None,
    ownership: Ownership | None = None,
    features: str = "x",
    workspace: str | Path | None = None,
    progress: Progress = silent,
) -> dict[str, float]:
    """Exact accuracy on stored targets, by inference over all vertices; the same on every rank. A collective.

    Each target is counted by its owner and by nobody else.
    """
    mesh = mesh or solo_mesh()
    labels = graph.stored_array("y")
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        fix = "compute another metric from the output of gsplit.infer"
        raise InputError(explain("y", "one class per vertex", f"{labels.dtype} {list(labels.shape[1:])}", fix))
    for name in names:
        if graph.stored_targets(name)[2] == 0:
            raise InputError(explain(f"targets/{name}", "at least one target", "none", "name other targets"))
    with _evaluating(model):
        run = _Run(model, graph, mesh, ownership, features, workspace, progress)
        right = np.zeros(run.stop - run.first, bool)
        offset = graph.vertex_range[0]
        for low, rows in run.outputs():
            high = low + rows.size(0)
            guess = rows.argmax(dim=-1).cpu().numpy()
            right[low - run.first : high - run.first] = guess == labels[low - offset : high - offset]
    counts = torch.zeros(len(names), 2, dtype=torch.float64, device=mesh.device)
    for place, name in enumerate(names):
        ids = local_stored_targets(*graph.stored_targets(name), run.first, run.stop).ids
        counts[place, 0], counts[place, 1] = float(right[ids - run.first].sum()), float(ids.size)
    mesh.world.all_reduce(Call("count right answers"), counts).wait()  # all ranks: same names
    return {name: float(counts[place, 0] / counts[place, 1]) for place, name in enumerate(names)}
