"""Programs and commands in processes of their own that start in a moment, alone or as the ranks of a launcher.

Each is forked from a server that has imported torch and PyG, instead of importing them for some seconds. What a Python
of its own would have, it has: arguments, environment, folder, standard output and error, an exit code, and it can be
killed. What torchrun gives a rank, a rank has too. Processes that it starts itself, such as ranks, are real ones.
"""

import atexit
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess

from gsplit_bench.ranks import fork_context

__all__ = ["ForkedProcess", "run_forked", "run_ranks_forked", "start_forked"]


@dataclass(frozen=True)
class ForkedProcess:
    """A process that was started; what it says goes into two files."""

    words: list[str]
    process: BaseProcess
    out: Path
    err: Path

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process.pid is not None
        return self.process.pid

    def wait(self, timeout_s: float = 500.0) -> "CompletedProcess[str]":
        """Wait for its end; a process that takes longer is killed."""
        self.process.join(timeout_s)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        assert self.process.exitcode is not None
        return CompletedProcess(self.words, self.process.exitcode, self.out.read_text(), self.err.read_text())


def _become(words: list[str], environment: dict[str, str], cwd: Path | None, out: Path, err: Path) -> None:
    """Run ``script.py args`` or ``-m module args`` as a Python of its own would."""
    os.environ.clear()
    os.environ.update(environment)
    if cwd is not None:
        os.chdir(cwd)
    for number, path in ((1, out), (2, err)):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    code = 0
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()  # a forked process would leave them out
    sys.stdout.flush()
    os._exit(code)


def start_forked(
    words: list[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    *,
    name: str = "said",
    cwd: Path | None = None,
) -> ForkedProcess:
    """Start ``script.py args`` or ``-m module args``; what it says goes to files of this name in ``folder``."""
    everything = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    out, err = folder / f"{name}.out", folder / f"{name}.err"
    process = fork_context().Process(target=_become, args=(words, everything, cwd, out, err), daemon=True)
    process.start()
    return ForkedProcess(words, process, out, err)


def run_forked(
    words: list[str], folder: Path, *, cwd: Path | None = None, timeout_s: float = 500.0
) -> "CompletedProcess[str]":
    """A process to its end."""
    return start_forked(words, folder, cwd=cwd).wait(timeout_s)


def run_ranks_forked(
    words: list[str], num_ranks: int, folder: Path, *, cwd: Path | None = None, timeout_s: float = 500.0
) -> list[str]:
    """The standard output of every rank, all of which must end with exit code 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    started = []
    for rank in range(num_ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        environment = shared | own if num_ranks > 1 else {}  # one process needs no launcher
        started.append(start_forked(words, folder, environment, name=f"rank-{rank}", cwd=cwd))
    done = [rank.wait(timeout_s) for rank in started]
    assert [rank.returncode for rank in done] == [0] * num_ranks, (words, *(rank.stderr for rank in done))
    return [rank.stdout for rank in done]
