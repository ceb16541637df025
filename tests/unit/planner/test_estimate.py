"""Estimates follow their formulas: more work takes longer, ranks beyond the cores take turns, presets are whole."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from gsplit.errors import InputError
from gsplit.minibatch.strategy_names import parse_strategy
from gsplit.planner.counts import RankCounts, StrategyCounts
from gsplit.planner.disk import DiskReads
from gsplit.planner.estimate import estimate_step
from gsplit.planner.hardware import PRESETS, Hardware, read_hardware, write_hardware
from gsplit.planner.placement import Placement
from gsplit.planner.shapes import PlannedModel, layer_work

HOST = replace(
    PRESETS["v100-nvlink"], name="host", cores=2, thread_gain=0.8, collective_s=0.0, collective_per_rank_s=0.0
)
SHAPE = PlannedModel("sage", 100, 64, 8, 2)
PLACE = Placement(row_bytes=(400,))


def _rank(factor: float = 1.0, crossing: float = 0.0) -> RankCounts:
    one = RankCounts(
        10, (3000, 100), (300, 10), (2000, 300), 2000, (crossing, crossing), (crossing,) * 2, crossing, crossing, 3100
    )

    def grown(value: object) -> object:
        return tuple(v * factor for v in value) if isinstance(value, tuple) else value * factor  # type: ignore[operator]

    values = {name: grown(value) for name, value in asdict(one).items() if value is not None}
    return RankCounts(**values)  # type: ignore[arg-type]


def _counts(name: str, *ranks: RankCounts) -> StrategyCounts:
    return StrategyCounts(parse_strategy(name, 2), 1, ranks, 1)


def test_data_parallelism_waits_for_the_slowest_rank_once_and_split_at_every_stage() -> None:
    ranks = (_rank(1.0), _rank(3.0))
    machine = PRESETS["v100-nvlink"]
    data = estimate_step(_counts("data", *ranks), SHAPE, machine, PLACE)
    latency = machine.latency(2) * SHAPE.num_layers  # of the gradients
    assert data.wall_s == pytest.approx(max(rank.total for rank in data.ranks) + latency)
    assert data.imbalance > 1.0 and data.cpu_s == pytest.approx(sum(rank.total for rank in data.ranks))
    split = estimate_step(_counts("split", *ranks), SHAPE, machine, PLACE)
    assert split.wall_s == pytest.approx(split.stages.total)


def test_ranks_beyond_the_cores_take_turns() -> None:
    two = estimate_step(_counts("data", *(_rank(),) * 2), SHAPE, HOST, PLACE, threads=1)
    four = estimate_step(_counts("data", *(_rank(),) * 4), SHAPE, HOST, PLACE, threads=1)
    apart = estimate_step(_counts("data", *(_rank(),) * 4), SHAPE, replace(HOST, cores=None), PLACE)
    assert four.wall_s == pytest.approx(2 * apart.wall_s, rel=1e-6)
    assert four.wall_s > 1.9 * two.wall_s


def test_one_process_has_all_threads_for_products() -> None:
    big = _rank(1000.0)
    alone = estimate_step(_counts("split", big), SHAPE, HOST, PLACE)
    single = estimate_step(_counts("split", big), SHAPE, HOST, PLACE, threads=1)
    assert alone.stages.forward < single.stages.forward and alone.stages.sample == single.stages.sample
    assert alone.stages.shuffle == alone.stages.exchange_ids == alone.stages.exchange_features == 0
    assert alone.bytes_sent == 0


def test_rows_that_cross_cost_time_and_bytes() -> None:
    none, some = (_counts("split", *(_rank(crossing=c),) * 2) for c in (0.0, 500.0))
    quiet, busy = (estimate_step(counts, SHAPE, HOST, PLACE) for counts in (none, some))
    for stage in ("shuffle", "exchange_features", "exchange_ids", "split", "backward"):
        assert getattr(busy.stages, stage) > getattr(quiet.stages, stage), stage
    assert busy.bytes_sent - quiet.bytes_sent == 500 * 400 + 2 * 500 * 64 * 4 + 500 * 8


def test_a_cache_spares_the_disk_which_brings_a_page_once_for_all_ranks() -> None:
    host, on_disk = replace(HOST, load_s=0.0), replace(PLACE, disk=DiskReads(1000, 4e6))
    memory, disk, cached = (
        estimate_step(_counts("data", *(_rank(),) * 2), SHAPE, host, place)
        for place in (PLACE, on_disk, replace(on_disk, hit_rate=0.9, disk_hit_rate=0.9))
    )
    wait = 1000 / host.disk_reads_per_s + 4e6 / host.disk_bytes_per_s
    assert disk.wall_s == pytest.approx(memory.wall_s + wait) and disk.cpu_s == memory.cpu_s
    assert cached.stages.load < 0.2 * disk.stages.load
    alone, without = (estimate_step(_counts("data", _rank()), SHAPE, host, place) for place in (on_disk, PLACE))
    assert alone.wall_s - without.wall_s == pytest.approx(wait)


def test_narrow_rows_are_read_at_a_lower_rate() -> None:
    narrow_place = replace(PLACE, row_bytes=(PLACE.row_bytes[0] / 4,))
    wide = estimate_step(_counts("data", *(_rank(),) * 4), SHAPE, HOST, PLACE).ranks[0].load
    narrow = estimate_step(_counts("data", *(_rank(4.0),) * 4), SHAPE, HOST, narrow_place).ranks[0].load
    assert narrow > wide + HOST.row_overhead_bytes * 2 * 2000 / HOST.load_bytes_per_s


def test_work_of_a_mean_layer_is_two_products_each_way() -> None:
    forward, backward = layer_work(SHAPE, 0, edges=50, destinations=10, sources=40)
    assert forward.flops == 2 * 2 * 10 * 100 * 64 == backward.flops  # no gradient of input rows
    assert forward.aggregate_bytes == 50 * 100 * 4 and backward.aggregate_bytes == 0
    _, above = layer_work(SHAPE, 1, edges=50, destinations=10, sources=40)
    assert above.flops == 2 * 2 * 2 * 10 * 64 * 8 and above.aggregate_bytes == 50 * 64 * 4
    first = layer_work(replace(SHAPE, projects_first=True), 0, 50, 10, 40)[0]
    assert first.flops == 2 * (40 + 10) * 100 * 64 and first.aggregate_bytes == 50 * 64 * 4


def test_attention_takes_the_cheaper_order() -> None:
    gat = PlannedModel("gat", 64, 64, 8, 2, heads=4)
    many_sources, _ = layer_work(gat, 0, edges=100, destinations=10, sources=10_000)
    assert many_sources.flops == 2 * 10 * 4 * 64 * 16 + 2 * 10_000 * 64 * 4
    few_sources, _ = layer_work(gat, 0, edges=10_000, destinations=1000, sources=1000)
    assert few_sources.flops == 2 * 1000 * 64 * 64 + 2 * 1000 * 64 * 4
    assert few_sources.attention_values == (10_000 + 1000) * 64 * 9 / 8


def test_unknown_models_are_refused_and_similar_ones_named() -> None:
    assert PlannedModel("gin").note == "gin is costed as sage" and PlannedModel("gat").note is None
    with pytest.raises(InputError, match="model: expected one of sage"):
        PlannedModel("perceptron")


def test_hardware_files_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    write_hardware(HOST, path, {"host": "here"})
    assert read_hardware(path) == HOST
    (tmp_path / "part.toml").write_text('base = "a100"\nname = "mine"\nstep_s = 0.004\n')
    mine = read_hardware(tmp_path / "part.toml")
    assert mine == replace(PRESETS["a100"], name="mine", step_s=0.004)
    for text, message in (
        ("{", "JSON, or TOML"),
        (json.dumps({"base": "a100", "speed": 3}), "unknown"),
        (json.dumps({"name": "x"}), "missing"),
        (json.dumps({"base": "a100", "flops_per_s": 0}), "flops_per_s: expected a positive number"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            read_hardware(path)
    with pytest.raises(InputError, match="No such file"):
        read_hardware(tmp_path / "nothing.json")


def test_a_device_trains_while_the_next_mini_batch_is_made() -> None:
    machine = PRESETS["a100"]
    host = replace(PLACE, host_samples=True)
    serial = estimate_step(_counts("split", *(_rank(crossing=50),) * 2), SHAPE, machine, host)
    stages = serial.stages
    drawn = stages.sample + stages.split + stages.exchange_ids
    brought = stages.load + stages.exchange_features
    assert serial.wall_s == pytest.approx(stages.total)
    assert stages.sample == pytest.approx(3100 / machine.host_sample_edges_per_s + machine.sample_s)
    for threads, made in ((1, drawn + brought), (2, drawn / 2 + brought)):
        place = replace(host, prefetch=2, sampling_threads=threads)
        ahead = estimate_step(_counts("split", *(_rank(crossing=50),) * 2), SHAPE, machine, place)
        assert ahead.wall_s == pytest.approx(max(made, stages.total - drawn - brought))
    shared = estimate_step(_counts("split", *(_rank(),) * 2), SHAPE, HOST, replace(PLACE, prefetch=2))
    assert shared.wall_s == pytest.approx(shared.stages.total)  # both use the cores


def test_rows_between_hosts_take_the_slower_link() -> None:
    machine = replace(PRESETS["a100"], exchange_bytes_per_s=1e9, between_bytes_per_s=1e7)
    counts = _counts("split", *(_rank(crossing=500),) * 4)
    one, two = (estimate_step(counts, SHAPE, machine, PLACE, hosts=hosts) for hosts in (1, 2))
    input_bytes = 500 * 4 * SHAPE.num_features
    assert two.ranks[0].exchange_features == pytest.approx(2 / 3 * input_bytes / 1e7)
    assert two.ranks[0].backward > one.ranks[0].backward + two.ranks[0].shuffle - one.ranks[0].shuffle
    replicas = replace(counts, replicas=2)
    inside = estimate_step(replicas, SHAPE, machine, PLACE, hosts=2)
    assert inside.ranks[0].shuffle == one.ranks[0].shuffle  # only gradients go to the other host


def test_a_report_of_the_doctor_gives_the_rates_of_links(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    rates = {"copy from pinned memory, 64 MB": 20.0, "zero-copy gather, 1 MB": 2.0, "zero-copy gather, 64 MB": 18.0}
    links = {"check": "links", "figures": {**rates, "all-to-all, 64 MB per rank": 90.0}}
    versions = {"check": "versions", "found": "torch 2.13, GPU NVIDIA H100 80GB HBM3"}
    path.write_text(json.dumps({"ok": True, "findings": [versions, links]}))
    links_of_h100 = replace(PRESETS["h100"], load_bytes_per_s=18e9, exchange_bytes_per_s=90e9, reduce_bytes_per_s=90e9)
    assert read_hardware(path) == replace(links_of_h100, name="report.json")
    kernels = {"check": "constants", "figures": {"flops_per_s": 2e13, "memory_bytes": 8e10}}
    path.write_text(json.dumps({"findings": [*json.loads(path.read_text())["findings"], kernels]}))
    measured = replace(links_of_h100, name="report.json", flops_per_s=2e13, memory_bytes=8e10)
    assert read_hardware(path) == measured
    path.write_text(json.dumps({"findings": [{"check": "links", "figures": rates}]}))
    assert read_hardware(path) == replace(PRESETS["a100"], name="report.json", load_bytes_per_s=18e9)
    gather = "zero-copy gather, 1 MB"
    for figures in ({"copy from pageable memory, 1 MB": 5.0}, {gather: "fast"}, {gather: 1e12}, None):
        path.write_text(json.dumps({"findings": [{"check": ["links"]}, {"check": "links", "figures": figures}]}))
        with pytest.raises(InputError, match="report of gsplit doctor --device cuda .got a report"):
            read_hardware(path)


@pytest.mark.parametrize("newer", ["a100", "h100"])
def test_newer_devices_are_faster_but_for_fixed_costs(newer: str) -> None:
    old, new = PRESETS["v100-nvlink"], PRESETS[newer]
    rates = [name for name in asdict(old) if name.endswith("_per_s") and not name.startswith(("disk", "host"))]
    assert all(getattr(new, name) > getattr(old, name) for name in rates)
    assert (new.step_s, new.collective_s) == (old.step_s, old.collective_s)
    assert isinstance(new, Hardware) and new.threads(4) == 1


def test_fixed_costs_fall_on_their_stage_and_only_where_there_is_one() -> None:
    dear = replace(HOST, split_s=1.0, optimizer_s=2.0)
    for name, splits in (("split", 1.0), ("data_cached", 1.0), ("data", 0.0)):
        plain, more = (estimate_step(_counts(name, *(_rank(),) * 2), SHAPE, machine, PLACE) for machine in (HOST, dear))
        assert more.ranks[0].split - plain.ranks[0].split == pytest.approx(splits)
        assert more.ranks[0].optimizer - plain.ranks[0].optimizer == pytest.approx(2.0)


def test_a_micro_batch_copies_the_rows_that_its_rank_loaded_itself() -> None:
    split, cached = (
        estimate_step(_counts(name, *(_rank(),) * 2), SHAPE, HOST, PLACE).ranks[0].exchange_features
        for name in ("split", "data_cached")
    )
    own = _rank().sources[0] - _rank().rows_received[0]
    assert cached - split == pytest.approx(2 * own * 4 * SHAPE.num_features / HOST.row_bytes_per_s)
