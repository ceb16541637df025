"""What the start of a mesh takes as ranks grow: seconds and CPU seconds of ``gsplit.init``, sockets and threads of a rank.

Ranks are forked from one process that has imported everything, so that 64 of them fit here. Settings are then compared
once over all ranks, as loaders and trainers do.
"""

import argparse
import json
import os
import resource
import socket
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import gsplit
from gsplit.distributed.comm.comm import assert_same_on_all_ranks
from gsplit_bench.machine import current_commit, describe_machine, installed_versions

__all__ = ["main", "start"]

SETTINGS = {f"setting {number}": number for number in range(30)}
PATIENCE_S = 600


def _run_rank(rank: int, num_ranks: int, port: int) -> dict[str, Any]:
    local = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update({name: str(number) for name, number in local.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    begun, cpu = time.perf_counter(), time.process_time()
    mesh = gsplit.init("cpu", timeout_s=PATIENCE_S)
    made, made_cpu = time.perf_counter(), time.process_time()
    assert_same_on_all_ranks(mesh.control, "start", SETTINGS)
    compared = time.process_time()
    kinds: Counter[str] = Counter()
    for name in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # a descriptor that threads of gloo closed in between
            kinds[str(name.readlink()).partition(":")[0]] += 1
    found = {
        "ranks": num_ranks,
        "init_s": round(made - begun, 3),
        "init_cpu_s": round(made_cpu - cpu, 3),
        "compare_cpu_s": round(compared - made_cpu, 4),
        "sockets": kinds["socket"],
        "threads": len(list(Path("/proc/self/task").iterdir())),
    }
    mesh.close()
    return found


def start(num_ranks: int) -> dict[str, Any]:
    """Start ranks; what rank 0 found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    reader, writer = os.pipe()
    ranks = []
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                found = _run_rank(rank, num_ranks, port)
                if rank == 0:
                    os.write(writer, json.dumps(found).encode())
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                os._exit(code)
        ranks.append(pid)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    failed = [pid for pid in ranks if os.waitpid(pid, 0)[1]]
    if failed or not text:
        raise SystemExit(f"{len(failed)} of {num_ranks} ranks failed")
    result: dict[str, Any] = json.loads(text)
    return result


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", default="2,4,8,16,32,64")
    parser.add_argument("--out", type=Path, help="where to write OUT.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    runs = []
    for number in map(int, options.ranks.split(",")):
        runs.append(start(number))
        print(json.dumps(runs[-1]), flush=True)
    if options.out:
        about = {"commit": current_commit(), "machine": describe_machine(), "versions": installed_versions()}
        command = "python -m gsplit_bench start-ranks " + " ".join(arguments)
        options.out.with_suffix(".json").write_text(
            json.dumps({"command": command, **about, "runs": runs}, indent=1) + "\n"
        )
