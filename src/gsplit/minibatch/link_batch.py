"""The mini-batch of a step of link prediction on one rank: a ``Batch`` with pairs, under the names of PyG.

The rows of pairs are rows of ``z``, the final rows of the endpoints of this rank's pairs:

    z = model(batch.x, batch.edge_index)          # a wrapped model: its output is exchanged when forward ends
    score = (z[batch.edge_label_index[0]] * z[batch.edge_label_index[1]]).sum(-1)
    loss = batch.mean(F.binary_cross_entropy_with_logits(score, batch.edge_label, reduction="none"))

A model that decodes pairs itself takes the batch and calls ``z = batch.endpoints(h)``, with the output h of its last
layer. The number of rows that a rank computes is not that of its pairs: a rank may have pairs and no targets, or the
other way round. So ``mean`` and ``sum`` are over pairs.
"""

from dataclasses import dataclass

from torch import Tensor

from gsplit.distributed.comm.comm import Call
from gsplit.errors import InputError, explain
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.pair_rows import PairRows
from gsplit.minibatch.shuffle import exchange_rows

__all__ = ["LinkBatch", "PairModeError"]


class PairModeError(InputError):
    """A batch of pairs does not have what was asked for, because its negatives are of another mode."""


@dataclass(frozen=True, repr=False)
class LinkBatch(Batch):
    """One rank's part of a mini-batch of pairs.

    ``num_targets``: the rows that this rank computes. ``global_batch_size``: the pairs of all ranks, without negatives.
    """

    def __repr__(self) -> str:
        mesh = self.context.mesh
        key = self.context.key
        return (
            f"LinkBatch(epoch {key.epoch}, step {key.step}: {self.input_id.numel()} of {self.global_batch_size} pairs, "
            f"{self.num_layers} layers, x {list(self.x.shape)}, "
            f"{self.context.strategy} on rank {mesh.rank} of {mesh.size})"
        )

    @property
    def pair_rows(self) -> PairRows:
        """The pairs of this rank."""
        if self.pairs is None:  # in exact inference, which has vertices
            expected = "a forward that calls batch.endpoints before it reads pairs"
            fix = "call batch.endpoints(h) first: inference ends the forward there"
            raise InputError(explain("the model", expected, "one that reads them first", fix))
        return self.pairs

    @property
    def y(self) -> Tensor:
        """Refused: the targets are pairs."""
        raise InputError(explain("batch.y", "a batch of vertices", "a batch of pairs", "use batch.edge_label"))

    @property
    def input_id(self) -> Tensor:
        """The positions of this rank's pairs in the list of pairs."""
        return self.pair_rows.input_id

    @property
    def edge_label_index(self) -> Tensor:
        """Rows of the endpoints [2, n] of this rank's pairs, then of its negative pairs."""
        self._require("edge_label_index", ("binary",))
        return self.pair_rows.index

    @property
    def edge_label(self) -> Tensor:
        """Labels of the columns of ``edge_label_index``: 0 for a negative pair."""
        self._require("edge_label", ("binary",))
        if self.pair_rows.label is None:
            fix = "give LinkNeighborLoader(edge_label=...), or neg_sampling='binary'"
            raise InputError(explain("batch.edge_label", "pairs with labels", "pairs without labels", fix))
        return self.pair_rows.label

    @property
    def src_index(self) -> Tensor:
        """Rows of the sources of this rank's pairs [n]."""
        self._require("src_index", ("triplet", "joint", "in_batch"))
        return self.pair_rows.index[0]

    @property
    def dst_pos_index(self) -> Tensor:
        """Rows of the destinations of this rank's pairs [n]."""
        self._require("dst_pos_index", ("triplet", "joint", "in_batch"))
        return self.pair_rows.index[1]

    @property
    def dst_neg_index(self) -> Tensor:
        """Rows of the negative destinations: for ``triplet`` [n] or [n, amount], for ``joint`` [amount]."""
        self._require("dst_neg_index", ("triplet", "joint"))
        return self.pair_rows.negatives

    @property
    def candidates(self) -> Tensor:
        """Rows of the destinations of all pairs of the step [B], for ``in_batch``."""
        self._require("candidates", ("in_batch",))
        return self.pair_rows.negatives

    @property
    def own_columns(self) -> Tensor:
        """Where in ``candidates`` the destinations of this rank's pairs are [n]: the classes of a cross entropy."""
        self._require("own_columns", ("in_batch",))
        return self.pair_rows.own_columns

    @property
    def edge_label_time(self) -> Tensor:
        """The times of the columns of ``edge_label_index``, in temporal sampling; of a negative, that of its pair."""
        self._require("edge_label_time", ("binary",))
        return self._times("edge_label_time")

    @property
    def seed_time(self) -> Tensor:
        """The times of this rank's pairs [n], in temporal sampling, for ``triplet``."""
        self._require("seed_time", ("triplet",))
        return self._times("seed_time")

    def _times(self, name: str) -> Tensor:
        pairs = self.pair_rows
        if pairs.time is None:
            fix = "give LinkNeighborLoader(time_attr=..., edge_label_time=...)"
            raise InputError(explain(f"batch.{name}", "pairs with times", "pairs without times", fix))
        return pairs.time[pairs.index[0]]

    @property
    def endpoint_ids(self) -> Tensor:
        """Original ids of the rows that ``endpoints`` returns, such as to mask negatives that are edges."""
        return self.pair_rows.n_id

    def _require(self, name: str, modes: tuple[str, ...]) -> None:
        if self.pair_rows.mode not in modes:
            expected = f"neg_sampling {' or '.join(modes)}"
            fix = "use the names of the mode, or another neg_sampling"
            raise PairModeError(explain(f"batch.{name}", expected, self.pair_rows.mode, fix))

    @property
    def num_values(self) -> int:
        """The number of values of this rank's loss: columns of ``edge_label_index``, or pairs."""
        return self.pair_rows.index.size(1)

    @property
    def global_num_values(self) -> int:
        """``num_values`` over all ranks."""
        return self.pair_rows.num_values

    def endpoints(self, h: Tensor) -> Tensor:
        """The final rows of the endpoints of this rank's pairs, from the model's output; differentiable. A collective.

        A wrapped model that does not call it in its forward has its output exchanged when the forward ends.
        """
        context = self.context
        context.guard.has_endpoints = True
        if h.dim() == 0 or h.size(0) != self.num_targets:
            fix = "pass the output of the last layer"
            raise InputError(explain("batch.endpoints", f"[{self.num_targets}, ...]", list(h.shape), fix))
        route = self.pair_rows.route
        if route is None:
            return h
        call = Call("endpoints", context.key.step, self.num_layers, self.of)
        with self.telemetry.span("shuffle"):  # all ranks: once per forward, with pairs or without
            return exchange_rows(
                h,
                route,
                context.mesh.shuffles,
                call,
                context.pool,
                self.telemetry,
                deterministic=context.deterministic,
            )[0]
