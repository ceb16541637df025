"""Two hosts on one machine: network namespaces joined by a virtual cable, with the bandwidth, delay and loss asked for.

Needs root and the commands ``ip`` and ``tc``; delay and loss need a kernel with netem. Processes in a namespace see its
loopback and the cable, and nothing else of the machine's network.
"""

import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType

from gsplit.errors import InputError, explain

__all__ = ["TwoHosts"]


class TwoHosts:
    """Use with ``with``: namespaces are there inside, and gone afterwards, with the cable."""

    addresses = ("10.213.77.1", "10.213.77.2")

    def __init__(self, *, rate: str = "1gbit", delay_ms: float = 0.0, loss_percent: float = 0.0) -> None:
        if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
            fix = "run as root with iproute2 installed, or without --hosts"
            raise InputError(explain("two hosts", "root, ip and tc", "not all of them", fix))
        self._rate, self._delay_ms, self._loss = rate, delay_ms, loss_percent
        mark = secrets.token_hex(3)
        self.names = (f"gsplit-{mark}-0", f"gsplit-{mark}-1")
        self.interfaces = (f"gs{mark}0", f"gs{mark}1")

    def __enter__(self) -> "TwoHosts":
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
        for name in self.names:
            _run("ip", "netns", "add", name)
        first, second = self.interfaces
        _run("ip", "link", "add", first, "type", "veth", "peer", "name", second)
        for name, interface, address in zip(self.names, self.interfaces, self.addresses, strict=True):
            _run("ip", "link", "set", interface, "netns", name)
            inside = ("ip", "-n", name)
            _run(*inside, "address", "add", f"{address}/24", "dev", interface)
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "link", "set", interface, "up")
            shape = ["tbf", "rate", self._rate, "burst", "256k", "latency", "50ms"]
            if self._delay_ms or self._loss:
                shape = ["netem", "rate", self._rate, "delay", f"{self._delay_ms}ms", "loss", f"{self._loss}%"]
            _run("tc", "-n", name, "qdisc", "add", "dev", interface, "root", *shape)

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """The same command on one of the hosts."""
        return ["ip", "netns", "exec", self.names[host], *command]

    def set_link(self, *, up: bool) -> None:
        """Plug the cable in, or pull it."""
        _run("ip", "-n", self.names[0], "link", "set", self.interfaces[0], "up" if up else "down")

    def close(self) -> None:
        """Take everything away; what is not there is passed over."""
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        fix = "network namespaces must be allowed here; delay and loss need a kernel with netem"
        raise InputError(explain("two hosts", " ".join(command), done.stderr.strip(), fix))
