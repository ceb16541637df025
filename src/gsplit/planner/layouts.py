"""Which rank samples, loads and computes which layer: what the name of a strategy says, for the planner.

Every strategy computes the same step. They differ in two things: who takes which target (every W-th, or the one who
owns it), and which layers are split among the owners of their vertices. Layers are counted from the input.

    split            every layer is split
    hybrid(k)        layers 0 .. k-1 are split, the ones above are each rank's own
    data_cached      no layer is split, but the owner of an input row reads it and sends it: hybrid(0)
    data             every layer, and every input row, is each rank's own
"""

from dataclasses import dataclass

from gsplit.strategies.spec import parse_strategy

__all__ = ["Layout", "all_layouts", "parse_layout"]


@dataclass(frozen=True, slots=True)
class Layout:
    """A strategy in the planner's terms.

    ``split_layers``: how many layers, from the input up, are split among the owners of their vertices; input rows are
    read by their owners. None: no owner is asked for anything.
    ``by_owner``: targets go to their owner; otherwise strided.
    """

    name: str
    split_layers: int | None = None
    by_owner: bool = False

    def needs_whole_graph(self, num_layers: int) -> bool:
        """Whether a rank samples vertices it does not own."""
        return self.split_layers != num_layers

    def exchanged_levels(self, num_layers: int) -> tuple[int, ...]:
        """The layers whose source rows cross between ranks; 0: input rows."""
        if self.split_layers is None:
            return ()
        return tuple(range(min(self.split_layers, num_layers - 1) + 1))


def parse_layout(name: str, num_layers: int) -> Layout:
    """The layout of a strategy's name.

    >>> parse_layout("hybrid(1)", 3)
    Layout(name='hybrid(1)', split_layers=1, by_owner=True)
    >>> parse_layout("split", 3).exchanged_levels(3), parse_layout("data_cached", 3).exchanged_levels(3)
    ((0, 1, 2), (0,))
    """
    spec = parse_strategy(name, num_layers)
    by_owner = spec.targets == "owner"
    layers = {"split": num_layers, "hybrid": spec.num_split_layers, "data_cached": 0}
    return Layout(spec.name, split_layers=layers.get(spec.family), by_owner=by_owner)


def all_layouts(num_layers: int) -> list[Layout]:
    """Every strategy for a number of layers.

    >>> [layout.name for layout in all_layouts(2)]
    ['split', 'hybrid(1)', 'data_cached', 'data_cached(strided)', 'data', 'data(owner)']
    """
    names = ["split", *(f"hybrid({k})" for k in range(num_layers - 1, 0, -1)), "data_cached", "data_cached(strided)"]
    return [parse_layout(name, num_layers) for name in (*names, "data", "data(owner)")]
