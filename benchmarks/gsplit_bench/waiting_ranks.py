"""Real ranks of a benchmark that wait for the word to take a step: for taking turns with others.

The program of a rank prints "ready", then for every line of standard input takes a step and prints
``{"cpu": CPU seconds, "loss": the loss}``; ``answer_steps`` does that.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import IO

__all__ = ["WaitingRanks", "answer_steps"]


class WaitingRanks:
    """The ranks of one program; of one rank, a process that knows of no others."""

    def __init__(self, program: list[str], count: int, environment: dict[str, str] | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
        shared = {**os.environ, "OMP_NUM_THREADS": "1", **place, **(environment or {})}
        self._processes = []
        for rank in range(count):
            several = {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)} if count > 1 else {}
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, *program],
                    env={**shared, **several},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )

    def _pipes(self) -> list[tuple[IO[str], IO[str]]]:
        return [(p.stdin, p.stdout) for p in self._processes if p.stdin is not None and p.stdout is not None]

    def wait_until_ready(self) -> None:
        for _, out in self._pipes():
            for line in out:
                if "ready" in line:
                    break
            else:
                raise RuntimeError("a rank ended before it was ready; run its program by hand to see why")

    def step(self) -> tuple[float, float]:
        """CPU seconds of all ranks, and the loss."""
        for word, _ in self._pipes():
            word.write("step\n")
            word.flush()
        answers = [json.loads(out.readline()) for _, out in self._pipes()]
        return sum(answer["cpu"] for answer in answers), answers[0]["loss"]

    def close(self) -> None:
        for word, _ in self._pipes():
            word.close()
        for process in self._processes:
            process.wait(60)


def answer_steps(step: Callable[[int], float]) -> None:
    """A rank's side: ``step(number)`` trains and returns the loss."""
    print("ready", flush=True)
    for number, _ in enumerate(sys.stdin):
        start = time.process_time()
        loss = step(number)
        print(json.dumps({"cpu": time.process_time() - start, "loss": loss}), flush=True)
