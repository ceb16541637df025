"""docs/measured.md shows what its records have, and every record can be measured again by one command."""

import re

import pytest
from docs_hooks import ROOT

from gsplit_bench.measured import ROWS, Row, find_record, table
from gsplit_bench.measurements import MEASUREMENTS

PAGE = (ROOT / "docs" / "measured.md").read_text()
NAMES = {measurement.name for measurement in MEASUREMENTS}


def test_the_page_shows_what_the_command_prints() -> None:
    assert PAGE.endswith(f"\n{table()}\n"), "copy the output of python -m gsplit_bench measured"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.what[:40])
def test_every_row_is_short_and_names_its_record(row: Row) -> None:
    what, result, record, command = row.cells()
    assert re.search(r"\d|bit-identical", result) and len(result) < 100 and len(what) < 160
    links = re.findall(r"\]\(\.\./([^)]+)\)", record)
    assert links and all((ROOT / link).is_file() for link in links)
    assert re.fullmatch(r"`[^`]+`|\[commands\]\(scale\.md#[\w-]+\)", command)


def test_records_that_the_command_record_does_not_make_are_known() -> None:
    """The fused layers are part of the exactness matrix since; the others took hours, or compare two versions."""
    named = {name for row in ROWS for name in row.records}
    assert named - NAMES == {
        "billion-edges",
        "exactness-fused",
        "presampling",
        "solvers",
        "training-default-allocator-4",
    }


def test_the_newest_record_of_a_name_counts() -> None:
    assert find_record("bare-loop").stem == "2026-11-17-bare-loop"
    assert find_record("training").stem == "2026-11-15-training"
