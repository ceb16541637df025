"""How ranks reach each other: backends, interfaces, and a real test of collectives over several ranks."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from gsplit.distributed.comm import Call
from gsplit.distributed.local_ranks import RankFailedError, run_ranks
from gsplit.distributed.mesh import Mesh
from gsplit.distributed.process_groups import available_backends
from gsplit.distributed.shared_memory import SharedComm
from gsplit.doctor.line import Line

__all__ = ["check_backends", "check_collectives", "check_interfaces"]

_TIMEOUT_S = 120.0
_REPEATS = 50
_NUM_FLOATS = 4 << 20  # 16 MiB
_SLOW_S = 0.02


def check_backends() -> Line:
    """What torch can send over."""
    found = available_backends()
    said = ", ".join(found) or "none"
    if "gloo" not in found:
        return Line("backends", "error", said, "install a torch with gloo: the wheels for Linux have it")
    if torch.cuda.is_available() and "nccl" not in found:
        return Line("backends", "error", f"{said}, and a GPU", "install a CUDA build of torch, which has NCCL")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Line("backends", "ok", f"{said}; GPUs: {gpus}")


def check_interfaces() -> Line:
    """Which network interfaces are there, and whether the one that gloo is told to use is among them."""
    states = {name: _state(name) for _, name in socket.if_nameindex()}
    said = ", ".join(f"{name} {state}" for name, state in states.items())
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if wanted and not set(wanted.split(",")) <= set(states):
        fix = "export GLOO_SOCKET_IFNAME=NAME with one of these, or unset it"
        return Line("interfaces", "error", f"{said}; GLOO_SOCKET_IFNAME={wanted}", fix)
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        fix = "for several hosts: export GLOO_SOCKET_IFNAME=NAME, or add the host to /etc/hosts"
        return Line("interfaces", "warning", f"{said}; {host} has no address", fix)
    note = ""
    if address.startswith("127.") and not wanted:
        note = "enough for one host; for several: export GLOO_SOCKET_IFNAME=NAME"
    return Line("interfaces", "ok", f"{said}; {host} is {address}", note)


def _state(name: str) -> str:
    try:
        state = Path(f"/sys/class/net/{name}/operstate").read_text().strip()
    except OSError:
        return "unknown"
    return "up" if name == "lo" or state == "unknown" else state


def check_collectives(nproc: int) -> list[Line]:
    """Start ranks and let them exchange; how fast."""
    if nproc == 1:
        return [Line("ranks", "ok", "not tried with one rank", "give --nproc to test them")]
    start = time.perf_counter()
    try:
        found = run_ranks(measure, nproc, timeout_s=_TIMEOUT_S)[0]
    except RankFailedError as error:
        said = (str(error).strip().splitlines() or ["no word"])[-1]
        return [Line("ranks", "error", said, "see the interfaces, firewalls and limits above")]
    seconds = time.perf_counter() - start
    lines = [Line("ranks", "ok", f"{nproc} started and met in {seconds:.1f} s", figures={"seconds": round(seconds, 2)})]
    return [*lines, _describe("gloo", found), _describe("shared memory", found)]


def _describe(how: str, found: dict[str, float]) -> Line:
    figures = {name: value for name, value in found.items() if name.startswith(how)}
    if not figures:
        fix = "let ranks open each other's /proc/PID/fd: the same user, one container, no hidepid"
        return Line(how, "warning", "not used: ranks cannot open each other's memory", fix)
    latency, rate = figures[f"{how} latency_s"], figures[f"{how} bytes_per_s"]
    said = f"{1e6 * latency:.0f} us and {rate / 1e9:.2f} GB/s from each rank"
    if latency > _SLOW_S:
        return Line(how, "warning", said, "end other programs, or start fewer ranks: these wait for a core", figures)
    return Line(how, "ok", said, figures=figures)


def measure(mesh: Mesh) -> dict[str, float]:
    """Seconds of an empty exchange, and bytes per second that leave a rank; over gloo and through shared memory."""
    one, many = torch.zeros(1), torch.ones(_NUM_FLOATS // mesh.size * mesh.size)
    found = {"gloo latency_s": _median_s(lambda: mesh.world.all_reduce(Call("measure"), one).wait(), _REPEATS)}
    counts = (many.numel() // mesh.size,) * mesh.size
    received, leaving = torch.empty_like(many), many.nbytes * (mesh.size - 1) / mesh.size
    seconds = _median_s(lambda: mesh.world.all_to_all(Call("send"), received, many, counts, counts).wait(), 5)
    found["gloo bytes_per_s"] = leaving / seconds
    if isinstance(mesh.shuffles, SharedComm):
        ones = (1,) * mesh.size
        latency = _median_s(lambda: mesh.shuffles.all_to_all_counts(Call("measure"), ones), _REPEATS)
        seconds = _median_s(lambda: mesh.shuffles.all_to_all(Call("send"), received, many, counts, counts).wait(), 5)
        found |= {"shared memory latency_s": latency, "shared memory bytes_per_s": leaving / seconds}
    return found


def _median_s(run: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats + 1):  # all ranks: the same number
        start = time.perf_counter()
        run()
        taken.append(time.perf_counter() - start)
    return median(taken[1:])
