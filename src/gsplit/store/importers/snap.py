"""Edge lists as SNAP publishes them, with random features, labels and targets.

Lines that begin with ``#``, then two integers in every line, tab or space between them, gzipped or not: Orkut
(``com-orkut.ungraph.txt.gz``) and Friendster, on which the paper measures (Section 6.1). Ids may have gaps: the
vertices are the distinct ids in ascending order. The files have no features, labels or targets, so these are hashes of
(seed, vertex): the same in every run, and in pieces of any size. Nothing can be learned from them. ``.ungraph`` files
list an undirected edge once and need ``symmetrise``.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Ids
from gsplit.errors import InputError, explain
from gsplit.keys import scalar
from gsplit.store.importers.arrow import TableColumns, TableFile
from gsplit.store.importers.synthetic import check_limits, draw_targets, draw_unit
from gsplit.store.importers.tables import edge_chunks
from gsplit.store.importers.vertex_ids import UnknownIds, collect_ids
from gsplit.store.source import GraphSource, RowChunk, RowStream, ValueType, plain_name, row_slices

__all__ = ["RandomVertices", "snap_source"]

_FEATURES, _LABELS, _TARGETS = range(3)  # key domains, so that no two uses share a hash


@dataclass(frozen=True)
class RandomVertices:
    """Random data of vertices: features between -1 and 1, classes, and a share of the vertices as targets."""

    num_features: int = 128
    num_classes: int = 16
    target_share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        limits = {
            "num_features": (0, 1 << 16),
            "num_classes": (1, 1 << 20),
            "target_share": (0, 1),
            "seed": (0, (1 << 63) - 1),
        }
        check_limits(self, limits)

    def features(self, num_vertices: int) -> Iterator[RowChunk]:
        """Rows of float32 of ``num_vertices`` vertices."""
        width = self.num_features
        for piece in row_slices(num_vertices, 8 * width):
            numbers = np.arange(piece.start * width, piece.stop * width)
            drawn = draw_unit(scalar.mix(self.seed, _FEATURES), numbers)
            yield RowChunk(piece, (2.0 * drawn - 1.0).astype(np.float32).reshape(-1, width))

    def labels(self, num_vertices: int) -> Iterator[RowChunk]:
        """Classes of ``num_vertices`` vertices."""
        for piece in row_slices(num_vertices, 8):
            drawn = draw_unit(scalar.mix(self.seed, _LABELS), np.arange(piece.start, piece.stop))
            yield RowChunk(piece, (drawn * self.num_classes).astype(np.int64))

    def targets(self, num_vertices: int) -> dict[str, Ids]:
        """Targets among ``num_vertices`` vertices, 8 : 1 : 1 for train, val and test."""
        return draw_targets(scalar.mix(self.seed, _TARGETS), num_vertices, self.target_share, _any_vertex)


def _any_vertex(vertices: Ids) -> npt.NDArray[np.bool_]:
    return np.ones(vertices.size, np.bool_)


def snap_source(path: str | Path, random: RandomVertices | None = None) -> GraphSource:
    """The graph in an edge list, with random data of its vertices."""
    random = random or RandomVertices()
    columns = TableColumns()
    table = TableFile(path, integer_columns=(columns.src, columns.dst))
    if not table.is_csv:
        raise InputError(explain(path, "a text file of edges", "Parquet", "use gsplit import tables"))
    ids = collect_ids(
        str(path),
        (column for batch in table.batches([columns.src, columns.dst]) for column in batch.columns),
        unique=False,
    )
    count = ids.num_vertices
    if count == 0:
        raise InputError(explain(path, "two integers in every line", "no edges", "check the file"))
    kind = ValueType("float32", (random.num_features,))
    return GraphSource(
        kind="snap",
        num_vertices=count,
        num_edges=table.forecast_rows(),
        edges=lambda: edge_chunks(table, columns, (ids, ids), UnknownIds.REFUSE),
        features={"x": RowStream(kind, lambda: random.features(count))} if random.num_features else {},
        y=RowStream(ValueType("int64"), lambda: random.labels(count)),
        targets=random.targets(count),
        vertex_ids=ids.as_integers(),
        settings={"edges": plain_name(Path(path)), **asdict(random)},
        identity=table.identity(),
        modified=table.modified(),
    )
