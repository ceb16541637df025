"""The whole grid: every model, option and task with every strategy, on four meshes. Weekly, and as a record.

``python -m tests.exactness grid OUT.json`` trains all cases. The record has a row for every group and mesh: the number
of its cases and their largest difference from one process.
"""

import itertools
import json
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from gsplit_bench.machine import current_commit, describe_machine, installed_versions
from tests.exactness.case import AXES, Case, is_meaningful, refusal
from tests.exactness.record import train_on_mesh
from tests.exactness.training import BOUND, difference, reference

__all__ = ["GROUPS", "MESHES", "cases_of", "run_grid", "write_grid"]

MESHES = ("1 x 2", "1 x 3", "1 x 4", "2 x 2")
_STRATEGIES, _BOTH, _AHEAD = AXES["strategy"], ("on", "off"), ("0", "2")
_OWNERSHIPS = (*AXES["ownership"], "original order")
_ONE = ("sage", "sage_max", "gat", "gatv2", "gin", "pna", "transformer", "graphconv", "edgecnn", "gcn", "batch_norm")
_THREE = ("sage", "gat", "to_hetero", "rgcn", "hgt", "rgat", "batch_norm")
GROUPS: dict[str, dict[str, Collection[str]]] = {
    "models": {"model": _ONE, "ownership": _OWNERSHIPS, "dropout": _BOTH, "jk": ("none", "max")},
    "values of edges": {
        "model": ("gat", "gatv2", "pna", "transformer", "gine", "gcn", "graphconv"),
        "values": ("stored",),
        "ownership": _OWNERSHIPS,
        "dropout": _BOTH,
    },
    "samplers": {"sampler": AXES["sampler"], "model": ("sage", "gat"), "dropout": _BOTH, "prefetch": _AHEAD},
    "pairs": {
        "task": AXES["task"][1:],
        "excluded": AXES["excluded"],
        "model": ("sage", "decoder"),
        "prefetch": _AHEAD,
    },
    "pairs by sampler": {"task": ("binary",), "sampler": AXES["sampler"][1:], "prefetch": _AHEAD},
    "types": {
        "types": ("three",),
        "model": _THREE,
        "values": ("none", "stored"),
        "ownership": AXES["ownership"],
        "dropout": _BOTH,
        "prefetch": _AHEAD,
    },
    "pairs of types": {
        "task": AXES["task"][1:],
        "types": ("three",),
        "excluded": AXES["excluded"],
        "dropout": _BOTH,
        "prefetch": _AHEAD,
    },
    "times": {
        "task": ("vertices", "binary", "triplet", "labels"),
        "times": ("uniform", "last"),
        "model": ("sage", "gat"),
        "dropout": _BOTH,
        "prefetch": _AHEAD,
    },
    "tiers": {"tier": AXES["tier"], "types": ("one", "three"), "prefetch": AXES["prefetch"], "resume": AXES["resume"]},
    "trained rows": {
        "rows": ("owned",),
        "types": ("one", "three"),
        "task": ("vertices", "binary"),
        "resume": AXES["resume"],
    },
    "devices": {
        "device": ("sim", "sim samples"),
        "types": ("one", "three"),
        "task": ("vertices", "binary"),
        "model": ("sage", "gat"),
        "sampler": ("uniform", "labor"),
        "prefetch": _AHEAD,
    },
}
"""Values of the options of each group; every one is combined with every strategy, unless that means nothing or
raises.
"""


def cases_of(group: str, mesh: str) -> Iterator[Case]:
    """The cases of a group that run on a mesh."""
    options = {**GROUPS[group], "strategy": _STRATEGIES}
    for values in itertools.product(*options.values()):
        case = Case(**dict(zip(options, values, strict=True)), mesh=mesh)
        if is_meaningful(case) and refusal(case) is None:
            yield case


def run_grid(folder: Path, groups: Collection[str], meshes: Collection[str]) -> list[dict[str, Any]]:
    """A row for every group on every mesh."""
    rows = []
    for group, mesh in itertools.product(groups, meshes):
        cases = list(cases_of(group, mesh))
        begun = time.perf_counter()
        worst, of_worst = 0.0, ""
        for case, runs in train_on_mesh(mesh, cases, folder).items():
            for run in runs:
                assert not isinstance(run, str), f"{case}: {run}"
            found = difference(case, runs)  # type: ignore[arg-type]
            worst, of_worst = max((worst, of_worst), (found, str(case)))
        reference.cache_clear()
        seconds = round(time.perf_counter() - begun)
        rows.append(
            {"group": group, "mesh": mesh, "cases": len(cases), "largest": worst, "of": of_worst, "seconds": seconds}
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def write_grid(path: Path, rows: list[dict[str, Any]]) -> None:
    """The record, and the page beside it."""
    about = {"commit": current_commit(), "versions": installed_versions(), "machine": describe_machine()}
    ok = all(row["largest"] <= BOUND for row in rows)
    path.write_text(json.dumps({"kind": "exactness", **about, "bound": BOUND, "ok": ok, "rows": rows}, indent=1) + "\n")
    lines = [
        f"| {row['group']} | {row['mesh']} | {row['cases']} | {row['largest']:.1e} | {row['of']} |" for row in rows
    ]
    count = sum(row["cases"] for row in rows)
    page = [
        "# Same answer everywhere\n",
        f"`python -m gsplit_bench exactness {path.stem}.json`, commit {about['commit']}.",
        f"{count:,} cases in float64, four steps of Adam on real gloo ranks, against one process on the graph in its",
        "original order. Compared: outputs of all targets or pairs, losses, gradients of every step, weights, trained",
        f"rows, exact scores, and the number of sampled edges. Bound {BOUND:.0e}.\n",
        "| group | replicas x ranks | cases | largest difference | of the case |",
        "|---|---|---|---|---|",
        *lines,
        "",
    ]
    path.with_suffix(".md").write_text("\n".join(page))
