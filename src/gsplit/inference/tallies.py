"""Counting the metrics of one list of targets, chunk by chunk on every rank, and over all ranks at the end.

Sums are added. For ``roc_auc`` each rank keeps the outputs of its own targets, and rank 0 gets one column of scores
after the other from all ranks: some 50 bytes per target of the list there, for the sort.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gsplit.distributed.comm import Call, Comm
from gsplit.errors import InputError, explain
from gsplit.metrics import Metric, Scored, is_classes, is_labelled, rank_area, score_columns

__all__ = ["Tally"]


class Tally:
    """The targets of one list on one rank."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics
        self._sums: dict[str, Tensor] = {}
        self._kept: list[Scored] = []
        self._num_labelled = 0

    def add(self, out: Tensor, y: Tensor) -> None:
        """Count some targets, with outputs [n, C] and their labels, on the host."""
        targets = _labelled_targets(out, y)
        self._num_labelled += targets.y.size(0)
        for metric in self._metrics:
            if metric.count is not None:
                sums = metric.count(targets)
                self._sums[metric.name] = self._sums.get(metric.name, torch.zeros_like(sums)) + sums
        if any(metric.count is None for metric in self._metrics):
            self._kept.append(targets)

    def count_labelled(self, comm: Comm) -> int:
        """Targets with a label, over all ranks. A collective."""
        total = torch.tensor([self._num_labelled], dtype=torch.int64, device=comm.device)
        comm.all_reduce(Call("count labelled targets"), total).wait()
        return int(total)

    def total(self, metric: Metric, comm: Comm) -> Tensor:
        """What ``metric.finish`` makes the score of, over all ranks and the same on every rank. A collective."""
        return self._areas(comm) if metric.count is None else self._sum(metric, comm)

    def _sum(self, metric: Metric, comm: Comm) -> Tensor:
        own = self._sums.get(metric.name)
        shape = [] if own is None else list(own.shape)
        texts = comm.gather_text(Call("sizes of sums"), ",".join(map(str, shape)))  # a rank may have no targets
        shape = max([int(size) for size in text.split(",") if size] for text in texts)
        sums = torch.zeros(shape, dtype=torch.float64) if own is None else own
        there = sums.to(comm.device)
        comm.all_reduce(Call(f"sums of {metric.name}"), there).wait()
        return there.cpu()

    def _areas(self, comm: Comm) -> Tensor:
        """The area of every column, and whether it has one, [C, 2], from rank 0. A collective."""
        columns = score_columns(_join(self._kept)) if self._kept else []
        (width,) = {int(text) for text in comm.gather_text(Call("columns of scores"), str(len(columns)))} - {0}
        areas = torch.zeros(width, 2, dtype=torch.float64)
        none = torch.empty(0, dtype=torch.float64)
        for place in range(width):
            scores, positive = columns[place] if columns else (none, none)
            gathered = _gather(comm, torch.stack([scores.double(), positive.double()], dim=1)).numpy()
            if comm.rank == 0:
                area = rank_area(gathered[:, 0], gathered[:, 1] > 0)
                areas[place] = torch.tensor([0.0, 0.0] if area is None else [area, 1.0])
        there = areas.to(comm.device)
        comm.broadcast(Call("areas", long_wait=True), there)
        return there.cpu()


def _labelled_targets(out: Tensor, y: Tensor) -> Scored:
    """Targets with at least one label, in the form that metrics take."""
    out, y = out.double(), y.to(torch.uint8) if y.dtype == torch.bool else y
    if out.dim() == 2 and is_classes(y, out.size(1)):
        has = is_labelled(y)
        return Scored(out[has], y[has].long())
    entries = y.unsqueeze(1) if y.dim() == 1 else y
    if out.shape != entries.shape:
        expected = f"{list(entries.shape[1:])} values per vertex, as y has, or one class each"
        fix = "give the model as many outputs as there are columns of labels"
        raise InputError(explain("the model's output", expected, list(out.shape[1:]), fix))
    has = is_labelled(entries).any(dim=1)
    return Scored(out[has], entries[has])


def _join(kept: Sequence[Scored]) -> Scored:
    return Scored(torch.cat([one.out for one in kept]), torch.cat([one.y for one in kept]))


def _gather(comm: Comm, rows: Tensor) -> Tensor:
    """The rows of all ranks on rank 0, none elsewhere. A collective."""
    counts = (rows.size(0), *(0 for _ in range(comm.size - 1)))
    received = comm.all_to_all_counts(Call("numbers of scores"), counts)
    out = torch.empty(int(np.sum(received)), 2, dtype=rows.dtype, device=comm.device)
    comm.all_to_all(Call("scores"), out, rows.to(comm.device), received, counts).wait()
    return out.cpu()
