"""Checks of a command before torch is imported and ranks are started, so that a mistake is answered within a second.

What needs the model, the values of labels or the ranks is checked later, by ``run.choices`` and ``run.recipe``.
"""

import importlib.machinery
import os
import runpy
from pathlib import Path

from gsplit.errors import InputError, explain
from gsplit.files.byte_sizes import parse_bytes
from gsplit.files.objects import as_url, shown_place
from gsplit.files.places import is_file
from gsplit.graph.ownership import own_parts
from gsplit.inference.metric_names import check_metric_names
from gsplit.inference.prediction_table import What, default_what
from gsplit.minibatch.strategy_names import AUTO, parse_strategy
from gsplit.run.arrays import typed_widths
from gsplit.run.config import TrainSettings, check_heads
from gsplit.run.labels import BALANCED, labels_of
from gsplit.run.results import ModelShape
from gsplit.sampling.draw_options import DrawOptions
from gsplit.store.reader import Store

__all__ = [
    "check_device",
    "check_features",
    "check_new_file",
    "check_precision",
    "check_ranks",
    "check_settings",
    "check_threads",
    "choose_what",
    "columns_of",
    "num_columns",
    "refuse_link_settings",
]


def check_device(device: str | None) -> None:
    """Refuse devices of other names than cpu and cuda, and cuda with a torch that is built without it."""
    if (device or "cpu").partition(":")[0] not in ("cpu", "cuda"):
        raise InputError(explain("device", "cpu or cuda", device, "choose one of these"))
    if device is not None and device.startswith("cuda") and (version := _torch_for_cpus()):
        fix = "leave device out to train on the CPU, or install a torch with CUDA"
        raise InputError(explain("device", "a torch that is built for GPUs", f"torch {version}", fix))


def _torch_for_cpus() -> str | None:
    """The version of torch if it is built without CUDA and ROCm."""
    found = importlib.machinery.PathFinder.find_spec("torch")
    if found is None or found.origin is None:
        return None
    built = runpy.run_path(str(Path(found.origin).with_name("version.py")))
    return built["__version__"] if built.get("cuda") is None and built.get("hip") is None else None


def _on_cpus(device: str | None) -> bool:
    """Whether a run is certain to be on CPUs. Without a device it is on GPUs where there are some."""
    return device.startswith("cpu") if device is not None else _torch_for_cpus() is not None


def check_precision(settings: TrainSettings, device: str | None) -> None:
    """Refuse tf32 on CPUs."""
    if settings.precision == "tf32" and _on_cpus(device):
        fix = "choose float32 or bf16, or train on GPUs"
        raise InputError(explain("precision", "GPUs for tf32", f"device {device or 'cpu'}", fix))


def check_threads(settings: TrainSettings, device: str | None) -> None:
    """Refuse more threads than batches that are prepared ahead, where their number is known before the run."""
    prefetch, threads = settings.prefetch, settings.sampling_threads
    if prefetch is None and _on_cpus(device):
        prefetch = 0
    if prefetch is not None and 1 < threads > prefetch:
        fix = f"add --prefetch {2 * threads}, or choose fewer threads"
        expected = "at least as many batches prepared ahead as threads"
        raise InputError(explain("--sampling-threads", expected, f"{threads} threads, --prefetch {prefetch}", fix))


def check_ranks(settings: TrainSettings, store: Store, num_ranks: int) -> None:
    """Refuse a strategy that does not exist, and ranks that cannot share the store."""
    if settings.strategy != AUTO:
        spec = parse_strategy(settings.strategy, settings.num_layers)
        if settings.norm == "batch_norm" and not spec.computes_each_vertex_once(num_ranks, settings.replicas):
            got = f"--strategy {settings.strategy} on {num_ranks} ranks, --replicas {settings.replicas}"
            fix = "use --strategy split with one replica, or --norm layer_norm"
            raise InputError(explain("--norm batch_norm", "each vertex computed on one rank", got, fix))
    if num_ranks % settings.replicas:
        expected = f"a divisor of {num_ranks} ranks"
        raise InputError(explain("--replicas", expected, settings.replicas, "change one of them"))
    own_parts(store.part_boundaries, num_ranks // settings.replicas, store.part_loads)


def check_settings(settings: TrainSettings, store: Store) -> None:
    """Refuse samplers and sizes, and names of stored arrays, losses and metrics that do not fit the store."""
    DrawOptions(**settings.sampler_options)
    if settings.patience is not None and settings.evaluate_every == 0:
        raise InputError(explain("--patience", "evaluations", "--evaluate-every 0", "leave one of them out"))
    check_heads(settings.model, settings.hidden, settings.heads)
    sizes = {name: parse_bytes(getattr(settings, name), name) for name in ("cache", "copies")}
    if settings.device_cache != AUTO:
        parse_bytes(settings.device_cache, "device_cache")
    if any(sizes.values()):
        store.shape("hotness")
    if store.types is None:
        values = (settings.edge_attr, settings.edge_weight, settings.weight_attr)
        names = [f"features/{name}" for name in settings.feature_names]
        for name in [*names, *(f"edges/{value}" for value in values if value is not None)]:
            store.shape(name)
    metrics = [] if settings.metric is None else settings.metric.split(",")
    if settings.metric is not None:
        check_metric_names(metrics, of_pairs=settings.of_pairs)
    if settings.of_pairs:
        return
    refuse_link_settings(settings)
    store.stored_targets(settings.targets)
    labels = labels_of(store, settings.targets)
    if settings.loss is not None:
        labels.check_form(settings.loss)
    if settings.class_weights not in (None, BALANCED) and settings.loss in (None, "cross_entropy"):
        labels.parse_weights(settings.class_weights)
    if settings.evaluate_every != 0 and f"targets/{settings.list_named('val')}" in store.names:
        for metric in metrics:
            labels.check_metric(metric, settings.loss)


def refuse_link_settings(settings: TrainSettings) -> None:
    """Refuse what only link prediction has in a run on vertices."""
    given = {"loss": settings.loss == "bpr", "neg_sampling": settings.neg_sampling is not None}
    for name, is_given in given.items():
        if is_given:
            fix = "add --task link, or leave it out"
            raise InputError(explain(name, "a setting of --task node", getattr(settings, name), fix))


def num_columns(store: Store, settings: TrainSettings) -> int:
    """The width of the features of a run."""
    return sum(store.shape(f"features/{name}")[1] for name in settings.feature_names)


def columns_of(store: Store, settings: TrainSettings) -> tuple[str, ...]:
    """The names of the feature columns in the imported table, if they are stored."""
    return tuple(store.manifest.feature_columns) if settings.feature_names == ["x"] else ()


def check_features(store: Store, settings: TrainSettings, trained: ModelShape) -> None:
    """Refuse features whose number or order of columns differs from training, and other types."""
    fix = "give the store it was trained on, or one like it"
    if store.types is not None or trained.widths:
        edge_types = () if store.types is None else store.types.edge_types
        widths = {} if store.types is None else typed_widths(settings, store)
        if widths != trained.widths:
            raise InputError(explain(store.where, f"features by type {dict(trained.widths)}", widths, fix))
        if edge_types != trained.edge_types:
            raise InputError(explain(store.where, f"edge types {trained.edge_types}", edge_types, fix))
        return
    width = num_columns(store, settings)
    columns = columns_of(store, settings)
    if width != trained.num_features:
        raise InputError(explain(store.where, f"{trained.num_features} features", width, fix))
    if columns and trained.feature_columns and columns != trained.feature_columns:
        place = next(i for i in range(width) if columns[i] != trained.feature_columns[i])
        expected = f"{trained.feature_columns[place]} as column {place} of the features, as in training"
        fix = (
            "import with --feature-column for each of them, in the order that gsplit inspect --json shows of that store"
        )
        raise InputError(explain(store.where, expected, columns[place], fix))


def choose_what(settings: TrainSettings, out: Path, what: What | None) -> What:
    """What to write: the given choice if it fits the model, otherwise the default of the file."""
    classifies = not settings.of_pairs and settings.loss in (None, "cross_entropy")  # None: a run of an older version
    if what not in (None, "outputs") and not classifies:
        fix = "leave --what out: the file holds the values"
        trained = "on pairs" if settings.of_pairs else f"with {settings.loss}"
        raise InputError(explain("--what", f"outputs, for a model trained {trained}", what, fix))
    return what or default_what(out, classifies=classifies)


def check_new_file(path: Path, *, overwrite: bool) -> None:
    """Refuse an existing file unless it may be overwritten, and a file for which there is no folder."""
    if (
        as_url(path) is None
        and not path.exists()
        and not (path.parent.is_dir() and os.access(path.parent, os.W_OK | os.X_OK))
    ):
        got = "a folder that cannot be written" if path.parent.is_dir() else "no such folder"
        raise InputError(explain(path.parent, "a folder to write in", got, "make it, or choose another --out"))
    if (is_file(path) or path.exists()) and not overwrite:
        fix = "choose another --out, or pass --overwrite"
        raise InputError(explain(shown_place(path), "a new file", "a file", fix))
