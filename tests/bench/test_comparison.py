"""What the page says follows from the records: ratios worked out by hand."""

from report_samples import count, record

from gsplit_bench.report.comparison import advise, compare_with_peers, find_redundancy, split_against
from gsplit_bench.report.documents import Count, TrainRecord


def _record(system: str, ranks: int, wall: float, cpu: float, **more: object) -> TrainRecord:
    spreads = {
        name: {"median": value, "low": value, "high": value} for name, value in (("wall_s", wall), ("cpu_s", cpu))
    }
    return TrainRecord.model_validate(record("g", "sage", system, ranks) | spreads | more)


def test_the_best_of_ours_is_found_by_each_clock() -> None:
    records = [_record("split", 2, 1.0, 4.0), _record("data", 2, 2.0, 3.0), _record("dgl", 2, 5.0, 6.0)]
    found = {each.clock: (each.system, each.ratio) for each in compare_with_peers(records)}
    assert found == {"wall": ("split", 5.0), "cpu": ("data", 2.0)}


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


def test_split_is_compared_where_redundancy_is_known() -> None:
    records = [
        _record("split", 2, 1.0, 2.0, edges=10),
        _record("data", 2, 1.5, 2.0, edges=14),
        _record("data_cached", 2, 0.5, 1.0, edges=14),
        _record("split", 4, 1.0, 2.0, edges=10),
        _record("data_cached", 4, 1.0, 2.0, edges=14),
    ]
    found = [
        (each.rival, each.redundancy, each.wall, each.cpu) for each in split_against(records, ("data", "data_cached"))
    ]
    assert found == [("data", 1.4, 1.5, 1.0), ("data_cached", 1.4, 0.5, 0.5)]
