"""``strategy="auto"``: rank 0 runs the planner, and all ranks use the strategy that it chooses.

On CPUs the planner uses the constants of this machine, which ``gsplit plan`` has measured; measuring them during
training would stop it for a minute. On GPUs it uses the report of ``gsplit doctor --device cuda`` in ``device_file``,
or the preset for the GPU's name.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import GSplitError, InputError, explain
from gsplit.files.byte_sizes import parse_bytes
from gsplit.minibatch.strategy_names import AUTO, all_strategies
from gsplit.partitioning.presample import Workload
from gsplit.planner.calibration import cache_file, device_file, known_machine, measure_sampling
from gsplit.planner.hardware import PRESETS, Hardware, preset_of, read_hardware
from gsplit.planner.placement import Loading
from gsplit.planner.plan import Choice, choose
from gsplit.planner.shapes import PlannedModel
from gsplit.sampling.draw_options import DrawOptions
from gsplit.sampling.pairs import StoredPairs
from gsplit.sampling.protocol import Fanout
from gsplit.store.protocol import GraphStore
from gsplit.store.reader import Store

__all__ = ["PlannedSteps", "fit_to_graph", "resolve_strategy"]


def fit_to_graph(hardware: Hardware, workload: Workload) -> Hardware:
    """Replace the sampling rate of a host's constants by the rate measured on this graph."""
    rate = measure_sampling(workload)
    return replace(hardware, sample_edges_per_s=rate, far_sample_edges_per_s=rate)


@dataclass(frozen=True)
class PlannedSteps:
    """The training to plan for. The fields have the names of the arguments of ``NeighborLoader``.

    ``shape``: the model, if it is known. ``strategies``: the strategies that can run the model; None for all.
    ``copies`` allows only strategies that shuffle input rows. ``draw``: the built-in sampler; None for the default.
    ``pairs``: for link prediction, in place of ``input_nodes``. In a heterogeneous graph, ``input_nodes`` are of one
    vertex type, "paper/train" or all vertices of "paper", ``num_neighbors`` may have a number per relation, and
    ``features`` are such as "paper/x".
    """

    input_nodes: str | Tensor | None
    num_neighbors: Sequence[Fanout]
    batch_size: int
    features: Sequence[str] = ("x",)
    on_disk: bool = False
    cache: int | str = 0
    device_cache: int | str = "auto"
    prefetch: int | None = None
    sampling_threads: int = 1
    copies: int | str = 0
    shape: PlannedModel | None = None
    strategies: tuple[str, ...] | None = None
    draw: DrawOptions | None = None
    pairs: StoredPairs | None = None


def resolve_strategy(name: str, store: GraphStore, mesh: Mesh, steps: PlannedSteps) -> Choice:
    """The named strategy, or for "auto" the planner's choice, equal on all ranks. A collective for "auto"."""
    if name != AUTO:
        return Choice(name, "")
    if mesh.size == 1:
        return Choice("split", "one process computes every mini-batch whole")
    answer: dict[str, Any] = {}
    if mesh.rank == 0:
        try:
            answer = asdict(_run_planner(store, mesh, steps))
        except (GSplitError, OSError) as error:
            answer = {"error": str(error) or type(error).__name__}
    # all ranks: also if rank 0 failed, so that all raise the same error
    texts = mesh.control.gather_text(Call("choose strategy", long_wait=True), json.dumps(answer))
    chosen = json.loads(texts[0])
    if "error" in chosen:
        raise InputError(chosen["error"])
    return Choice(chosen["strategy"], chosen["reason"], tuple(chosen["shortlist"]))


def _run_planner(store: GraphStore, mesh: Mesh, steps: PlannedSteps) -> Choice:
    targets = steps.input_nodes
    if not isinstance(store, Store) or isinstance(targets, Tensor):
        expected = "a store on disk and the name of stored targets"
        fix = "name a strategy, such as strategy='split'"
        got = "a tensor of targets" if isinstance(store, Store) else "a graph in memory"
        raise InputError(explain("strategy='auto'", expected, got, fix))
    hardware = _find_hardware(mesh.device)
    workload = Workload.of_store(
        store, targets, steps.num_neighbors, steps.batch_size, options=steps.draw, pairs=steps.pairs
    )
    if hardware.cores is not None:
        hardware = fit_to_graph(hardware, workload)
    return choose(
        store,
        workload,
        mesh.size,
        hardware,
        replicas=mesh.num_replicas,
        shape=steps.shape,
        features=tuple(steps.features),
        hosts=_count_hosts(mesh),
        loading=Loading(
            on_disk=steps.on_disk,
            cache_bytes=parse_bytes(steps.cache),
            copies=parse_bytes(steps.copies, "copies") > 0,
            device_cache_bytes=None if steps.device_cache == AUTO else parse_bytes(steps.device_cache, "device_cache"),
            prefetch=steps.prefetch,
            sampling_threads=steps.sampling_threads,
            samples_on_device=mesh.sample_device.type != "cpu",
        ),
        strategies=_runnable(steps),
    )


def _runnable(steps: PlannedSteps) -> tuple[str, ...] | None:
    """The strategies to choose from; None for all that run the model."""
    if not parse_bytes(steps.copies, "copies"):
        return steps.strategies
    shuffling = [spec.name for spec in all_strategies(len(steps.num_neighbors)) if spec.shuffles_input]
    given = ("split",) if steps.strategies is None and steps.shape is None else steps.strategies
    return tuple(name for name in shuffling if given is None or name in given)


def _count_hosts(mesh: Mesh) -> int:
    """The machines that the ranks are on, by what launchers set; 1 if they have different numbers of ranks."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    ranks_per_host = int(local) if local.isdigit() and int(local) else mesh.size
    return 1 if mesh.size % ranks_per_host else mesh.size // ranks_per_host


def _find_hardware(device: torch.device) -> Hardware:
    if device.type == "cpu":
        known = known_machine()
        if known is None:
            fix = "run gsplit plan STORE once (a minute), or name a strategy"
            raise InputError(explain("strategy='auto'", "this machine's constants", f"no valid {cache_file()}", fix))
        return known
    label = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    report = device_file()
    if report.is_file() and label.encode() in report.read_bytes():
        return read_hardware(report)
    preset = preset_of(label)
    if preset is None:
        fix = f"run gsplit doctor --device cuda --out {report}, which measures it, or name a strategy"
        raise InputError(explain("strategy='auto'", "a GPU that is known or was measured", label, fix))
    return PRESETS[preset]
