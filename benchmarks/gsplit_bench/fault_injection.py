"""Faults inside a rank, at a place of a step: this file runs as ``sitecustomize`` of the processes of a trial.

``fault_trials`` copies it there, so it imports nothing of ours. The environment says in which rank, in which function,
at which call of it, and what is to happen. A file says when it did.
"""

import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["FAULT", "KINDS"]

FAULT = "GSPLIT_TEST_FAULT"
"""A JSON object: ``rank``, ``function`` (module:name), ``call``, ``kind``, ``repeat`` and ``folder``."""


def _raise() -> None:
    raise ValueError("a fault on purpose")


def _run_out_of_memory() -> None:
    import resource

    import torch

    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + (64 << 20), resource.RLIM_INFINITY))
    torch.ones(1 << 30)


def _stop_and_terminate_launcher() -> None:
    os.kill(os.getppid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGSTOP)


KINDS: dict[str, Callable[[], None]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exception": _raise,
    "exit 0": lambda: os._exit(0),
    "out of memory": _run_out_of_memory,
    "SIGTERM to the launcher": lambda: os.kill(os.getppid(), signal.SIGTERM),
    "SIGTERM to the launcher, SIGSTOP": _stop_and_terminate_launcher,
    "SIGKILL of the launcher": lambda: os.kill(os.getppid(), signal.SIGKILL),
}


class _Injector(importlib.abc.MetaPathFinder):
    """Wraps one function of a module as soon as that has been imported."""

    def __init__(self, fault: dict[str, Any]) -> None:
        self._module, self._name = fault["function"].split(":")
        self._fault, self._calls = fault, 0

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: ModuleType) -> None:
            execute(module)
            setattr(module, self._name, self._wrap(getattr(module, self._name)))

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if os.environ.get("RANK") != str(self._fault["rank"]):  # or the launcher, which ranks are copies of
                return function(*args, **kwargs)
            self._calls += 1
            reached = Path(self._fault["folder"], "reached")
            if self._calls == self._fault["call"] and (self._fault["repeat"] or not reached.exists()):
                reached.touch()
                KINDS[self._fault["kind"]]()
            return function(*args, **kwargs)

        return wrapped


if FAULT in os.environ and __name__ == "sitecustomize":
    sys.meta_path.insert(0, _Injector(json.loads(os.environ[FAULT])))
