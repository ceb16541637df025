"""Why one strategy is before another, in words: the stages in which they differ most, with seconds and counts."""

from collections.abc import Sequence

from gsplit.planner.estimate import StepEstimate

__all__ = ["explain_choice"]

_LEVEL = 0.05
_WORDS = {
    "sample": "sampling",
    "split": "splitting",
    "exchange_ids": "exchanging ids",
    "load": "loading rows",
    "exchange_features": "exchanging input rows",
    "shuffle": "shuffling hidden rows",
    "forward": "the forward pass",
    "backward": "the backward pass",
    "optimizer": "the optimizer",
}


def explain_choice(ranked: Sequence[tuple[str, StepEstimate]]) -> str:
    """Two or three sentences on the first against the next, and against what it is most often compared with."""
    (name, best), others = ranked[0], ranked[1:]
    text = f"{name} is fastest: {best.wall_s:.3g} s per step."
    if not others:
        return text
    second_name, second = others[0]
    if second.wall_s < best.wall_s * (1 + _LEVEL):
        text += f" {second_name} is level with it ({second.wall_s:.3g} s)."
    rivals = [found for found in others if found[0] in ("data", "split", "one process") and found[0] != name]
    for rival_name, rival in rivals[:2] or [(second_name, second)]:
        text += " " + _compare(name, best, rival_name, rival)
    if name == "one process":
        text += " More ranks do not pay here: use one process."
    return text


def _compare(name: str, best: StepEstimate, rival_name: str, rival: StepEstimate) -> str:
    """Where the difference comes from: gains first, then what is paid for them."""
    ours, theirs = best.stages.by_name(), rival.stages.by_name()
    saved = {stage: theirs[stage] - ours[stage] for stage in ours}
    gains = sorted((stage for stage in saved if saved[stage] > 0), key=lambda stage: -saved[stage])[:2]
    costs = sorted((stage for stage in saved if saved[stage] < 0), key=lambda stage: saved[stage])[:1]
    text = f"{rival_name} takes {rival.wall_s:.3g} s ({rival.wall_s / best.wall_s:.2f} times as long)"
    if gains:
        text += ": " + " and ".join(f"{saved[stage]:.2g} s more for {_WORDS[stage]}" for stage in gains)
    rows = (rival.counts.rows_loaded, best.counts.rows_loaded)
    edges = (rival.counts.num_edges, best.counts.num_edges)
    if rows[0] > rows[1] * (1 + _LEVEL) or edges[0] > edges[1] * (1 + _LEVEL):
        text += f" ({rows[0] / max(rows[1], 1):.2f} times the input rows, {edges[0] / max(edges[1], 1):.2f} the edges)"
    if costs and -saved[costs[0]] > _LEVEL * best.wall_s:
        text += f", though {name} pays {-saved[costs[0]]:.2g} s for {_WORDS[costs[0]]}"
    return text + "."
