"""docs/scale.md shows what benchmarks/scale.py prints, from the records that are committed."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_page_shows_what_the_script_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import scale

    page = (ROOT / "docs" / "scale.md").read_text()
    for number, table in enumerate(scale.tables()):
        assert table in page, f"table {number} differs: copy the output of python benchmarks/scale.py"
    for name in ("scale", "scale_model"):
        del sys.modules[name]
