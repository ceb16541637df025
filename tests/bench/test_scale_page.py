"""docs/scale.md and docs/scale-formulas.md show what ``python -m gsplit_bench scale`` prints, from records."""

from pathlib import Path

from gsplit_bench import scale, scale_model

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pages_show_what_the_command_prints() -> None:
    constants, measured, large = scale.tables()
    for page, table in (("scale-formulas.md", constants), ("scale-formulas.md", measured), ("scale.md", large)):
        assert table in (DOCS / page).read_text(), f"{page} differs: copy the output of python -m gsplit_bench scale"


def test_four_ranks_on_two_cores_take_what_the_page_says() -> None:
    cpu = {(run["graph"], run["ranks"]): run["cpu_s"]["median"] for run in scale_model.trained_steps()}
    most = max(cpu[graph, 4] / cpu[graph, 2] for graph, ranks in cpu if ranks == 2)
    said = f"(4 ranks on 2 cores took up to {100 * (most - 1):.0f} % more CPU per edge than 2"
    assert said in (DOCS / "scale-formulas.md").read_text(), said
