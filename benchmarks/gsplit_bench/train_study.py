"""What ``python -m gsplit_bench train`` is to measure: a study, its scenarios, and the presets.

A study is every combination of what it lists. A scenario is one of them on one number of ranks; its systems take turns
in the same processes. Ranks are launched once per graph, number of ranks, number of threads and setting of the
allocator, which are fixed when a process starts; all scenarios of them run inside.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from gsplit.errors import InputError, explain
from gsplit.run.config import MODELS

__all__ = [
    "ALLOCATORS",
    "DEFAULT",
    "DEVICES",
    "FEATURES",
    "PEERS",
    "PRESETS",
    "Launch",
    "Scenario",
    "Study",
    "find_preset",
    "parse_system",
]

_PEERS_IN_MEMORY = ("dgl", "pyg", "pyg_our_sampler", "p3")
PEERS = (*_PEERS_IN_MEMORY, "quiver")
"""Systems that are not ours; every other name is a strategy, with its sampler behind a plus sign."""
FEATURES = ("memory", "disk")
ALLOCATORS = ("tuned", "default")
DEVICES = ("cpu", "cuda", "sim")
"""Where models compute; "sim" is the simulated device, which shows that everything runs, and not how fast."""


@dataclass(frozen=True)
class Scenario:
    """One model on one graph, and the systems that train it in turn, on the ranks of one launch."""

    graph: str
    model: str
    systems: tuple[str, ...]
    ranks: int
    threads: int
    allocator: str
    replicas: int
    features: str
    batch_size: int
    hidden: int
    fanout: tuple[int, ...]
    targets: str
    heads: int
    cache: float
    learning_rate: float
    seed: int
    warm_up: int
    steps: int
    repeats: int
    epochs: int
    device: str

    @property
    def num_steps(self) -> int:
        """Steps of every system, with those that are not measured."""
        return self.warm_up + self.steps * self.repeats


@dataclass(frozen=True)
class Launch:
    """Processes that start together, with so many threads each."""

    ranks: int
    allocator: str
    threads: int = 1

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        threads = f" x {self.threads} threads" if self.threads > 1 else ""
        return f"{ranks}{threads}, {self.allocator} allocator"


@dataclass(frozen=True)
class Study:
    """Every combination of the tuples, for every graph.

    ``batch_sizes``: targets of the GLOBAL mini-batch. ``threads``: of each rank; of several numbers, those launches
    that have no more threads in all than the most ranks with the fewest threads, or the fewest with the most.
    ``steps``: of one turn of a system, ``repeats``: turns, ``warm_up``: steps before that are not measured.
    ``epochs``: instead of turns, train each system so long and evaluate it after every epoch. ``cache``: of each rank, of all features, where they are read from disk.
    ``counted_ranks``: numbers of ranks to count ``counted_strategies`` for, in one process, over ``counted_steps``
    mini-batches.
    """

    title: str
    systems: tuple[str, ...] = ("split", "data", *_PEERS_IN_MEMORY)
    models: tuple[str, ...] = ("sage", "gat")
    ranks: tuple[int, ...] = (2,)
    allocators: tuple[str, ...] = ("tuned",)
    replicas: tuple[int, ...] = (1,)
    features: tuple[str, ...] = ("memory",)
    batch_sizes: tuple[int, ...] = (1024,)
    hidden: tuple[int, ...] = (256,)
    fanouts: tuple[tuple[int, ...], ...] = ((15, 15, 15),)
    targets: str = "train"
    heads: int = 4
    cache: float = 0.1
    learning_rate: float = 1e-3
    seed: int = 1
    threads: tuple[int, ...] = (1,)
    warm_up: int = 1
    steps: int = 2
    repeats: int = 3
    epochs: int = 0
    counted_ranks: tuple[int, ...] = ()
    counted_strategies: tuple[str, ...] = ("split", "data")
    counted_steps: int = 5
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, given, known in (
            ("--device", (self.device,), DEVICES),
            ("--models", self.models, MODELS),
            ("--features", self.features, FEATURES),
            ("--allocator", self.allocators, ALLOCATORS),
        ):
            for value in given:
                if value not in known:
                    raise InputError(explain(name, f"one of {', '.join(known)}", value, "choose one of these"))

    def launches(self) -> list[Launch]:
        """The launches that it takes, for every graph."""
        if not self.systems:
            return []
        most = max(max(self.ranks) * min(self.threads), min(self.ranks) * max(self.threads))
        return [
            Launch(ranks, allocator, threads)
            for ranks, threads, allocator in product(self.ranks, self.threads, self.allocators)
            if ranks * threads <= most
        ]

    def scenarios(self, graphs: Sequence[str], launch: Launch) -> list[Scenario]:
        """What the ranks of a launch are to do, in order."""
        return list(self._scenarios(graphs, launch))

    def _scenarios(self, graphs: Sequence[str], launch: Launch) -> Iterator[Scenario]:
        for graph, fanout, hidden, batch_size, features, model, replicas in product(
            graphs, self.fanouts, self.hidden, self.batch_sizes, self.features, self.models, self.replicas
        ):
            if launch.ranks % replicas:
                continue
            yield Scenario(
                graph=graph,
                model=model,
                systems=self.systems,
                ranks=launch.ranks,
                threads=launch.threads,
                allocator=launch.allocator,
                replicas=replicas,
                features=features,
                batch_size=batch_size,
                hidden=hidden,
                fanout=fanout,
                targets=self.targets,
                heads=self.heads,
                cache=self.cache,
                learning_rate=self.learning_rate,
                seed=self.seed,
                warm_up=self.warm_up,
                steps=self.steps,
                repeats=self.repeats,
                epochs=self.epochs,
                device=self.device,
            )


_STEADY = 8
"""Steps after which our buffers and the allocator hardly grow: page faults of an arxiv step fall from 400 to 5."""
_OURS = ("split", "hybrid(2)", "hybrid(1)", "data_cached", "data(owner)", "data")

DEFAULT = Study("our two ends, split and data, and the peers")

PRESETS: dict[str, Study] = {
    "redundancy": Study(
        "Table 1: edges computed and input rows loaded, data parallel against split; counted",
        systems=(),
        batch_sizes=(1024, 4096),
        counted_ranks=(1, 2, 4, 8),
        counted_strategies=("split", "data", "data(owner)"),
    ),
    "main": Study(
        "Table 3: every strategy and the peers, SAGE and GAT, as users run them and with the allocator tuned",
        systems=(*_OURS, *_PEERS_IN_MEMORY),
        ranks=(1, 2, 4),
        allocators=ALLOCATORS,
    ),
    "partition": Study(
        "Figure 5: split on partitions of the same graph by several objectives; give a store of each",
        systems=("split",),
        models=("sage",),
        ranks=(4,),
        counted_ranks=(4,),
        counted_strategies=("split",),
    ),
    "ranks": Study(
        "Figure 6: 1, 2 and 4 ranks measured, up to 64 counted",
        systems=("split", "data_cached", "data"),
        ranks=(1, 2, 4),
        counted_ranks=(1, 2, 4, 8, 16, 32, 64),
        counted_strategies=_OURS,
        counted_steps=2,
    ),
    "replicas": Study(
        "in place of Figure 6b: 4 ranks of one host as 1, 2 and 4 replicas",
        systems=("split",),
        models=("sage",),
        ranks=(4,),
        replicas=(1, 2, 4),
    ),
    "hidden": Study(
        "Figure 6: hidden widths",
        systems=("split", "data_cached", "data"),
        hidden=(64, 128, 256, 512),
    ),
    "batch": Study(
        "Figure 6: sizes of the mini-batch, from little overlap to much; also counted",
        systems=("split", "data_cached", "data"),
        batch_sizes=(256, 1024, 4096),
        hidden=(128,),
        counted_ranks=(2, 4),
        counted_strategies=_OURS,
    ),
    "layers": Study(
        "Figure 6: 2, 3 and 4 layers, with fanouts that keep the mini-batch small",
        systems=("split", "data_cached", "data"),
        hidden=(128,),
        fanouts=((15, 15), (15, 15, 15), (5, 5, 5, 5)),
    ),
    "accuracy": Study(
        "Figure 7: loss and exact accuracy after every epoch; the curves of all strategies are one",
        systems=("split", "data_cached", "data"),
        models=("sage",),
        epochs=5,
    ),
    "host": Study(
        "one host: our strategies against DGL and PyG, with PyG's sampler and with ours, on four models",
        systems=("split", "data(owner)", "data", "hybrid(1)", "dgl", "pyg", "pyg_our_sampler"),
        models=("sage", "gcn", "gin", "gat"),
        ranks=(1, 2, 4),
        warm_up=_STEADY,
        steps=2,
        repeats=5,
    ),
    "threads": Study(
        "one process with several threads against as many ranks of one thread",
        systems=("split", "data(owner)", "data", "dgl", "pyg", "pyg_our_sampler"),
        models=("sage", "gcn", "gin", "gat"),
        ranks=(1, 2),
        threads=(1, 2),
        warm_up=_STEADY,
        steps=2,
        repeats=5,
    ),
    "crossover": Study(
        "who wins where: split against our other strategies and against LABOR sampling, by batch size and ranks",
        systems=("split", "data(owner)", "data", "hybrid(1)", "hybrid(2)", "split+labor"),
        ranks=(2, 4),
        batch_sizes=(256, 1024, 4096),
        warm_up=_STEADY,
        steps=1,
        repeats=5,
    ),
}


def parse_system(name: str) -> tuple[str, str]:
    """The strategy of a system of ours, and the sampler that it draws with.

    >>> parse_system("split+labor"), parse_system("hybrid(1)")
    (('split', 'labor'), ('hybrid(1)', 'uniform'))
    """
    strategy, _, sampler = name.partition("+")
    return strategy, sampler or "uniform"


def find_preset(name: str) -> Study:
    """A preset by its name."""
    if name not in PRESETS:
        raise InputError(explain("--preset", f"one of {', '.join(PRESETS)}", name, "choose one of these"))
    return PRESETS[name]
