"""Which of several failed ranks is named, and how what it reported comes back."""

import json
import logging
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from gsplit.distributed.launch import _cause, _silence_elastic, report_failure
from gsplit.errors import CommError, InputError


def _failure(folder: Path, rank: int, exitcode: int, error: Exception | None = None) -> ProcessFailure:
    """A rank that ended; the file is what TorchElastic tells a rank to write."""
    path = folder / f"{rank}-{exitcode}.json"
    if error is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
            report_failure(error)
        assert json.loads(path.read_text())
    return ProcessFailure(local_rank=rank, pid=1, exitcode=exitcode, error_file=str(path))


def test_a_cause_comes_before_its_consequences(tmp_path: Path) -> None:
    lost = _failure(tmp_path, 0, 2, CommError("shuffle of step 3: rank 1 is gone"))
    cause = _failure(tmp_path, 1, 2, InputError("x: expected a (got b: c). Fix: d."))
    killed, ended = _failure(tmp_path, 2, -9), _failure(tmp_path, 3, -15)
    bug = _failure(tmp_path, 4, 1)
    assert _cause({0: lost, 1: cause, 2: killed}) == "rank 1: x: expected a (got b: c). Fix: d."
    assert _cause({0: lost, 2: killed, 3: ended}).startswith("rank 2: expected to finish (got signal 9)")
    assert "memory ran out" in _cause({2: killed}) and "memory" not in _cause({3: ended})
    assert _cause({0: lost, 4: bug}).startswith("rank 4: expected to finish (got exit code 1)")
    assert _cause({0: lost}) == "rank 0: shuffle of step 3: rank 1 is gone"
    assert _cause({3: ended}).startswith("rank 3: expected to finish (got signal 15)")


def test_an_error_without_words_is_named_by_its_type(tmp_path: Path) -> None:
    assert _cause({0: _failure(tmp_path, 0, 2, MemoryError())}) == "rank 0: MemoryError"


def test_without_a_launcher_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    report_failure(InputError("x"))
    assert list(tmp_path.iterdir()) == []


def test_torchelastic_says_nothing_of_its_own() -> None:
    logger = logging.getLogger("torch.distributed.elastic.agent.server.api")
    logger.setLevel(logging.WARNING)  # as torch sets it, whatever the level of its parent
    _silence_elastic()
    assert not logger.isEnabledFor(logging.WARNING)
