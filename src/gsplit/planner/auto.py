"""``strategy="auto"``: rank 0 asks the planner, and all ranks do what it says.

On the host the planner goes by this machine's kept constants, which ``gsplit plan`` measures once; measuring inside a
training would stop it for a minute. On GPUs it goes by the preset of the same name.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gsplit.distributed.comm import Call
from gsplit.distributed.mesh import Mesh
from gsplit.errors import GSplitError, InputError, explain
from gsplit.features.cache import parse_bytes
from gsplit.partitioning.presample import Workload
from gsplit.planner.calibration import known_machine
from gsplit.planner.hardware import PRESETS, Hardware
from gsplit.planner.plan import Choice, choose
from gsplit.planner.probes import measure_sampling
from gsplit.planner.shapes import PlannedModel
from gsplit.store.protocol import GraphStore
from gsplit.store.reader import Store
from gsplit.strategies.spec import all_strategies

__all__ = ["AUTO", "PlannedSteps", "fit_to_graph", "resolve_strategy"]

AUTO = "auto"
_BY_NAME = {"V100": "v100-nvlink", "A100": "a100", "H100": "h100"}


def fit_to_graph(hardware: Hardware, workload: Workload) -> Hardware:
    """The constants of a host with the rate at which it samples this graph, measured."""
    rate = measure_sampling(workload)
    return replace(hardware, sample_edges_per_s=rate, far_sample_edges_per_s=rate)


@dataclass(frozen=True)
class PlannedSteps:
    """What will be trained, by the names of ``NeighborLoader``, with a model of this ``shape`` if that is known.

    ``strategies``: the ones that can run the model, where not all can. ``copies``: memory for copies of other ranks'
    rows, which only strategies that shuffle input rows can have.
    """

    input_nodes: str | Tensor | None
    num_neighbors: list[int]
    batch_size: int
    features: Sequence[str] = ("x",)
    on_disk: bool = False
    cache: int | str = 0
    copies: int | str = 0
    shape: PlannedModel | None = None
    strategies: tuple[str, ...] | None = None


def resolve_strategy(name: str, store: GraphStore, mesh: Mesh, steps: PlannedSteps) -> Choice:
    """A strategy by name, or for "auto" the planner's choice, the same on every rank. A collective for "auto"."""
    if name != AUTO:
        return Choice(name, "")
    if mesh.size == 1:
        return Choice("split", "one process computes every mini-batch whole")
    said = {"strategy": "", "reason": "", "error": ""}
    if mesh.rank == 0:
        try:
            choice = _ask(store, mesh, steps)
            said = {"strategy": choice.strategy, "reason": choice.reason, "error": ""}
        except (GSplitError, OSError) as error:
            said["error"] = str(error) or type(error).__name__
    heard = json.loads(mesh.world.gather_text(Call("choose strategy", long_wait=True), json.dumps(said))[0])
    if heard["error"]:
        raise InputError(heard["error"])
    return Choice(heard["strategy"], heard["reason"])


def _ask(store: GraphStore, mesh: Mesh, steps: PlannedSteps) -> Choice:
    targets = steps.input_nodes
    if not isinstance(store, Store) or isinstance(targets, Tensor):
        expected, fix = "a store on disk and the name of stored targets", "name a strategy, such as strategy='split'"
        got = "a tensor of targets" if isinstance(store, Store) else "a graph in memory"
        raise InputError(explain("strategy='auto'", expected, got, fix))
    hardware, workload = (
        _hardware(mesh.device),
        Workload.of_store(store, targets, steps.num_neighbors, steps.batch_size),
    )
    return choose(
        store,
        workload,
        mesh.size,
        hardware if hardware.cores is None else fit_to_graph(hardware, workload),
        replicas=mesh.num_replicas,
        shape=steps.shape,
        features=tuple(steps.features),
        on_disk=steps.on_disk,
        cache_bytes=parse_bytes(steps.cache),
        strategies=_runnable(steps),
    )


def _runnable(steps: PlannedSteps) -> tuple[str, ...] | None:
    """The strategies to choose from; None: all that run the model."""
    if not parse_bytes(steps.copies, "copies"):
        return steps.strategies
    shuffling = [spec.name for spec in all_strategies(len(steps.num_neighbors)) if spec.shuffles_input]
    given = ("split",) if steps.strategies is None and steps.shape is None else steps.strategies
    return tuple(name for name in shuffling if given is None or name in given)


def _hardware(device: torch.device) -> Hardware:
    if device.type == "cpu":
        known = known_machine()
        if known is None:
            fix = "run gsplit plan STORE once (a minute), or name a strategy"
            raise InputError(explain("strategy='auto'", "this machine's constants", "none that were measured", fix))
        return known
    label = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    for part, preset in _BY_NAME.items():
        if part in label:
            return PRESETS[preset]
    fix = "look at gsplit plan STORE --hardware FILE, and name a strategy"
    raise InputError(explain("strategy='auto'", f"one of {', '.join(_BY_NAME)}", label, fix))
