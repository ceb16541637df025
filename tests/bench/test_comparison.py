"""What the page says follows from the records: ratios worked out by hand."""

from report_samples import count, record

from gsplit_bench.report.comparison import advise, compare_with_peers, find_redundancy, split_against
from gsplit_bench.report.documents import Count, TrainRecord
from gsplit_bench.report.tables import tabulate_records, tabulate_speedups


def _record(system: str, ranks: int, wall: float, cpu: float, **more: object) -> TrainRecord:
    spreads = {
        name: {"median": value, "low": value, "high": value} for name, value in (("wall_s", wall), ("cpu_s", cpu))
    }
    return TrainRecord.model_validate(record("g", "sage", system, ranks) | spreads | more)


def test_the_best_of_ours_is_found_by_each_clock() -> None:
    records = [_record("split", 2, 1.0, 4.0), _record("data", 2, 2.0, 3.0), _record("dgl", 2, 5.0, 6.0)]
    found = {each.clock: (each.system, each.ratio) for each in compare_with_peers(records)}
    assert found == {"wall": ("split", 5.0), "cpu": ("data", 2.0)}


def test_another_sampler_is_not_the_best_of_our_strategies() -> None:
    records = [_record("split", 2, 2.0, 2.0), _record("split+labor", 2, 1.0, 1.0), _record("dgl", 2, 6.0, 6.0)]
    assert [(each.system, each.ratio) for each in compare_with_peers(records)] == [("split", 3.0), ("split", 3.0)]
    assert [(each.system, each.thriftiest) for each in advise(records)] == [("split", "split")]


def test_one_strategy_can_be_compared_and_threads_are_a_scenario_of_their_own() -> None:
    records = [_record("split", 1, 2.0, 2.0), _record("data", 1, 1.0, 1.0), _record("dgl", 1, 6.0, 6.0)]
    records += [_record("split", 1, 1.5, 2.0, threads=2), _record("dgl", 1, 3.0, 6.0, threads=2)]
    found = compare_with_peers(records, "split")
    ratios = {(each.scenario.threads, each.clock): each.ratio for each in found}
    assert ratios == {(1, "wall"): 3.0, (1, "cpu"): 3.0, (2, "wall"): 2.0, (2, "cpu"): 3.0}


def test_tables_have_ratios_quartiles_and_means_by_what_varies() -> None:
    quartiles = {"median": 4.0, "low": 1.0, "high": 9.0, "first_quartile": 3.5, "third_quartile": 4.5}
    records = [
        _record("split", 2, 2.0, 4.0, cpu_s=quartiles),
        _record("data", 2, 1.0, 8.0),
        _record("dgl", 2, 4.0, 16.0),
        *(_record(system, 4, 1.0, cpu) for system, cpu in (("split", 2.0), ("dgl", 2.0))),
        *(_record(system, 4, 1.0, cpu, features="disk") for system, cpu in (("split", 1.0), ("dgl", 5.0))),
    ]
    cells = {(row[2], row[3]): row[4:10] for row in tabulate_records(records).rows}
    assert cells["2 ranks, memory", "split"][0] == "4.000 (3.500 to 4.500)"
    assert cells["2 ranks, memory", "data"][:2] == ["8.000 (8.000 to 8.000, all)", "1.000 (1.000 to 1.000, all)"]
    assert cells["2 ranks, memory", "dgl"][2:] == ["4.00", "4.00", "4.00", "2.00"]
    assert tabulate_speedups(records).rows == [
        ["sage, 2 ranks, memory", "dgl", "4.00", "4.00", "4.00", "2.00", "1"],
        ["sage, 4 ranks, disk", "dgl", "5.00", "1.00", "5.00", "1.00", "1"],
        ["sage, 4 ranks, memory", "dgl", "1.00", "1.00", "1.00", "1.00", "1"],
        ["sage, all with several ranks, memory", "dgl", "2.00", "2.00", "2.00", "1.41", "2"],
        ["sage, all with several ranks, disk", "dgl", "5.00", "1.00", "5.00", "1.00", "1"],
    ]


def test_a_peer_is_compared_within_its_scenario_and_by_its_allocator() -> None:
    records = [_record("split", 2, 1.0, 1.0), _record("dgl", 2, 2.0, 2.0), _record("dgl", 4, 9.0, 9.0)]
    records.append(_record("dgl", 2, 3.0, 3.0, allocator="default"))
    found = {each.peer: each.ratio for each in compare_with_peers(records) if each.clock == "wall"}
    assert found == {"dgl": 2.0, "dgl, default allocator": 3.0}


def test_advice_is_the_fastest_its_lead_and_one_process() -> None:
    records = [
        _record("split", 1, 1.5, 1.5, partition="none"),
        _record("split", 2, 2.0, 3.0),
        _record("data", 2, 3.0, 3.0),
        _record("pyg", 2, 1.0, 1.0),  # not ours
        _record("data", 4, 1.0, 3.0),
    ]
    one, two, four = sorted(advise(records), key=lambda each: each.scenario.ranks)
    assert (one.system, one.lead, one.over_one_process) == ("split", None, None)
    assert (two.system, two.next_system, two.lead) == ("split", "data", 1.5)
    assert two.over_one_process == 0.75 and two.prefers_one_process
    assert (four.system, four.lead, four.over_one_process) == ("data", None, 1.5)


def test_redundancy_is_data_over_split_and_counts_come_first() -> None:
    records = [_record("split", 2, 1, 1, edges=10, rows_loaded=4), _record("data", 2, 1, 1, edges=15, rows_loaded=8)]
    (measured,) = find_redundancy(records, [])
    assert (measured.graph, measured.ranks, measured.edges, measured.rows) == ("g", 2, 1.5, 2.0)
    counted = {"edges_per_rank": [10, 10], "rows_loaded_per_rank": [6, 6]}
    (both,) = find_redundancy(records, [Count.model_validate(count("g", "data", 2) | counted)])
    assert (both.edges, both.rows) == (2.0, 3.0)


def test_split_is_compared_with_all_of_ours_and_redundancy_is_that_of_data() -> None:
    records = [
        _record("split", 2, 1.0, 2.0, edges=10),
        _record("data", 2, 1.5, 2.0, edges=14),
        _record("data_cached", 2, 0.5, 1.0, edges=14),
        _record("split", 4, 1.0, 2.0, edges=10),
        _record("split+labor", 4, 0.75, 1.0, edges=8),
        _record("dgl", 4, 3.0, 3.0),
    ]
    found = [(each.rival, each.redundancy, each.wall, each.cpu) for each in split_against(records)]
    assert found == [("data", 1.4, 1.5, 1.0), ("data_cached", 1.4, 0.5, 0.5), ("split+labor", None, 0.75, 0.5)]
