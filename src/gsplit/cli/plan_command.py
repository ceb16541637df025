"""``gsplit plan``: which strategy is fastest for a store, a model and a machine, and why."""

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from gsplit.cli.console import command, emit_json, human, progress_bars
from gsplit.cli.options import Flags, Json, StoreArgument, settings_options
from gsplit.errors import CommError, InputError
from gsplit.run.config import TrainSettings
from gsplit.sampling.draw_options import DrawOptions
from gsplit.store.reader import Store, open_store

if TYPE_CHECKING:
    from gsplit.partitioning.presample import Workload
    from gsplit.planner.hardware import Hardware
    from gsplit.planner.placement import Loading
    from gsplit.planner.plan import Candidate, Plan
    from gsplit.progress import Progress

__all__ = ["plan"]

SampleDevice = Literal["cpu", "cuda"]


@settings_options(
    only=(
        "task",
        "model",
        "hidden",
        "heads",
        "fanout",
        "sampler",
        "weight_attr",
        "replace",
        "layer_dependency",
        "batch_size",
        "targets",
        "pairs",
        "neg_sampling",
        "num_negatives",
        "embedding",
        "features",
        "cache",
        "device_cache",
        "features_on_disk",
        "prefetch",
        "sampling_threads",
        "trial_steps",
    )
)
def plan(
    *,
    store: StoreArgument,
    nproc: Annotated[int, typer.Option(min=1, metavar="INT", help="ranks to plan for")] = 2,
    flags: Flags[TrainSettings],
    layers: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="INT", help="number of layers, each with the first fanout [default: one per fanout]"
        ),
    ] = None,
    hosts: Annotated[int, typer.Option(min=1, metavar="INT", help="machines that the ranks are on")] = 1,
    sample_device: Annotated[
        SampleDevice, typer.Option(help="where mini-batches are sampled for GPUs: cpu, or cuda with the graph on them")
    ] = "cpu",
    hardware: Annotated[
        str,
        typer.Option(
            metavar="FILE|NAME",
            help="this, v100-nvlink, a100, h100, a file of constants, or a report of gsplit doctor",
        ),
    ] = "this",
    recalibrate: Annotated[bool, typer.Option("--recalibrate", help="measure this machine again")] = False,
    steps: Annotated[int, typer.Option(min=1, metavar="INT", help="mini-batches to count")] = 3,
    as_json: Json = False,
) -> None:
    """Compare all strategies for a store, a model and a machine.

    Counts some mini-batches under every strategy; seconds come from the constants of a machine. The first plan for this
    machine measures it, which takes about a minute. For this machine, the best three are then timed by a few training
    steps.
    """
    with command(as_json):
        settings = flags.parse()
        opened = open_store(store)
        options = DrawOptions(**settings.sampler_options)
        from gsplit.partitioning.presample import Workload  # torch and PyG, only when used
        from gsplit.planner.plan import make_plan, planned_types
        from gsplit.planner.shapes import PlannedModel
        from gsplit.run.arrays import feature_arrays
        from gsplit.run.choices import choose_for_pairs, refuse_typed_settings
        from gsplit.sampling.pairs import StoredPairs

        pairs = None
        refuse_typed_settings(settings, opened)
        if settings.of_pairs:
            settings = choose_for_pairs(settings, opened)
            pairs = StoredPairs.given(settings.pairs, settings.neg_sampling or "binary", settings.num_negatives)
        fanouts = settings.fanout if layers is None else settings.fanout[:1] * layers
        names = tuple(feature_arrays(settings, opened))
        shape = PlannedModel(
            kind=settings.model,
            num_features=_num_columns(opened, names),
            hidden=settings.hidden,
            num_classes=settings.embedding if settings.of_pairs else max(2, _num_classes(opened, settings.targets)),
            num_layers=len(fanouts),
            heads=settings.heads,
            types=planned_types(opened, names),
        )
        targets = None if settings.targets == "all" and opened.types is None else settings.targets
        workload = Workload.of_store(opened, targets, fanouts, settings.batch_size, options=options, pairs=pairs)
        with progress_bars(as_json) as progress:
            machine = _hardware(hardware, workload, progress, again=recalibrate)
            made = make_plan(
                opened,
                workload,
                shape,
                machine,
                nproc,
                features=names,
                loading=_loading(settings, sample_device),
                hosts=hosts,
                steps=steps,
                progress=progress,
            )
        if hardware == "this" and hosts == 1:
            made = _time_best(made, settings.model_copy(update={"fanout": fanouts}), opened, nproc)
        if as_json:
            emit_json(_document(made))
        else:
            _show(made, Console())


def _loading(settings: TrainSettings, sample_device: SampleDevice) -> "Loading":
    from gsplit.files.byte_sizes import parse_bytes
    from gsplit.planner.placement import Loading

    automatic = settings.device_cache == "auto"
    return Loading(
        on_disk=settings.features_on_disk,
        cache_bytes=parse_bytes(settings.cache),
        device_cache_bytes=None if automatic else parse_bytes(settings.device_cache, "device_cache"),
        prefetch=settings.prefetch,
        sampling_threads=settings.sampling_threads,
        samples_on_device=sample_device == "cuda",
    )


def _num_columns(store: Store, names: tuple[str, ...]) -> int:
    return sum(store.shape(f"features/{name}")[1] for name in names)


def _num_classes(store: Store, targets: str) -> int:
    """Classes of the vertices that the targets are of; 0 without integer labels."""
    if store.types is None:
        return store.num_classes
    vertex_type = targets.partition("/")[0]
    if targets not in store.types.vertex_types:
        store.stored_array(f"targets/{targets}")  # refuses names that are not stored
    return store.manifest.vertex_types[store.types.number(vertex_type)].num_classes


def _hardware(name: str, workload: "Workload", progress: "Progress", *, again: bool) -> "Hardware":
    """A preset, a file, or this machine, whose sampling is measured on the graph itself."""
    from gsplit.planner.auto import fit_to_graph
    from gsplit.planner.calibration import this_machine
    from gsplit.planner.hardware import PRESETS, read_hardware

    if name in PRESETS:
        return PRESETS[name]
    if name != "this":
        return read_hardware(Path(name))
    return fit_to_graph(this_machine(again=again, progress=progress), workload)


def _time_best(made: "Plan", settings: TrainSettings, store: Store, nproc: int) -> "Plan":
    """The plan with the times of its best candidates; a note says if they cannot be trained here."""
    from gsplit.planner.plan import rank_timed, shortlist
    from gsplit.run.recipe import shape_of
    from gsplit.run.trial import describe_trial, medians, time_on_ranks

    setups = [candidate.setup for candidate in shortlist(made.candidates, made.hardware)]
    if not settings.trial_steps or len(setups) < 2 or settings.targets == "all":  # no run trains on these
        return made
    start_s = time.perf_counter()
    try:
        shape_of(store, settings)
        found = medians(time_on_ranks(setups, settings, store.path, nproc))
    except (InputError, CommError) as error:
        return replace(made, notes=(*made.notes, f"not timed: {error}"))
    if not found:
        return made
    timed = rank_timed(made, found)
    return replace(timed, reason=f"{timed.reason} {describe_trial(start_s)}")


def _document(made: "Plan") -> dict[str, Any]:
    """The document of ``--json``."""
    return {
        "kind": "plan",
        "hardware": asdict(made.hardware),
        "model": asdict(made.shape),
        "best": made.best.setup.strategy,
        "best_ranks": made.best.setup.ranks,
        "best_replicas": made.best.setup.replicas,
        "reason": made.reason,
        "notes": list(made.notes),
        "candidates": [_describe(candidate) for candidate in made.candidates],
    }


def _describe(candidate: "Candidate") -> dict[str, Any]:
    step, counts = candidate.step, candidate.step.counts
    return {
        **asdict(candidate.setup),
        "wall_s": step.wall_s,
        "cpu_s": step.cpu_s,
        "timed": None if candidate.timed is None else asdict(candidate.timed),
        "stages_s": step.stages.by_name(),
        "stages_s_per_rank": [rank.by_name() for rank in step.ranks],
        "edges": counts.num_edges,
        "rows_loaded": counts.rows_loaded,
        "rows_sent": counts.rows_sent,
        "bytes_sent_per_rank": step.bytes_sent,
        "imbalance": step.imbalance,
        "memory_own_bytes": candidate.memory.own,
        "memory_mapped_bytes": candidate.memory.mapped,
        "fits": candidate.fits,
    }


def _show(made: "Plan", console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ("timed", "step", "draw", "load", "move", "fwd", "bwd", "rows", "sent", "own", "imb."):
        table.add_column(name, justify="right", no_wrap=True)
    for candidate in made.candidates:
        table.add_row(*_cells(candidate), style=None if candidate.fits else "dim")
    console.print(table)
    console.print(
        "ms of a step, timed and estimated, and of its stages (move: ids and rows between\n"
        "ranks, forward); input rows read; bytes that the busiest rank sends, and that a\n"
        "rank takes of its own; work of the largest rank over the mean",
        style="dim",
        highlight=False,
    )
    console.print(f"\n{made.reason}", highlight=False, soft_wrap=True)
    for note in made.notes:
        console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)


def _cells(candidate: "Candidate") -> list[str]:
    step, stages = candidate.step, candidate.step.stages
    seconds = (
        step.wall_s,
        stages.sample + stages.split,
        stages.load,
        stages.exchange_ids + stages.exchange_features + stages.shuffle,
        stages.forward,
        stages.backward + stages.optimizer,
    )
    return [
        candidate.setup.name,
        "" if candidate.timed is None else f"{1000 * candidate.timed.wall_s:.0f}",
        *(f"{1000 * value:.0f}" if value >= 0.1 else f"{1000 * value:.1f}" for value in seconds),
        human(step.counts.rows_loaded),
        human(step.bytes_sent) if candidate.setup.ranks > 1 else "",
        human(candidate.memory.own),
        f"{step.imbalance:.2f}",
    ]
