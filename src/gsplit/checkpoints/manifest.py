"""What a checkpoint was made from, and how what is about to go on differs from it.

Training goes on exactly only with what decides its steps: the graph, the targets, the batch size, the fanouts, the
seed, the model, the optimizer. All of that must be equal, and what is not is listed. The number of ranks, the strategy,
the replicas and how batches are made ahead decide nothing; they are written down to be read by people.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from gsplit.errors import InputError, explain

__all__ = ["Manifest", "parse_manifest"]

_SHOWN = 8


@dataclass(frozen=True)
class Manifest:
    """``fixed``: what must be equal for going on. ``free``: what may differ. Both are short texts by name."""

    fixed: Mapping[str, str]
    free: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """As JSON."""
        return json.dumps({"fixed": dict(self.fixed), "free": dict(self.free)})

    def compare(self, now: "Manifest", where: object) -> None:
        """Refuse to go on with anything else than what this was saved from."""
        names = [*self.fixed, *(name for name in now.fixed if name not in self.fixed)]
        differences = [
            f"{name} {now.fixed.get(name, 'not set')} instead of {self.fixed.get(name, 'not set')}"
            for name in names
            if self.fixed.get(name) != now.fixed.get(name)
        ]
        if differences:
            more = [] if len(differences) <= _SHOWN else [f"{len(differences) - _SHOWN} more"]
            fix = "start it as it was saved; only ranks, strategy, replicas, caches and prefetching may change"
            got = "; ".join([*differences[:_SHOWN], *more])
            raise InputError(explain(where, "the same training", got, fix))


def parse_manifest(text: str) -> Manifest:
    """A manifest from its JSON; ValueError, KeyError or TypeError if it is none."""
    document = json.loads(text)
    fixed, free = document["fixed"], document["free"]
    for name, value in (*fixed.items(), *free.items()):
        if not isinstance(value, str):
            raise ValueError(f"{name} that is no text")
    return Manifest(fixed, free)
