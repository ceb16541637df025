"""What attention over edges takes beside its tensors, whichever kernel computes it (``kernels.attention``)."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["AttentionOptions"]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """``keep`` [E, H] is True where a weight stays; None: nothing is dropped, whatever ``p``, the probability, says."""

    negative_slope: float
    keep: Tensor | None = None
    p: float = 0.0

    @property
    def scale(self) -> float:
        """What the weights that stay are multiplied by."""
        if self.keep is None:
            return 1.0
        return 1.0 / (1.0 - self.p) if self.p < 1 else 0.0

    def kept(self) -> Tensor:
        """``keep``, with no rows where nothing is dropped."""
        return torch.empty(0, 0, dtype=torch.bool) if self.keep is None else self.keep
