"""A loss in place of the user's, which GSplit does not have in a loop: the model's outputs, each weighted by target."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, float32, promote_types
from torch.nn import Module

from gsplit.errors import InputError, explain
from gsplit.keys import kernels_torch
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.link_batch import LinkBatch
from gsplit.minibatch.typed_batch import TypedLinkBatch
from gsplit.nn.calls import CallTemplate, tensors_of

__all__ = ["OutputLoss"]


@dataclass(frozen=True, slots=True)
class OutputLoss:
    """A mean over all targets of a weighted sum of all outputs of the model that have a row per target.

    Weights differ between targets and between outputs, so neither the gradients of rows nor those of outputs can
    cancel. For pairs the outputs are those of their two ends, unless the model has decoded them.

    ``left_out``: the positions of outputs that have had no row per target in a mini-batch, and ``used`` those of the
    outputs that were summed. A table may have as many rows as one mini-batch has targets, and is then in both.
    """

    template: CallTemplate
    left_out: set[int] = field(default_factory=set)
    used: set[int] = field(default_factory=set)

    @property
    def is_undecided(self) -> bool:
        """Whether an output has a row per target in some of the mini-batches only."""
        return not self.used.isdisjoint(self.left_out)

    def __call__(self, model: Module, batch: Batch) -> Tensor:
        out = self.template.call(model, batch)
        if isinstance(batch, LinkBatch) and not batch.context.guard.has_endpoints:
            outputs = _ends_of_pairs(batch, out)
        else:
            outputs = list(tensors_of(out))
        values: Tensor | None = None
        for position, rows in enumerate(outputs):
            if not (rows.is_floating_point() and rows.dim() and rows.size(0) == batch.num_values):
                self.left_out.add(position)
            elif position not in self.left_out:
                self.used.add(position)
                rows = rows.to(promote_types(rows.dtype, float32)).unsqueeze(-1).flatten(1)
                hashes = kernels_torch.mix(1 + position, batch.value_keys) % 1009
                weighted = rows.cos().sum(1) * (hashes.to(rows.dtype) / 1009 + 0.5)
                values = weighted if values is None else values + weighted
        if values is None:
            fix = "use gsplit.Trainer, or gsplit.verify_step with your loss"
            raise InputError(explain("the model's output", "one row per target", type(out).__name__, fix))
        return batch.mean(values)


def _ends_of_pairs(batch: LinkBatch, out: Any) -> list[Tensor]:
    """The outputs of the sources and of the destinations of this rank's pairs."""
    ends = (out, out)
    if isinstance(batch, TypedLinkBatch):
        ends = (out[batch.pair_type[0]], out[batch.pair_type[2]])
    return [rows[index] for rows, index in zip(ends, batch.pair_rows.index, strict=True)]
