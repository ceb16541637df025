"""Which records may be compared: those of one scenario, which differ in the system alone.

Everything that decides how much work a step is belongs to the scenario: graph, model, ranks, batch, width, fanout. The
allocator belongs to the system: it is a way to run it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from gsplit.report.documents import TrainRecord

__all__ = ["PEERS", "Scenario", "describe", "group", "is_peer", "of_record", "system_label", "varying"]

PEERS = ("dgl", "pyg")
"""Systems that are not ours; every other name is a strategy."""


@dataclass(frozen=True, order=True)
class Scenario:
    """What systems are compared on."""

    graph: str
    model: str
    ranks: int
    replicas: int
    batch_size: int
    hidden: int
    fanout: tuple[int, ...]
    features: str
    partition: str


def of_record(record: TrainRecord) -> Scenario:
    """The scenario of a record."""
    return Scenario(
        record.graph,
        record.model,
        record.ranks,
        record.replicas,
        record.batch_size,
        record.hidden,
        tuple(record.fanout),
        record.features,
        record.partition or "",
    )


def is_peer(record: TrainRecord) -> bool:
    """Whether a record is of somebody else's system."""
    return record.system in PEERS


def system_label(record: TrainRecord) -> str:
    """The system as pictures and tables name it."""
    return record.system if record.allocator == "tuned" else f"{record.system}, {record.allocator} allocator"


def group(records: Iterable[TrainRecord]) -> dict[Scenario, dict[str, TrainRecord]]:
    """Records by scenario and system; of two of the same, the later one counts."""
    found: dict[Scenario, dict[str, TrainRecord]] = {}
    for record in records:
        found.setdefault(of_record(record), {})[system_label(record)] = record
    return dict(sorted(found.items()))


def varying(scenarios: Sequence[Scenario]) -> list[str]:
    """Names of what is not the same in all scenarios, besides graph, model and ranks."""
    names = [field.name for field in fields(Scenario)[3:]]
    return [name for name in names if len({getattr(scenario, name) for scenario in scenarios}) > 1]


def describe(scenario: Scenario, names: Sequence[str], *, ranks: bool = True) -> str:
    """A scenario within its graph and model: its ranks, and what varies.

    >>> describe(Scenario("arxiv", "sage", 4, 1, 1024, 256, (15, 15), "disk", "gsplit"), ["batch_size", "features"])
    '4 ranks, batch 1024, disk'
    """
    parts = [f"{scenario.ranks} rank{'s' if scenario.ranks > 1 else ''}"] if ranks else []
    words = {"replicas": "replicas ", "batch_size": "batch ", "hidden": "hidden ", "fanout": "fanout ", "partition": ""}
    for name in names:
        value = getattr(scenario, name)
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        if text:
            parts.append(f"{words.get(name, '')}{text}")
    return ", ".join(parts)
