"""What one layer of a model costs on counted rows and edges: products, bytes along edges, bytes row after row.

A layer turns S source rows of width a into D destination rows of width b along E edges. Forward:

    mean       aggregates E rows of width a, then two products [D, a] x [a, b]     (GraphSAGE as PyG computes it)
    mean, projected first: two products, [S, a] x [a, b] and [D, a] x [a, b], then E rows of width b  (as DGL, a > b)
    attention  projects S rows and attends along E edges of width b, or attends on rows of width a and projects D
               sums per head, whichever ``aggregates_first`` says                     (GAT as ``nn.attention`` does)

Backward has the products for the weights again and, above layer 0, those for the rows; edges are passed once more, and
nothing goes below layer 0: input rows have no gradient. Other layers are taken for the one they are most like.
"""

from dataclasses import dataclass

from gsplit.errors import InputError, explain
from gsplit.kernels.attention_types import aggregates_first

__all__ = ["ATTENTION_BACKWARD", "LayerWork", "PlannedModel", "layer_work"]

_LIKE_SAGE = ("sage", "sage_max", "gin", "graphconv", "gcn", "gine", "edgecnn", "pna")
_LIKE_GAT = ("gat", "gatv2", "transformer")
_FLOAT_BYTES = 4
ATTENTION_BACKWARD = 1.4
"""Seconds of attention backward over those forward: 1.2 to 1.4 for the kernels on the host."""
_PASSES_FORWARD, _PASSES_BACKWARD = 6.0, 8.0
"""How often an output row is read or written beside products and aggregation: bias, sums, activation, dropout."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model as far as its cost goes. ``projects_first``: rows are projected before aggregation where that is less."""

    kind: str = "sage"
    num_features: int = 128
    hidden: int = 256
    num_classes: int = 16
    num_layers: int = 3
    heads: int = 4
    projects_first: bool = False

    def __post_init__(self) -> None:
        if self.kind not in _LIKE_SAGE + _LIKE_GAT:
            known = ", ".join(_LIKE_SAGE + _LIKE_GAT)
            raise InputError(explain("model", f"one of {known}", self.kind, "plan for the one it is most like"))

    @property
    def attends(self) -> bool:
        """Whether layers weigh edges by attention."""
        return self.kind in _LIKE_GAT

    @property
    def note(self) -> str | None:
        """What the figures are of, if the model itself is not known."""
        nearest = "gat" if self.attends else "sage"
        return None if self.kind == nearest else f"{self.kind} is costed as {nearest}"

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the input rows, and of every layer's output rows.

        >>> PlannedModel(num_features=8, hidden=4, num_classes=2, num_layers=3).widths
        (8, 4, 4, 2)
        """
        return (self.num_features, *(self.hidden,) * (self.num_layers - 1), self.num_classes)

    @property
    def num_parameters(self) -> int:
        """Weights, whose gradients are averaged; biases are small."""
        matrices = 1 if self.attends else 2
        return sum(matrices * a * b for a, b in zip(self.widths, self.widths[1:], strict=False))


@dataclass(frozen=True, slots=True)
class LayerWork:
    """One pass through one layer on one rank. ``reach_bytes``: of the rows that edges point at."""

    flops: float
    aggregate_bytes: float
    attention_values: float
    row_bytes: float
    reach_bytes: float


def layer_work(
    shape: PlannedModel, layer: int, edges: float, destinations: float, sources: float, *, slices: int = 1
) -> tuple[LayerWork, LayerWork]:
    """Forward and backward. ``slices``: the layer's input has this share of its columns."""
    a, b = shape.widths[layer] / slices, shape.widths[layer + 1]
    returns = 1.0 if layer else 0.0  # gradients of the rows
    if shape.attends:
        return _attention(shape, a, b, edges, destinations, sources, returns)
    own = 2 * destinations * a * b
    if shape.projects_first and a > b:
        products, along = own + 2 * sources * a * b, edges * b * _FLOAT_BYTES
        rows = (_PASSES_FORWARD * destinations + 2 * sources) * b * _FLOAT_BYTES
        back_along, reach = along, sources * b * _FLOAT_BYTES
    else:
        products, along = 2 * own, edges * a * _FLOAT_BYTES
        rows = (_PASSES_FORWARD * destinations * b + destinations * a) * _FLOAT_BYTES
        back_along, reach = returns * along, sources * a * _FLOAT_BYTES
    back_rows = (_PASSES_BACKWARD * destinations * b + returns * 2 * sources * a) * _FLOAT_BYTES
    return (
        LayerWork(products, along, 0.0, rows, reach),
        LayerWork(products * (1 + returns), back_along, 0.0, back_rows, reach),
    )


def _attention(
    shape: PlannedModel, a: float, b: float, edges: float, destinations: float, sources: float, returns: float
) -> tuple[LayerWork, LayerWork]:
    """GAT: every destination has a self-loop too; the last layer's heads are averaged."""
    heads, edges = shape.heads, edges + destinations
    last = b == shape.num_classes
    width = b if last else b / heads
    scores = 2 * sources * a * heads
    sums_first = aggregates_first(int(sources), int(destinations), int(edges), heads, int(a), int(width))
    if sums_first and not shape.projects_first:
        products = 2 * destinations * heads * a * width
        values = edges * a * (1 + heads / 8)
        back_products, reach = 2 * products, sources * a * _FLOAT_BYTES
    else:
        products = 2 * sources * a * heads * width
        values = edges * heads * width * (1 + 1 / 8)
        back_products, reach = products * (1 + returns), sources * heads * width * _FLOAT_BYTES
    out = destinations * heads * width
    between = destinations * heads * a if sums_first else sources * heads * width
    rows = (_PASSES_FORWARD * out + 2 * between) * _FLOAT_BYTES
    back_rows = (_PASSES_BACKWARD * out + 3 * between + returns * 2 * sources * a) * _FLOAT_BYTES
    return (
        LayerWork(products + scores, 0.0, values, rows, reach),
        LayerWork(back_products + scores * (1 + returns), 0.0, ATTENTION_BACKWARD * values, back_rows, reach),
    )
