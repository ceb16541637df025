"""Rows between hosts: the counts against sets of vertices, and the figures of docs/hosts.md against the record."""

import json
from pathlib import Path
from statistics import median

import gsplit
from gsplit.graph.ownership import Ownership, own_parts
from gsplit.minibatch.split import split_in_one_process
from gsplit.partitioning.presample import Workload
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit_bench.between_hosts import count_crossing

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks/results/2026-11-18-between-hosts.json"


def test_rows_between_hosts_are_those_that_ranks_request_from_other_hosts(tmp_path: Path) -> None:
    planted = PlantedGraph(800, 8000, num_communities=8, num_features=4, num_classes=4)
    plain = build_store(synthetic_source(planted), tmp_path / "g.gsplit")
    store = gsplit.partition(plain, tmp_path / "p.gsplit", 4, [3, 3], batch_size=64, solver="restream", epochs=2)
    workload = Workload.of_store(store, "train", [3, 3], 64)
    ranks = own_parts(store.part_boundaries, 4, store.part_loads)
    hosts = Ownership(ranks.boundaries[::2])
    key = workload.key(2, 0)
    samplers = [
        workload.sampler_of(
            workload.graph.restrict(*ranks.range_of(r)), workload.original_ids[slice(*ranks.range_of(r))]
        )
        for r in range(4)
    ]
    splits = split_in_one_process(samplers, workload.step_targets(key)[0], [3, 3], key, ranks)
    by_rank, by_host = [], []
    for layer in range(2):
        wanted = [
            (rank // 2, vertex, rank)
            for rank, split in enumerate(splits)
            for vertex in split.layers[layer].foreign_ids.tolist()
            if vertex // hosts.boundaries[1] != rank // 2
        ]
        by_rank.append(float(len(wanted)))
        by_host.append(float(len({(host, vertex) for host, vertex, _ in wanted})))
    assert count_crossing(workload, ranks, 2, 1, 2) == by_rank
    assert count_crossing(workload, hosts, 2, 1, 2) == by_host
    assert by_host < by_rank


def _saved(mesh: str, graphs: tuple[str, ...]) -> str:
    """The shares of bytes saved, in percent, as the page writes them."""
    hosts, ranks = (int(number) for number in mesh.split(" x "))
    found = [
        round(100 * (1 - sum(each["bytes_once"].values()) / sum(each["bytes"].values())))
        for document in json.loads(RECORD.read_text())
        if document["graph"] in graphs
        for each in document["meshes"]
        if (each["hosts"], each["ranks_per_host"]) == (hosts, ranks)
    ]
    low, high = min(found), max(found)
    return f"{low} %" if low == high else f"{low} to {high} %"


def test_the_page_has_the_figures_of_the_record() -> None:
    page = (ROOT / "docs/hosts.md").read_text()
    four = ("arxiv", "debian", "ego", "planted1m")
    assert f"| 2 hosts x 2 ranks | {_saved('2 x 2', four)} |" in page
    assert f"| 2 hosts x 4 ranks | {_saved('2 x 4', four)} |" in page
    assert f"| 2 hosts x 8 ranks, ego-twitter | {_saved('2 x 8', ('ego64',))} |" in page
    assert f"| 2 hosts x 32 ranks, ego-twitter | {_saved('2 x 32', ('ego64',))} |" in page
    ratios = [
        next(sum(mesh["rows_once"]) for mesh in document["meshes"] if mesh["hosts"] == int(hosts)) / sum(rows)
        for document in json.loads(RECORD.read_text())
        for hosts, rows in document["rows_of_direct_partition"].items()
    ]
    assert len(ratios) == 8
    assert f"between {100 * min(ratios) - 100:.0f} % and +{100 * max(ratios) - 100:.0f} % as many rows cross" in page


def test_the_page_has_the_bytes_that_left_the_hosts() -> None:
    page = (ROOT / "docs/hosts.md").read_text()
    runs = json.loads((ROOT / "benchmarks/results/2026-11-18-host-steps.json").read_text())
    sent = {
        way: median(
            row["bytes_between_hosts"] / 1e6
            for run in runs
            for row in run["rows"]
            if (row["way"], row["ranks_per_host"]) == (way, 2)
        )
        for way in ("from rank to rank", "in two levels", "replicas")
    }
    assert f"{sent['in two levels']:.0f} instead of {sent['from rank to rank']:.0f} MB left the hosts" in page
    assert f"sent {sent['replicas']:.1f} MB" in page
    assert all(row["largest_relative_difference"] < 1e-4 for run in runs for row in run["rows"])
