"""More than 300 damaged stores: each refused by name and with a fix, none believed, none read outside."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import sample_store

from gsplit.errors import StoreError
from gsplit.store.files import npy_header
from gsplit.store.manifest import VERSION
from gsplit.store.reader import open_store
from gsplit.store.verify import verify_store

N, E = 300, 3000
BIG_N, BIG_E = 60_000, 300_000
ARRAYS = {
    "indptr": ("int64", (N + 1,)),
    "indices": ("int32", (E,)),
    "y": ("int64", (N,)),
    "name_offsets": ("int64", (N + 1,)),
    "name_bytes": ("uint8", (12 * N,)),
    "features/x": ("float32", (N, 5)),
    "edges/weight": ("float32", (E,)),
    "targets/train": ("int64", (N // 2,)),
    "targets/test": ("int64", (N // 4,)),
    "pairs/links": ("int64", (N // 4, 2)),
    "pair_labels/links": ("float32", (N // 4,)),
    "pair_negatives/links": ("int64", (N // 4, 3)),
}
UNSAMPLED = ("y", "name_bytes", "features/x", "edges/weight", "pair_labels/links")
REFUSAL = re.compile(r"(\S+\.npy|manifest\.json|\S+\.gsplit): expected .+ \(got .*\)\. Fix: .+", re.S)


Apply = Callable[[Path], None]


@dataclass(frozen=True)
class Damage:
    name: str
    apply: Apply
    seen_by: str  # "open", or "verify" where only a full scan can see it
    blames: str


def _file(store: Path, array: str) -> Path:
    return store / f"{array}.npy"


def _edit_bytes(array: str, edit: Callable[[bytes], bytes]) -> Apply:
    def apply(store: Path) -> None:
        _file(store, array).write_bytes(edit(_file(store, array).read_bytes()))

    return apply


def _cut(array: str, at: int) -> Apply:
    return _edit_bytes(array, lambda data: data[:at])


def _pad(array: str, count: int) -> Apply:
    return _edit_bytes(array, lambda data: data + b"\0" * count)


def _flip(array: str, at: int, mask: int) -> Apply:
    return _edit_bytes(array, lambda data: data[:at] + bytes([data[at] ^ mask]) + data[at:][1:])


def _new_header(array: str, dtype: str, shape: tuple[int, ...]) -> Apply:
    return _edit_bytes(array, lambda data: npy_header(dtype, shape) + data[128:])


def _replace(name: str, make: Callable[[Path], object]) -> Apply:
    def apply(store: Path) -> None:
        (store / name).unlink()
        make(store / name)

    return apply


def _link_out(name: str) -> Apply:
    """Move a sound file or folder out of the store and leave a link: whoever follows it would be content."""

    def apply(store: Path) -> None:
        outside = store.parent / "outside" / name.replace("/", "-")
        outside.parent.mkdir(exist_ok=True)
        shutil.move(store / name, outside)
        (store / name).symlink_to(outside)

    return apply


def _make_huge(file: Path) -> None:
    with file.open("wb") as stream:
        stream.truncate(1 << 40)


def _pickle(file: Path) -> None:
    np.save(file, np.array([{"a": 1}, None], object), allow_pickle=True)


def _edit_values(array: str, change: Callable[[Any], None], *, hide: bool = True) -> Apply:
    """Change elements; with ``hide``, also make the checksum fit, so that only the meaning is wrong."""

    def apply(store: Path) -> None:
        values = np.load(_file(store, array))
        change(values)
        np.save(_file(store, array), values)
        if hide:
            manifest = json.loads((store / "manifest.json").read_text())
            manifest["arrays"][array]["sha256"] = hashlib.sha256(values.tobytes()).hexdigest()
            (store / "manifest.json").write_text(json.dumps(manifest))

    return apply


def _edit_manifest(change: Callable[[dict[str, Any]], None]) -> Apply:
    def apply(store: Path) -> None:
        manifest = json.loads((store / "manifest.json").read_text())
        change(manifest)
        (store / "manifest.json").write_text(json.dumps(manifest))

    return apply


def _set(*path: str | int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: Any) -> None:
        for key in path[:-1]:
            manifest = manifest[key]
        manifest[path[-1]] = value

    return change


def _delete(*path: str | int) -> Callable[[dict[str, Any]], None]:
    def change(manifest: Any) -> None:
        for key in path[:-1]:
            manifest = manifest[key]
        del manifest[path[-1]]

    return change


def _rename_array(old: str, new: str) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["arrays"][new] = manifest["arrays"].pop(old)

    return change


def _file_damages() -> Iterator[Damage]:
    for array, (dtype, shape) in ARRAYS.items():
        file = f"{array}.npy"
        damages: dict[str, Apply] = {}
        for at in (0, 1, 64, 127, 128, 129, -1, -4):
            damages[f"cut at {at}"] = _cut(array, at)
        for count in (1, 8, 4096):
            damages[f"longer by {count}"] = _pad(array, count)
        for wrong in ("float64", "int8", "bfloat16"):
            damages[f"says {wrong}"] = _new_header(array, wrong, shape)
        for rows in (shape[0] + 1, shape[0] - 1, 1 << 61):
            damages[f"says {rows} rows"] = _new_header(array, dtype, (rows, *shape[1:]))
        damages["says another dimension"] = _new_header(array, dtype, (*shape, 2))
        for at in (0, 6, 8, 20, 100, 127):
            damages[f"header byte {at}"] = _flip(array, at, 0x41)
        damages["gone"] = _replace(file, lambda path: None)
        damages["a directory"] = _replace(file, Path.mkdir)
        damages["a pipe"] = _replace(file, os.mkfifo)
        damages["pickled"] = _replace(file, _pickle)
        damages["a link out"] = _link_out(file)
        for name, apply in damages.items():
            yield Damage(f"{file} {name}", apply, "open", file)
        yield Damage(f"{file} one bit", _flip(array, -3, 1), "verify" if array in UNSAMPLED else "open", file)
    for folder in ("features", "edges", "targets", "pairs"):
        yield Damage(f"{folder} a link out", _link_out(folder), "open", f"{folder}/")


def _value_damages() -> Iterator[Damage]:
    def put(at: int, value: int) -> Callable[[Any], None]:
        return lambda values: values.__setitem__(at, value)

    for value in (N, -1, 2**31 - 1, -(2**31)):
        for at in (0, E // 2, E - 1):
            yield Damage(f"indices[{at}] = {value}", _edit_values("indices", put(at, value)), "open", "indices.npy")
    for array in ("targets/train", "targets/test"):
        for value in (N, -1, 2**62, -(2**63)):
            for at in (0, 10, -1):
                yield Damage(f"{array}[{at}] = {value}", _edit_values(array, put(at, value)), "open", f"{array}.npy")
        yield Damage(f"{array} twice", _edit_values(array, lambda v: v.__setitem__(1, v[0])), "verify", f"{array}.npy")
        yield Damage(
            f"{array} unordered",
            _edit_values(array, lambda v: v.__setitem__(slice(None), v[::-1].copy())),
            "verify",
            f"{array}.npy",
        )
    for array in ("pairs/links", "pair_negatives/links"):
        for value in (N, -1, 2**62, -(2**63)):
            for at in (0, N // 8, -1):
                change = _edit_values(array, put(at, value))
                yield Damage(f"{array}[{at}] = {value}", change, "open", f"{array}.npy")
    for array, end in (("indptr", E), ("name_offsets", 12 * N)):
        for at, value in (
            (0, 1),
            (0, -1),
            (-1, end + 1),
            (-1, end - 1),
            (-1, 2**62),
            (5, -1),
            (5, end + 1),
            (150, -(2**63)),
            (150, 2**63 - 1),
            (299, 0),
        ):
            yield Damage(f"{array}[{at}] = {value}", _edit_values(array, put(at, value)), "open", f"{array}.npy")
    swap = _edit_values("indices", lambda v: v.__setitem__(slice(0, 40), v[:40][::-1].copy()))
    yield Damage("indices unordered", swap, "verify", "indices.npy")


def _manifest_damages() -> Iterator[Damage]:
    def damage(name: str, change: Callable[[dict[str, Any]], None]) -> Damage:
        return Damage(f"manifest {name}", _edit_manifest(change), "open", "manifest.json")

    required = ("num_vertices", "num_edges", "vertex_range", "part_boundaries", "arrays", "statistics", "provenance")
    for key in required:
        yield damage(f"without {key}", _delete(key))
        values: tuple[Any, ...] = (None, "3", 1.5, True, [], {"a": 1})
        for value in values:
            fits = value == [] and key == "provenance"
            if not fits:
                yield damage(f"{key} = {value!r}", _set(key, value=value))
    for key in ("num_vertices", "num_edges"):
        for number in (-1, N - 1, 10**30, 2**62, -(2**63)):
            yield damage(f"{key} = {number}", _set(key, value=number))
    for version in (0, VERSION - 1, VERSION + 1, 99, str(VERSION), None, -1):
        yield damage(f"version = {version!r}", _set("version", value=version))
    for text in ("", "other", None, 5):
        yield damage(f"format = {text!r}", _set("format", value=text))
    for cut in ([0, N + 1], [-1, N], [N, 0], [1, N], [0], [0, 1, 2], "0300", [0, 10**40], [0, 1.5]):
        yield damage(f"vertex_range = {cut}", _set("vertex_range", value=cut))
    for cuts in ([0], [0, 5], [1, N], [0, 9, 8, N], [0, -1, N], [0, 10**40], ["0", N]):
        yield damage(f"part_boundaries = {cuts}", _set("part_boundaries", value=cuts))
    good = {"num_batches": 1, "loads": [1], "links": [[1]]}
    changes: list[dict[str, Any]] = [
        {"num_batches": 0},
        {"loads": [1, 2]},
        {"loads": [-1]},
        {"links": [[1, 2]]},
        {"links": []},
        {"links": [["1"]]},
        {"links": [[2**63]]},
        {"more": 1},
    ]
    wrong_parts: list[Any] = [{}, [], *({**good, **change} for change in changes)]
    for statistics in wrong_parts:
        yield damage(f"part_statistics = {statistics}", _set("part_statistics", value=statistics))
    for shard in (
        {},
        {"whole_fingerprint": 5, "num_targets": {}},
        {"whole_fingerprint": "x", "num_targets": {"train": -1}},
        {"whole_fingerprint": "x", "num_targets": {}},
    ):
        yield damage(f"shard = {shard}", _set("shard", value=shard))
    yield damage("positions in a whole store", _rename_array("targets/test", "target_positions/test"))
    for key in ("dtype", "shape", "sha256"):
        yield damage(f"array without {key}", _delete("arrays", "indptr", key))
    for dtype in ("object", "O", "|O", "int128", "", None, 8, "x" * 10_000, "float32"):
        yield damage(f"dtype = {str(dtype)[:20]}", _set("arrays", "indptr", "dtype", value=dtype))
    for shape in ([], [N], [N + 2], [N + 1, 1], [-1], [2**70], [1.0], None, "9", [N + 1] * 40):
        yield damage(f"shape = {str(shape)[:20]}", _set("arrays", "indptr", "shape", value=shape))
    for digest in ("", "0" * 63, "g" * 64, None, "0" * 65):
        yield damage(
            f"sha256 = {str(digest)[:1]!r} x {len(str(digest))}", _set("arrays", "indptr", "sha256", value=digest)
        )
    for name in (
        "/etc/passwd",
        "../outside",
        "features/../../x",
        "features/..",
        "features/",
        "features/a/b",
        "features/.x",
        "features//x",
        "x",
        "",
        "indptr.npy",
        "targets/\0",
        "features/" + "a" * 65,
        "édges/x",
        "features/x\n",
    ):
        yield damage(f"array named {name[:30]!r}", _rename_array("features/x", name))
    for array in ("indptr", "indices", "name_bytes", "name_offsets"):
        yield damage(f"no {array}", _delete("arrays", array))
    yield damage("array with a path", _set("arrays", "indptr", "file", value="/etc/passwd"))
    yield damage("unknown key", _set("hooks", value="import os"))
    for key in ("num_self_loops", "num_isolated_vertices", "max_in_degree", "in_degree_histogram"):
        yield damage(f"statistics without {key}", _delete("statistics", key))
        yield damage(f"statistics.{key} = -1", _set("statistics", key, value=-1))
    wrong = _edit_manifest(_set("statistics", "num_self_loops", value=10**6))
    yield Damage("manifest wrong statistics", wrong, "verify", "manifest.json")
    wrong_classes = _edit_manifest(_set("num_classes", value=77))
    yield Damage("manifest wrong num_classes", wrong_classes, "verify", "manifest.json")
    yield Damage("manifest forgets y", _edit_manifest(_delete("arrays", "y")), "verify", "manifest.json")
    yield damage("absurd columns", _set("arrays", "features/x", "shape", value=[N, 2**61]))
    yield damage("negative counts", _set("provenance", 0, "counts", value={"edges_read": -5}))
    yield damage("pairs with a third column", _set("arrays", "pairs/links", "shape", value=[N // 4, 3]))
    yield damage("labels without pairs", _delete("arrays", "pairs/links"))
    yield damage("too few labels", _set("arrays", "pair_labels/links", "shape", value=[N // 4 - 1]))
    yield damage("too few negatives", _set("arrays", "pair_negatives/links", "shape", value=[N // 4 - 1, 3]))
    yield damage("internal ids alone", _rename_array("y", "internal_ids"))
    digest_of_nothing = _edit_manifest(_set("arrays", "y", "sha256", value="0" * 64))
    yield Damage("manifest wrong checksum", digest_of_nothing, "verify", "y.npy")

    def raw(name: str, text: bytes) -> Damage:
        write = _replace("manifest.json", lambda path: path.write_bytes(text))
        return Damage(f"manifest {name}", write, "open", "manifest.json")

    yield raw("empty", b"")
    yield raw("null", b"null")
    yield raw("list", b"[]")
    yield raw("binary", b"\x93NUMPY\xff\xfe")
    yield raw("deep", b"[" * 100_000)
    yield raw("cut", b'{"format": "gsplit-store", "ver')
    yield raw("not utf-8", b'{"format": "\xff"}')
    for name, make in (
        ("gone", lambda path: None),
        ("a pipe", os.mkfifo),
        ("a directory", Path.mkdir),
        ("huge", _make_huge),
    ):
        yield Damage(f"manifest {name}", _replace("manifest.json", make), "open", "manifest.json")
    yield Damage("manifest a link out", _link_out("manifest.json"), "open", "manifest.json")


DAMAGES = [*_file_damages(), *_value_damages(), *_manifest_damages()]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = sample_store(tmp_path_factory.mktemp("sound") / "g.gsplit", N, E).path
    return path


def test_there_are_more_than_three_hundred_different_ones(sound: Path) -> None:
    assert len({damage.name for damage in DAMAGES}) == len(DAMAGES) > 300
    verify_store(open_store(sound))
    assert {name: (e.dtype, e.shape) for name, e in open_store(sound).manifest.arrays.items()} == ARRAYS


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.name)
def test_damage_is_refused_with_file_and_fix(sound: Path, tmp_path: Path, damage: Damage) -> None:
    store = tmp_path / "g.gsplit"
    shutil.copytree(sound, store)
    damage.apply(store)
    if damage.seen_by == "open":
        with pytest.raises(StoreError) as refusal:
            open_store(store)
    else:
        opened = open_store(store)
        with pytest.raises(StoreError) as refusal:
            verify_store(opened)
    message = str(refusal.value)
    assert REFUSAL.search(message), message
    assert damage.blames in message, message
    assert len(message) < 1500
    shutil.rmtree(tmp_path)  # 400 copies would stay otherwise


def test_what_opening_cannot_see_never_makes_a_kernel_read_out_of_bounds(tmp_path: Path) -> None:
    """Damage between the sampled places, then everything that runs on a store, with numba's bounds checks on."""
    sound = sample_store(tmp_path / "g.gsplit", BIG_N, BIG_E).path
    damages = {
        "indptr up": _edit_values("indptr", lambda v: v.__setitem__(500, 2**62)),
        "indptr down": _edit_values("indptr", lambda v: v.__setitem__(500, -(2**62))),
        "indices up": _edit_values("indices", lambda v: v.__setitem__(5000, 2**31 - 1)),
        "indices down": _edit_values("indices", lambda v: v.__setitem__(5000, -1)),
        "targets": _edit_values("targets/train", lambda v: v.__setitem__(700, 2**62)),
        "names": _edit_values("name_offsets", lambda v: v.__setitem__(500, 2**62)),
    }
    code = """
import sys
import gsplit
from gsplit.cli.store_view import describe
from gsplit.store.verify import verify_store
for path in sys.argv[1:]:
    store = gsplit.open(path)
    describe(store)
    for vertex in (498, 499, 500, 501):
        assert len(store.graph.sources(vertex)) <= store.num_edges
    store.graph.in_degrees()
    store.vertex_names([498, 499, 500, 501])
    try:
        verify_store(store)
    except gsplit.StoreError as error:
        print(path, "refused:", error, flush=True)
"""
    env = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path / "numba")}
    stores = [tmp_path / f"{name.replace(' ', '-')}.gsplit" for name in damages]
    for store, damage in zip(stores, damages.values(), strict=True):
        shutil.copytree(sound, store)
        damage(store)
    command = [sys.executable, "-c", code, *map(str, stores)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (done.stdout, done.stderr)
    for line, store in zip(done.stdout.splitlines(), stores, strict=True):
        assert line.startswith(f"{store} refused:"), line


def test_what_stands_in_place_of_a_file_is_named(sound: Path, tmp_path: Path) -> None:
    makes: list[tuple[Callable[[Path], Any], str]] = [
        (os.mkfifo, r"y.npy: expected a regular file inside the store, not a link \(got a named pipe\)"),
        (Path.mkdir, r"y.npy: expected a regular file inside the store, not a link \(got a directory\)"),
        (lambda path: None, r"y.npy: expected a regular file inside the store, not a link \(got No such file"),
    ]
    for place, (make, message) in enumerate(makes):
        store = tmp_path / f"{place}.gsplit"
        shutil.copytree(sound, store)
        (store / "y.npy").unlink()
        make(store / "y.npy")
        with pytest.raises(StoreError, match=message):
            open_store(store)


def test_nothing_outside_the_directory_is_opened(sound: Path, tmp_path: Path) -> None:
    """Every file that opening asks for is named relative to the store's own descriptor, and no link is followed."""
    asked: list[tuple[Any, ...]] = []
    opening = True

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if opening and event == "open" and not isinstance(args[0], int):  # an int is a descriptor already open
            asked.append(args)

    sys.addaudithook(watch)
    open_store(sound)
    opening = False
    names = {str(name) for name, _mode, _flags in asked}
    parts = {part for array in ARRAYS for part in f"{array}.npy".split("/")}
    assert names == parts | {str(sound), "manifest.json"}
    assert all(flags & os.O_NOFOLLOW for name, _mode, flags in asked if str(name) != str(sound))
