"""Convert PyG ``Data`` and ``HeteroData`` objects to stores and back without loss.

``from_pyg`` stores every supported attribute and refuses the others by name. It also stores each edge's position in
``edge_index`` (``edges/input_position``), and the original type and shape of labels if ``labels`` changed them, so that
``to_pyg`` returns an equal object. (Of float labels with both -1 and NaN, all missing ones become NaN.)

The vertices of a type of a ``HeteroData`` are handled as a ``Data`` of their own. The values of its edges, such as
``edge_attr``, have one shape and type of numbers in all edge types that have them.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from gsplit.array_types import Array, Ids
from gsplit.errors import InputError, explain
from gsplit.graph.types import EdgeType, GraphTypes
from gsplit.progress import Progress, silent
from gsplit.store.build import build_store
from gsplit.store.files import storage_dtype
from gsplit.store.importers.labels import Labels, as_labels
from gsplit.store.in_memory import MemoryStore, join_values, renumbered_store, typed_store
from gsplit.store.manifest import INPUT_POSITION, check_vertex_type, role_of
from gsplit.store.pairs import pair_list
from gsplit.store.reader import Store
from gsplit.store.source import (
    CHUNK_EDGES,
    EdgeChunk,
    EdgeRules,
    GraphSource,
    PairList,
    RowStream,
    ValueType,
    check_edge_index,
    dtype_name,
    stream_rows,
)
from gsplit.store.verify import verify_store

__all__ = ["from_pyg", "hetero_source", "memory_store", "pyg_source", "to_pyg"]

_SPLITS = ("train", "val", "test")
_MASKS = tuple(f"{split}_mask" for split in _SPLITS)
_STRIPES = 64
"""Parts of a heterogeneous graph in memory without a partition, each with an equal range of every vertex type."""
_log = logging.getLogger(__name__)


def from_pyg(
    data: Data | HeteroData,
    path: str | Path,
    *,
    symmetrise: bool = False,
    drop_self_loops: bool = False,
    drop_duplicates: bool = False,
    ignore: Iterable[str] = (),
    pairs: Mapping[str, Tensor] | None = None,
    pair_labels: Mapping[str, Tensor] | None = None,
    pair_negatives: Mapping[str, Tensor] | None = None,
    overwrite: bool = False,
    progress: Progress = silent,
) -> Store:
    """Write a PyG ``Data`` or ``HeteroData`` as a store. ``ignore`` names attributes to leave out.

    ``pairs`` are lists of vertex pairs for link prediction by name, such as ``{"train": edge_label_index}``, each
    [2, n]. ``pair_labels`` [n] and ``pair_negatives`` [n, K], negative destinations, belong to lists of these names.
    """
    rules = EdgeRules(symmetrise, drop_self_loops, drop_duplicates)
    ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    make_source = hetero_source if isinstance(data, HeteroData) else pyg_source
    source = make_source(data, ignore=ignore, keep_positions=rules == EdgeRules())
    source = replace(source, pairs=_pair_lists(pairs or {}, pair_labels or {}, pair_negatives or {}))
    for note in source.notes:
        _log.info("%s", note)
    return build_store(source, path, rules=rules, overwrite=overwrite, progress=progress)


def _pair_lists(
    pairs: Mapping[str, Tensor], labels: Mapping[str, Tensor], negatives: Mapping[str, Tensor]
) -> dict[str, PairList]:
    for argument, given in (("pair_labels", labels), ("pair_negatives", negatives)):
        unknown = sorted(set(given) - set(pairs))
        if unknown:
            expected = f"names of pairs: {', '.join(pairs) or 'none are given'}"
            raise InputError(explain(argument, expected, ", ".join(unknown), "give the pairs, too"))
    ends, labelled, wrong = (
        {name: _host(tensor) for name, tensor in tensors.items()} for tensors in (pairs, labels, negatives)
    )
    return {name: pair_list(name, ends[name], labelled.get(name), wrong.get(name)) for name in pairs}


def pyg_source(data: Data, *, ignore: Iterable[str] = (), keep_positions: bool = True) -> GraphSource:
    """A ``Data`` object as a graph source."""
    if not isinstance(data, Data) or not isinstance(data.edge_index, Tensor):
        got = f"{type(data).__name__} without an edge_index tensor" if isinstance(data, Data) else type(data).__name__
        fix = "pass a homogeneous torch_geometric.data.Data; convert adj_t with ToUndirected or to edge_index"
        raise InputError(explain("data", "a PyG Data with edge_index", got, fix))
    num_vertices = int(data.num_nodes or 0)
    edge_index = _host(data.edge_index)
    check_edge_index("data.edge_index", edge_index.dtype, edge_index.shape)
    features: dict[str, RowStream] = {}
    values: dict[str, tuple[ValueType, Array]] = {}
    targets: dict[str, Array] = {}
    labels: Labels | None = None
    settings: dict[str, object] = {"num_nodes_given": "num_nodes" in data}
    left: list[str] = []
    for name, value in data.to_dict().items():
        if name in ("edge_index", "num_nodes") or name in ignore or value is None:
            continue
        kind = _kind(data, name, value, num_vertices)
        if kind == "label":
            array, dtype = _stored(value)
            rows = stream_rows(array, dtype)
            labels = as_labels(rows)
            if labels.rows is not rows:
                settings["y_given"] = {"dtype": str(value.dtype).removeprefix("torch."), "dim": value.dim()}
        elif kind == "mask":
            targets[name.removesuffix("_mask")] = np.flatnonzero(_host(value))
        elif kind == "edge":
            array, dtype = _stored(value)
            values[name] = (ValueType(dtype, array.shape[1:]), array)
        elif kind == "feature":
            array, dtype = _stored(value)
            features[name] = stream_rows(array, dtype)
        else:
            left.append(name)
    if left:
        expected = "float matrices per vertex, 1-d train/val/test masks, per-edge tensors and y"
        fix = f"convert them, or pass ignore={tuple(left)!r}"
        raise InputError(explain("data", expected, f"also {', '.join(left)}", fix))
    if keep_positions:
        values[INPUT_POSITION] = (ValueType("int64"), np.arange(edge_index.shape[1]))
    return GraphSource(
        kind="pyg",
        num_vertices=num_vertices,
        num_edges=edge_index.shape[1],
        edges=lambda: _edge_chunks(edge_index, {name: array for name, (_, array) in values.items()}),
        edge_values={name: kind for name, (kind, _) in values.items()},
        features=features,
        y=labels.rows if labels else None,
        targets=targets,
        settings=settings,
        notes=labels.notes if labels else (),
    )


def hetero_source(data: HeteroData, *, ignore: Iterable[str] = (), keep_positions: bool = True) -> GraphSource:
    """A ``HeteroData`` object as a graph source."""
    values, left = _edge_values(data, ignore)
    left += sorted(set(data._global_store.to_dict()) - set(ignore))
    if left:
        fix = f"leave them out: ignore={tuple(dict.fromkeys(name.rpartition('.')[2] for name in left))!r}"
        expected = "values of edges as tensors [E] or [E, D], of one width and type in all edge types that have them"
        raise InputError(explain("data", expected, ", ".join(left), fix))
    vertices = {name: _vertex_source(data, name, ignore) for name in data.node_types}
    counts = {name: source.num_vertices for name, source in vertices.items()}
    edges = _typed_edges(data, counts)
    first = dict(zip(counts, [0, *accumulate(counts.values())], strict=False))

    def chunks() -> Iterator[EdgeChunk]:
        for number, (relation, (src, dst)) in enumerate(edges.items()):
            for start in range(0, src.size, CHUNK_EDGES):
                piece = slice(start, start + CHUNK_EDGES)
                size = src[piece].size
                columns = {INPUT_POSITION: np.arange(start, start + size)} if keep_positions else {}
                for name, (found, _) in values.items():
                    rows = {relation: found[relation][piece]} if relation in found else found
                    columns[name] = join_values(rows, {relation: size})
                src_ids, dst_ids = src[piece] + first[relation[0]], dst[piece] + first[relation[2]]
                yield EdgeChunk(src_ids, dst_ids, columns, relation=number)

    kinds = {name: ValueType(dtype, next(iter(found.values())).shape[1:]) for name, (found, dtype) in values.items()}

    return GraphSource(
        kind="pyg",
        num_vertices=sum(counts.values()),
        num_edges=sum(src.size for src, _ in edges.values()),
        edges=chunks,
        edge_values=kinds | ({INPUT_POSITION: ValueType("int64")} if keep_positions else {}),
        values_of_types=tuple(tuple(name for name in kinds if relation in values[name][0]) for relation in edges),
        settings={"vertices": {name: dict(source.settings) for name, source in vertices.items()}},
        notes=tuple(f"{name}: {note}" for name, source in vertices.items() for note in source.notes),
        vertices=vertices,
        edge_types=tuple(edges),
    )


def _vertex_source(data: HeteroData, name: str, ignore: Iterable[str]) -> GraphSource:
    """The vertices of a type as a source without edges."""
    try:
        source = pyg_source(_vertices_of(data, name), ignore=ignore, keep_positions=False)
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
    return replace(source, settings={**source.settings, "num_nodes_given": "num_nodes" in data[name]})


def _vertices_of(data: HeteroData, name: str) -> Data:
    """The vertices of a type as a ``Data`` without edges."""
    content = {key: value for key, value in data[name].items() if key != "num_nodes"}
    return Data(edge_index=torch.empty(2, 0, dtype=torch.int64), num_nodes=int(data[name].num_nodes or 0), **content)


def _edge_values(
    data: HeteroData, ignore: Iterable[str]
) -> tuple[dict[str, tuple[dict[EdgeType, Array], str]], list[str]]:
    """The values of edges by name, with the type of their numbers, and the attributes that cannot be stored.

    The latter have names such as ``author writes paper.edge_attr``.
    """
    found: dict[str, tuple[dict[EdgeType, Array], str]] = {}
    left = []
    for relation in data.edge_types:
        edges = data[relation].get("edge_index")
        num_edges = edges.size(1) if isinstance(edges, Tensor) and edges.dim() == 2 else -1
        for name, value in data[relation].items():
            if name == "edge_index" or name in ignore or value is None:
                continue
            fits = isinstance(value, Tensor) and value.layout == torch.strided and value.dim() in (1, 2)
            if not fits or value.size(0) != num_edges or name == INPUT_POSITION:
                left.append(f"{' '.join(relation)}.{name}")
                continue
            array, dtype = _stored(value)
            others, known = found.setdefault(name, ({}, dtype))
            if known != dtype or any(other.shape[1:] != array.shape[1:] for other in others.values()):
                left.append(f"{' '.join(relation)}.{name}")
                continue
            others[relation] = array
    return found, left


def _typed_edges(data: HeteroData, counts: Mapping[str, int]) -> dict[EdgeType, tuple[Ids, Ids]]:
    """Sources and destinations of every relation, checked against the numbers of vertices."""
    if not counts:
        raise InputError(explain("data", "a HeteroData with vertex types", "one without", "add data[TYPE].num_nodes"))
    found = {}
    for relation in data.edge_types:
        where = f"data[{relation}].edge_index"
        if any(end not in counts for end in (relation[0], relation[2])):
            fix = "add the type, at least its num_nodes"
            raise InputError(explain(where, f"edges between {', '.join(counts)}", relation, fix))
        if not isinstance(data[relation].get("edge_index"), Tensor):
            fix = "convert adj_t to edge_index, or remove the edge type"
            raise InputError(explain(where, "a tensor", type(data[relation].get("edge_index")).__name__, fix))
        edges = _host(data[relation].edge_index)
        check_edge_index(where, edges.dtype, edges.shape)
        for ids, end in zip(edges, (relation[0], relation[2]), strict=True):
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < counts[end]:
                got = f"{ids.min()}..{ids.max()}"
                raise InputError(explain(where, f"ids in 0..{counts[end] - 1} of {end}", got, "correct the edges"))
        found[relation] = (edges[0].astype(np.int64), edges[1].astype(np.int64))
    return found


def _kind(data: Data, name: str, value: Any, num_vertices: int) -> Literal["label", "mask", "edge", "feature"] | None:
    """The role of an attribute in a store; None if a store cannot represent it."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or name == INPUT_POSITION:
        return None
    if name == "y" and value.dim() in (1, 2) and value.size(0) == num_vertices:
        return "label"
    if name in _MASKS and value.dtype == torch.bool and value.shape == (num_vertices,):
        return "mask"
    if data.is_edge_attr(name) and value.dim() in (1, 2) and value.size(0) == data.edge_index.size(1):
        return "edge"
    return "feature" if value.is_floating_point() and value.dim() == 2 and value.size(0) == num_vertices else None


def memory_store(data: Data | HeteroData, partition: Tensor | Mapping[str, Tensor] | None) -> MemoryStore:
    """A ``Data`` or ``HeteroData`` in memory, renumbered by ``partition``: a part for every vertex.

    Without a partition, a ``Data`` is one part, and a ``HeteroData`` 64 parts with equal ranges of every vertex type. A
    ``HeteroData`` takes a dict with the parts of every vertex type.
    """
    if isinstance(data, HeteroData):
        return _hetero_memory_store(data, partition)
    if isinstance(partition, Mapping):
        fix = "give a tensor with the part of every vertex"
        raise InputError(explain("partition", "a tensor for a homogeneous graph", f"a dict of {list(partition)}", fix))
    unused = _not_for_sampling(data)
    source = pyg_source(data, ignore=unused, keep_positions=False)
    for note in source.notes:
        _log.info("%s", note)
    num_vertices = source.num_vertices
    edges = _host(data.edge_index).astype(np.int64)
    arrays = {f"features/{name}": (_all_rows(rows), rows.type.dtype) for name, rows in source.features.items()}
    if source.y is not None:
        arrays["y"] = (_all_rows(source.y), source.y.type.dtype)
    outside = np.flatnonzero(((edges < 0) | (edges >= num_vertices)).any(axis=0))
    if outside.size:
        src, dst = edges[:, outside[0]].tolist()
        got = f"{outside.size} with other ids, such as edge {outside[0]}, {src} -> {dst}"
        raise InputError(explain("edge_index", f"ids in 0..{num_vertices - 1}", got, "correct the edges"))
    values = {name: _stored(data[name]) for name in source.edge_values}
    parts = _parts(partition, num_vertices)
    return renumbered_store(edges[0], edges[1], parts, arrays, source.targets, values, unused=tuple(unused))


def _hetero_memory_store(data: HeteroData, partition: Tensor | Mapping[str, Tensor] | None) -> MemoryStore:
    for name in data.node_types:
        check_vertex_type(name)
    unused = {name: _not_for_sampling(_vertices_of(data, name)) for name in data.node_types}
    vertices = {name: _vertex_source(data, name, unused[name]) for name in data.node_types}
    counts = {name: source.num_vertices for name, source in vertices.items()}
    if partition is not None and (not isinstance(partition, Mapping) or set(partition) != set(counts)):
        got = list(partition) if isinstance(partition, Mapping) else type(partition).__name__
        fix = "give a tensor of parts for each type"
        raise InputError(explain("partition", f"a dict with {', '.join(counts)}", got, fix))
    arrays: dict[str, tuple[Array, str]] = {}
    targets: dict[str, Ids] = {}
    for name, source in vertices.items():
        for note in source.notes:
            _log.info("%s: %s", name, note)
        for word, rows in source.features.items():
            arrays[f"features/{name}/{word}"] = (_all_rows(rows), rows.type.dtype)
        if source.y is not None:
            arrays[f"y/{name}"] = (_all_rows(source.y), source.y.type.dtype)
        targets |= {f"{name}/{word}": ids for word, ids in source.targets.items()}
    parts = {
        name: np.arange(count) * _STRIPES // max(1, count) if partition is None else _parts(partition[name], count)
        for name, count in counts.items()
    }
    values, left = _edge_values(data, ())
    left += [f"{name}.{word}" for name, words in unused.items() for word in words]
    edges = _typed_edges(data, counts)
    return typed_store(counts, edges, parts, arrays, targets, edge_values=values, unused=tuple(sorted(left)))


def _parts(partition: Tensor | None, num_vertices: int) -> Ids:
    if partition is None:
        return np.zeros(num_vertices, np.int64)
    parts = _host(partition)
    fix = "give the part of every vertex, from 0"
    if parts.shape != (num_vertices,) or parts.dtype.kind not in "iu":
        got = f"{parts.dtype} {list(parts.shape)}"
        raise InputError(explain("partition", f"integers of shape [{num_vertices}]", got, fix))
    if parts.size and int(parts.min()) < 0:
        got = f"{parts.min()} for vertex {parts.argmin()}"
        raise InputError(explain("partition", "parts from 0", got, fix))
    return parts.astype(np.int64)


def _not_for_sampling(data: Data) -> list[str]:
    """Attributes that mini-batches do not carry. Unsupported x, y and masks are not among them: they are refused."""
    if not isinstance(data, Data):
        return []
    kept = {"x", "y", "edge_index", "num_nodes", *_MASKS}
    num_vertices = int(data.num_nodes or 0)
    others = {name: value for name, value in data.to_dict().items() if name not in kept and value is not None}
    return sorted(name for name, value in others.items() if _kind(data, name, value, num_vertices) is None)


def _all_rows(rows: RowStream) -> Array:
    empty = np.empty((0, *rows.type.row_shape), storage_dtype(rows.type.dtype))
    return np.concatenate([empty, *(chunk.rows for chunk in rows.chunks())])


def _edge_chunks(edge_index: Array, values: dict[str, Array]) -> Iterator[EdgeChunk]:
    for first in range(0, edge_index.shape[1], CHUNK_EDGES):
        piece = slice(first, first + CHUNK_EDGES)
        columns = {name: array[piece] for name, array in values.items()}
        yield EdgeChunk(edge_index[0, piece], edge_index[1, piece], columns)


def _host(tensor: Tensor) -> Array:
    array: Array = tensor.detach().resolve_neg().cpu().contiguous().numpy()
    return array


def _stored(tensor: Tensor) -> tuple[Array, str]:
    """The tensor's elements as numpy array and the name of their type."""
    if tensor.dtype == torch.bfloat16:
        return _host(tensor.detach().contiguous().view(torch.uint16)), "bfloat16"
    array = _host(tensor)
    name = dtype_name(array.dtype)
    if name is None:
        fix = "convert it to one of the types of docs/store.md"
        raise InputError(explain("data", "a type that the store supports", tensor.dtype, fix))
    return array, name


def _loaded(store: Store, name: str) -> Tensor:
    """A copy of an array as a tensor of its logical type: rows of vertices by original id, those of edges as stored."""
    by_vertex = role_of(name).rows == "vertex" or name.startswith("targets/")
    tensor = torch.from_numpy(np.array(store.array(name) if by_vertex else store.stored_array(name)))
    return tensor.view(torch.bfloat16) if store.dtype(name) == "bfloat16" else tensor


def to_pyg(store: Store) -> Data | HeteroData:
    """The whole store as a PyG ``Data`` in original ids, or ``HeteroData`` if it has vertex types.

    The store is verified and copied into memory.

    Pairs are not part of it: ``torch.tensor(store.pairs(name).T)`` is what ``from_pyg`` received.
    """
    if store.vertex_range != (0, store.num_vertices):
        got = f"a shard, {store.vertex_range}"
        raise InputError(explain(store.where, "all vertices", got, "open the whole store"))
    verify_store(store)  # ids are used as indices below
    original = torch.from_numpy(np.array(store.original_ids()))
    graph = store.graph
    dst = torch.repeat_interleave(original, torch.from_numpy(graph.in_degrees()))
    edge_index = torch.stack([original[torch.from_numpy(np.array(graph.indices, np.int64))], dst])
    settings = store.manifest.provenance[0].settings if store.manifest.provenance else {}
    if store.types is not None:
        return _hetero_data(store, store.types, edge_index, settings.get("vertices"))
    order: Tensor | None = None
    if f"edges/{INPUT_POSITION}" in store.names:
        order = torch.argsort(_loaded(store, f"edges/{INPUT_POSITION}"))
    content: dict[str, Any] = {"edge_index": edge_index if order is None else edge_index[:, order]}
    content |= _vertex_content(store, settings, store.num_vertices)
    for name in store.manifest.names("edges"):
        if name != INPUT_POSITION:
            column = _loaded(store, f"edges/{name}")
            content[name] = column if order is None else column[order]
    return Data(**content)


def _vertex_content(store: Store, settings: Any, num_vertices: int, vertex_type: str | None = None) -> dict[str, Any]:
    """Attributes of all vertices, or of those of a type, from ``settings`` of their import."""
    settings = settings if isinstance(settings, dict) else {}
    folder = f"{vertex_type}/" if vertex_type else ""
    content: dict[str, Any] = {}
    for name in store.manifest.names("features"):
        if name.startswith(folder):
            rows = _loaded(store, f"features/{name}")
            if store.dtype(f"features/{name}") == "int8":
                rows = rows.float() * _loaded(store, f"scales/{name}").unsqueeze(1)
            content[name.removeprefix(folder)] = rows
    labels = f"y/{vertex_type}" if vertex_type else "y"
    if labels in store.names:
        content["y"] = _labels_as_given(_loaded(store, labels), settings.get("y_given"))
    for name in store.manifest.names("targets"):
        if name.startswith(folder):
            mask = torch.zeros(num_vertices, dtype=torch.bool)
            mask[_loaded(store, f"targets/{name}")] = True
            content[f"{name.removeprefix(folder)}_mask"] = mask
    given = settings.get("num_nodes_given", False)
    if given or not any(name in content for name in ("x", "pos")):  # PyG does not infer it from other attributes
        content["num_nodes"] = num_vertices
    return content


def _hetero_data(store: Store, types: GraphTypes, edge_index: Tensor, settings: Any) -> HeteroData:
    """The store as a ``HeteroData``. ``edge_index`` has the edges in the order of the store, in fused ids."""
    data = HeteroData()
    settings = settings if isinstance(settings, dict) else {}
    for name in types.vertex_types:
        for key, value in _vertex_content(store, settings.get(name), types.count(name), name).items():
            data[name][key] = value
    kinds = _loaded(store, "edge_type")
    position = f"edges/{INPUT_POSITION}"
    positions = _loaded(store, position) if position in store.names else None
    for number, relation in enumerate(types.edge_types):
        mine = torch.nonzero(kinds == number).squeeze(1)
        if positions is not None:
            mine = mine[torch.argsort(positions[mine])]
        first = torch.tensor([[types.offsets[types.number(end)]] for end in (relation[0], relation[2])])
        data[relation].edge_index = edge_index[:, mine] - first
        for name in types.edge_values[number]:
            data[relation][name] = _loaded(store, f"edges/{name}")[mine]
    return data


def _labels_as_given(y: Tensor, given: Any) -> Tensor:
    """Labels in the type and shape that ``from_pyg`` received; unchanged if none were recorded."""
    dtype = getattr(torch, str(given.get("dtype")), None) if isinstance(given, dict) else None
    if not isinstance(dtype, torch.dtype):
        return y
    if dtype.is_floating_point:
        y = torch.where(y < 0, torch.nan, y)
    return (y.unsqueeze(1) if given.get("dim") == 2 else y).to(dtype)
