"""Exact resume, killed again and again: `python -m gsplit_bench resume`, ten minutes and more; `--quick` for a small part.

Four parts, each against a run that nobody disturbs:
- kills: `gsplit train` of 200 steps on 2 ranks, one of them killed by SIGKILL at 20 random moments, resumed each time;
- chain: 1 -> 4 -> 3 -> 2 ranks with BatchNorm, and split -> data -> split without it, in float32 and float64, dropout on;
- files: processes killed at 50 random moments while they write checkpoints;
- cost: what a save takes from a step, the copy of the state in the training thread, beside what the writing thread does.
"""

import argparse
import json
import math
import multiprocessing
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.distributed.comm.mesh import Mesh, solo_mesh
from gsplit.run.folder import finished_folder, latest_checkpoint, telemetry_path
from gsplit.store.build import build_store
from gsplit.store.importers.synthetic import PlantedGraph, synthetic_source
from gsplit.training.checkpoints.files import CheckpointManifest, CheckpointWriter, read_checkpoint, read_latest
from gsplit.training.checkpoints.names import latest_file
from gsplit_bench.ranks import IMPORTED_BEFORE, run_ranks

__all__ = ["main"]

SETTINGS = [
    "--hidden",
    "64",
    "--fanout",
    "10,10",
    "--batch-size",
    "512",
    "--norm",
    "batch_norm",
    "--evaluate-every",
    "0",
]

PARTS = ("files", "cost", "chain", "kills")
BOUNDS = {"float64": (1e-9, 1e-9), "float32": (1e-3, 1e-2)}
"""Of losses and weights, on other ranks."""


@dataclass(frozen=True)
class Plan:
    """How much is done."""

    steps: int
    kills: int
    file_kills: int
    cost_steps: int


# ------------------------------------------------------------------------------------------------- kills


def run_rank(words: list[str], environment: dict[str, str], log: Path) -> None:
    """Be a rank of `gsplit train` as torchrun starts it, in a process of its own."""
    os.environ.update(environment)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from gsplit.cli.main import app

    app(words)


def _words(store: Path, run: Path, steps: int) -> list[str]:
    """Begin a run, or go on with it."""
    if latest_checkpoint(run) is not None:
        return ["train", str(store), "--json", "--resume", str(run)]
    return ["train", str(store), "--json", "--out", str(run), "--steps", str(steps), "--save-every", "3", *SETTINGS]


def _start_ranks(words: list[str], run: Path) -> list[BaseProcess]:
    """Two ranks, forked from a server that has imported torch; everything of ours begins anew."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes: list[BaseProcess] = []
    for rank in "01":
        own = {**shared, "RANK": rank, "LOCAL_RANK": rank}
        log = run.with_name(f"{run.name}-rank-{rank}.log")
        processes.append(_context().Process(target=run_rank, args=(words, own, log)))
        processes[-1].start()
    return processes


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_BEFORE)
    return context


def _run_to_the_end(store: Path, run: Path, steps: int) -> Any:
    """The document of history.json of a run that nobody disturbs any more."""
    processes = _start_ranks(_words(store, run, steps), run)
    for process in processes:
        process.join(900)
    log = run.with_name(f"{run.name}-rank-0.log")
    assert [process.exitcode for process in processes] == [0, 0], log.read_text()
    return json.loads((finished_folder(run) / "history.json").read_text())


def _num_lines(run: Path) -> int:
    path = telemetry_path(run, 0)
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _kill_once(store: Path, run: Path, plan: Plan, rng: random.Random) -> dict[str, Any]:
    """Start or resume a run and kill one of its ranks at some moment behind its first new steps."""
    latest = latest_checkpoint(run)
    kept = 0 if latest is None else int(latest.name[5:13])
    processes = _start_ranks(_words(store, run, plan.steps), run)
    begun, deadline = math.inf, time.monotonic() + 200
    more = rng.randrange(max(1, min(2 * plan.steps // plan.kills - 2, plan.steps - kept - 10)))
    while not kept <= begun < _num_lines(run) - more:  # telemetry is cut back to the checkpoint, then it grows
        assert time.monotonic() < deadline and processes[0].is_alive(), run.with_name(
            f"{run.name}-rank-0.log"
        ).read_text()
        begun = kept if _num_lines(run) == kept else begun
        time.sleep(0.005)
    time.sleep(rng.uniform(0.0, 0.5))
    victim = rng.randrange(2)
    processes[victim].kill()
    start = time.monotonic()
    for process in processes:
        process.join(60)
    seconds, codes = time.monotonic() - start, [process.exitcode for process in processes]
    after = latest_checkpoint(run)
    return {
        "killed": f"rank {victim}",
        "exit_codes": codes,
        "seconds_until_all_had_ended": round(seconds, 2),
        "steps_done": _num_lines(run),
        "steps_kept": 0 if after is None else int(after.name[5:13]),
    }


def try_kills(store: Path, folder: Path, plan: Plan, seed: int) -> dict[str, Any]:
    """One run undisturbed, one killed many times; both on two ranks."""
    rng, whole, killed = random.Random(seed), folder / "whole", folder / "killed"
    want = _run_to_the_end(store, whole, plan.steps)
    kills: list[dict[str, Any]] = []
    while len(kills) < plan.kills and finished_folder(killed) == killed:
        kills.append(_kill_once(store, killed, plan, rng))
        print(f"kill {len(kills)}: {kills[-1]}", file=sys.stderr)
    found = _run_to_the_end(store, killed, plan.steps)
    weights = [load_file(finished_folder(run) / "weights.safetensors") for run in (whole, killed)]
    lost = [kill["steps_done"] - kill["steps_kept"] for kill in kills]
    return {
        "steps": len(want["losses"]),
        "kills": kills,
        "largest_loss_difference": _largest(want["losses"], found["losses"]),
        "largest_weight_difference": _largest_of(*weights),
        "most_steps_done_again": max(lost),
    }


def _largest(one: list[float], two: list[float]) -> float:
    assert len(one) == len(two), (len(one), len(two))
    return max(abs(a - b) for a, b in zip(one, two, strict=True))


def _largest_of(one: dict[str, Any], two: dict[str, Any]) -> float:
    assert one.keys() == two.keys()
    return max(float(np.abs(one[name] - two[name]).max()) for name in one)


# ------------------------------------------------------------------------------------------------- chain


@dataclass(frozen=True)
class Piece:
    """Steps of one of the chains' trainings, up to ``stop``; it goes on from the folder's checkpoint if there is one."""

    store: Path
    folder: Path
    stop: int
    dtype: str
    strategy: str
    norm: str | None


def train_piece(mesh: Mesh, piece: Piece) -> dict[str, Any]:
    """Train a piece with everything made anew; losses so far and weights."""
    store = gsplit.open(piece.store)
    loader = gsplit.NeighborLoader(
        store, [10, 10], "train", batch_size=512, mesh=mesh, strategy=piece.strategy, prefetch=mesh.size % 3
    )
    torch.manual_seed(0)
    model = GraphSAGE(store.num_features, 64, 2, store.num_classes, dropout=0.5, norm=piece.norm)
    model = gsplit.parallelize(model.to(getattr(torch, piece.dtype)), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    trainer = gsplit.Trainer(model, optimizer, loader, lr_scheduler=scheduler, save_to=piece.folder)
    if latest_file(piece.folder) is not None:
        trainer.load(piece.folder)
    while trainer.state.num_steps < piece.stop:
        trainer.train_epoch(piece.stop - trainer.state.num_steps)
    trainer.save()
    weights = {name: value.numpy(force=True).copy() for name, value in model.state_dict().items()}
    return {"losses": trainer.state.history.losses, "weights": weights}


def train_pieces(mesh: Mesh, pieces: list[Piece]) -> list[dict[str, Any]]:
    """Several pieces on the same ranks."""
    return [train_piece(mesh, piece) for piece in pieces]


def _on_ranks(num_ranks: int, pieces: list[Piece]) -> list[dict[str, Any]]:
    if num_ranks == 1:
        return train_pieces(solo_mesh(), pieces)
    found: list[dict[str, Any]] = run_ranks(train_pieces, num_ranks, pieces, timeout_s=900)[0]
    return found


def try_chain(store: Path, folder: Path, plan: Plan) -> list[dict[str, Any]]:
    """Two ranks without a stop, against 1 -> 4 -> 3 -> 2 ranks, and split -> data -> split on the way."""
    cases = [(dtype, norm) for dtype in ("float32", "float64") for norm in ("batch_norm", None)]
    whole = _on_ranks(2, [Piece(store, folder / f"w-{d}-{n}", plan.steps, d, "split", n) for d, n in cases])
    quarters = [plan.steps * part // 4 for part in (1, 2, 3, 4)]
    strategies = ("split", "data", "split", "data")
    found: list[dict[str, Any]] = []
    for ranks, stop, other in zip((1, 4, 3, 2), quarters, strategies, strict=True):
        pieces = [Piece(store, folder / f"c-{d}-{n}", stop, d, "split" if n else other, n) for d, n in cases]
        found = _on_ranks(ranks, pieces)
        print(f"chain: {stop} steps, now on {ranks} ranks", file=sys.stderr)
    records = []
    for (dtype, norm), one, two in zip(cases, whole, found, strict=True):
        how = "split, BatchNorm" if norm else "split -> data -> split -> data, no BatchNorm"
        losses, weights = _largest(one["losses"], two["losses"]), _largest_of(one["weights"], two["weights"])
        records.append({"dtype": dtype, "how": how, "steps": plan.steps, "loss": losses, "weights": weights})
    return records


# ------------------------------------------------------------------------------------------------- files


def save_for_ever(folder: Path, told: Any) -> None:
    """Save one state after the other, and tell which are known to be on the disk."""
    latest = latest_file(folder)
    first = 1 if latest is None else int(latest.name[5:13]) + 1
    writer = CheckpointWriter(folder, 2)
    for step in range(first, first + 1_000_000):
        writer.save(step, {"w": torch.full((1 << 22,), float(step)), "step": step}, CheckpointManifest({}))
        writer.finish()
        told.send(step)


def try_files(folder: Path, plan: Plan, seed: int) -> dict[str, Any]:
    """Kill processes that save, and look what is there."""
    rng, context = random.Random(seed), _context()
    half_written = lost = 0
    for _ in range(plan.file_kills):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=save_for_ever, args=(folder, theirs))
        process.start()
        known = mine.recv()
        while not list(folder.glob("*.tmp")):  # until the next one is being written
            pass
        time.sleep(rng.uniform(0.0, 0.02))
        process.kill()
        process.join()
        theirs.close()
        while mine.poll():
            try:
                known = mine.recv()
            except EOFError:
                break
        found = read_latest(folder)
        number = found.state["step"]
        assert not found.damaged and found.state["w"].unique().tolist() == [number]
        half_written += bool(list(folder.glob("*.tmp")))
        lost += max(0, known - number)
    return {"kills": plan.file_kills, "killed_while_a_file_was_half_written": half_written, "known_saves_lost": lost}


# ------------------------------------------------------------------------------------------------- cost


def try_cost(store_path: Path, folder: Path, plan: Plan) -> dict[str, Any]:
    """Steps of GraphSAGE-256 with a save after every one, one process: seconds of the copy beside those of a step."""
    store = gsplit.open(store_path)
    loader = gsplit.NeighborLoader(store, [15, 15, 15], "train", batch_size=1024)
    model = gsplit.parallelize(GraphSAGE(store.num_features, 256, 3, store.num_classes, dropout=0.5), solo_mesh())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    trainer = gsplit.Trainer(model, optimizer, loader, save_to=folder)
    trainer.train_epoch(2)  # compiles
    copies, writes, sizes = [], [], []
    first = trainer.state.num_steps
    while trainer.state.num_steps < first + plan.cost_steps:
        trainer.train_epoch(1)
        start = time.perf_counter()
        trainer.save_in_background()
        copies.append(time.perf_counter() - start)
        trainer._checked_saver().finish()
        writes.append(time.perf_counter() - start)
    latest = latest_file(folder)
    assert latest is not None
    sizes.append(latest.stat().st_size)
    assert read_checkpoint(latest).state["train_edges"] > 0
    steps = trainer.state.history.step_seconds[first:]
    step, copy = statistics.median(steps), statistics.median(copies[1:])
    return {
        "store": store_path.name,
        "checkpoint_bytes": sizes[-1],
        "step_s": step,
        "copy_s": copy,
        "written_after_s": statistics.median(writes),
        "share_of_a_step": copy / step,
        "share_with_save_every_10": copy / step / 10,
    }


# ------------------------------------------------------------------------------------------------- main


def _markdown(record: dict[str, Any]) -> str:
    kills, files, cost = record["kills"], record["files"], record["cost"]
    rows = [
        f"| {c['dtype']} | {c['how']} | {c['steps']} | {c['loss']:.1e} | {c['weights']:.1e} |" for c in record["chain"]
    ]
    return f"""# Exact resume, {record["date"]}

`python -m gsplit_bench resume` on {record["machine"]}, torch {record["torch"]}, commit {record["commit"]}. Raw records beside this file.

- **Kills.** {kills["steps"]} steps on 2 ranks, dropout and BatchNorm, a checkpoint every 3 steps, one of them killed by SIGKILL {len(kills["kills"])}
  times at random moments and the run resumed. Largest difference to the run nobody killed: losses {kills["largest_loss_difference"]:.1e}, weights {kills["largest_weight_difference"]:.1e}.
  Steps done again after a kill: at most {kills["most_steps_done_again"]}.
- **Files.** {files["kills"]} processes killed while they saved, {files["killed_while_a_file_was_half_written"]} of them with a half-written file: the latest checkpoint was whole every
  time, {files["known_saves_lost"]} saves lost that had returned.
- **Cost.** GraphSAGE-256, 3 layers, batch 1024 on {cost["store"]}, {cost["checkpoint_bytes"] / 1e6:.1f} MB per checkpoint: {1e3 * cost["copy_s"]:.2f} ms of a step of
  {1e3 * cost["step_s"]:.0f} ms, {100 * cost["share_of_a_step"]:.2f} % with a save after every step, {100 * cost["share_with_save_every_10"]:.3f} % with every tenth; on the disk after {1e3 * cost["written_after_s"]:.0f} ms.

Two ranks without a stop against 1 -> 4 -> 3 -> 2 ranks, a quarter of the steps each, other prefetching, dropout on, cosine schedule; largest differences:

| | strategy | steps | of a loss | of a weight |
|---|---|---|---|---|
{chr(10).join(rows)}

A bias before BatchNorm has no gradient but rounding, which Adam scales up: in float32 it, and the running mean that contains it, are the largest
differences of a weight there, and no output depends on them.
"""


def _check(record: dict[str, Any]) -> None:
    """What must hold."""
    if "kills" in record:
        kills = record["kills"]
        assert kills["largest_loss_difference"] == kills["largest_weight_difference"] == 0.0, "not bit for bit"
    if "files" in record:
        assert record["files"]["known_saves_lost"] == 0
    for case in record.get("chain", []):
        loss, weights = BOUNDS[case["dtype"]]
        assert case["loss"] < loss and case["weights"] < weights, case


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small part of all")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this; the others stay as they are")
    parser.add_argument("--cost-store", type=Path, help="a store to measure the cost of saving on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="where to write .json and .md; parts that are there and not asked for are kept"
    )
    given = parser.parse_args(arguments)
    plan = Plan(24, 2, 5, 5) if given.quick else Plan(200, 20, 50, 15)
    results = None if given.out is None else given.out.with_suffix(".json")
    record = json.loads(results.read_text()) if results is not None and results.exists() else {}
    record |= {"date": str(date.today()), "torch": torch.__version__, "commit": _commit(), "plan": asdict(plan)}
    record["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, shared"
    with tempfile.TemporaryDirectory(prefix="gsplit-resume-") as name:
        folder = Path(name)
        graph = PlantedGraph(20_000, 300_000, num_features=32, target_share=0.3)
        store = build_store(synthetic_source(graph), folder / "planted.gsplit").path
        parts: dict[str, Callable[[], Any]] = {
            "files": lambda: try_files(folder / "files", plan, given.seed),
            "cost": lambda: try_cost(given.cost_store or store, folder / "cost", plan),
            "chain": lambda: try_chain(store, folder, plan),
            "kills": lambda: try_kills(store, folder, plan, given.seed),
        }
        for part in given.part or PARTS:
            record[part] = parts[part]()
            print(json.dumps({part: record[part]}), file=sys.stderr)
            if results is not None:
                results.write_text(json.dumps(record, indent=1))
    if all(part in record for part in PARTS):
        print(_markdown(record))
        if results is not None:
            results.with_suffix(".md").write_text(_markdown(record))
    _check(record)


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"
