"""Which of several failed ranks is named, and how what it reported comes back."""

import json
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from gsplit.distributed.comm.comm import SoloComm, run_on_rank_zero
from gsplit.distributed.launch.failures import Cause, RankEnd, Report, find_cause, parse_report
from gsplit.distributed.launch.launched_rank import ERROR_FILE, report_failure
from gsplit.errors import CommError, InputError, UnavailableError

LOST = Report("CommError", "rank 0: shuffle of step 3: expected all ranks to join (got rank 1, gone). Fix: look.", 5.0)
REFUSED = Report("InputError", "x: expected a (got b: c). Fix: d.", 6.0)


def _report(error: Exception, path: Path, monkeypatch: pytest.MonkeyPatch) -> Report | None:
    monkeypatch.setenv(ERROR_FILE, str(path))
    report_failure(error)
    return parse_report(path.read_text())


def test_a_cause_comes_before_its_consequences() -> None:
    lost, refused, bug = RankEnd(0, 2, LOST), RankEnd(1, 2, REFUSED), RankEnd(4, 1)
    killed, ended = RankEnd(2, -9), RankEnd(3, -15)
    assert find_cause([lost, killed, refused]).message == "rank 1: x: expected a (got b: c). Fix: d."
    said = find_cause([lost, ended, killed]).message
    assert said.startswith("rank 2: expected to finish (got signal 9 (SIGKILL); rank 0 missed it in: shuffle of")
    assert "memory ran out" in said and "memory" not in find_cause([ended]).message
    assert find_cause([lost, bug]).message.startswith("rank 4: expected to finish (got exit code 1;")
    assert find_cause([lost]).message == LOST.message
    assert find_cause([ended]).message.startswith("rank 3: expected to finish (got signal 15 (SIGTERM))")


def test_of_two_causes_the_earlier_is_named_whatever_its_rank() -> None:
    late, early = Report("ValueError", "late", 9.5), Report("ValueError", "early", 9.25)
    assert find_cause([RankEnd(0, 1, late), RankEnd(1, 1, early)]).message == "rank 1: ValueError: early"


@pytest.mark.parametrize(
    "error, kind, lasting",
    [
        (OSError(28, "No space left on device"), UnavailableError, False),
        (UnavailableError("no answer"), UnavailableError, False),
        (PermissionError(13, "Permission denied"), InputError, True),
        (OSError(30, "Read-only file system"), InputError, True),
        (InputError("wrong"), InputError, True),
    ],
)
def test_what_may_work_later_is_tried_again(
    error: Exception, kind: type[Exception], lasting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act() -> None:
        raise error

    with pytest.raises(kind) as raised:
        run_on_rank_zero(SoloComm(), "save", act)
    assert type(raised.value) is kind and str(raised.value) == str(error)
    report = _report(raised.value, tmp_path / "report", monkeypatch)
    assert find_cause([RankEnd(0, 2, report)]) == Cause(0, f"rank 0: {error}", lasting)


def test_a_rank_that_names_anothers_fault_speaks_for_itself() -> None:
    fault = Report("RankFaultError", "rank 0: sum: expected the same collective on every rank (got b). Fix: c.", 4.0)
    assert find_cause([RankEnd(1, 2, LOST), RankEnd(0, 2, fault)]).message == fault.message


def test_ranks_that_the_launcher_ended_are_no_cause() -> None:
    ended = [RankEnd(0, -9, on_request=True), RankEnd(2, 2, LOST)]
    assert find_cause([*ended, RankEnd(1, 0)]).message.startswith(
        "rank 1: expected to work with the others (got exit code 0 while the others went on; rank 2 missed it in: "
    )
    absent = RankEnd(3, 0, joined=False)
    assert "rank 3: expected to work with the others (got exit code 0 before it had joined" in (
        find_cause([RankEnd(1, 0), absent, ended[0]]).message
    )
    assert find_cause(ended, stopped=[0]).message.startswith("rank 0: expected to go on (got a process that a signal")


def test_there_is_always_a_cause() -> None:
    assert find_cause([RankEnd(1, -62)]).message.startswith("rank 1: expected to finish (got signal 62)")
    ended = [RankEnd(0, -9, on_request=True), RankEnd(1, -15, on_request=True)]
    assert find_cause(ended).message.startswith("rank 0: expected to finish (got signal 9 (SIGKILL))")


def test_what_was_asked_for_wrongly_lasts_and_a_killed_rank_does_not() -> None:
    assert find_cause([RankEnd(0, 2, REFUSED)]).lasting
    assert not find_cause([RankEnd(0, -9)]).lasting and not find_cause([RankEnd(0, 2, LOST)]).lasting


def test_a_report_is_read_by_us_and_by_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    said = _report(InputError("x: expected a (got b: c). Fix: d."), path, monkeypatch)
    assert said is not None and (said.kind, str(said)) == ("InputError", "x: expected a (got b: c). Fix: d.")
    theirs = ProcessFailure(local_rank=1, pid=1, exitcode=2, error_file=str(path))
    assert theirs.error_file_data["message"]["message"] == "InputError: x: expected a (got b: c). Fix: d."
    assert theirs.timestamp == int(said.time_s)


def test_an_error_of_others_is_named_by_its_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "error.json"
    for error, said in [
        (MemoryError(), "MemoryError"),
        (ValueError("a: b"), "ValueError: a: b"),
        (CommError("c"), "c"),
    ]:
        assert str(_report(error, path, monkeypatch)) == said


def test_the_place_of_an_error_of_others_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        json.loads("{")
    except ValueError as error:
        said = str(_report(error, tmp_path / "error.json", monkeypatch))
    assert said.startswith("JSONDecodeError: Expecting property name") and "decoder.py:" in said
    assert said.endswith(", in raw_decode)")


@pytest.mark.parametrize(
    "text", ["", "{", '{"message": "old format"}', json.dumps({"message": {"message": "a"}}), "[]"]
)
def test_a_report_that_is_not_there_or_not_whole_is_none(text: str) -> None:
    assert parse_report(text) is None


def test_without_a_launcher_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ERROR_FILE, raising=False)
    monkeypatch.chdir(tmp_path)
    report_failure(InputError("x"))
    assert list(tmp_path.iterdir()) == []
