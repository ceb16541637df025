"""The copy of a model on which row independence is checked: other weights, and no larger than the check needs.

The weights are moved away from their initial values, because a gate that starts closed would hide what lies behind.
The copy is made in one pass, straight into its final dtype. Of an ``nn.Embedding`` it keeps as many rows as a toy
graph has vertices: a table with a row per vertex of the real graph may be most of a rank's memory.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding, Module, Parameter

__all__ = ["has_tables", "perturbed_copy"]


class _FoldedEmbedding(Embedding):
    """An embedding of few rows that takes any id: still a function of the id alone."""

    def forward(self, input: Tensor) -> Tensor:
        """Look up ids modulo the number of rows."""
        return super().forward(input % self.num_embeddings)


def _tables(model: Module, max_rows: int) -> dict[str, Embedding]:
    """Embeddings of more rows; subclasses may do other things with their ids."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is Embedding and module.num_embeddings > max_rows
    }


def has_tables(model: Module, max_rows: int) -> bool:
    """Whether ``perturbed_copy`` would cut an embedding."""
    return bool(_tables(model, max_rows))


def perturbed_copy(model: Module, dtype: torch.dtype | None, max_rows: int | None) -> Module:
    """A copy with perturbed parameters and buffers, in ``dtype`` if given; embeddings have at most ``max_rows``."""
    tables = {} if max_rows is None else _tables(model, max_rows)
    cut = {id(table.weight) for table in tables.values()}
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            values = parameter.detach()[:max_rows] if id(parameter) in cut else parameter.detach()
            memo[id(parameter)] = Parameter(_perturb(values, dtype or values.dtype, generator), parameter.requires_grad)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            moved = _perturb(buffer.detach(), dtype or buffer.dtype, generator)
            still = buffer.detach().to(moved)
            memo[id(buffer)] = still + (moved - still).abs()  # upwards: some, such as variances, must stay positive
    copied = copy.deepcopy(model, memo)
    for name in tables:
        table = copied.get_submodule(name)
        assert isinstance(table, Embedding)
        table.__class__ = _FoldedEmbedding
        table.num_embeddings, table.padding_idx = table.weight.size(0), None
    return copied


def _perturb(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    noise = torch.randn(values.shape, generator=generator, dtype=wide).to(values.device)
    return noise.mul_(0.1).add_(values).to(dtype)
