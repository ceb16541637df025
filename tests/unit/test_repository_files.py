"""Files beside the code that other machines read, and whose errors nobody would notice: images, forms, citation."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
IMAGES = sorted((ROOT / "docker").glob("*.Dockerfile"))
FORMS = sorted(path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")


def _document(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def test_hadolint_has_nothing_to_say_about_the_images() -> None:
    assert [path.name for path in IMAGES] == ["cpu.Dockerfile", "cuda.Dockerfile"]
    linter = str(Path(sys.executable).parent / "hadolint")
    done = subprocess.run([linter, "--no-color", *IMAGES], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("image", IMAGES, ids=lambda path: path.name)
def test_an_image_copies_only_what_the_ignore_file_lets_through(image: Path) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    lines = [line.split() for line in image.read_text().splitlines()]
    copied = {word for words in lines if words[:1] == ["COPY"] and "--from=build" not in words for word in words[1:-1]}
    assert copied == allowed
    assert all((ROOT / name).exists() for name in copied)
    assert ["USER", "1000"] in lines  # not root


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.name)
def test_an_issue_form_has_what_github_asks_of_it(form: Path) -> None:
    document = _document(form)
    assert {"name", "description", "body"} <= document.keys() <= {"name", "description", "labels", "body"}
    for element in document["body"]:
        assert element["type"] in {"markdown", "textarea", "input"}
        assert ("value" if element["type"] == "markdown" else "label") in element["attributes"]
    identifiers = [element["id"] for element in document["body"] if element["type"] != "markdown"]
    assert len(identifiers) == len(set(identifiers)) > 0


def test_the_citation_names_the_paper() -> None:
    document = _document(ROOT / "CITATION.cff")
    assert document["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= document.keys()  # what the format requires
    paper = document["preferred-citation"]
    assert paper["title"].startswith("GSplit: Scaling Graph Neural Network Training on Large Graphs")
    assert [author["family-names"] for author in paper["authors"]][:1] == ["Polisetty"]
    assert len(paper["authors"]) == 7
