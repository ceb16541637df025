"""The inputs and options of attention, which the kernels of the host and of devices share (``kernels.attention``)."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from gsplit.kernels.csr import CsrEdges

__all__ = ["AttentionInputs", "AttentionKernels", "AttentionOptions", "aggregates_first"]


class AttentionInputs(NamedTuple):
    """The tensors of attention. GAT has ``src_terms`` and no ``att``; GATv2 has ``att``, its source terms are values.

    Terms are [rows, H] for GAT and [rows, H, C] for GATv2, with a row per source, destination and edge. Dot products
    have keys as ``src_terms`` and queries as ``dst_terms``, [rows, H, C], and neither ``edge_terms`` nor ``att``.
    """

    values: Tensor
    src_terms: Tensor | None
    dst_terms: Tensor
    edge_terms: Tensor | None
    att: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """``keep`` [E, H] is True for weights that are not dropped, ``p`` the probability of dropping one.

    Without ``keep`` nothing is dropped, whatever ``p`` is. Dot products do not use ``negative_slope``.
    """

    negative_slope: float = 1.0
    keep: Tensor | None = None
    p: float = 0.0

    @property
    def scale(self) -> float:
        """The factor of the weights that are kept."""
        if self.keep is None:
            return 1.0
        return 1.0 / (1.0 - self.p) if self.p < 1 else 0.0


class AttentionKernels(Protocol):
    """A module that computes GAT's and GATv2's attention; that of the host computes dot products too."""

    def forward(
        self, edges: CsrEdges, inputs: AttentionInputs, options: AttentionOptions
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``out``, and what ``backward`` needs of it."""

    def backward(
        self,
        edges: CsrEdges,
        inputs: AttentionInputs,
        out: Tensor,
        kept: tuple[Tensor, ...],
        g: Tensor,
        options: AttentionOptions,
        wants: tuple[bool, ...],
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs; those that are not wanted may be None."""


def aggregates_first(num_src: int, num_dst: int, num_edges: int, heads: int, width_in: int, width_out: int) -> bool:
    """Whether GAT should aggregate rows before it projects them: fewer rows to project, wider ones to sum.

    Counted are numbers moved, four times for what is written and comes back as a gradient, and products, of which a
    kernel makes 8 in that time and a matrix product 16; about, on one core.
    """
    sums, rows = num_dst * heads * width_in, num_src * heads * width_out
    first = 4 * sums + num_edges * width_in * (1 + heads / 8) + sums * width_out / 16
    after = 4 * rows + num_edges * heads * width_out * (1 + 1 / 8) + rows * width_in / 16
    return first < after
