"""Ranks that are copies of the launcher: what they have, how they end, and when there are none."""

import json
import signal

import pytest
from forked_scripts import run_forked

_PROGRAM = """
import atexit, gc, json, os, signal, sys, threading, time
from gsplit.distributed.launch.forked_rank import can_fork, fork_rank, stay_with_one_thread

def wait(rank):
    while rank.poll() is None:
        time.sleep(0.01)
    return rank.poll()

def look():
    import torch
    atexit.register(lambda: open("left", "w").write("yes"))
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    block = bytearray(64 << 20)  # a large block, kept by the tuned allocator once it is freed
    block[:: 4096] = b"x" * len(block[:: 4096])
    del block
    pages = int(open("/proc/self/statm").read().split()[1])
    seen = {
        "variable": os.environ["SAID"], "before": "BEFORE" in os.environ, "threads": torch.get_num_threads(),
        "handlers": handlers == [signal.SIG_DFL, signal.default_int_handler], "pages": pages,
    }
    open("seen", "w").write(json.dumps(seen))
    return 5

stay_with_one_thread()
os.environ["BEFORE"] = "yes"
atexit.register(print, "the launcher ends")
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGINT, lambda *_: None)
environment = {"SAID": "by the launcher", "OMP_NUM_THREADS": "2,1"}
ends = {}
ends["looks"] = wait(fork_rank(look, environment))
plain = json.load(open("seen"))
tuned = environment | {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "68719476736", "MALLOC_TOP_PAD_": "268435456"}
wait(fork_rank(look, tuned))
seen = json.load(open("seen")) | {"left": os.path.exists("left")}
ends["exits"] = wait(fork_rank(lambda: sys.exit(7), environment))
ends["raises"] = wait(fork_rank(lambda: 1 // 0, environment))
sleeping = fork_rank(lambda: time.sleep(600) or 0, environment)
sleeping.send_signal(signal.SIGKILL)
ends["killed"] = wait(sleeping)
sleeping.send_signal(signal.SIGKILL)  # it has ended: nobody is signalled
terminated = fork_rank(lambda: time.sleep(600) or 0, environment)
time.sleep(0.5)
terminated.send_signal(signal.SIGTERM)
ends["terminated"] = wait(terminated)
alone = {"cpu": can_fork("cpu"), "cuda": can_fork("cuda")}
stop = threading.Event()
thread = threading.Thread(target=stop.wait)
thread.start()
alone["with a thread"] = can_fork("cpu")
stop.set()
thread.join()
kept = (seen.pop("pages") - plain["pages"]) * os.sysconf("SC_PAGE_SIZE")
print(json.dumps({"seen": seen, "ends": ends, "can": alone, "kept": kept, "frozen": gc.get_freeze_count()}))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, object]]:
    folder = tmp_path_factory.mktemp("forked")
    (folder / "program.py").write_text(_PROGRAM)
    done = run_forked([str(folder / "program.py")], folder, cwd=folder)
    assert done.returncode == 0, done.stderr
    said, *others = done.stdout.splitlines()
    assert others == ["the launcher ends"]  # once: what it registered is not for ranks
    assert "ZeroDivisionError" in done.stderr
    loaded: dict[str, dict[str, object]] = json.loads(said)
    return loaded


def test_a_copy_has_what_a_python_of_its_own_would_have(found: dict[str, dict[str, object]]) -> None:
    assert found["seen"] == {
        "variable": "by the launcher",
        "before": False,
        "threads": 2,
        "handlers": True,
        "left": True,
    }


def test_its_allocator_keeps_large_blocks(found: dict[str, int]) -> None:
    assert found["kept"] > 60 << 20


def test_it_ends_as_any_process(found: dict[str, dict[str, object]]) -> None:
    ends = {"looks": 5, "exits": 7, "raises": 1, "killed": -signal.SIGKILL, "terminated": -signal.SIGTERM}
    assert found["ends"] == ends


def test_only_a_process_of_one_thread_is_copied_and_never_for_gpus(found: dict[str, dict[str, object]]) -> None:
    assert found["can"] == {"cpu": True, "cuda": False, "with a thread": False}


def test_the_launcher_leaves_nothing_frozen(found: dict[str, int]) -> None:
    assert found["frozen"] == 0  # or extension modules would report leaks when it ends
