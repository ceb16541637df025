"""The hooks of the documentation site, docs/hooks.py, as a module."""

import importlib.util
from pathlib import Path
from types import ModuleType

__all__ = ["ROOT", "hooks"]

ROOT = Path(__file__).resolve().parents[2]


def hooks() -> ModuleType:
    """It lies beside the pages and is no package's; mkdocs loads it by its path, too."""
    spec = importlib.util.spec_from_file_location("docs_hooks_module", ROOT / "docs" / "hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
