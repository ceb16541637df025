"""What every strategy is made of: the views of the graph, the targets, the groups, and the settings of the loader."""

from dataclasses import dataclass

from torch import Tensor

from gsplit.batch import Batch
from gsplit.distributed.mesh import LoadingGroups, Mesh
from gsplit.features.copies import ForeignCopies
from gsplit.local_graph import LocalGraph
from gsplit.ownership import Ownership
from gsplit.sampling.minibatch import StepKey
from gsplit.sampling.neighbor import uniform_sampler
from gsplit.sampling.protocol import LayerSampler, SampledRange, SamplerFactory
from gsplit.sampling.targets import LocalTargets
from gsplit.store.protocol import GraphStore
from gsplit.strategies.loading import StepLoader
from gsplit.strategies.protocol import LoadedStep, SampledStep, Strategy
from gsplit.strategies.spec import StrategySpec
from gsplit.telemetry import StepTelemetry

__all__ = ["GraphViews", "StrategyBase", "StrategySetup", "view_graph"]


@dataclass(frozen=True)
class GraphViews:
    """A rank's views of a graph: the vertices it may sample, its own or all, and its own. Often the same object."""

    sampled: LocalGraph
    owned: LocalGraph

    def read(self, kind: type[Strategy]) -> LocalGraph:
        """The vertices whose features a strategy reads here."""
        return self.owned if kind.reads == "own rows" else self.sampled

    def targets(self, spec: StrategySpec, input_nodes: str | Tensor | None) -> LocalTargets:
        """The targets that this rank may take: its own, or all, of which it takes some in turn."""
        return (self.owned if spec.targets == "owner" else self.sampled).targets(input_nodes)


def view_graph(store: GraphStore, mesh: Mesh, ownership: Ownership, kind: type[Strategy]) -> GraphViews:
    """What a rank sees of a graph under a strategy."""
    owned = None if kind.needs_whole_graph and mesh.num_splits == 1 else LocalGraph(store, mesh, ownership)
    sampled = LocalGraph(store, mesh, ownership, whole=True) if kind.needs_whole_graph else owned
    assert sampled is not None
    return GraphViews(sampled, owned or sampled)


@dataclass(frozen=True, kw_only=True)
class StrategySetup:
    """The arguments of every strategy.

    ``num_columns``: of a whole input row. ``edge_ids``: the sampler says which edges it drew. ``sampler``: makes one.
    """

    spec: StrategySpec
    views: GraphViews
    targets: LocalTargets
    loader: StepLoader
    mesh: Mesh
    groups: LoadingGroups
    num_neighbors: list[int]
    batch_size: int
    num_columns: int
    shuffle: bool = True
    deterministic: bool = False
    copies: ForeignCopies | None = None
    edge_ids: bool = False
    sampler: SamplerFactory = uniform_sampler

    def make_sampler(self, view: LocalGraph) -> LayerSampler:
        """A sampler of the vertices of a view."""
        part = SampledRange(view.graph, view.original_ids, self.mesh.sample_device, self.edge_ids)
        return self.sampler(part)


class StrategyBase:
    """What strategies have in common: which targets a rank takes, and the stages after sampling."""

    def __init__(self, setup: StrategySetup) -> None:
        self._setup, self._mesh, self._targets = setup, setup.mesh, setup.targets
        mesh = setup.mesh
        self._cut = (mesh.replica, mesh.num_replicas)
        if setup.spec.targets == "strided":
            self._cut = (mesh.replica + mesh.num_replicas * mesh.split_rank, mesh.size)

    @staticmethod
    def computes_each_vertex_once(mesh: Mesh) -> bool:
        """On one rank only."""
        return mesh.size == 1

    @property
    def num_targets(self) -> int:
        return self._targets.num_targets

    def _own_targets(self, key: StepKey, telemetry: StepTelemetry) -> tuple[Tensor, int]:
        """This rank's targets of a step, and the number of all."""
        setup, targets = self._setup, self._targets
        size = setup.batch_size
        own = targets.for_step(key.seed, key.epoch, key.step, size, shuffle=setup.shuffle, cut=self._cut)
        telemetry.record_max("targets_bytes", targets.num_bytes)
        return own.to(self._mesh.sample_device), targets.size_of_step(key.step, size)

    def load(self, sampled: SampledStep) -> LoadedStep:
        return self._setup.loader.load(sampled)

    def finish(self, loaded: LoadedStep) -> Batch:
        once = self.computes_each_vertex_once(self._mesh)
        return self._setup.loader.finish(loaded, strategy=self._setup.spec.name, each_vertex_once=once)
