"""Documents that hypothesis makes up, and shrinks where one is not refused as it should be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gsplit.errors import GSplitError
from gsplit.planner.hardware import Hardware, read_hardware
from gsplit.run.config import TrainSettings, load_settings
from gsplit.run.folder import read_settings
from gsplit.store.manifest import Manifest, parse_manifest
from gsplit_bench.report.documents import read_material

NUMBERS = st.one_of(st.integers(), st.floats(), st.integers(min_value=-(1 << 64), max_value=1 << 64))
WORDS = st.one_of(
    st.text(max_size=20),
    st.sampled_from([*TrainSettings.model_fields, *Hardware.__dataclass_fields__, *Manifest.model_fields]),
    st.sampled_from(
        ["kind", "settings", "shape", "num_classes", "base", "constants", "a100", "bench train", "records"]
    ),
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, WORDS),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(WORDS, inner, max_size=5)),
    max_leaves=20,
)
DOCUMENTS = st.one_of(
    st.dictionaries(WORDS, VALUES, max_size=8).map(json.dumps),
    VALUES.map(json.dumps),
    st.text(max_size=60),
    st.lists(st.tuples(WORDS, VALUES), max_size=6).map(
        lambda pairs: "\n".join(f"{key} = {json.dumps(value)}" for key, value in pairs)
    ),
)

READERS: dict[str, Callable[[Path], object]] = {
    "f.toml": lambda path: load_settings(path, {}),
    "settings.json": read_settings,
    "h.json": read_hardware,
    "h.toml": read_hardware,
    "r.json": lambda path: read_material([path]),
    "manifest.json": lambda path: parse_manifest(path.read_bytes()),
}


@pytest.mark.parametrize("name", list(READERS))
@settings(max_examples=100)
@given(text=DOCUMENTS)
@example(text="[" * 20_000)
@example(text='{"settings": ' * 200 + "1" + "}" * 200)
@example(text="lr = 1e300")
@example(text="\ud800")
def test_any_document_is_read_or_refused(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        READERS[name](path)
    except GSplitError as error:
        message = str(error)
        assert ": expected " in message and ". Fix: " in message and message.isprintable() and len(message) < 8000


@settings(max_examples=100)
@given(given_values=st.dictionaries(st.sampled_from(list(TrainSettings.model_fields)), st.one_of(NUMBERS, VALUES)))
def test_settings_that_pass_can_be_kept(given_values: dict[str, Any]) -> None:
    try:
        found = load_settings(None, given_values)
    except GSplitError:
        return
    assert TrainSettings(**json.loads(json.dumps(found.model_dump(), allow_nan=False))) == found
