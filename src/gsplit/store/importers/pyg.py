"""Convert PyG ``Data`` objects to stores and back without loss.

``from_pyg`` stores every supported attribute and refuses the others by name. It also stores each edge's position in
``edge_index`` (``edges/input_position``), and the original type and shape of labels if ``labels`` changed them, so that
``to_pyg`` returns an equal object. (Of float labels with both -1 and NaN, all missing ones become NaN.)
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from gsplit.array_types import Array, Ids
from gsplit.errors import InputError, explain
from gsplit.progress import Progress, silent
from gsplit.store.build import build_store
from gsplit.store.feature_types import feature_values
from gsplit.store.importers.labels import Labels, as_labels
from gsplit.store.in_memory import MemoryStore, renumbered_store
from gsplit.store.manifest import INPUT_POSITION
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

__all__ = ["from_pyg", "memory_store", "pyg_source", "to_pyg"]

_SPLITS = ("train", "val", "test")
_MASKS = tuple(f"{split}_mask" for split in _SPLITS)
_log = logging.getLogger(__name__)


def from_pyg(
    data: Data,
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
    """Write a PyG ``Data`` object as a store. ``ignore`` names attributes to leave out.

    ``pairs`` are lists of vertex pairs for link prediction by name, such as ``{"train": edge_label_index}``, each
    [2, n]. ``pair_labels`` [n] and ``pair_negatives`` [n, K], negative destinations, belong to lists of these names.
    """
    rules = EdgeRules(symmetrise, drop_self_loops, drop_duplicates)
    source = pyg_source(data, ignore=ignore, keep_positions=rules == EdgeRules())
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


def _kind(data: Data, name: str, value: Any, num_vertices: int) -> Literal["label", "mask", "edge", "feature"] | None:
    """The role of an attribute in a store; None if a store cannot represent it."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or name == INPUT_POSITION:
        return None
    if name == "y" and value.dim() in (1, 2) and value.size(0) == num_vertices:
        return "label"
    if name in _MASKS and value.dtype == torch.bool and value.shape == (num_vertices,):
        return "mask"
    if data.is_edge_attr(name) and value.dim() in (1, 2):
        return "edge"
    return "feature" if value.is_floating_point() and value.dim() == 2 and value.size(0) == num_vertices else None


def memory_store(data: Data, partition: Tensor | None) -> MemoryStore:
    """A ``Data`` object in memory, renumbered by ``partition`` (a part for every vertex; one part if None)."""
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
    return np.concatenate([chunk.rows for chunk in rows.chunks()])


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
    """A copy of an array as a tensor of its logical type."""
    tensor = torch.from_numpy(np.array(store.stored_array(name)))
    return tensor.view(torch.bfloat16) if store.manifest.arrays[name].dtype == "bfloat16" else tensor


def to_pyg(store: Store) -> Data:
    """The whole store as a PyG ``Data`` object in original ids. The store is verified and copied into memory.

    Pairs are not part of it: ``torch.tensor(store.pairs(name).T)`` is what ``from_pyg`` received.
    """
    if store.vertex_range != (0, store.num_vertices):
        got = f"a shard, {store.vertex_range}"
        raise InputError(explain(store.path, "all vertices", got, "open the whole store"))
    verify_store(store)  # ids are used as indices below
    original = torch.from_numpy(np.array(store.original_ids()))
    place = torch.argsort(original)  # row of each original id
    graph = store.graph
    dst = torch.repeat_interleave(original, torch.from_numpy(graph.in_degrees()))
    edge_index = torch.stack([original[torch.from_numpy(np.array(graph.indices, np.int64))], dst])
    order: Tensor | None = None
    if f"edges/{INPUT_POSITION}" in store.names:
        order = torch.argsort(_loaded(store, f"edges/{INPUT_POSITION}"))
    content: dict[str, Any] = {"edge_index": edge_index if order is None else edge_index[:, order]}
    for name in store.manifest.names("features"):
        full = f"features/{name}"
        whole = slice(0, store.num_vertices)
        is_scaled = store.dtype(full) == "int8"
        rows = torch.from_numpy(feature_values(store, name, whole)) if is_scaled else _loaded(store, full)
        content[name] = rows[place]
    settings = store.manifest.provenance[0].settings if store.manifest.provenance else {}
    if "y" in store.names:
        content["y"] = _labels_as_given(_loaded(store, "y")[place], settings.get("y_given"))
    for name in store.manifest.names("edges"):
        if name != INPUT_POSITION:
            column = _loaded(store, f"edges/{name}")
            content[name] = column if order is None else column[order]
    for name in store.manifest.names("targets"):
        mask = torch.zeros(store.num_vertices, dtype=torch.bool)
        mask[original[_loaded(store, f"targets/{name}")]] = True
        content[f"{name}_mask"] = mask
    given = settings.get("num_nodes_given", False)
    if given or not any(name in content for name in ("x", "pos")):  # PyG does not infer it from other attributes
        content["num_nodes"] = store.num_vertices
    return Data(**content)


def _labels_as_given(y: Tensor, given: Any) -> Tensor:
    """Labels in the type and shape that ``from_pyg`` received; unchanged if none were recorded."""
    dtype = getattr(torch, str(given.get("dtype")), None) if isinstance(given, dict) else None
    if not isinstance(dtype, torch.dtype):
        return y
    if dtype.is_floating_point:
        y = torch.where(y < 0, torch.nan, y)
    return (y.unsqueeze(1) if given.get("dim") == 2 else y).to(dtype)
