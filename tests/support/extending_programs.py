"""A sampler and a source of rows such as a program would write, and what ranks run with them."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import Mesh
from gsplit.extending import DrawnSampler, EdgeDraw, RowsRead, SampledRange, mix
from gsplit.sampling.excluded import ExcludedEdges
from gsplit.sampling.protocol import Fanout, Frontier, SampledLayer

__all__ = ["ComputedRows", "DictSampler", "by_range", "find_mistakes", "keyed_sampler", "train_extended"]

_DRAWING, _READING = threading.Lock(), threading.Lock()
_pause_s = [0.0]  # inside, so that another thread could come
_met = list[str]()  # threads that came while another was inside


def _draw(part: SampledRange, ids: Tensor, key: int, fanout: int) -> tuple[Tensor, Tensor]:
    """Of the first ``fanout`` in-edges of a vertex, or of all, each by a coin of its own."""
    with _alone(_DRAWING):
        return _toss(part, ids, key, fanout)


@contextmanager
def _alone(busy: threading.Lock) -> Iterator[None]:
    """Notes if two threads are inside: code of programs need not be made for threads."""
    is_alone = busy.acquire(blocking=False)
    if not is_alone:
        _met.append(threading.current_thread().name)
    time.sleep(_pause_s[0])
    yield
    if is_alone:
        busy.release()


def _toss(part: SampledRange, ids: Tensor, key: int, fanout: int) -> tuple[Tensor, Tensor]:
    indptr, rows = torch.from_numpy(np.array(part.graph.indptr)), ids - part.graph.first_vertex
    degrees = indptr[rows + 1] - indptr[rows]
    tossed = degrees if fanout < 0 else degrees.clamp(max=fanout)
    owner = torch.repeat_interleave(torch.arange(rows.numel()), tossed)
    position = torch.arange(owner.numel()) - (tossed.cumsum(0) - tossed)[owner]
    heads = (mix(mix(key, part.to_original_ids(ids))[owner], position) & 1).bool()
    return torch.bincount(owner[heads], minlength=rows.numel()), (indptr[rows][owner] + position)[heads]


def keyed_sampler(part: SampledRange) -> DrawnSampler:
    """A sampler by the draw alone."""
    draw: EdgeDraw = partial(_draw, part)
    return DrawnSampler(part, draw)


class DictSampler:
    """The same draws, with rows kept in a dictionary: the oracle of ``DrawnSampler``."""

    num_bytes = num_range_bytes = 0
    excluded: ExcludedEdges | None = None

    def __init__(self, part: SampledRange) -> None:
        self.part = part

    def start(self, targets: Tensor) -> Frontier:
        return _DictFrontier(self.part, targets)


class _DictFrontier:
    def __init__(self, part: SampledRange, targets: Tensor) -> None:
        self._part, self._row_of = part, dict[int, int]()
        self.locate(targets)

    @property
    def num_rows(self) -> int:
        return len(self._row_of)

    def ids(self, num_rows: int) -> Tensor:
        return torch.tensor(list(self._row_of)[:num_rows], dtype=torch.int64)

    def sample_layer(self, key: int, fanout: Fanout) -> SampledLayer:
        assert isinstance(fanout, int)
        graph, sources, slots = self._part.graph, list[int](), dict[int, int]()
        counts, edges = _draw(self._part, self.ids(self.num_rows), key, fanout)
        for source in graph.indices[edges.numpy()].tolist():
            if graph.first_vertex <= source < graph.stop_vertex:
                sources.append(self._row_of.setdefault(source, len(self._row_of)))
            else:
                sources.append(-1 - slots.setdefault(source, len(slots)))
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        found, foreign = (torch.tensor(each, dtype=torch.int64) for each in (sources, list(slots)))
        return SampledLayer(indptr, found, foreign, edges)

    def locate(self, ids: Tensor) -> Tensor:
        return torch.tensor([self._row_of.setdefault(v, len(self._row_of)) for v in ids.tolist()], dtype=torch.int64)

    def resolve(self, drawn: SampledLayer, foreign_rows: Tensor) -> Tensor:
        return torch.tensor([int(foreign_rows[-1 - s]) if s < 0 else s for s in drawn.sources.tolist()])

    def close(self) -> None:
        self._row_of.clear()


class ComputedRows:
    """Rows that are a function of the original id, in no store; keeps what it was asked for."""

    row_shape, dtype = (6,), torch.float32

    def __init__(self, fingerprint: str = "computed") -> None:
        self.fingerprint, self.asked = fingerprint, list[int]()

    def read(self, ids: Tensor, out: Tensor) -> RowsRead:
        assert ids.dtype == torch.int64 and ids.numel() and out.is_contiguous() and out.device.type == "cpu"
        self.asked += ids.tolist()
        with _alone(_READING):
            out.copy_(self.rows(ids))
        ids.zero_()  # they are the source's to write to
        return RowsRead(np.int64(out.size(0)), np.int64(out.nbytes // 2))  # type: ignore[arg-type]  # as programs do

    @staticmethod
    def rows(ids: Tensor) -> Tensor:
        """Numbers between -1 and 1."""
        return (mix(mix(9, ids)[:, None], torch.arange(6)) >> 32).float() / (1 << 31)


Found = tuple[list[float], list[float], float, set[int], npt.NDArray[np.int64]]


def train_extended(mesh: Mesh, path: str, cases: list[dict[str, Any]]) -> list[Found]:
    """Per case of loader options: losses and weights of an epoch in float64, a score, and the ids that were asked for
    during training, with those of this rank's vertices."""
    graph, out = gsplit.open(path), []
    for case in cases:
        rows = ComputedRows()
        features = case.pop("features", [rows])
        width = sum(6 if isinstance(each, ComputedRows) else graph.num_features for each in features)
        options = {"sampler": keyed_sampler, "features": features, **case}
        loader = gsplit.NeighborLoader(graph, [4, 3], "train", batch_size=60, mesh=mesh, seed=5, **options)
        torch.manual_seed(0)
        model = gsplit.parallelize(GraphSAGE(width, 8, 2, graph.num_classes).double(), mesh)
        # without the comparison with one process, in which rank 0 asks for rows of other ranks
        trainer = gsplit.Trainer(model, torch.optim.Adam(model.parameters(), 1e-2), loader, verify_every=0)
        losses, asked = trainer.train_epoch(), set(rows.asked)
        weights = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()]).tolist()
        score = trainer.evaluate(graph, ["test"])["test"]
        owned = loader._graph.owned.original_ids
        if "prefetch" in case:  # with it, while the loader makes the next batches
            _pause_s[0] = 0.05
            other = gsplit.parallelize(GraphSAGE(width, 8, 2, graph.num_classes).double(), mesh)
            gsplit.Trainer(other, torch.optim.Adam(other.parameters(), 1e-2), loader).train_epoch(1)
            _pause_s[0] = 0.0
        assert _met == []
        out.append((losses, weights, score, asked, owned))
    return out


def by_range(part: SampledRange) -> DrawnSampler:
    """A sampler that breaks the law: what it draws depends on where the rank's range begins."""
    return DrawnSampler(part, lambda ids, key, fanout: _draw(part, ids, key + part.graph.first_vertex, fanout))


def find_mistakes(mesh: Mesh, path: str) -> tuple[list[gsplit.Verification], list[str]]:
    """What ``verify`` finds of a lawful sampler and of another, with own rows; and what the loader says if ranks have
    different samplers, or sources that say they are different."""
    graph, said = gsplit.open(path), []
    model = GraphSAGE(6, 8, 2, graph.num_classes)
    checked = [
        gsplit.verify(model, graph, [4, 3], "train", batch_size=60, mesh=mesh, sampler=sampler, features=ComputedRows())
        for sampler in (keyed_sampler, by_range)
    ]
    own: list[dict[str, Any]] = [
        {"sampler": keyed_sampler if mesh.rank else by_range},
        {"features": ComputedRows(f"version {mesh.rank}")},
    ]
    for options in own:
        try:
            gsplit.NeighborLoader(graph, [4], "train", mesh=mesh, **options)
        except gsplit.InputError as error:
            said.append(str(error))
    return checked, said
