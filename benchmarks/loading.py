"""Put documents of ``gsplit bench loading --json`` together: raw records in OUT.json, tables in OUT.tables.md.

    python benchmarks/loading.py OUT NAME=FILE.json ... [--commit COMMIT]

NAME is the graph; several files of one graph (other batch sizes, other ranks) are given one after the other.
"""

import argparse
import json
from pathlib import Path
from typing import Any

Documents = list[tuple[str, dict[str, Any]]]


def _line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _head(*names: str) -> list[str]:
    return [_line(*names), _line(*("---" for _ in names))]


def redundancy(documents: Documents) -> list[str]:
    lines = _head(
        "graph", "batch", "mini-batches", "ranks", "edges", "data", "split", "rows", "data", "split", "rows exchanged"
    )
    for name, doc in documents:
        for row in doc["redundancy"]:
            cells: list[object] = [name, doc["batch_size"], doc["num_batches"], row["ranks"]]
            for what in ("edges", "rows"):
                cells.append(f"{row[what]['mini'] / 1e6:.1f} M")
                cells += [f"{row[f'{what}_{who}_to_mini']:.2f}" for who in ("data", "split")]
            lines.append(_line(*cells, f"{row['rows_received'] / row['rows']['mini']:.3f}"))
    return lines


def hits(documents: Documents, batch_size: int) -> list[str]:
    shown = [(name, doc) for name, doc in documents if doc["batch_size"] == batch_size and doc["hits"]]
    lines = _head("graph", "ranks", "order", "5 %", "10 %", "25 %", "50 %", "most off, points")
    for name, doc in shown:
        for ranks in (2, 4):
            for order in ("hot", "degree", "random", "id"):
                found = [row for row in doc["hits"] if (row["ranks"], row["order"]) == (ranks, order)]
                cells = [f"{100 * row['measured']:.1f} ({100 * row['predicted']:.1f})" for row in found]
                if cells:
                    worst = 100 * max(row["most_off"] for row in found)
                    lines.append(_line(name, ranks, order, *cells, f"{worst:.2f}"))
    return lines


def copies(documents: Documents, batch_size: int) -> list[str]:
    lines = _head("graph", "ranks", "rows exchanged per input row", "1 %", "2 %", "5 %", "10 %", "25 %")
    for name, doc in documents:
        if doc["batch_size"] != batch_size:
            continue
        for row in doc["redundancy"]:
            curve = [c for c in doc["copies"] if c["ranks"] == row["ranks"] and c["budget"] > 0]
            exchanged = row["rows_received"] / row["rows"]["mini"]
            if curve and row["ranks"] <= 8:
                lines.append(
                    _line(name, row["ranks"], f"{exchanged:.3f}", *(f"{c['of_no_copies']:.2f}" for c in curve))
                )
    return lines


def runs(documents: Documents) -> list[str]:
    lines = _head(
        "graph",
        "ranks",
        "source",
        "strategy",
        "rows",
        "read below the cache",
        "hits (predicted)",
        "s",
        "of it loading",
        "CPU s",
    )
    for name, doc in documents:
        for run in doc.get("runs", []):
            row_bytes = run["bytes_loaded"] / max(1, run["rows_loaded"])
            below = row_bytes * (run["rows_loaded"] - run["cache_hits"]) / 1e6
            hit = (
                f"{100 * run['hits_measured']:.1f} ({100 * run['hits_predicted']:.1f})"
                if run["cache_hits"]
                else "no cache"
            )
            what = (
                run["ranks"],
                run["source"],
                run["strategy"],
                f"{run['rows_loaded'] / 1e6:.2f} M",
                f"{below:.0f} MB",
            )
            times = (f"{run['seconds']:.2f}", f"{run['load_seconds']:.2f}", f"{run['cpu_seconds']:.2f}")
            lines.append(_line(name, *what, hit, *times))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="path without suffix, such as benchmarks/results/DATE-loading")
    parser.add_argument("documents", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--batch-size", type=int, default=1024, help="of the partition: hits are predicted for it")
    parser.add_argument("--commit", default="")
    given = parser.parse_args()
    pairs = [text.split("=", 1) for text in given.documents]
    documents: Documents = [(name, json.loads(Path(path).read_text())) for name, path in pairs]
    record = {"commit": given.commit, "documents": [{"graph": name, **doc} for name, doc in documents]}
    given.out.with_suffix(".json").write_text(json.dumps(record) + "\n")
    tables = {
        "Edges computed and rows loaded": redundancy([d for d in documents if not d[1].get("runs")]),
        "Cache hits, measured (predicted), per cent": hits(
            [d for d in documents if not d[1].get("runs")], given.batch_size
        ),
        "Rows exchanged at layer 0 with copies, of those without": copies(
            [d for d in documents if not d[1].get("runs")], given.batch_size
        ),
        "Real ranks, sampling and loading": runs(documents),
    }
    text = "\n".join(line for title, lines in tables.items() for line in (f"## {title}", *lines, ""))
    given.out.with_suffix(".tables.md").write_text(text)


if __name__ == "__main__":
    main()
