"""A generated graph: planted communities, power-law degrees, labels and features that can be learned.

Every edge, label and feature is a hash of (seed, its number), so a graph of a billion edges is generated in pieces, and
the result does not depend on their size. Vertices are ranked by popularity; a keyed permutation maps ranks to ids, so
ids do not reveal hubs or communities.

- Destination of an edge: rank ``n * u**skew`` for a uniform u; skew 2 gives a degree exponent of 3, skew 3 of 2.5.
- Source: with probability ``inside`` a member of the same community, drawn in the same way among them; otherwise
  any vertex. Communities take ranks in turn, so each has its own hubs.
- Label: the class of the community, and with probability ``label_noise`` any class. Feature: the class's own
  point on a cube plus uniform noise.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Ids
from gsplit.errors import InputError, explain
from gsplit.kernels.jit import kernel
from gsplit.keys import scalar
from gsplit.keys.kernels_numba import bounded, mix, mix_array, permute, unpermute
from gsplit.store.source import CHUNK_EDGES, EdgeChunk, GraphSource, RowChunk, RowStream, ValueType, row_slices

__all__ = ["PlantedGraph", "check_limits", "draw_targets", "draw_unit", "synthetic_source"]

_EDGES, _IDS, _LABELS, _FEATURES, _TARGETS, _CENTRES = range(6)  # key domains, so that no two uses share a hash
_UNIT = 2.0**-53


def check_limits(settings: object, limits: Mapping[str, tuple[float, float]]) -> None:
    """Refuse the first of some attributes that is not between its limits."""
    for name, (low, high) in limits.items():
        got = getattr(settings, name)
        if not low <= got <= high:
            raise InputError(explain(name, f"{low} to {high}", got, "choose a value in this range"))


@dataclass(frozen=True)
class PlantedGraph:
    """Parameters of a generated graph. ``target_communities``: share of the communities whose vertices are targets."""

    num_vertices: int
    num_edges: int
    seed: int = 0
    num_communities: int = 0
    num_classes: int = 16
    num_features: int = 64
    skew: int = 2
    inside: float = 0.8
    label_noise: float = 0.1
    feature_noise: float = 6.0
    target_share: float = 0.5
    target_communities: float = 1.0

    def __post_init__(self) -> None:
        limits = {
            "num_vertices": (2, 1 << 35),
            "num_edges": (0, 1 << 40),
            "seed": (0, (1 << 63) - 1),
            "num_communities": (0, self.num_vertices // 2),
            "num_classes": (1, 1 << 20),
            "num_features": (0, 1 << 16),
            "skew": (1, 8),
            "inside": (0, 1),
            "label_noise": (0, 1),
            "feature_noise": (0, 1e6),
            "target_share": (0, 1),
            "target_communities": (0, 1),
        }
        check_limits(self, limits)

    @property
    def communities(self) -> int:
        """Number of communities; by default one per thousand vertices."""
        return self.num_communities or max(1, self.num_vertices // 1000)

    def key(self, domain: int) -> int:
        """The hash key of one kind of draw."""
        return scalar.mix(self.seed, domain)


@kernel
def _draw_rank(word: np.uint64, count: int, skew: int) -> int:
    """A rank in [0, count), low ones more often: floor(count * u**skew)."""
    u = np.float64(word >> np.uint64(11)) * _UNIT
    power = u
    for _ in range(skew - 1):
        power *= u
    rank = np.int64(power * count)
    return int(rank) if rank < count else count - 1


@kernel
def _draw_edges(
    key: np.uint64,
    first: int,
    count: int,
    num_vertices: int,
    communities: int,
    skew: int,
    inside: float,
    src: Ids,
    dst: Ids,
) -> None:
    """Draw the ranks of the endpoints of edges first .. first + count, without self-loops."""
    for i in range(count):
        word = mix(key, np.uint64(first + i))
        target = _draw_rank(mix(word, np.uint64(0)), num_vertices, skew)
        community = target % communities
        members = (num_vertices - community + communities - 1) // communities
        if np.float64(mix(word, np.uint64(1)) >> np.uint64(11)) * _UNIT < inside and members > 1:
            member = _draw_rank(mix(word, np.uint64(2)), members, skew)
            if member == target // communities:
                member = (member + 1) % members
            source = member * communities + community
        else:
            source = _draw_rank(mix(word, np.uint64(2)), num_vertices, skew)
            if source == target:
                source = (source + 1) % num_vertices
        src[i] = source
        dst[i] = target


@kernel
def _draw_labels(
    key: np.uint64,
    community: Ids,
    vertices: Ids,
    classes: int,
    noise: float,
) -> Ids:
    labels = np.empty(vertices.size, np.int64)
    for i in range(vertices.size):
        word = mix(key, np.uint64(vertices[i]))
        if np.float64(word >> np.uint64(11)) * _UNIT < noise:
            labels[i] = np.int64(bounded(mix(word, np.uint64(0)), np.uint64(classes)))
        else:
            labels[i] = community[i] % classes
    return labels


@kernel
def _draw_features(
    key: np.uint64,
    centre_key: np.uint64,
    labels: Ids,
    first: int,
    noise: float,
    x: npt.NDArray[np.float32],
) -> None:
    for i in range(x.shape[0]):
        word = mix(key, np.uint64(first + i))
        centre = mix(centre_key, np.uint64(labels[i]))
        for j in range(x.shape[1]):
            sign = 1.0 if mix(centre, np.uint64(j)) >> np.uint64(63) else -1.0
            u = np.float64(mix(word, np.uint64(j)) >> np.uint64(11)) * _UNIT
            x[i, j] = sign + noise * (2.0 * u - 1.0)


def _communities(graph: PlantedGraph, vertices: Ids) -> Ids:
    return unpermute(vertices, graph.num_vertices, graph.key(_IDS)) % graph.communities


def _labels(graph: PlantedGraph, vertices: Ids) -> Ids:
    key = np.uint64(graph.key(_LABELS))
    return _draw_labels(key, _communities(graph, vertices), vertices, graph.num_classes, graph.label_noise)


def _edge_chunks(graph: PlantedGraph) -> Iterator[EdgeChunk]:
    key = np.uint64(graph.key(_EDGES))
    ids = graph.key(_IDS)
    for first in range(0, graph.num_edges, CHUNK_EDGES):
        count = min(CHUNK_EDGES, graph.num_edges - first)
        src = np.empty(count, np.int64)
        dst = np.empty(count, np.int64)
        _draw_edges(key, first, count, graph.num_vertices, graph.communities, graph.skew, graph.inside, src, dst)
        yield EdgeChunk(permute(src, graph.num_vertices, ids), permute(dst, graph.num_vertices, ids))


def _label_chunks(graph: PlantedGraph) -> Iterator[RowChunk]:
    for piece in row_slices(graph.num_vertices, 8):
        yield RowChunk(piece, _labels(graph, np.arange(piece.start, piece.stop)))


def _feature_chunks(graph: PlantedGraph) -> Iterator[RowChunk]:
    key = np.uint64(graph.key(_FEATURES))
    centres = np.uint64(graph.key(_CENTRES))
    for piece in row_slices(graph.num_vertices, 4 * graph.num_features):
        labels = _labels(graph, np.arange(piece.start, piece.stop))
        x = np.empty((labels.size, graph.num_features), np.float32)
        _draw_features(key, centres, labels, piece.start, graph.feature_noise, x)
        yield RowChunk(piece, x)


def _targets(graph: PlantedGraph) -> dict[str, Ids]:
    """``target_share`` of the vertices of the chosen communities."""
    chosen = max(1, round(graph.target_communities * graph.communities))
    return draw_targets(
        graph.key(_TARGETS),
        graph.num_vertices,
        graph.target_share,
        lambda vertices: _communities(graph, vertices) < chosen,
    )


def draw_targets(
    key: int, num_vertices: int, share: float, may_be_target: Callable[[Ids], npt.NDArray[np.bool_]]
) -> dict[str, Ids]:
    """A share of the vertices that may be targets, divided 8 : 1 : 1 into train, val and test by a hash of each."""
    found: dict[str, list[Ids]] = {"train": [], "val": [], "test": []}
    for piece in row_slices(num_vertices, 8):
        vertices = np.arange(piece.start, piece.stop)
        drawn = draw_unit(key, vertices)
        drawn[~may_be_target(vertices)] = 1.0
        cuts = np.array([0.0, 0.8, 0.9, 1.0]) * share
        for name, low, high in zip(found, cuts[:-1], cuts[1:], strict=True):
            found[name].append(vertices[(drawn >= low) & (drawn < high)])
    return {name: np.concatenate(parts) for name, parts in found.items()}


def draw_unit(key: int, numbers: Ids) -> npt.NDArray[np.float64]:
    """A value in [0, 1) for every number, its hash."""
    return (mix_array(key, numbers) >> np.uint64(11)) * np.float64(_UNIT)


def synthetic_source(graph: PlantedGraph) -> GraphSource:
    """The graph that ``graph`` describes, generated when it is read."""
    features = {}
    if graph.num_features:
        kind = ValueType("float32", (graph.num_features,))
        features["x"] = RowStream(kind, lambda: _feature_chunks(graph))
    return GraphSource(
        kind="synthetic",
        num_vertices=graph.num_vertices,
        num_edges=graph.num_edges,
        edges=lambda: _edge_chunks(graph),
        features=features,
        y=RowStream(ValueType("int64"), lambda: _label_chunks(graph)),
        targets=_targets(graph),
        settings={**asdict(graph), "num_communities": graph.communities},
    )
