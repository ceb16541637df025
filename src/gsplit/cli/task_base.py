"""What all tasks of ``tasks`` have in common: a store, what ranks must agree on, and what happens when they fail."""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict
from rich.console import Console

from gsplit.store.reader import open_store

__all__ = ["TaskBase", "say"]


class TaskBase(BaseModel):
    """One command as a document; see ``tasks``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: Path
    as_json: bool
    device: str | None

    def agreement(self) -> dict[str, object]:
        """What must be the same on every rank; paths may differ between hosts, and what is shown."""
        said = self.model_dump(exclude={"store", "as_json", "device", "settings", "out", "weights", "workspace"})
        manifest = open_store(self.store).manifest
        said |= {"vertices of the store": manifest.num_vertices, "parts of the store": manifest.part_boundaries}
        if manifest.shard is None:
            said["edges of the store"] = manifest.arrays["indices"].sha256
        return said

    @property
    def grace_s(self) -> float:
        """Seconds that ranks have to end when they are told to."""
        return 5.0

    def latest(self) -> Path | None:
        """The newest checkpoint of what it makes."""
        return None

    @property
    def origin(self) -> str:
        """Where it starts."""
        return "the start"

    def resumed(self, before: Path | None) -> Self:
        """What goes on after a failure: from the start, unless there is a newer checkpoint than ``before``."""
        return self

    def restarted(self) -> Self:
        """What goes on if a launcher has started its ranks again with the same words."""
        return self


def say(text: str) -> None:
    """Tell the user what is being started, apart from the result."""
    Console(stderr=True, soft_wrap=True).print(text, highlight=False, markup=False)
