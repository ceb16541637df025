"""The site of the documentation: links lead somewhere, every page has a place, and what is generated is complete.

``make docs`` in ``make check`` builds the site itself, with broken links as errors.
"""

import json
import re
from types import ModuleType

import pytest
import yaml
from docs_hooks import ROOT, hooks

from gsplit_bench.measured import table

DOCS = ROOT / "docs"
REPOSITORY = "https://forge.example/gsplit"


@pytest.fixture(scope="module")
def site() -> ModuleType:
    pytest.importorskip("mkdocs", reason="needs the extra docs")
    return hooks()


def test_links_out_of_docs_become_links_to_the_repository(site: ModuleType) -> None:
    assert site.link_out("training.md", "../src/gsplit/training/trainer.py", REPOSITORY) == (
        f"{REPOSITORY}/blob/main/src/gsplit/training/trainer.py"
    )
    assert site.link_out("measured.md", "../benchmarks/results", REPOSITORY + "/") == (
        f"{REPOSITORY}/tree/main/benchmarks/results"
    )
    assert site.link_out("decisions/0008-loading.md", "../loading.md", REPOSITORY) == "../loading.md"
    with pytest.raises(Exception, match="training.md links to ../src/gone.py, which is not there"):
        site.link_out("training.md", "../src/gone.py", REPOSITORY)


def test_what_the_texts_link_to_exists() -> None:
    texts = [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]
    assert len(texts) > 40
    for text in texts:
        markdown = text.read_text()
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", markdown) + re.findall(r'<img src="([^"]+)"', markdown):
            assert "://" in link or (text.parent / link).exists(), f"{text.name}: {link}"


def test_every_page_has_a_place_in_the_navigation() -> None:
    settings = (ROOT / "mkdocs.yml").read_text().replace("!ENV ", "")
    placed = re.findall(r"[\w/-]+\.md", json.dumps(yaml.safe_load(settings)["nav"]))
    assert sorted(placed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def _options(tree: object, path: tuple[str, ...] = ("gsplit",)) -> list[tuple[str, str]]:
    if isinstance(tree, dict):
        return [pair for word, below in tree.items() for pair in _options(below, (*path, word))]
    assert isinstance(tree, list)
    return [(" ".join(path), option) for option in tree if option.startswith("--") and option != "--help"]


def test_the_command_line_reference_has_every_command_and_option(site: ModuleType) -> None:
    sections = re.split(r"^#+ ", site.command_line(), flags=re.MULTILINE)
    by_name = {section.split("\n", 1)[0]: section for section in sections}
    recorded = _options(json.loads((ROOT / "tests" / "assets" / "command_line.json").read_text()))
    assert len(recorded) > 100
    for command, option in recorded:
        assert option in by_name[command], (command, option)


def test_the_page_of_measurements_is_what_the_command_prints() -> None:
    page = (DOCS / "measured.md").read_text()
    assert page.endswith(f"\n{table()}\n"), "copy the output of python -m gsplit_bench measured"
