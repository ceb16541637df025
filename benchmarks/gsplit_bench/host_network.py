"""Several hosts on one machine: network namespaces on one switch, with the bandwidth, delay and loss asked for.

Needs root and the commands ``ip`` and ``tc``; delay needs a kernel with netem, loss one with BPF filters (cls_bpf).
Processes in a namespace see its loopback and its cable to the switch, and nothing else of the machine's network. The
bandwidth is that of every cable, in each direction; a packet is lost where it arrives at a host.
"""

import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

from gsplit.errors import InputError, explain

__all__ = ["HostNetwork"]

_PORT = "29500"  # in a namespace of its own: nothing else listens there
_LOAD_RANDOM = f"32 0 0 {2**32 - 0x1000 + 56}"  # classic BPF: operation, jump if true, jump if false, operand
_SKIP_IF_AT_LEAST, _RETURN = "53 1 0", "6 0 0"
_DROP, _PASS = 2, 2**32 - 1  # TC_ACT_SHOT, TC_ACT_UNSPEC


class HostNetwork:
    """Use with ``with``: namespaces are there inside, and gone afterwards, with the cables."""

    def __init__(
        self, num_hosts: int = 2, *, rate: str = "1gbit", delay_ms: float = 0.0, loss_percent: float = 0.0
    ) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
            fix = "run as root with iproute2 installed, or without --hosts"
            raise InputError(explain("hosts", "root, ip and tc", "not all of them", fix))
        self._rate, self._delay_ms, self._loss = rate, delay_ms, loss_percent
        mark = secrets.token_hex(3)
        self._switch = f"gsplit-{mark}-switch"
        self.names = tuple(f"gsplit-{mark}-{host}" for host in range(num_hosts))
        self.interfaces = tuple(f"gs{mark}{host}" for host in range(num_hosts))
        self.addresses = tuple(f"10.213.77.{host + 1}" for host in range(num_hosts))

    def __enter__(self) -> "HostNetwork":
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for name, interface, address in zip(self.names, self.interfaces, self.addresses, strict=True):
            _run("ip", "netns", "add", name)
            port = f"{interface}p"
            _run(
                "ip",
                "link",
                "add",
                interface,
                "netns",
                name,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                self._switch,
            )
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", interface)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", interface, "up")
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
        self.set_rate(self._rate)
        if self._loss:
            self.set_loss(self._loss)

    def set_rate(self, rate: str) -> None:
        """Change the bandwidth of all cables."""
        shape = ["tbf", "rate", rate, "burst", "1m", "latency", "50ms"]
        if self._delay_ms:
            shape = ["netem", "rate", rate, "delay", f"{self._delay_ms}ms"]
        for name, interface in zip(self.names, self.interfaces, strict=True):
            for place, end in ((name, interface), (self._switch, f"{interface}p")):
                _run("tc", "-n", place, "qdisc", "replace", "dev", end, "root", *shape)

    def set_loss(self, percent: float) -> None:
        """Change the share of packets that are lost, each at random: a BPF program that compares a random number."""
        below = min(round(percent / 100 * 2**32), 2**32 - 1)
        program = f"4,{_LOAD_RANDOM},{_SKIP_IF_AT_LEAST} {below},{_RETURN} {_DROP},{_RETURN} {_PASS}"
        for name, interface in zip(self.names, self.interfaces, strict=True):
            _run("tc", "-n", name, "qdisc", "replace", "dev", interface, "clsact")
            place = ["dev", interface, "ingress", "pref", "1", "handle", "1"]
            _run("tc", "-n", name, "filter", "replace", *place, "bpf", "direct-action", "bytecode", program)

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The same command on one of the hosts."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def torchrun(self, host: int, per_host: int, program: Sequence[str]) -> list[str]:
        """One host's launcher of a module with its arguments; all ranks meet at the first host's address."""
        meeting = ["--master-addr", self.addresses[0], "--master-port", _PORT]
        place = ["--nnodes", str(len(self.names)), "--node-rank", str(host), "--nproc-per-node", str(per_host)]
        return self.command(host, [sys.executable, "-m", "torch.distributed.run", *place, *meeting, "-m", *program])

    def set_link(self, *, up: bool) -> None:
        """Plug the cable of the first host in, or pull it."""
        _run("ip", "-n", self.names[0], "link", "set", self.interfaces[0], "up" if up else "down")

    def close(self) -> None:
        """Take everything away; what is not there is passed over."""
        for name in (*self.names, self._switch):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        fix = "network namespaces must be allowed here; delay needs a kernel with netem, loss one with cls_bpf"
        raise InputError(explain("hosts", " ".join(command), done.stderr.strip(), fix))
