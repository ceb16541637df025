"""A process of its own for Triton: its interpreter can be turned on only before triton is first imported.

Imports nothing heavy, so that the environment is set before anything else in the new process. Programs are functions of
modules in this folder, named "module.function" and run one at a time; what they raise is raised here, with its
traceback.
"""

import importlib
import multiprocessing
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol


class Run(Protocol):
    def __call__(self, program: str, *args: Any) -> Any: ...


def _set_environment(variables: dict[str, str]) -> None:
    os.environ.update(variables)


def _run(program: str, args: tuple[Any, ...]) -> Any:
    module, name = program.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)(*args)


@contextmanager
def triton_process(environment: Mapping[str, str]) -> Iterator[Run]:
    """Run programs in one new process with some environment variables; it ends with the block."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=_set_environment, initargs=(dict(environment),)) as pool:
        yield lambda program, *args: pool.submit(_run, program, args).result()
