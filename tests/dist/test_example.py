"""The examples run as their docstrings say, and losses do not depend on the number of ranks."""

from difflib import ndiff
from pathlib import Path

import pytest
from forked_scripts import run_forked, run_ranks_forked

from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _under_torchrun(folder: Path, script: str, *args: str) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_forked([*launcher, str(EXAMPLES / script), *args], folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def _output(folder: Path, script: str, *args: str, ranks: int = 1) -> list[str]:
    return "".join(run_ranks_forked([str(EXAMPLES / script), *args], ranks, folder)).splitlines()


def _losses(lines: list[str]) -> list[float]:
    return [float(line.split("loss ")[1].split()[0]) for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    graph = PlantedGraph(4000, 60_000, num_features=16)
    return str(build_store(synthetic_source(graph), tmp_path_factory.mktemp("graph") / "demo.gsplit").path)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", ["by_hand.py", "own_model.py"])
def test_losses_are_the_same_on_one_and_two_ranks(store: str, script: str, tmp_path: Path) -> None:
    words = [script, store, "--batch-size", "256"]
    one = _output(tmp_path, *words)
    two = _under_torchrun(tmp_path, *words) if script == "own_model.py" else _output(tmp_path, *words, ranks=2)
    assert len(_losses(one)) >= 2
    assert _losses(one) == pytest.approx(_losses(two), abs=1e-4)  # float32: sums are made in another order
    assert _losses(one)[-1] < _losses(one)[0]
    if script == "own_model.py":
        assert float(two[-1].split()[-1]) < 1e-9  # it checks itself against one process


@pytest.mark.timeout(300)
def test_both_ways_of_the_same_training_run(tmp_path: Path) -> None:
    for script in ("train_ddp.py", "train_gsplit.py"):
        losses = _losses(_output(tmp_path, f"ddp_to_gsplit/{script}", ranks=2))
        assert len(losses) == 5
        assert losses[-1] < losses[0]


def test_five_lines_change_from_ddp() -> None:
    ddp, ours = ((EXAMPLES / "ddp_to_gsplit" / f"train_{name}.py").read_text() for name in ("ddp", "gsplit"))
    before, after = (text.split('"""')[2].splitlines() for text in (ddp, ours))
    new = [line[2:] for line in ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    assert len(new) == 5  # as README.md and docs/training.md say
    assert all(f"# ({number})" in line for number, line in enumerate(new, start=1))  # each is marked
    assert any("GLOBAL" in line for line in new)
