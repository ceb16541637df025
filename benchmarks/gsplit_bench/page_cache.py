"""Features on disk, cold: their files put out of the page cache before they are measured."""

import os
from collections.abc import Sequence

from gsplit.store.reader import Store

__all__ = ["forget_features"]


def forget_features(store: Store, names: Sequence[str]) -> None:
    """Put the files of features out of the page cache. No rank has mapped them: pages that are mapped stay."""
    for name in names:
        descriptor = os.open(store.path / f"features/{name}.npy", os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages that are not written yet stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
