"""Files on the disk, below everything else: atomic writes, fsync and locks."""

__all__: list[str] = []
