"""Checkpoints: damaged bytes, and documents inside them that are damaged but have the right checksum."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from fuzz_guard import Surface
from fuzz_mutations import mutate_bytes, mutate_document, mutate_text

from gsplit.training.checkpoints.files import CheckpointManifest, read_checkpoint, write_checkpoint
from gsplit.training.checkpoints.state_tree import take_snapshot

__all__ = ["CHECKPOINTS"]


class Checkpoints:
    """``step-N.safetensors`` of a run."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "step-00000003.safetensors"
        state = {"model": {"w": torch.ones(3, 2)}, "step": 3, "losses": [0.5] * 20, "groups": {0: (1, float("inf"))}}
        write_checkpoint(self._path, take_snapshot(state), CheckpointManifest({"seed": "0"}, {"ranks": "2"}))
        self._data = self._path.read_bytes()
        length = int.from_bytes(self._data[:8], "little")
        self._header, self._tensors = self._data[8 : 8 + length].decode(), self._data[8 + length :]
        read_checkpoint(self._path)

    def attempt(self, random: Random) -> None:
        data = mutate_bytes(random, self._data) if random.random() < 0.4 else self._with_new_sum(random)
        self._path.write_bytes(data)
        read_checkpoint(self._path)

    def _with_new_sum(self, random: Random) -> bytes:
        """Another header, or other texts in it, and the checksum of that."""
        header = json.loads(self._header)
        if random.random() < 0.6:
            name = random.choice(("state", "manifest"))
            header["__metadata__"][name] = mutate_text(random, header["__metadata__"][name]).decode("utf-8", "replace")
        else:
            header = mutate_document(random, self._header)
        texts = header.get("__metadata__") if isinstance(header, dict) else None
        if isinstance(texts, dict):
            texts.pop("sha256", None)
            plain = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
            texts["sha256"] = hashlib.sha256(plain + self._tensors).hexdigest()
        head = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
        return len(head).to_bytes(8, "little") + head + self._tensors


CHECKPOINTS: dict[str, Callable[[Path], Surface]] = {"checkpoint": Checkpoints}
