"""The record of ``gsplit bench exactness --json``: a table per kind of model beside the document itself.

gsplit bench exactness --json > exactness.json
python benchmarks/exactness.py exactness.json benchmarks/results/DATE-exactness --commit COMMIT
"""

import argparse
import json
import platform
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def largest(rows: Rows, *keys: str) -> str:
    return f"{max(row[key] for row in rows for key in keys):.1e}" if rows else "-"


def line(model: str, rows: Rows) -> str:
    plain = [row for row in rows if not row["edge_values"] and row["norm"] is None]
    norm = [row for row in rows if row["norm"] is not None]
    edges = [row for row in rows if row["edge_values"]]
    parts = [plain, norm, edges]
    cells = [
        cell
        for part in parts
        for cell in (str(len(part) or "-"), *(largest(part, k) for k in ("output", "gradient", "weights")))
    ]
    return f"| {model} | {' | '.join(cells)} |"


def summary(document: dict[str, Any]) -> str:
    rows: Rows = document["rows"]
    alone = sum(row["replicas"] * row["splits"] == 1 for row in rows)
    edges = [row for row in rows if row["edge_values"]]
    keys = ("output", "loss", "gradient", "weights")
    return (
        f"{len(rows):,} cases, {alone} of them one process against itself; largest difference {largest(rows, *keys)}. "
        f"{len(edges)} of them with features or weights of edges: {largest(edges, *keys)}"
    )


def report(document: dict[str, Any], title: str, commit: str) -> str:
    rows: Rows = document["rows"]
    models = list(dict.fromkeys(row["model"] for row in rows))
    num_plain = len({row["model"] for row in rows if not row["edge_values"]})
    worst = {name: f"{value:.1e}" for name, value in document["worst"].items()}
    versions = (
        f"Python {platform.python_version()}, torch {version('torch')}, torch_geometric {version('torch_geometric')}"
    )
    return "\n".join(
        [
            f"# Same answer everywhere, {title}\n",
            f"Command: `gsplit bench exactness --json`. Commit {commit}, {versions}, two cores. Rows in the `.json` beside this file.\n",
            f"{summary(document)}.\n",
            f"{num_plain} kinds of models x dropout x jumping knowledge x BatchNorm x `split` and `data`, with vertices owned at random, all by rank 0, and no targets on rank 1; and",
            "with values of edges: GAT, GATv2, Transformer and PNA with `edge_dim`, GINE, GraphConv and GCN with stored weights x dropout x `split` and `data` x three ownerships (renumbered",
            "at random, no targets on rank 1, original order). On 1, 2, 3 and 4 ranks and 2 replicas x 2. Graphs have duplicate edges with values of their own, self-loops and isolated",
            "vertices. 3 layers, fanouts 4, 3 and all, float64, 5 steps of Adam 1e-3, real gloo ranks against one process. BatchNorm only under `split` with one replica; elsewhere it is refused.\n",
            f"Largest difference of all cases: outputs {worst['output']}, losses {worst['loss']}, gradients {worst['gradient']}, weights after 5 steps {worst['weights']} (asked for: {document['tolerance']:.0e}).\n",
            "| model | cases | outputs | gradients | weights | with BatchNorm: cases | outputs | gradients | weights | with edge values: cases | outputs | gradients | weights |",
            f"|{'---|' * 13}",
            *(line(model, [row for row in rows if row["model"] == model]) for model in models),
            "\nWeights differ more behind BatchNorm because a bias in front of it has a gradient of zero but for rounding, which Adam divides by its own size.\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("document", type=Path)
    parser.add_argument("out", type=Path, help="record to write, without .md and .json")
    parser.add_argument("--commit", required=True)
    options = parser.parse_args()
    document = json.loads(options.document.read_text())
    title = "-".join(options.out.name.split("-")[:3])
    options.out.with_suffix(".md").write_text(report(document, title, options.commit))
    shutil.copyfile(options.document, options.out.with_suffix(".json"))
    print(summary(document), "within the tolerance" if document["ok"] else "NOT within the tolerance")


if __name__ == "__main__":
    main()
