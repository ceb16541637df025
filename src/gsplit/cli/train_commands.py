"""``gsplit train``, ``infer`` and ``verify``: one process, or ``--nproc`` ranks of this host, or a torchrun's.

The process that the user starts checks what it can and then starts the ranks, which run the same command.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gsplit.cli.console import command, emit_json, progress_bars
from gsplit.cli.options import Json, parse_fanout
from gsplit.errors import InputError, explain
from gsplit.store.reader import Store, open_store

__all__ = ["infer", "train", "verify"]

StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="a directory made by gsplit import")]
Nproc = Annotated[int, typer.Option(min=1, help="ranks to start on this host")]
Model = Annotated[str | None, typer.Option(help="sage, gat, gatv2, gin, gcn, pna, transformer, ... [sage]")]
Hidden = Annotated[int | None, typer.Option(help="width of the hidden layers [256]")]
Heads = Annotated[int | None, typer.Option(help="attention heads [4]")]
Dropout = Annotated[float | None, typer.Option(help="share of hidden values dropped [0.5]")]
Norm = Annotated[str | None, typer.Option(help="batch_norm or layer_norm, between layers [none]")]
Jk = Annotated[str | None, typer.Option(help="jumping knowledge: cat, max or lstm [none]")]
Fanout = Annotated[str | None, typer.Option(help="neighbours per hop, targets' hop first [15,15,15]")]
BatchSize = Annotated[int | None, typer.Option(help="targets of the GLOBAL mini-batch [1024]")]
Strategy = Annotated[str | None, typer.Option(help="split or data [split]")]
Seed = Annotated[int | None, typer.Option(help="of the sample, the dropout and the first weights [0]")]
Config = Annotated[Path | None, typer.Option(help="a TOML file with the same settings; flags come first")]
Features = Annotated[str | None, typer.Option(help="which feature array [x]")]


def _given(**options: Any) -> dict[str, Any]:
    """The options that were set, by the settings' names."""
    given = {name: value for name, value in options.items() if value is not None}
    if "fanout" in given:
        given["fanout"] = parse_fanout(given["fanout"])
    return given


def _rank() -> int | None:
    from gsplit.distributed.launch import is_rank

    return int(os.environ["RANK"]) if is_rank() else None


def _start_ranks(nproc: int) -> None:
    from gsplit.distributed.launch import launch

    code = launch([sys.executable, "-P", "-m", "gsplit.cli", *sys.argv[1:]], nproc)
    if code:
        raise typer.Exit(code)


def _on_ranks(nproc: int, check: Callable[[], None], work: Callable[[Any], None], replicas: int = 1) -> None:
    """Do the work here, or start ranks that do it; what can be checked without them is checked first, once."""
    rank = _rank()
    if rank is None and nproc > 1:
        check()
        _start_ranks(nproc)
        return
    from gsplit.distributed.comm import disconnect
    from gsplit.distributed.mesh import init

    mesh = init(replicas=replicas)
    if rank is not None and nproc not in (1, mesh.size):
        raise InputError(explain("--nproc", f"the launcher's {mesh.size}", nproc, "leave it out under torchrun"))
    work(mesh)
    disconnect()


def _check_model(settings: Any, store: Store, nproc: int) -> None:
    """Whether the model can be built and wrapped, found out before ranks start."""
    from gsplit.distributed.mesh import solo_mesh
    from gsplit.loader import STRATEGIES
    from gsplit.nn.parallelize import parallelize
    from gsplit.run.recipe import build_model, shape_of

    if settings.strategy not in STRATEGIES:
        raise InputError(explain("--strategy", " or ".join(STRATEGIES), settings.strategy, "use one of these"))
    if nproc % settings.replicas:
        raise InputError(explain("--replicas", f"a divisor of {nproc} ranks", settings.replicas, "change one of them"))
    store.stored_array(f"targets/{settings.targets}")
    parallelize(build_model(settings, shape_of(store, settings), store), solo_mesh())


def train(
    store: StoreArgument,
    nproc: Nproc = 1,
    config: Config = None,
    out: Annotated[Path | None, typer.Option(help="a folder for weights, history and telemetry")] = None,
    overwrite: Annotated[bool, typer.Option(help="replace a run of the same name")] = False,
    model: Model = None,
    hidden: Hidden = None,
    heads: Heads = None,
    dropout: Dropout = None,
    norm: Norm = None,
    jk: Jk = None,
    fanout: Fanout = None,
    batch_size: BatchSize = None,
    epochs: Annotated[int | None, typer.Option(help="passes over the targets [10]")] = None,
    steps: Annotated[int | None, typer.Option(help="stop after so many steps")] = None,
    lr: Annotated[float | None, typer.Option(help="Adam's learning rate [0.001]")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Adam's weight decay [0]")] = None,
    schedule: Annotated[str | None, typer.Option(help="constant or cosine [constant]")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="steps of linear start [0]")] = None,
    clip_norm: Annotated[float | None, typer.Option(help="largest norm of the gradient [none]")] = None,
    seed: Seed = None,
    strategy: Strategy = None,
    replicas: Annotated[int | None, typer.Option(help="groups of ranks that each take a cut of the batch [1]")] = None,
    features: Features = None,
    evaluate_every: Annotated[int | None, typer.Option(help="epochs between exact evaluations, 0: never [1]")] = None,
    as_json: Json = False,
) -> None:
    """Train a stock model; the losses do not depend on the strategy or on the number of ranks."""
    options = dict(locals())
    with command(as_json, rank=_rank(), lost="no weights were kept"):
        from gsplit.run.config import TrainSettings, load_settings
        from gsplit.run.folder import check_new_run

        given = _given(**{name: value for name, value in options.items() if name in TrainSettings.model_fields})
        settings, opened = load_settings(config, given), open_store(store)
        if out is not None and _rank() is None:
            check_new_run(out, overwrite=overwrite)
        _on_ranks(
            nproc,
            lambda: _check_model(settings, opened, nproc),
            lambda mesh: _train(settings, opened, mesh, out, overwrite, as_json),
            settings.replicas,
        )


def _train(settings: Any, store: Store, mesh: Any, out: Path | None, overwrite: bool, as_json: bool) -> None:
    from gsplit.cli.training_view import TrainingView
    from gsplit.run.recipe import train_run

    if mesh.rank or as_json:
        document = train_run(settings, store, mesh, out, overwrite)
        if mesh.rank == 0:
            emit_json(document)
        return
    with TrainingView(settings.steps, settings.epochs) as view:
        document = train_run(settings, store, mesh, out, overwrite, view.step, view.evaluation)
    table = Table(box=None, show_header=False, pad_edge=False)
    seconds = sum(document["epoch_seconds"])
    table.add_row("steps", f"{document['steps']} on {mesh.size} rank(s), {settings.strategy}")
    table.add_row("seconds per step", f"{seconds / document['steps']:.3f}")
    table.add_row("last loss", f"{document['losses'][-1]:.4f}")
    if document["best"]:
        scores = ", ".join(f"{k} {100 * v:.2f}%" for k, v in document["best"].items() if k != "epoch")
        table.add_row("best epoch", f"{document['best']['epoch']}: {scores} (exact, all neighbours)")
    if out is not None:
        table.add_row("weights", f"{out}, for gsplit infer")
    Console().print(table, highlight=False)


def infer(
    store: StoreArgument,
    weights: Annotated[Path, typer.Option(metavar="RUN", help="a folder made by gsplit train --out")],
    out: Annotated[Path, typer.Option(help="the .npy file to write, a row per vertex in original order")],
    overwrite: Annotated[bool, typer.Option(help="replace a file of the same name")] = False,
    nproc: Nproc = 1,
    as_json: Json = False,
) -> None:
    """Exact outputs of a trained model for every vertex, from all neighbours."""
    with command(as_json, rank=_rank()):
        opened = open_store(store)
        _on_ranks(
            nproc,
            lambda: _check_inference(weights, out, overwrite),
            lambda mesh: _infer(weights, opened, out, overwrite, mesh, as_json),
        )


def _check_inference(weights: Path, out: Path, overwrite: bool) -> None:
    from gsplit.run.folder import load_run
    from gsplit.run.recipe import check_new_file

    load_run(weights)
    check_new_file(out, overwrite=overwrite)


def _infer(weights: Path, store: Store, out: Path, overwrite: bool, mesh: Any, as_json: bool) -> None:
    from gsplit.run.recipe import infer_run

    with progress_bars(as_json or mesh.rank > 0) as progress:
        document = infer_run(weights, store, out, mesh, overwrite=overwrite, progress=progress)
    if mesh.rank == 0 and as_json:
        emit_json(document)
    elif mesh.rank == 0:
        Console().print(
            f"{out}: {document['shape'][0]:,} x {document['shape'][1]} {document['dtype']}", highlight=False
        )


def verify(
    store: StoreArgument,
    model: Model = None,
    nproc: Nproc = 2,
    config: Config = None,
    hidden: Hidden = None,
    heads: Heads = None,
    dropout: Dropout = None,
    norm: Norm = None,
    jk: Jk = None,
    fanout: Fanout = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    strategy: Strategy = None,
    replicas: Annotated[int | None, typer.Option(help="groups of ranks that each take a cut of the batch [1]")] = None,
    features: Features = None,
    steps: Annotated[int, typer.Option(min=1, help="steps compared")] = 3,
    as_json: Json = False,
) -> None:
    """Train the same steps on one process and on W ranks, in float64, and compare; exit code 3 if they differ."""
    options = {name: value for name, value in dict(locals()).items() if name != "steps"}
    with command(as_json, rank=_rank()):
        from gsplit.run.config import TrainSettings, load_settings

        given = _given(**{name: value for name, value in options.items() if name in TrainSettings.model_fields})
        settings, opened = load_settings(config, given), open_store(store)
        _on_ranks(
            nproc,
            lambda: _check_model(settings, opened, nproc),
            lambda mesh: _verify(settings, opened, mesh, steps, as_json),
            settings.replicas,
        )


def _verify(settings: Any, store: Store, mesh: Any, steps: int, as_json: bool) -> None:
    from gsplit.distributed.launch import DIFFERS
    from gsplit.run.recipe import verify_run

    found = verify_run(settings, store, mesh, steps)
    if mesh.rank == 0 and as_json:
        emit_json(found.as_dict())
    elif mesh.rank == 0:
        verdict = "equal one process" if found.ok else "DIFFER from one process"
        console = Console()
        console.print(f"{settings.model}, {found.strategy}: {found.ranks} rank(s) {verdict} over {found.steps} steps")
        console.print(f"largest difference: loss {found.max_loss_error:.2e}, gradients {found.max_grad_error:.2e}")
    if not found.ok:
        sys.stdout.flush()
        raise typer.Exit(DIFFERS)
