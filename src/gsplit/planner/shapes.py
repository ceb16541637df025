"""The work of one layer of a model on counted rows and edges: products, bytes along edges, bytes of rows.

A layer computes D destination rows of width b from S source rows of width a along E edges. Forward pass:

    mean       aggregates E rows of width a, then two products [D, a] x [a, b]     (GraphSAGE as PyG computes it)
    mean, projected first: two products, [S, a] x [a, b] and [D, a] x [a, b], then E rows of width b  (as DGL, a > b)
    attention  projects S rows and aggregates E rows of width b, or aggregates E rows of width a per head and projects
               D rows, whichever ``aggregates_first`` chooses                         (GAT as ``nn.attention`` does)

The backward pass has the products for the weights, and above layer 0 those for the rows and one more pass over the
edges. Input rows have no gradient. Other kinds of layers are estimated as the kind that is most similar.

A model of a heterogeneous graph has such a layer for every relation, between rows of two types.
"""

from dataclasses import dataclass

from gsplit.errors import InputError, explain
from gsplit.kernels.attention_types import aggregates_first

__all__ = ["ATTENTION_BACKWARD", "LayerWork", "PlannedModel", "PlannedTypes", "layer_work"]

_LIKE_SAGE = ("sage", "sage_max", "gin", "graphconv", "gcn", "gine", "edgecnn", "pna")
_LIKE_GAT = ("gat", "gatv2", "transformer")
_FLOAT_BYTES = 4
ATTENTION_BACKWARD = 1.4
"""Time of the backward pass of attention over that of the forward pass: 1.2 to 1.4 for the kernels on the host."""
_PASSES_FORWARD = 6.0
"""How often an output row is read or written by bias, sums, activation and dropout."""
_PASSES_BACKWARD = 8.0


@dataclass(frozen=True, slots=True)
class PlannedTypes:
    """``widths``: of the input rows of every vertex type, 0 without features. ``ends``: the numbers of the source type
    and of the destination type of every relation."""

    widths: tuple[int, ...]
    ends: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """The properties of a model that its cost depends on.

    ``projects_first``: rows are projected before they are aggregated if that makes them narrower. ``types``: of a
    heterogeneous graph; ``num_features`` is then not used.
    """

    kind: str = "sage"
    num_features: int = 128
    hidden: int = 256
    num_classes: int = 16
    num_layers: int = 3
    heads: int = 4
    projects_first: bool = False
    types: PlannedTypes | None = None

    def __post_init__(self) -> None:
        if self.kind not in _LIKE_SAGE + _LIKE_GAT:
            known = ", ".join(_LIKE_SAGE + _LIKE_GAT)
            raise InputError(explain("model", f"one of {known}", self.kind, "choose the one that is most similar"))

    @property
    def attends(self) -> bool:
        """Whether layers weight edges by attention."""
        return self.kind in _LIKE_GAT

    @property
    def note(self) -> str | None:
        """A note if the model is estimated as another kind of model."""
        nearest = "gat" if self.attends else "sage"
        return None if self.kind == nearest else f"{self.kind} is costed as {nearest}"

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the input rows and of the output rows of every layer.

        >>> PlannedModel(num_features=8, hidden=4, num_classes=2, num_layers=3).widths
        (8, 4, 4, 2)
        """
        return (self.num_features, *(self.hidden,) * (self.num_layers - 1), self.num_classes)

    @property
    def input_widths(self) -> tuple[int, ...]:
        """The width of the input rows of every vertex type; one without types."""
        return (self.num_features,) if self.types is None else self.types.widths

    @property
    def num_parameters(self) -> int:
        """Weights whose gradients are averaged. Biases are small and not counted."""
        if self.types is not None:  # every relation has a matrix for its sources and one for its destinations
            inputs = sum(self.types.widths[src] + self.types.widths[dst] for src, dst in self.types.ends)
            above = zip(self.widths[1:], self.widths[2:], strict=False)
            return inputs * self.widths[1] + len(self.types.ends) * sum(2 * a * b for a, b in above)
        matrices = 1 if self.attends else 2
        return sum(matrices * a * b for a, b in zip(self.widths, self.widths[1:], strict=False))


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The work of one pass through one layer on one rank. ``reach_bytes``: the size of the source rows."""

    flops: float
    aggregate_bytes: float
    attention_values: float
    row_bytes: float
    reach_bytes: float


def layer_work(
    shape: PlannedModel, layer: int, edges: float, destinations: float, sources: float, source_type: int = 0
) -> tuple[LayerWork, LayerWork]:
    """The work of the forward pass and of the backward pass, of all edges or of one relation with these sources."""
    a = shape.widths[layer] if layer else shape.input_widths[source_type]
    b = shape.widths[layer + 1]
    returns = 1.0 if layer else 0.0  # whether rows have gradients
    if shape.attends:
        return _attention(shape, a, b, edges, destinations, sources, returns)
    own = 2 * destinations * a * b
    if shape.projects_first and a > b:
        flops = own + 2 * sources * a * b
        along = edges * b * _FLOAT_BYTES
        back_along = along
        rows = (_PASSES_FORWARD * destinations + 2 * sources) * b * _FLOAT_BYTES
        reach = sources * b * _FLOAT_BYTES
    else:
        flops = 2 * own
        along = edges * a * _FLOAT_BYTES
        back_along = returns * along
        rows = (_PASSES_FORWARD * destinations * b + destinations * a) * _FLOAT_BYTES
        reach = sources * a * _FLOAT_BYTES
    back_rows = (_PASSES_BACKWARD * destinations * b + returns * 2 * sources * a) * _FLOAT_BYTES
    forward = LayerWork(flops=flops, aggregate_bytes=along, attention_values=0.0, row_bytes=rows, reach_bytes=reach)
    backward = LayerWork(
        flops=flops * (1 + returns),
        aggregate_bytes=back_along,
        attention_values=0.0,
        row_bytes=back_rows,
        reach_bytes=reach,
    )
    return forward, backward


def _attention(
    shape: PlannedModel, a: float, b: float, edges: float, destinations: float, sources: float, returns: float
) -> tuple[LayerWork, LayerWork]:
    """GAT. Every destination has a self-loop too, and the heads of the last layer are averaged."""
    heads = shape.heads
    edges += destinations
    width = b if b == shape.num_classes else b / heads
    scores = 2 * sources * a * heads
    sums_first = aggregates_first(int(sources), int(destinations), int(edges), heads, int(a), int(width))
    if sums_first and not shape.projects_first:
        flops = 2 * destinations * heads * a * width
        back_flops = 2 * flops
        values = edges * a * (1 + heads / 8)
        reach = sources * a * _FLOAT_BYTES
    else:
        flops = 2 * sources * a * heads * width
        back_flops = flops * (1 + returns)
        values = edges * heads * width * (1 + 1 / 8)
        reach = sources * heads * width * _FLOAT_BYTES
    out = destinations * heads * width
    between = destinations * heads * a if sums_first else sources * heads * width
    rows = (_PASSES_FORWARD * out + 2 * between) * _FLOAT_BYTES
    back_rows = (_PASSES_BACKWARD * out + 3 * between + returns * 2 * sources * a) * _FLOAT_BYTES
    forward = LayerWork(
        flops=flops + scores, aggregate_bytes=0.0, attention_values=values, row_bytes=rows, reach_bytes=reach
    )
    backward = LayerWork(
        flops=back_flops + scores * (1 + returns),
        aggregate_bytes=0.0,
        attention_values=ATTENTION_BACKWARD * values,
        row_bytes=back_rows,
        reach_bytes=reach,
    )
    return forward, backward
