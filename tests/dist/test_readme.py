"""The README's commands, run from its text in the order in which they stand; and the picture that it shows."""

import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from forked_scripts import run_forked, run_ranks_forked

from gsplit.planner import calibration
from gsplit.planner.hardware import PRESETS, write_hardware

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS for line in text.splitlines() if kind == "" and re.match(r"(gsplit|pip) ", line)]
PROGRAMS = [text for kind, text in BLOCKS if kind == "python"]


def _run(words: list[str], folder: Path) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_readme_has_the_whole_path() -> None:
    verbs = [shlex.split(line)[1] for line in COMMANDS if line.startswith("gsplit")]
    assert verbs == ["import", "inspect", "partition", "plan", "train", "verify", "infer", "report"]
    assert len(PROGRAMS) == 1


@pytest.mark.timeout(900)
def test_every_command_and_the_program_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    host = replace(PRESETS["v100-nvlink"], name="this", cores=2)  # measuring this machine takes a minute: test_calibration
    write_hardware(host, calibration.cache_file(), calibration._identity())
    for line in COMMANDS:
        words = shlex.split(line, comments=True)
        if words[0] == "pip":  # what is here already, without the network: CI itself installs from nothing
            offline = ["--dry-run", "--no-deps", "--no-index", "--no-build-isolation", "--quiet"]
            _run([sys.executable, "-m", *words[:2], *offline, *words[2:]], ROOT)
        else:
            done = run_forked(["-m", *words], tmp_path, cwd=tmp_path)
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
            said[words[1]] = done.stdout
    assert "verified: every checksum" in said["inspect"]
    assert "8 parts by gsplit with metis" in said["partition"]
    assert "2 rank(s) equal one process" in said["verify"]
    assert "is fastest: " in said["plan"]
    program = tmp_path / "train.py"
    program.write_text(PROGRAMS[0])
    for num_ranks in (1, 2):  # torchrun itself is started for examples/own_model.py and in test_exit.py
        run_ranks_forked([str(program)], num_ranks, tmp_path, cwd=tmp_path)


def test_the_picture_is_what_the_code_answers() -> None:
    draw = runpy.run_path(str(ROOT / "docs" / "draw_step.py"))["draw"]
    assert draw() == (ROOT / "docs" / "step.svg").read_text()


def test_what_the_texts_link_to_exists() -> None:
    for text in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text.read_text()):
            assert "://" in link or (text.parent / link).exists(), f"{text.name}: {link}"
