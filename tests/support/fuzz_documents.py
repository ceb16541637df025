"""Surfaces that are one small file: manifests, settings, constants, records of measurements, array headers."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from fuzz_guard import Surface
from fuzz_mutations import mutate_bytes, mutate_document, mutate_text
from graphs import sample_store
from report_samples import bench_document, count, partition_document, planner_document, record, save_run
from typed_graphs import academic

from gsplit.planner.hardware import PRESETS, read_hardware
from gsplit.run.config import TrainSettings, load_settings
from gsplit.run.folder import read_settings, read_weights
from gsplit.store.files import ArrayFile, npy_header
from gsplit.store.manifest import parse_manifest
from gsplit.training.checkpoints.tensor_file import write_tensor_file
from gsplit_bench.report.documents import read_material

__all__ = ["DOCUMENTS"]


def _toml(random: Random, table: Any) -> bytes:
    """A table as TOML, as far as its values can be written; else its JSON, which mostly is none."""
    lines = []
    if not isinstance(table, dict):
        return json.dumps(table).encode("utf-8", "surrogatepass")
    for key, value in table.items():
        text = json.dumps(value).replace("Infinity", "inf").replace("NaN", "nan")
        lines.append(f"{key if key.isidentifier() else json.dumps(key)} = {text}")
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    return mutate_bytes(random, data) if random.random() < 0.5 else data


class Manifests:
    """``manifest.json``, parsed: of a graph without types, or of one with types and pairs."""

    def __init__(self, folder: Path) -> None:
        sample_store(folder / "s.gsplit", 40, 200)
        document = json.loads((folder / "s.gsplit" / "manifest.json").read_text())
        document["part_boundaries"] = [0, 20, 40]
        for name, dtype in (("original_ids", "int64"), ("internal_ids", "int32")):
            document["arrays"][name] = {"dtype": dtype, "shape": [40], "sha256": "0" * 64}
        document["part_statistics"] = {"num_batches": 2, "loads": [3, 4], "links": [[1, 2], [3, 4]]}
        academic().build(folder / "typed.gsplit")
        typed = json.loads((folder / "typed.gsplit" / "manifest.json").read_text())
        for name, shape in (("pairs/train", [9, 2]), ("pair_labels/train", [9]), ("pair_negatives/train", [9, 4])):
            document["arrays"][name] = {"dtype": "int64", "shape": shape, "sha256": "0" * 64}
        document["version"] = typed["version"]
        self._texts = [json.dumps(document), json.dumps(typed)]
        for text in self._texts:
            parse_manifest(text.encode())

    def attempt(self, random: Random) -> None:
        parse_manifest(mutate_text(random, random.choice(self._texts)))


class Arrays:
    """The header and the length of a ``.npy`` file."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._data = folder, npy_header("float32", (10, 3)) + bytes(120)
        self._root = os.open(folder, os.O_RDONLY)
        (folder / "a.npy").write_bytes(self._data)
        self._read()

    def _read(self) -> None:
        file = ArrayFile(self._root, "a.npy", "float32", (10, 3))
        try:
            file.read(0, 30)
            file.map(self._folder).sum()
        finally:
            file.close()

    def attempt(self, random: Random) -> None:
        (self._folder / "a.npy").write_bytes(mutate_bytes(random, self._data))
        with np.errstate(all="ignore"):
            self._read()


class Settings:
    """The TOML file of ``--config``."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "run.toml"
        table = {key: value for key, value in TrainSettings().model_dump().items() if value is not None}
        self._text = json.dumps(table)
        self._path.write_bytes(b"lr = 0.5")
        load_settings(self._path, {})

    def attempt(self, random: Random) -> None:
        table = mutate_document(random, self._text)
        self._path.write_bytes(_toml(random, table))
        load_settings(self._path, {})


class RunSettings:
    """``settings.json`` of a run folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "settings.json"
        shape = {"num_features": 4, "num_classes": 2, "num_edge_features": None}
        self._text = json.dumps({"settings": TrainSettings().model_dump(), "shape": shape})

    def attempt(self, random: Random) -> None:
        self._path.write_bytes(mutate_text(random, self._text))
        read_settings(self._path)


class RunWeights:
    """``weights.safetensors`` of a run folder, of a model that exists."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "weights.safetensors"
        self._model = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
        write_tensor_file(self._path, self._model.state_dict(), {})
        self._data = self._path.read_bytes()
        read_weights(self._path, self._model)

    def attempt(self, random: Random) -> None:
        self._path.write_bytes(mutate_bytes(random, self._data))
        read_weights(self._path, self._model)


class HardwareFiles:
    """Constants of a machine for the planner, in JSON and TOML."""

    def __init__(self, folder: Path) -> None:
        self._folder, whole = folder, asdict(PRESETS["v100-nvlink"])
        del whole["cores"]
        documents = [{"base": "a100", "step_s": 0.1}, whole, {"notes": {}, "constants": whole}]
        self._texts = [json.dumps(document) for document in documents]

    def attempt(self, random: Random) -> None:
        text, toml = random.choice(self._texts), random.random() < 0.3
        path = self._folder / ("h.toml" if toml else "h.json")
        path.write_bytes(_toml(random, mutate_document(random, text)) if toml else mutate_text(random, text))
        read_hardware(path).latency(4)


class Records:
    """What ``gsplit report`` reads: records of measurements, and folders of runs with their telemetry."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._run = folder, folder / "run"
        bench = bench_document([record("g", "sage", "split", 2)]) | {"counts": [count("g", "split", 2)]}
        self._texts = [json.dumps(document) for document in (bench, partition_document(), planner_document())]
        save_run(self._run)
        self._files = {path: path.read_bytes() for path in self._run.rglob("*") if path.suffix in (".json", ".jsonl")}
        self._path = folder / "r.json"
        for text in self._texts:
            self._path.write_text(text)
            read_material([self._path, self._run])

    def attempt(self, random: Random) -> None:
        if random.random() < 0.7:
            self._path.write_bytes(mutate_text(random, random.choice(self._texts)))
            read_material([self._path])
            return
        path = random.choice(sorted(self._files))
        path.write_bytes(mutate_bytes(random, self._files[path]))
        try:
            read_material([self._run])
        finally:
            path.write_bytes(self._files[path])


DOCUMENTS: dict[str, Callable[[Path], Surface]] = {
    "manifest": Manifests,
    "array": Arrays,
    "settings": Settings,
    "run settings": RunSettings,
    "run weights": RunWeights,
    "hardware": HardwareFiles,
    "records": Records,
}
