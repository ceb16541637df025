"""``python -m gsplit_bench paper``: the tables and figures of the paper's evaluation that this machine can make.

Stores are partitioned here: by the objective of GSplit, and by Edge, the baseline. What is measured are the presets of
``train_study``; Table 1 is counted by ``loading``, Figure 5 by ``partition``. Every experiment leaves a JSON document in
the folder of the page. One that is there and complete is kept, so a page that was interrupted can be continued.
"""

import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gsplit.cli.console import command, progress_bars
from gsplit.errors import InputError, explain
from gsplit.files.atomic import write_atomic
from gsplit.partitioning.partition import partition
from gsplit.partitioning.presample import Workload
from gsplit.partitioning.settings import EPOCHS
from gsplit.progress import Progress
from gsplit.report.figures import load_figure
from gsplit.store.reader import Store, open_store
from gsplit_bench.loading import count_loading
from gsplit_bench.paper_page import EDGE_SUFFIX, write_paper
from gsplit_bench.partition import bench_partition
from gsplit_bench.train import run_study
from gsplit_bench.train_command import write_document
from gsplit_bench.train_study import Study, find_preset

__all__ = ["EXPERIMENTS", "make_studies", "paper"]

_SYSTEMS = ("split", "data_cached", "data", "dgl", "pyg", "pyg_our_sampler", "p3")
_CACHED = ("split", "data_cached", "quiver", "data")
_RIVALS = ("split", "data_cached", "data", "dgl", "p3")
_PARTS = 8
_CASES = [("gsplit", "metis"), ("node", "metis"), ("edge", "metis"), ("random", "random")]
_STEADY: dict[str, Any] = {"warm_up": find_preset("host").warm_up, "steps": 1, "repeats": 4}
EXPERIMENTS = ("table1", "table3", "figure5", "figure6a", "figure6b", "figure6c", "figure6d", "figure6e", "figure7")
"""Names of the experiments. Figure 3 is made from the records of Table 3."""


def make_studies(ranks: int, device: str, *, quick: bool) -> dict[str, Study]:
    """The studies that are measured: presets, with the paper's systems, models and number of ranks."""
    both = ("sage", "gat")

    def study(preset: str, **changes: Any) -> Study:
        given = {"models": both, "ranks": (ranks,), "device": device} | _STEADY | changes
        found = replace(find_preset(preset), **given)
        return _shrink(found) if quick else found

    measured_ranks = tuple(number for number in find_preset("ranks").ranks if number <= ranks)
    counted_ranks = tuple(number for number in find_preset("ranks").counted_ranks if number <= _PARTS)
    return {
        "table3": study("main", systems=_SYSTEMS, allocators=("tuned",)),
        "table3-edge": study("partition", counted_ranks=()),
        "table3-cache": study("main", systems=_CACHED, allocators=("tuned",), features=("disk",)),
        "figure6a": study("ranks", systems=_RIVALS, ranks=measured_ranks, counted_ranks=counted_ranks),
        "figure6b": study("replicas", systems=("split", "data")),
        "figure6c": study("hidden", systems=_RIVALS),
        "figure6d": study("batch", systems=_RIVALS, counted_ranks=()),
        "figure6e": study("layers", systems=_RIVALS),
        "figure7": study("accuracy"),
    }


def _shrink(study: Study) -> Study:
    """The same study at a sixteenth of the width and the mini-batch, with few neighbours and steps."""
    return replace(
        study,
        hidden=tuple(width // 16 for width in study.hidden),
        batch_sizes=tuple(size // 16 for size in study.batch_sizes),
        fanouts=tuple((3,) * len(fanout) for fanout in study.fanouts),
        ranks=tuple(sorted({min(number, 2) for number in study.ranks})),
        replicas=tuple(number for number in study.replicas if number <= 2),
        counted_ranks=tuple(number for number in study.counted_ranks if number <= 2),
        counted_strategies=("split", "data"),
        epochs=min(study.epochs, 2),
        steps=1,
        repeats=1,
    )


def paper(
    stores: Annotated[list[Path], typer.Argument(metavar="STORE", help="stores that have not been partitioned")],
    out: Annotated[Path, typer.Option(help="folder for the page, its pictures, documents and partitions")],
    ranks: Annotated[int, typer.Option(min=1, help="ranks, for the paper's GPUs")] = 4,
    device: Annotated[str, typer.Option(help="of the models: cpu, cuda, or sim, which is simulated")] = "cpu",
    only: Annotated[
        str | None, typer.Option(help=f"experiments, of {', '.join(EXPERIMENTS)} [default: all]", metavar="NAMES")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="small models and mini-batches, one step each: a trial")
    ] = False,
) -> None:
    """Make the tables and figures of the paper's evaluation, as one page.

    Hours on two cores. Experiments whose document is in the folder are kept.
    """
    with command(as_json=False, lost="documents of finished experiments are kept"):
        chosen = EXPERIMENTS if only is None else tuple(only.split(","))
        for name in chosen:
            if name not in EXPERIMENTS:
                raise InputError(explain("--only", f"some of {', '.join(EXPERIMENTS)}", name, "choose among these"))
        load_figure()
        opened = [open_store(path) for path in stores]
        if len({path.stem for path in stores}) < len(stores):
            got = ", ".join(map(str, stores))
            raise InputError(explain("STORE...", "stores with different names", got, "rename them"))
        if wrong := [path for path in stores if path.stem.endswith(EDGE_SUFFIX)]:
            expected = f"names that do not end in {EDGE_SUFFIX}, as those of partitions by edges do"
            raise InputError(explain("STORE...", expected, wrong[0], "rename it"))
        out.mkdir(parents=True, exist_ok=True)
        _check_settings(
            out, {"stores": [str(path.resolve()) for path in stores], "ranks": ranks, "device": device, "quick": quick}
        )
        studies = make_studies(ranks, device, quick=quick)
        with progress_bars(as_json=False) as progress:
            _Run(opened, out, studies, progress, epochs=1 if quick else EPOCHS).make(chosen)
        page = write_paper(out, EXPERIMENTS, is_trial=quick or device == "sim")
        Console().print(str(page.file), highlight=False, soft_wrap=True)
        if page.faults:
            raise typer.Exit(1)


def _check_settings(out: Path, settings: dict[str, Any]) -> None:
    """Refuse a folder with documents of other settings; note those of a new one."""
    file = out / "settings.json"
    if not file.exists():
        write_atomic(file, [json.dumps(settings, indent=1).encode(), b"\n"])
        return
    found = json.loads(file.read_text())
    if found != settings:
        raise InputError(explain(out, f"documents of {settings}", f"of {found}", "choose another --out, or remove it"))


class _Run:
    """The experiments on some stores, with their documents in a folder."""

    def __init__(
        self, stores: Sequence[Store], out: Path, studies: dict[str, Study], progress: Progress, *, epochs: int
    ) -> None:
        self._stores, self._out, self._studies, self._progress = stores, out, studies, progress
        self._epochs = epochs  # presampled

    def make(self, names: Sequence[str]) -> None:
        """Run what has no document yet."""
        for name in names:
            if name == "table1":
                self._once(name, lambda: [self._count_redundancy(store) for store in self._stores])
            elif name == "figure5":
                self._once(name, lambda: [self._compare_objectives(store) for store in self._stores])
            else:
                self._measure(name)
            if name == "table3":
                self._measure("table3-edge", "gsplit", "edge")
                self._measure("table3-cache")

    def _once(self, name: str, make: Callable[[], list[dict[str, Any]]]) -> None:
        file = self._out / f"{name}.json"
        if not file.exists():
            write_atomic(file, [json.dumps(make(), indent=1).encode(), b"\n"])

    def _measure(self, name: str, *objectives: str) -> None:
        file = self._out / f"{name}.json"
        study = self._studies[name]
        if file.exists():
            found = json.loads(file.read_text())
            if not found["failures"] and found["study"] == json.loads(json.dumps(asdict(study))):
                return
        graphs = [
            self._partitioned(store, objective).path
            for store in self._stores
            for objective in objectives or ("gsplit",)
        ]
        words = shlex.join(["python", "-m", "gsplit_bench", *sys.argv[1:]])
        report = run_study(study, graphs, preset=name, command=words, progress=self._progress)
        write_document(file, report)

    def _partitioned(self, store: Store, objective: str) -> Store:
        """The store's partition by an objective, made once."""
        path = self._out / f"{store.path.stem}{EDGE_SUFFIX if objective == 'edge' else ''}.gsplit"
        if path.exists():
            return open_store(path)
        fanout, batch_size = self._sizes()
        return partition(
            store,
            path,
            _PARTS,
            list(fanout),
            batch_size=batch_size,
            objective=objective,
            epochs=self._epochs,
            progress=self._progress,
        )

    def _sizes(self) -> tuple[tuple[int, ...], int]:
        """Fanout and mini-batch of Table 3."""
        study = self._studies["table3"]
        return study.fanouts[0], study.batch_sizes[0]

    def _count_redundancy(self, store: Store) -> dict[str, Any]:
        """An epoch of mini-batches of as many targets per rank as Table 3 has in all, as in the paper's Table 1."""
        fanout, batch_size = self._sizes()
        ranks = self._studies["table3"].ranks[0]
        divided = self._partitioned(store, "gsplit")
        most = int(divided.stored_array("targets/train").size)
        workload = Workload.of_store(divided, "train", list(fanout), min(ranks * batch_size, most), 1)
        return {"graph": store.path.stem} | count_loading(divided, workload, [ranks], progress=self._progress)

    def _compare_objectives(self, store: Store) -> dict[str, Any]:
        fanout, batch_size = self._sizes()
        workload = Workload.of_store(store, "train", list(fanout), batch_size, 0)
        parts = [self._studies["table3"].ranks[0]]
        found = bench_partition(workload, parts, cases=_CASES, epochs=self._epochs, progress=self._progress)
        return {"graph": store.path.stem} | found
