"""A process with Triton's interpreter, and one with its compiler, for the tests of this folder; skipped without
Triton."""

import importlib.metadata
import importlib.util
from collections.abc import Iterator

import pytest
from triton_process import Run, triton_process


def _need_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install 'gsplit[dev]' on Linux")


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Run]:
    """Runs programs of tests/support where kernels are interpreted on the host."""
    _need_triton()
    if importlib.metadata.version("triton").startswith("3.2."):
        pytest.skip("the interpreter of triton 3.2 has no booleans (get_int1_ty); its compiler is tested")
    with triton_process({"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}) as run:
        yield run


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Runs programs of tests/support where kernels are compiled, with an empty cache."""
    _need_triton()
    cache = str(tmp_path_factory.mktemp("triton-cache"))
    with triton_process({"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache}) as run:
        yield run
