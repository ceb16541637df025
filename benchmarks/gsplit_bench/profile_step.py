"""Where the CPU seconds of a training step go, beside the least that this machine needs for it.

    python -m gsplit_bench profile STORE --ranks 2 4 --strategies split data --out benchmarks/results/DATE-profile

Ranks are started as ``gsplit train`` starts them, with the tuned allocator, one thread each, every one on its core (in
turn, if there are more ranks than cores). CPU seconds per step by category and rank (``profile_rank``), and the limit:
dense products at the rate of the step's own shapes, and unavoidable bytes at the measured bandwidth (``step_limit``),
measured by all ranks at the same time. ``share``: the limit over the CPU seconds of the step; 100 % cannot be beaten
without fewer products or bytes. Use an idle machine: operators are timed by wall time, and what else runs on the cores
makes products and memory slower, in the step and in the limit.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gsplit.distributed.launch.launcher import launch
from gsplit_bench.machine import current_commit, describe_machine, installed_versions
from gsplit_bench.step_limit import COUNTED_MODELS
from gsplit_bench.train_study import Launch, Scenario, Study

__all__ = ["describe", "main"]


def measure(scenario: Scenario) -> list[dict[str, Any]]:
    """Profile every strategy of a scenario on its ranks; a record for each."""
    with tempfile.TemporaryDirectory(prefix="gsplit-profile-") as name:
        folder = Path(name)
        (folder / "scenario.json").write_text(json.dumps(asdict(scenario)))
        program = [sys.executable, "-P", "-m", "gsplit_bench.profile_rank", name]
        launch(program, scenario.ranks, threads=1, variables={"KINETO_LOG_LEVEL": "99"})  # the profiler's own messages
        ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(scenario.ranks)]
    return [
        {
            "graph": Path(scenario.graph).stem,
            "model": scenario.model,
            "ranks": scenario.ranks,
            "strategy": strategy,
            "per_rank": [profiles[place] for profiles in ranks],
        }
        for place, strategy in enumerate(scenario.systems)
    ]


def _total(record: dict[str, Any], *names: str) -> float:
    """The sum over the ranks of a number of their profiles."""
    total = 0.0
    for profile in record["per_rank"]:
        for name in names:
            profile = profile[name]
        total += profile
    return total


def describe(records: list[dict[str, Any]]) -> list[str]:
    """Two tables: distance to the limit, summed over the ranks, and CPU milliseconds by category and rank."""
    columns = "CPU ms | wall ms | limit ms | share | products | GFLOP/s | gathered | GB/s | written"
    lines = [f"| graph | model | ranks | strategy | {columns} |", "|---" * 13 + "|"]
    for record in records:
        parts = {
            name: _total(record, "limit", name)
            for name in ("flops", "products_s", "gathered_bytes", "gathered_s", "written_s")
        }
        limit_s = parts["products_s"] + parts["gathered_s"] + parts["written_s"]
        cpu_s = _total(record, "cpu_s")
        cells = [
            *(str(record[name]) for name in ("graph", "model", "ranks", "strategy")),
            f"{1000 * cpu_s:.1f}",
            f"{1000 * max(profile['wall_s'] for profile in record['per_rank']):.1f}",
            f"{1000 * limit_s:.1f}",
            f"{limit_s / cpu_s:.0%}",
            f"{1000 * parts['products_s']:.1f}",
            f"{parts['flops'] / max(parts['products_s'], 1e-9) / 1e9:.0f}",
            f"{1000 * parts['gathered_s']:.1f}",
            f"{parts['gathered_bytes'] / max(parts['gathered_s'], 1e-9) / 1e9:.1f}",
            f"{1000 * parts['written_s']:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    names = list(records[0]["per_rank"][0]["categories"])
    lines += ["", f"| graph | model | ranks | strategy | rank | {' | '.join(names)} |", "|---" * (5 + len(names)) + "|"]
    for record in records:
        by_rank = {str(rank): profile["categories"] for rank, profile in enumerate(record["per_rank"])}
        if len(by_rank) > 1:
            by_rank["all"] = {name: _total(record, "categories", name) for name in names}
        for rank, seconds in by_rank.items():
            times = [f"{1000 * seconds[name]:.1f}" for name in names]
            cells = [*(str(record[name]) for name in ("graph", "model", "ranks", "strategy")), rank, *times]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stores", nargs="+", type=Path, help="partitioned stores")
    parser.add_argument("--model", choices=COUNTED_MODELS, default="sage")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--strategies", nargs="+", default=["split"])
    parser.add_argument("--batch-size", type=int, default=1024, help="targets of the GLOBAL mini-batch")
    parser.add_argument("--fanout", nargs="+", type=int, default=[15, 15, 15])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, help="record to write, without .json and .md")
    options = parser.parse_args(arguments)
    study = Study(
        title="profile",
        systems=tuple(options.strategies),
        models=(options.model,),
        ranks=tuple(options.ranks),
        batch_sizes=(options.batch_size,),
        hidden=(options.hidden,),
        fanouts=(tuple(options.fanout),),
        steps=options.steps,
    )
    records = []
    for store in options.stores:
        for ranks in options.ranks:
            for scenario in study.scenarios([str(store.resolve())], Launch(ranks, "tuned")):
                records += measure(scenario)
    print("\n".join(describe(records)))
    if options.out is not None:
        document = {
            "kind": "bench profile",
            "commit": current_commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": installed_versions(),
            "machine": describe_machine(),
            "study": asdict(study),
            "records": records,
        }
        options.out.with_suffix(".json").write_text(json.dumps(document, indent=1))
        options.out.with_suffix(".md").write_text("\n".join([*describe(records), ""]))
