"""All surfaces that read files of strangers, by name."""

from collections.abc import Callable
from pathlib import Path

from fuzz_checkpoints import CHECKPOINTS
from fuzz_documents import DOCUMENTS
from fuzz_guard import Surface
from fuzz_imports import IMPORTS
from fuzz_stores import STORES

__all__ = ["SURFACES"]

SURFACES: dict[str, Callable[[Path], Surface]] = {**DOCUMENTS, **CHECKPOINTS, **IMPORTS, **STORES}
