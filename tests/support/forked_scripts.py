"""Programs and commands as the ranks of a launcher would run them, in processes that start in a moment.

Every rank is forked from a server that has imported torch and PyG, instead of importing them for some seconds. What
torchrun gives a rank, it has: the environment, and a standard output of its own. What starts ranks is not tested here.
"""

import atexit
import multiprocessing
import os
import runpy
import socket
import sys
import traceback
from pathlib import Path

from gsplit.testing.ranks import IMPORTED_BEFORE


def _become(words: list[str], environment: dict[str, str], out: Path) -> None:
    """Run ``script.py args`` or ``-m module args`` as a Python of its own would."""
    os.environ.clear()
    os.environ.update(environment)
    with out.open("w") as file:
        os.dup2(file.fileno(), 1)
    sys.stdout = os.fdopen(1, "w", closefd=False)
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


def run_forked(words: list[str], num_ranks: int, folder: Path, timeout_s: float = 100.0) -> list[str]:
    """The standard output of every rank, all of which must end with exit code 0."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_BEFORE)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = os.environ | {"OMP_NUM_THREADS": "1"}
    if num_ranks > 1:
        shared |= {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    outs = [folder / f"stdout-{rank}" for rank in range(num_ranks)]
    ranks = []
    for rank, out in enumerate(outs):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks)} if num_ranks > 1 else {}
        ranks.append(context.Process(target=_become, args=(words, shared | own, out), daemon=True))
        ranks[-1].start()
    try:
        for process in ranks:
            process.join(timeout_s)
        assert [process.exitcode for process in ranks] == [0] * num_ranks, words
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [out.read_text() for out in outs]
