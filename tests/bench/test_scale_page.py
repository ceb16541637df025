"""docs/scale.md shows what ``python -m gsplit_bench scale`` prints, from the records that are committed."""

from pathlib import Path

from gsplit_bench import scale

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"


def test_the_page_shows_what_the_command_prints() -> None:
    page = PAGE.read_text()
    for number, table in enumerate(scale.tables()):
        assert table in page, f"table {number} differs: copy the output of python -m gsplit_bench scale"
