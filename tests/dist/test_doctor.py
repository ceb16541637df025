"""The doctor starts real ranks and measures their collectives."""

from gsplit.doctor.network import check_collectives


def test_ranks_join_and_both_ways_between_them_are_measured() -> None:
    lines = {line.check: line for line in check_collectives(2)}
    assert list(lines) == ["ranks", "gloo", "shared memory"]
    assert lines["ranks"].verdict == "ok" and lines["ranks"].found.startswith("2 started and joined in ")
    for how in ("gloo", "shared memory"):
        assert lines[how].verdict != "error"
        assert lines[how].figures[f"{how} latency_s"] > 0 and lines[how].figures[f"{how} bytes_per_s"] > 1e6
