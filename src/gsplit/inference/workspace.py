"""Where exact inference keeps activations: a folder with room for them, or an error that says what is missing."""

import errno
import os
import shutil
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gsplit.errors import InputError, explain
from gsplit.files.mapped_files import temporary_mapped

__all__ = ["check_workspace", "new_workspace_file"]

_FIX = "free space, or name a folder on a larger disk: workspace=, on the command line --workspace FOLDER"


def check_workspace(folder: Path | None) -> None:
    """Refuse a folder that cannot be written to, before any work is done; None is the temporary folder."""
    if folder is not None and not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        got = "one that cannot be written" if folder.is_dir() else "none"
        raise InputError(explain(f"workspace {folder}", "a folder to write in", got, "create it, or choose another"))


def new_workspace_file(folder: str | Path | None, name: str, dtype: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """A map of a new file without a name, its space reserved."""
    place = Path(tempfile.gettempdir() if folder is None else folder)
    check_workspace(place)
    try:
        return temporary_mapped(place, name, dtype, shape)
    except OSError as error:
        wanted = prod(shape) * np.dtype(dtype).itemsize
        got = f"{shutil.disk_usage(place).free:,} free" if error.errno == errno.ENOSPC else error.strerror
        raise InputError(explain(f"workspace {place}", f"{wanted:,} bytes for {name}", got, _FIX)) from None
