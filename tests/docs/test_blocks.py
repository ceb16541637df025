"""Every block of code in README and docs is run, page by page in the order of the page, or says why it is not."""

import re
import runpy
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from doc_blocks import ADDED, ROOT, SMALLER, Block, blocks_of, forked_launch, gsplit_commands, pages, smaller
from forked_scripts import run_ranks_forked
from typer.testing import CliRunner

import gsplit.distributed.launch.forked_rank
import gsplit.distributed.launch.launcher
from gsplit.cli.main import app
from gsplit.planner import calibration
from gsplit.planner.hardware import PRESETS, write_hardware
from gsplit.run.config import TrainSettings

PAGES = {str(page.relative_to(ROOT)): blocks_of(page) for page in pages()}
RUN = {name: blocks for name, blocks in PAGES.items() if any(block.is_run for block in blocks)}
STORES = ("STORE", "p.gsplit", "arxiv.gsplit")  # the names that pages give to a partitioned store
_TELL = "\nprint('last loss', float(loss.detach()))\n"


def _gsplit(words: list[str]) -> str:
    """A command in this process."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        done = CliRunner().invoke(app, words)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert done.exit_code == 0, (words, done.output, done.exception)
    return done.output


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that pages import, and the one that they partition it into."""
    folder = tmp_path_factory.mktemp("stores")
    sizes = ["--vertices", SMALLER["--vertices"]["20000"], "--edges", SMALLER["--edges"]["400000"]]
    _gsplit(["import", "synthetic", str(folder / "demo.gsplit"), *sizes])
    words = [str(folder / "demo.gsplit"), str(folder / "demo8.gsplit"), "--parts", "8", "--fanout", "10,10"]
    _gsplit(["partition", *words, *ADDED["partition"]])
    return folder


@pytest.fixture
def folder(stores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to run a page in, on a machine whose speed is known: measuring it takes a minute (test_calibration)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_hardware(
        replace(PRESETS["v100-nvlink"], name="this", cores=2), calibration.cache_file(), calibration._identity()
    )
    monkeypatch.setattr(gsplit.distributed.launch.forked_rank, "can_fork", lambda device: False)  # by a command
    monkeypatch.setattr(gsplit.distributed.launch.launcher, "launch", forked_launch(tmp_path))
    place = tmp_path / "page"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def _provide(stores: Path, place: Path, blocks: list[Block]) -> None:
    """The stores that a page speaks of, unless it makes them."""
    made = " ".join(block.text for block in blocks if block.kind == "commands" and block.is_run)
    for name in STORES:
        shutil.copytree(stores / "demo8.gsplit", place / name)
    for name in ("demo.gsplit", "demo8.gsplit"):
        if not re.search(rf"gsplit (import \w+|partition \S+) {name}", made):
            shutil.copytree(stores / name, place / name)


def _run_commands(block: Block) -> None:
    for words in gsplit_commands(block.text):
        if words[0] == "pip":  # what is here already, without the network: CI itself installs from nothing
            offline = ["--dry-run", "--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
            command = [sys.executable, "-m", *words[:2], *offline, *words[2:]]
            subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=300)
            continue
        assert words[0] == "gsplit", f"{block}: expected a gsplit command, or a reason why it is not run (got {words})"
        _gsplit(smaller(words)[1:])


def _run_python(block: Block, names: dict[str, Any], place: Path) -> None:
    if block.ranks > 1:
        told = []
        for number in (1, block.ranks):
            program = place / f"program-{number}.py"  # weights would differ, did the page not seed them
            program.write_text(f"import torch\ntorch.manual_seed({number})\n{block.text}{_TELL}")
            told += run_ranks_forked([str(program)], number, place, cwd=place)
        losses = [float(rank.rpartition("last loss ")[2]) for rank in told]
        assert losses == pytest.approx(losses[:1] * len(losses), rel=1e-5)  # the same on one process, as pages say
        return
    lines = "\n" * (block.line - (block.kind == "setup"))  # tracebacks name the page's line
    exec(compile(lines + block.text, str(ROOT / block.page), "exec"), names)


@pytest.mark.parametrize("name", RUN)
def test_the_blocks_of_a_page_run(name: str, stores: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _provide(stores, folder, RUN[name])
    page = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", page)  # PyG reads the module of a layer's class
    names = vars(page)
    for block in RUN[name]:
        if not block.is_run:
            continue
        if block.kind == "commands":
            _run_commands(block)
        elif block.kind == "toml" and "vertices" in tomllib.loads(block.text):
            (folder / "graph.toml").write_text(block.text)  # for gsplit import typed
        elif block.kind == "toml":
            TrainSettings(**tomllib.loads(block.text))
        else:
            _run_python(block, names, folder)


def test_every_block_is_run_or_says_why_not() -> None:
    blocks = [block for page in PAGES.values() for block in page]
    assert {block.kind for block in blocks} <= {"python", "commands", "toml", "text", "setup"}
    assert len([block for block in blocks if block.kind in ("python", "commands")]) > 30
    for block in blocks:
        assert not block.reason or len(block.reason.split()) > 1, f"{block}: a reason of some words"
        if block.same_as:
            assert block.text in [other.text for other in PAGES[block.same_as] if other.is_run], block
        assert block.kind != "text" or not re.search(r"^gsplit ", block.text, re.MULTILINE), block


def test_the_path_of_the_readme_says_what_it_should(stores: Path, folder: Path) -> None:
    """What users see of three commands that the pages run."""
    demo8 = str(stores / "demo8.gsplit")
    assert "verified: every checksum" in _gsplit(["inspect", demo8, "--verify"])
    assert "8 parts by gsplit with metis" in _gsplit(["inspect", demo8])
    planned = _gsplit(["plan", demo8, "--nproc", "2", "--hidden", "16", "--fanout", "10,10"])
    assert "is fastest: " in planned and "the median of 5 timed steps" in planned


@pytest.mark.parametrize("drawing", ["draw_step.py", "draw_result.py"])
def test_pictures_are_what_the_code_and_the_records_say(drawing: str) -> None:
    made = runpy.run_path(str(ROOT / "docs" / drawing))
    assert made["draw"]() == (ROOT / "docs" / made["PICTURE"]).read_text()
