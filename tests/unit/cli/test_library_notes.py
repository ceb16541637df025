"""What the library logs during a command is shown once, and what was announced already is not."""

import logging

import pytest

from gsplit.cli.console import library_notes


def test_warnings_of_rank_zero_are_notes_and_errors_of_all_ranks_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("gsplit")
    before = (log.level, list(log.handlers))
    with library_notes(0):
        log.info("not for users")
        for missing in (9, 9, 8):  # of several evaluations
            log.warning("targets/test: %d without a label are left out of the score", missing)
        log.handle(log.makeRecord(log.name, logging.WARNING, "loader.py", 1, "it was announced", (), None))
        log.error("rank 1 does not come")
    with library_notes(1):
        log.warning("the same as on rank 0")
        log.error("rank 0 does not come")
    assert capsys.readouterr().err.splitlines() == [
        "note: targets/test: 9 without a label are left out of the score",
        "note: targets/test: 8 without a label are left out of the score",
        "rank 1 does not come",
        "rank 0 does not come",
    ]
    assert (log.level, list(log.handlers)) == before
