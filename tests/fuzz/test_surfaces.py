"""Thousands of damaged inputs on every surface: each is read or refused in the usual form, and nothing else happens.

``python tests/fuzz/campaign.py --inputs 1000000`` runs the same on more of them, with bounds on memory.
"""

import os
import runpy
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest
from fuzz_guard import Guard, attempt
from fuzz_mutations import mutate_array, mutate_bytes, mutate_document
from fuzz_surfaces import SURFACES

from gsplit.errors import InputError

NUMBERS = {"manifest": 2000, "array": 1500, "settings": 800, "run settings": 1500, "run weights": 500}
NUMBERS |= {"hardware": 1500, "records": 800, "npz": 150, "csv": 120, "parquet": 120, "ogb csv": 80, "ogb npz": 100}
NUMBERS |= {"store": 300, "typed store": 250, "timed store": 250, "shard": 250, "checkpoint": 800}
NUMBERS |= {"typed tables": 80, "ogb typed": 80, "snap": 120}


@cache
def _guard() -> Guard:
    return Guard()  # a hook stays, so there is one


@pytest.mark.parametrize("name", list(SURFACES))
def test_damaged_inputs_are_read_or_refused(tmp_path: Path, name: str) -> None:
    surface, refusals = SURFACES[name](tmp_path), 0
    with _guard().watch(tmp_path):
        for number in range(NUMBERS[name]):
            refused, finding = attempt(name, surface, number, _guard())
            assert finding is None, f"{name} {number}: {finding.what}"
            refusals += refused
    assert refusals > NUMBERS[name] // 10  # mutants are damaged, not only different


def test_the_campaign_has_a_share_for_each_surface() -> None:
    assert runpy.run_path(str(Path(__file__).with_name("campaign.py")))["SHARES"].keys() == SURFACES.keys()


class _Wrong:
    """A surface that does what none may."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind

    def attempt(self, random: Random) -> None:
        if self._kind == "another error":
            raise KeyError(self._kind)
        if self._kind == "another form":
            raise InputError("something is wrong")
        if self._kind == "a file outside":
            os.close(os.open("/etc/hostname", os.O_RDONLY))
        if self._kind == "a link that leads out":
            (self._folder / "link").symlink_to("/etc/hostname")
            (self._folder / "link").read_text()
        if self._kind == "a warning":
            np.float32(1e30) * np.float32(1e30)


@pytest.mark.parametrize(
    "kind, what",
    [
        ("another error", "KeyError"),
        ("another form", "another form"),
        ("a file outside", "opened"),
        ("a link that leads out", "opened"),
        ("a warning", "RuntimeWarning"),
        ("nothing", None),
    ],
)
def test_what_must_not_happen_is_noticed(tmp_path: Path, kind: str, what: str | None) -> None:
    with _guard().watch(tmp_path):
        _, finding = attempt("wrong", _Wrong(tmp_path, kind), 0, _guard())
    assert (finding is None) == (what is None)
    assert finding is None or (what is not None and what in finding.what)


def test_a_number_is_an_input() -> None:
    document = '{"a": [1, 2, {"b": "c"}], "d": 0.5}'
    for number in range(50):
        first, second = Random(number), Random(number)
        assert mutate_bytes(first, b"some bytes") == mutate_bytes(second, b"some bytes")
        assert repr(mutate_document(first, document)) == repr(mutate_document(second, document))
        assert mutate_array(first, np.arange(9)).tolist() == mutate_array(second, np.arange(9)).tolist()
