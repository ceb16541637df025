"""What ``gsplit inspect`` shows of a store: the document of ``--json`` and the screen, from the same numbers."""

from dataclasses import asdict
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gsplit.cli.console import human
from gsplit.errors import printable
from gsplit.store.files import storage_dtype
from gsplit.store.manifest import VertexTypeEntry
from gsplit.store.reader import Store
from gsplit.store.statistics import UNLABELLED, degree_bin_labels, not_finite_key

if TYPE_CHECKING:
    from gsplit.run.memory import RankMemory

__all__ = ["describe", "describe_memory", "show", "show_memory", "show_partition"]

_BAR = 32
_MOST_NAMES = 6
_MOST_TYPES = 40
_ID_KINDS = {"names": "strings", "mapped": "integers, mapped", "dense": "0 .. n-1"}


def describe(store: Store) -> dict[str, Any]:
    """The document of ``gsplit inspect --json``."""
    manifest, statistics = store.manifest, store.manifest.statistics
    first, stop = store.vertex_range
    entries = manifest.arrays
    counts = manifest.provenance[0].counts if manifest.provenance else {}
    return {
        "path": store.where,
        "num_vertices": store.num_vertices,
        "num_edges": store.num_edges,
        "vertex_range": [first, stop],
        "num_parts": len(manifest.part_boundaries) - 1,
        "num_features": store.num_features,
        "num_classes": store.num_classes,
        "class_names": list(store.class_names),
        "feature_columns": manifest.feature_columns,
        "features": {
            n: _array(entries[f"features/{n}"]) | {"num_not_finite": counts.get(not_finite_key(n))}
            for n in manifest.names("features")
        },
        "vertex_types": [_vertex_type(store, entry, counts) for entry in manifest.vertex_types],
        "edge_types": [entry.model_dump() for entry in manifest.edge_types],
        "edge_arrays": {n: _array(entries[f"edges/{n}"]) for n in manifest.names("edges")},
        "targets": {n: entries[f"targets/{n}"].shape[0] for n in manifest.names("targets")},
        "pairs": {n: _pair_list(store, n) for n in store.pair_names},
        "has_labels": "y" in entries,
        "num_unlabelled_vertices": counts.get(UNLABELLED),
        "ids": _ids(store),
        "mean_in_degree": store.num_edges / max(1, stop - first),
        **statistics.model_dump(),
        "num_bytes": sum(prod(entry.shape) * storage_dtype(entry.dtype).itemsize for entry in entries.values()),
        "partition": _partition(store),
        "provenance": [step.model_dump() for step in manifest.provenance],
    }


def _ids(store: Store, of_type: str = "") -> str:
    """What the ids were when the graph was imported. ``of_type`` is the end of the arrays' names, such as /paper."""
    names = store.names
    return "names" if f"name_bytes{of_type}" in names else "mapped" if f"vertex_ids{of_type}" in names else "dense"


def _vertex_type(store: Store, entry: VertexTypeEntry, counts: dict[str, int]) -> dict[str, Any]:
    return entry.model_dump() | {
        "has_labels": f"y/{entry.name}" in store.names,
        "num_unlabelled_vertices": counts.get(f"{UNLABELLED}/{entry.name}"),
        "ids": _ids(store, f"/{entry.name}"),
    }


def _partition(store: Store) -> dict[str, Any] | None:
    """How the store was partitioned, and a forecast for each useful number of ranks."""
    found = store.manifest.part_statistics
    if found is None:
        return None
    from gsplit.partitioning.forecast import forecasts

    steps = [step for step in store.manifest.provenance if step.step == "partition"]
    return {
        "settings": steps[-1].settings if steps else {},
        "part_sizes": [b - a for a, b in pairwise(store.part_boundaries)],
        "ranks": [asdict(line) for line in forecasts(found, store.part_boundaries)],
    }


def show_partition(document: dict[str, Any], console: Console) -> None:
    """Print the forecasts for each number of ranks of a partitioned store."""
    found = document["partition"]
    if found is None:
        return
    console.print(Text(f"\n{document['num_parts']} parts", style="bold"), end="")
    names = ("objective", "solver", "targets", "num_neighbors", "batch_size")
    objective, solver, targets, fanout, size = (printable(str(found["settings"].get(name, "?"))[:80]) for name in names)
    whose = targets if targets == "every vertex" else f"{targets} targets"
    how = f" by {objective} with {solver}, for {whose}, fanout {fanout}, batch {size}"
    console.print(Text(how), soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for name in ("ranks", "most work", "most vertices", "cross edges", ""):
        table.add_column(name, justify="left" if not name else "right")
    for line in found["ranks"]:
        advice = "" if line["divides"] else f"or partition with --parts {line['ranks']}"
        shown = [f"{line['work_imbalance']:.3f}", f"{line['vertex_imbalance']:.3f}", f"{line['cross_edge_share']:.1%}"]
        table.add_row(str(line["ranks"]), *shown, advice)
    console.print(table, highlight=False)
    console.print("work, vertices: of the rank with most, over the mean; cross edges: of all", highlight=False)


def _array(entry: Any) -> dict[str, Any]:
    return {"dtype": entry.dtype, "shape": list(entry.shape)}


def _pair_list(store: Store, name: str) -> dict[str, Any]:
    """Number of pairs, type of their labels (None without) and number of negatives of each."""
    entries = store.manifest.arrays
    labels = entries.get(f"pair_labels/{name}")
    negatives = entries.get(f"pair_negatives/{name}")
    return {
        "num_pairs": entries[f"pairs/{name}"].shape[0],
        "labels": labels.dtype if labels else None,
        "num_negatives": negatives.shape[1] if negatives else 0,
    }


def show(document: dict[str, Any], console: Console) -> None:
    """Print a document of ``describe``."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for name, value in _lines(document):
        table.add_row(Text(printable(name), style="bold"), Text(printable(value)))
    console.print(Text(printable(document["path"]), style="bold cyan"), soft_wrap=True)
    console.print(table)
    console.print(Text("\nin-degrees", style="bold"))
    histogram = document["in_degree_histogram"]
    full, least = ("█", "▏") if _can_draw(console) else ("#", ".")
    for label, count in zip(degree_bin_labels(len(histogram)), histogram, strict=True):
        bar = full * round(_BAR * count / max(1, *histogram)) or (least if count else "")
        console.print(Text.assemble(f"{label:>19} ", (f"{bar:<{_BAR}}", "green"), f" {count:,}"), soft_wrap=True)


def _classes(document: dict[str, Any]) -> str:
    if not document["has_labels"]:
        return "no labels"
    kind = "" if document["num_classes"] else " (y holds values, not classes)"
    gaps, names = document["num_unlabelled_vertices"], document["class_names"]
    kind = _some(names) or kind
    return f"{document['num_classes']:,}{kind}" + (f", unlabelled vertices: {gaps:,}" if gaps else "")


def _some(names: list[str]) -> str:
    """The first of some names, in brackets, if there are any."""
    return f" ({', '.join(names[:_MOST_NAMES])}{', ...' if len(names) > _MOST_NAMES else ''})" if names else ""


def _can_draw(console: Console) -> bool:
    try:
        "█▏".encode(console.encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _lines(document: dict[str, Any]) -> list[tuple[str, str]]:
    first, stop = document["vertex_range"]
    held = f"{first:,} .. {stop - 1:,}" if stop > first else "none"
    shard = "" if stop - first == document["num_vertices"] else f"  (this shard: {held})"
    lines = [
        ("vertices", f"{document['num_vertices']:,}{shard}"),
        ("edges", f"{document['num_edges']:,}"),
        ("in-degree", f"mean {document['mean_in_degree']:.1f}, largest {document['max_in_degree']:,}"),
        ("self-loops", f"{document['num_self_loops']:,}"),
        ("duplicate edges", f"{document['num_duplicate_edges']:,}"),
        ("isolated vertices", f"{document['num_isolated_vertices']:,}"),
        ("parts", f"{document['num_parts']:,}"),
    ]
    lines += _type_lines(document)
    named = {"features x": document["feature_columns"]}
    named |= {f"features {found['name']}/x": found["feature_columns"] for found in document["vertex_types"]}
    for word, key in (("features", "features"), ("edge array", "edge_arrays")):
        for name, array in document[key].items():
            bad = array.get("num_not_finite") or 0
            warning = f", NaN or infinite: {bad:,}" if bad else ""
            size = " x ".join(f"{n:,}" for n in array["shape"])
            scaled = " with a scale per row" if word == "features" and array["dtype"] == "int8" else ""
            columns = _some(named.get(f"{word} {name}", []))
            lines.append((f"{word} {name}", f"{array['dtype']} {size}{columns}{scaled}{warning}"))
    if not document["vertex_types"]:
        lines.append(("classes", _classes(document)))
    lines += [(f"targets {name}", f"{count:,}") for name, count in document["targets"].items()]
    for name, found in document["pairs"].items():
        labels = f", labels {found['labels']}" if found["labels"] else ""
        negatives = f", {found['num_negatives']:,} negatives each" if found["num_negatives"] else ""
        lines.append((f"pairs {name}", f"{found['num_pairs']:,}{labels}{negatives}"))
    if not document["vertex_types"]:
        lines.append(("ids", _ID_KINDS[document["ids"]]))
    lines.append(("size", f"{human(document['num_bytes'])}B"))
    for step in document["provenance"]:
        lines.append(("made by", f"{step['step']}, {step['time']}, gsplit {step['gsplit_version']}"))
        changes = {k: v for k, v in step["counts"].items() if v and k.endswith(("dropped", "added"))}
        lines += [(what.replace("_", " ")[:80], f"{count:,}") for what, count in changes.items()]
    return lines


def _type_lines(document: dict[str, Any]) -> list[tuple[str, str]]:
    """A line per vertex type and per edge type, the first of very many."""
    lines: list[tuple[str, str]] = []
    for found in document["vertex_types"]:
        classes = f", classes: {_classes(found)}" if found["has_labels"] else ""
        lines.append((f"vertex type {found['name']}", f"{found['count']:,}{classes}, ids {_ID_KINDS[found['ids']]}"))
    for found in document["edge_types"]:
        lines.append((f"edge type {found['src']} {found['name']} {found['dst']}", f"{found['num_edges']:,}"))
    more = len(lines) - _MOST_TYPES
    return lines if more <= 0 else [*lines[:_MOST_TYPES], ("more types", f"{more:,} (--json lists them)")]


def describe_memory(ranks: "list[RankMemory]") -> list[dict[str, Any]]:
    """The document of ``gsplit inspect --memory --json``."""
    return [asdict(rank) | {"num_bytes": rank.num_bytes} for rank in ranks]


def show_memory(ranks: "list[RankMemory]", console: Console) -> None:
    """Print a column per rank and a row per use of memory."""
    table = Table(box=None, pad_edge=False)
    table.add_column("memory")
    for rank in ranks:
        table.add_column(f"rank {rank.rank}", justify="right")
    for name in ranks[0].mapped:
        table.add_row(f"mapped: {name}", *(_bytes(rank.mapped[name]) for rank in ranks), style="dim")
    for name in ranks[0].anonymous:
        if any(rank.anonymous[name] for rank in ranks):
            table.add_row(name, *(_bytes(rank.anonymous[name]) for rank in ranks))
    table.add_row("own memory, in all", *(_bytes(rank.num_bytes) for rank in ranks), style="bold")
    table.add_row("input rows per step", *(f"{rank.input_rows:,.0f}" for rank in ranks))
    if ranks[0].expected_hit_rate is not None:
        table.add_row("expected cache hits", *(f"{rank.expected_hit_rate or 0:.1%}" for rank in ranks))
    console.print(table, highlight=False)
    console.print(f"mini-batches: {ranks[0].basis}", highlight=False, soft_wrap=True)


def _bytes(number: int) -> str:
    return f"{human(number)}B"
