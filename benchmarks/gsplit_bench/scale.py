"""Prints the tables of docs/scale.md: constants with their sources, formulas against measurements, large graphs.

Copy them into the pages by hand. The formulas are in ``scale_model``.
"""

from collections.abc import Iterable, Sequence

from gsplit_bench import scale_model as model
from gsplit_bench.measured import find_record, read_record

__all__ = ["main"]


def table(head: str, rows: Iterable[list[str]]) -> str:
    """A table of Markdown."""
    lines = [head, " | ".join("---" for _ in head.split(" | ")), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def _name_record(name: str) -> str:
    """As it is in benchmarks/results, with its date if it has one."""
    return find_record(name).stem


def constants_table() -> str:
    """What everything is multiplied with."""
    known = model.constants()
    sent = known.sent_per_loaded
    rows = [
        [
            "import, one process",
            f"{1e9 * known.import_s_per_edge:.0f} ns per edge",
            f"{_name_record('import')}, 100 M edges",
        ],
        [
            "import, 4 processes, sorted input, all CPU seconds",
            f"{1e9 * known.shared_import_s_per_edge:.0f} ns per edge",
            "2026-11-16-sharded-import",
        ],
        [
            "presampling, one core",
            f"{known.presample_edges_per_s / 1e6:.0f} M edges/s",
            f"{_name_record('presampling')}, two threads, arxiv",
        ],
        [
            "weighing and `cluster`, one core",
            f"{1e9 * known.cluster_s_per_entry:.0f} ns per entry",
            f"{_name_record('billion-edges')}, 0.97 B entries, busy machine",
        ],
        [
            "KaMinPar, one core",
            f"{1e9 * known.kaminpar_s_per_entry:.0f} ns per entry; {model.KAMINPAR_BYTES_PER_ENTRY} bytes (estimate)",
            f"{_name_record('solvers')}, planted5m, 100 M entries, busy machine",
        ],
        [
            "a training step, 128 features, GraphSAGE-256, one core",
            f"{1e9 * known.train_s_per_edge:.0f} ns per edge drawn",
            "host-sage-1m and -1m-4, planted1m",
        ],
        [
            "rows sent per row loaded, W ranks",
            f"{sent.base:.2f} + {sent.slope:.2f} log2 W",
            f"{_name_record('training-counted')}, 8 to 64 ranks, batch 4096",
        ],
        ["hidden rows among them", f"{100 * known.hidden_share:.0f} %", "the same, 64 ranks"],
        ["largest over mean work of ranks", f"{known.imbalance:.2f}", "the same"],
        ["collectives per step, 3 layers", f"{model.collectives(3)}", "4 L + 1; tests/dist/test_counts.py"],
        [
            "per target: edges drawn, rows computed, input rows",
            "374, 56, 191",
            "GSplit paper, Table 1, Papers100M, batch 4096, fanout 15,15,15; assumed for all",
        ],
        ["SHA-256", f"{model.SHA256_BYTES_PER_S / 1e9} GB/s", "docs/decisions/0002"],
        [
            "a host: 64 cores, 256 GB, 32 ranks",
            f"${model.HOST_DOLLARS_PER_H:.2f} per hour",
            (
                "32 x m7g.large, $0.0816, us-east-1, on demand, June 2026 (factualminds.com, "
                "amazon-ec2-on-demand-pricing-instance-families-2026); a vCPU taken as a core of this machine: assumption"
            ),
        ],
        [
            "network and disk of a host, a message of an all-to-all",
            (
                f"{model.NETWORK_BYTES_PER_S / 1e9} and {model.DISK_BYTES_PER_S / 1e9:.0f} GB/s, "
                f"{1e6 * model.MESSAGE_S:.0f} us"
            ),
            "assumptions",
        ],
    ]
    return table("constant | value | source", rows)


def _check(what: str, basis: str, predicted: float, found: float, unit: str, digits: int = 1) -> list[str]:
    error = f"{100 * (predicted / found - 1):+.0f} %"
    return [what, basis, f"{predicted:.{digits}f} {unit}", f"{found:.{digits}f} {unit}", error]


def checks_table() -> str:
    """Formulas fitted to some records, against others."""
    small, middle, large = model.import_points()
    seconds = model.fit([(edges, time) for edges, _, time, _ in (small, middle)])
    memory = model.fit([(vertices, size) for _, vertices, _, size in (small, middle, large)])
    billion = read_record("import")["billion"]
    drawn = {name: edges / time for name, edges, time in model.presample_points()}
    sent = model.fit(model.sent_points((8, 16, 32)))
    last = model.sent_points((64,))
    known, largest = model.constants(), model.billion_edges()
    rows = [
        _check("import, 100 M edges", "10 M and 30 M", seconds.at(large[0]), large[2], "s"),
        _check(
            "memory of an import, 1 B edges, 50 M vertices",
            "10 M to 100 M edges",
            memory.at(billion["vertices"]) / 1e9,
            billion["peak_anonymous_bytes"] / 1e9,
            "GB",
            2,
        ),
        _check(
            "CPU of presampling, 784 mini-batches of 967 M edges",
            "arxiv",
            1024 * 784 * 110 / known.presample_edges_per_s,  # fanout 10, 10
            next(stage["cpu_s"] for stage in largest["stages"] if stage["stage"].startswith("presample")),
            "s",
            0,
        ),
        _check("presampling rate, debian", "arxiv", drawn["arxiv"] / 1e6, drawn["debian"] / 1e6, "M edges/s"),
        _check("presampling rate, ego-twitter", "arxiv", drawn["arxiv"] / 1e6, drawn["ego-twitter"] / 1e6, "M edges/s"),
        _check(
            "weighing and restreaming, 100 M entries",
            "1, 5 and 20 M",
            model.fit(model.restream_points()).at(model.PLANTED_ENTRIES),
            model.restream_seconds(),
            "s",
        ),
        _check(
            "rows sent per row loaded, 64 ranks, mean of two graphs",
            "8 to 32 ranks",
            sent.at(6),
            sum(share for _, share in last) / len(last),
            "rows",
            2,
        ),
        _check(
            "peak memory of KaMinPar, planted5m",
            "its estimate",
            (model.KAMINPAR_BYTES_PER_ENTRY * model.PLANTED_ENTRIES + 100 * 5e6) / 1e9,
            model.solved("planted5m", "kaminpar")["peak_bytes"] / 1e9,
            "GB",
        ),
        _check(
            "memory of presampling, 967 M edges, 50 M vertices",
            "4 E + 24 V (2 cores)",
            model.partition_bytes(largest["graph"]["edges"], largest["graph"]["vertices"], 2) / 1e9,
            next(stage["anonymous_gb"] for stage in largest["stages"] if stage["stage"].startswith("presample")),
            "GB",
        ),
        _check("collectives of a step, without the loss", "4 L", 4 * model.LAYERS, known.counted_collectives, "", 0),
    ]
    for run in model.trained_steps():
        if run["graph"] in ("arxiv", "debian", "ego"):
            what = f"CPU of a step, {run['graph']}, {run['ranks']} ranks"
            predicted = known.train_s_per_edge * run["edges"]
            rows.append(_check(what, "planted1m", predicted, run["cpu_s"]["median"], "s", 2))
    for run in model.copied_batches():
        if run["graph"] in ("arxiv", "planted1m"):
            ranks, bytes_of_rank = run["ranks"], max(run["batch_bytes_per_rank"])
            received = run["rows_sent"] * (1 - known.hidden_share)
            predicted = ((run["input_rows"] + received) * 4 * 128 + 8 * run["edges"]) / ranks
            what = f"a mini-batch on the largest rank, {run['graph']}, {ranks} ranks"
            rows.append(_check(what, "counts", predicted / 1e6, bytes_of_rank / 1e6, "MB", 0))
    return table("what | from | formula | measured | error", rows)


def _hours(hours: float) -> str:
    if hours >= 1:
        return f"{hours:.1f} h"
    return f"{60 * hours:.0f} min" if hours >= 1 / 60 else f"{3600 * hours:.0f} s"


def graphs_table() -> str:
    """The graphs."""
    known, rows = model.constants(), []
    for graph in model.GRAPHS:
        found = model.forecast(graph, known)
        solving = f"{_hours(found.solve_h)} {found.solver}"
        alone = f"{_hours(found.presample_h)} + {solving}, {found.partition_bytes / 1e9:.0f} GB"
        if not found.partitions_today:
            alone = f"not today: {found.partition_bytes / 1e9:,.0f} GB on one host"
        rows.append(
            [
                graph.name,
                f"{graph.vertices / 1e6:,.0f} M",
                f"{graph.edges / 1e9:,.1f} B",
                f"{graph.features} x {graph.feature_bytes} B",
                f"{graph.store_bytes / 1e9:,.0f} GB",
                f"{found.hosts} x {model.RANKS_PER_HOST}",
                _hours(found.import_h),
                alone,
                f"{found.mapped_bytes / 1e9:.1f} + {found.rank_bytes / 1e9:.1f} GB",
                f"{found.batch_size:,}",
                f"{found.sent_bytes / 1e6:.0f} MB",
                f"{found.step_s:.2f} s",
                _hours(found.epoch_h),
                f"${found.dollars:,.0f}",
            ]
        )
    head = (
        "graph | vertices | edges | features | store | hosts x ranks | import | presample + partition, one host"
        " | a rank: mapped + own | batch | sent per rank and step | step | epoch | import, partition, 10 epochs"
    )
    return table(head, rows)


def tables() -> list[str]:
    """All that the page shows."""
    return [constants_table(), checks_table(), graphs_table()]


def main(arguments: Sequence[str]) -> None:
    print("\n\n".join(tables()))
