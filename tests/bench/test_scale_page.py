"""docs/scale.md and docs/scale-formulas.md show what ``python -m gsplit_bench scale`` prints, from records."""

from pathlib import Path

from gsplit_bench import scale

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pages_show_what_the_command_prints() -> None:
    constants, measured, large = scale.tables()
    for page, table in (("scale-formulas.md", constants), ("scale-formulas.md", measured), ("scale.md", large)):
        assert table in (DOCS / page).read_text(), f"{page} differs: copy the output of python -m gsplit_bench scale"
