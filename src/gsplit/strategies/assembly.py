"""From what a loader was asked for to its strategy: the tiers that its rows come from, its groups, its samplers."""

from dataclasses import dataclass

from gsplit.device_tiers import open_device_rows
from gsplit.distributed.mesh import Mesh
from gsplit.feature_tiers import open_features
from gsplit.features.budget import parse_bytes
from gsplit.features.copies import ForeignCopies
from gsplit.features.device import DeviceRows
from gsplit.features.protocol import HostSource, RowSource
from gsplit.local_graph import ArrayNames
from gsplit.sampling.neighbor import uniform_sampler
from gsplit.sampling.protocol import SamplerFactory
from gsplit.sampling.targets import LocalTargets
from gsplit.strategies.loading import StepLoader
from gsplit.strategies.protocol import Strategy
from gsplit.strategies.registry import strategy_class
from gsplit.strategies.setup import GraphViews, StrategySetup
from gsplit.strategies.spec import StrategySpec

__all__ = ["MiniBatchOptions", "RowOptions", "make_strategy"]


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Where input rows come from: see ``NeighborLoader``. ``num_ahead``: steps loaded ahead of training."""

    cache: int | str = 0
    device_cache: int | str = 0
    copies: int = 0
    on_disk: bool = False
    num_ahead: int = 0


@dataclass(frozen=True)
class MiniBatchOptions:
    """What a mini-batch is: see ``NeighborLoader``."""

    num_neighbors: list[int]
    batch_size: int
    shuffle: bool = True
    deterministic: bool = False
    sampler: SamplerFactory = uniform_sampler


def make_strategy(
    spec: StrategySpec,
    views: GraphViews,
    arrays: ArrayNames,
    mesh: Mesh,
    targets: LocalTargets,
    options: RowOptions,
    batches: MiniBatchOptions,
) -> Strategy:
    """The strategy of a loader. A collective: rows are copied between ranks, and groups are made, where asked for."""
    kind = strategy_class(spec)
    rows = open_features(views.read(kind), arrays.features, cache=options.cache, on_disk=options.on_disk)
    in_store = len(arrays.stored_features) == len(arrays.features)
    device_rows = _open_device_rows(kind, views, mesh, rows, options, in_store=in_store)
    loader = StepLoader(views.sampled, mesh, rows, arrays, device_rows=device_rows, num_ahead=options.num_ahead)
    setup = StrategySetup(
        spec=spec,
        views=views,
        targets=targets,
        loader=loader,
        mesh=mesh,
        groups=mesh.borrow_loading_groups(owner=loader) if options.num_ahead else mesh.loading_groups,
        num_neighbors=batches.num_neighbors,
        batch_size=batches.batch_size,
        shuffle=batches.shuffle,
        deterministic=batches.deterministic,
        copies=_copy_rows(views, rows, mesh, options.copies),
        edge_ids=arrays.has_edge_values,
        sampler=batches.sampler,
    )
    return kind(setup)


def _open_device_rows(
    kind: type[Strategy], views: GraphViews, mesh: Mesh, rows: HostSource, options: RowOptions, *, in_store: bool
) -> DeviceRows | None:
    """The input rows for a device that the host samples for; own rows may be held there as one copy of all ranks.

    Not those of a source of the program's own, which may be slow or large: they are read as they are needed.
    """
    if not mesh.host_samples:
        return None
    held = in_store and kind.reads == "own rows" and not options.on_disk and not parse_bytes(options.cache)
    return open_device_rows(views.read(kind), rows, mesh.device, cache=options.device_cache, held=held)


def _copy_rows(views: GraphViews, rows: RowSource, mesh: Mesh, num_bytes: int) -> ForeignCopies | None:
    """Copies of other ranks' hottest rows, where the model computes. A collective if there are any."""
    if not num_bytes:
        return None
    return views.owned.copy_foreign_rows(rows, num_bytes, mesh.loading).move_rows(mesh.device)
