"""Whether GAT aggregates rows before it projects them; the rule is the layer's and the planner's alike."""

__all__ = ["aggregates_first"]


def aggregates_first(num_src: int, num_dst: int, num_edges: int, heads: int, width_in: int, width_out: int) -> bool:
    """Whether GAT should aggregate rows before it projects them: fewer rows to project, wider ones to sum.

    Counted are numbers moved, four times for what is written and comes back as a gradient, and products, of which a
    kernel makes 8 in that time and a matrix product 16; about, on one core.
    """
    sums, rows = num_dst * heads * width_in, num_src * heads * width_out
    first = 4 * sums + num_edges * width_in * (1 + heads / 8) + sums * width_out / 16
    after = 4 * rows + num_edges * heads * width_out * (1 + 1 / 8) + rows * width_in / 16
    return first < after
