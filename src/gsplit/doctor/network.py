"""How ranks reach each other: backends, interfaces, and measured collectives between several ranks."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from gsplit.distributed.comm.comm import Call, Comm
from gsplit.distributed.comm.mesh import Mesh
from gsplit.distributed.comm.process_groups import available_backends
from gsplit.distributed.comm.shared_memory import SharedComm
from gsplit.doctor.finding import Finding
from gsplit.doctor.ranks import RunRanks, run_ranks
from gsplit.errors import CommError

__all__ = ["check_backends", "check_collectives", "check_interfaces", "measure", "median_seconds", "send_rate"]

_REPEATS = 50
_NUM_FLOATS = 4 << 20  # 16 MiB
_SLOW_S = 0.02


def check_backends() -> Finding:
    """Check the backends of torch.distributed."""
    found = available_backends()
    text = ", ".join(found) or "none"
    if "gloo" not in found:
        return Finding("backends", "error", text, "install a torch with gloo: the wheels for Linux have it")
    if torch.cuda.is_available() and "nccl" not in found:
        return Finding("backends", "error", f"{text}, and a GPU", "install a CUDA build of torch, which has NCCL")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Finding("backends", "ok", f"{text}; GPUs: {gpus}")


def check_interfaces() -> Finding:
    """Check the network interfaces, and that the ones of GLOO_SOCKET_IFNAME are among them."""
    states = {name: _state(name) for _, name in socket.if_nameindex()}
    text = ", ".join(f"{name} {state}" for name, state in states.items())
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if wanted and not set(wanted.split(",")) <= set(states):
        fix = "export GLOO_SOCKET_IFNAME=NAME with one of these, or unset it"
        return Finding("interfaces", "error", f"{text}; GLOO_SOCKET_IFNAME={wanted}", fix)
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError:
        fix = "for several hosts: export GLOO_SOCKET_IFNAME=NAME, or add the host to /etc/hosts"
        return Finding("interfaces", "warning", f"{text}; {host} has no address", fix)
    note = ""
    if address.startswith("127.") and not wanted:
        note = "enough for one host; for several: export GLOO_SOCKET_IFNAME=NAME"
    return Finding("interfaces", "ok", f"{text}; {host} is {address}", note)


def _state(name: str) -> str:
    try:
        state = Path(f"/sys/class/net/{name}/operstate").read_text().strip()
    except OSError:
        return "unknown"
    return "up" if name == "lo" or state == "unknown" else state


def check_collectives(nproc: int, *, run: RunRanks = run_ranks) -> list[Finding]:
    """Start ranks and measure their collectives."""
    if nproc == 1:
        return [Finding("ranks", "skipped", "one rank only", "--nproc 2 starts two")]
    start = time.perf_counter()
    try:
        found = run(measure, nproc, "cpu")
    except CommError as error:
        return [Finding("ranks", "error", str(error), "see the interfaces, firewalls and limits above")]
    seconds = time.perf_counter() - start
    text = f"{nproc} started and joined in {seconds:.1f} s"
    started = Finding("ranks", "ok", text, figures={"seconds": round(seconds, 2)})
    return [started, _describe("gloo", found), _describe("shared memory", found)]


def _describe(how: str, found: dict[str, float]) -> Finding:
    figures = {name: value for name, value in found.items() if name.startswith(how)}
    if not figures:
        fix = "let ranks open each other's /proc/PID/fd: the same user, one container, no hidepid"
        return Finding(how, "warning", "not used: ranks cannot open each other's memory", fix)
    latency, rate = figures[f"{how} latency_s"], figures[f"{how} bytes_per_s"]
    text = f"{1e6 * latency:.0f} us and {rate / 1e9:.2f} GB/s from each rank"
    if latency > _SLOW_S:
        return Finding(how, "warning", text, "end other programs, or start fewer ranks: these wait for a core", figures)
    return Finding(how, "ok", text, figures=figures)


def measure(mesh: Mesh) -> dict[str, float]:
    """Seconds of an empty exchange, and bytes per second that leave a rank, over gloo and through shared memory."""
    one = torch.zeros(1)
    latency = median_seconds(lambda: mesh.world.all_reduce(Call("measure"), one).wait(), _REPEATS)
    found = {"gloo latency_s": latency, "gloo bytes_per_s": send_rate(mesh.world, _NUM_FLOATS)}
    if isinstance(mesh.shuffles, SharedComm):
        ones = (1,) * mesh.size
        latency = median_seconds(lambda: mesh.shuffles.all_to_all_counts(Call("measure"), ones), _REPEATS)
        rate = send_rate(mesh.shuffles, _NUM_FLOATS)
        found |= {"shared memory latency_s": latency, "shared memory bytes_per_s": rate}
    return found


def send_rate(comm: Comm, num_floats: int) -> float:
    """Bytes per second that leave a rank when every rank sends as much to every other."""
    counts = (num_floats // comm.size,) * comm.size
    sent = torch.ones(sum(counts), device=comm.device)
    received = torch.empty_like(sent)
    seconds = median_seconds(
        lambda: comm.all_to_all(Call("send"), received, sent, counts, counts).wait(), 5, comm.device
    )
    return sent.nbytes * (comm.size - 1) / comm.size / seconds


def median_seconds(run: Callable[[], object], repeats: int, device: torch.device | None = None) -> float:
    """The median time of ``run``, each to its end on the device, after one run to warm up.

    All ranks repeat it as often, because it may be a collective.
    """
    synchronize = torch.get_device_module(device).synchronize if device and device.type != "cpu" else lambda: None
    taken = []
    for _ in range(repeats + 1):
        synchronize()
        start = time.perf_counter()
        run()
        synchronize()
        taken.append(time.perf_counter() - start)
    return median(taken[1:])
