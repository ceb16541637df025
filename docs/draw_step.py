"""Draws docs/step.svg: one step on two ranks, the worked example of split.py, with what the code itself answers.

python docs/draw_step.py docs/step.svg
"""

import sys
from pathlib import Path

import numpy as np
import torch

from gsplit.graph.graph import Graph
from gsplit.graph.ownership import Ownership
from gsplit.minibatch.split import LayerSplit, add_requested, group_by_owner
from gsplit.sampling.neighbor import TorchNeighborSampler

OWNED, INKS = ("#cfe3f5", "#fbe0b8"), ("#1b6ca8", "#b5651d")
LEFT, WIDTH, BOX, STEP = (150, 520), 300, 38, 92
TEXT = "#333333"
PICTURE = "step.svg"


def split_example() -> tuple[list[list[int]], list[LayerSplit]]:
    """Rank 0 owns 0..4, rank 1 owns 5..9; targets 1 and 7; 1 <- {3, 6}, 7 <- {3, 8}: local frontiers and splits."""
    ownership, cpu, same = Ownership((0, 5, 10)), torch.device("cpu"), np.empty(0, np.int64)
    graphs = [
        Graph(np.array([0, 0, 2, 2, 2, 2]), np.array([3, 6]), num_vertices=10),
        Graph(np.array([0, 0, 0, 2, 2, 2]), np.array([3, 8]), num_vertices=10, first_vertex=5),
    ]
    targets = [torch.tensor([1]), torch.tensor([7])]
    frontiers = [TorchNeighborSampler(g, same, cpu).start(t) for g, t in zip(graphs, targets, strict=True)]
    asks = [group_by_owner(frontier.sample_layer(0, 2), ownership) for frontier in frontiers]
    layers = [
        add_requested(frontiers[0], asks[0], asks[1].ids, (0, 1)),
        add_requested(frontiers[1], asks[1], asks[0].ids, (1, 0)),
    ]
    return [frontier.ids(frontier.num_rows).tolist() for frontier in frontiers], layers


class Picture:
    def __init__(self) -> None:
        self._parts: list[str] = []

    def box(self, rank: int, slot: int, y: int, vertex: int, *, received: bool = False) -> None:
        """A vertex in a rank's column, in its owner's colour."""
        owner = 0 if vertex < 5 else 1
        x = LEFT[rank] + 20 + slot * (BOX + 14)
        dash = ' stroke-dasharray="5 3"' if received else ""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{BOX}" height="{BOX}" rx="7" fill="{OWNED[owner]}" stroke="{INKS[owner]}" stroke-width="1.6"{dash}/>'
        )
        self.text(x + BOX // 2, y + BOX // 2 + 5, str(vertex), anchor="middle", bold=True)

    def text(self, x: int, y: int, words: str, *, anchor: str = "start", bold: bool = False, size: int = 14) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{TEXT}"{weight}>{words}</text>'
        )

    def arrow(self, x1: int, y1: int, x2: int, y2: int, owner: int) -> None:
        self._parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INKS[owner]}" stroke-width="1.8" marker-end="url(#tip{owner})"/>'
        )

    def line(self, y: int) -> None:
        self._parts.append(f'<line x1="16" y1="{y}" x2="{LEFT[1] + WIDTH}" y2="{y}" stroke="#dddddd"/>')

    def svg(self, width: int, height: int) -> str:
        tips = "".join(
            f'<marker id="tip{o}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{INKS[o]}"/></marker>'
            for o in (0, 1)
        )
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif">'
        back = f'<rect width="{width}" height="{height}" fill="white"/>'
        return "\n".join([head, f"<defs>{tips}</defs>", back, *self._parts, "</svg>", ""])


def draw() -> str:
    frontiers, layers = split_example()
    picture = Picture()
    stages = ("targets", "sample", "ask the owners", "load", "shuffle", "layer", "loss")
    tops = [66 + number * STEP for number in range(len(stages))]
    for rank in (0, 1):
        picture.text(LEFT[rank] + 20, 34, f"rank {rank} owns {'0 .. 4' if rank == 0 else '5 .. 9'}", bold=True, size=16)
    for name, top in zip(stages, tops, strict=True):
        picture.text(20, top + 24, name, bold=True)
        picture.line(top - 16)
    received: list[list[int]] = [[], []]
    for rank, layer in enumerate(layers):
        received[1 - rank] = [frontiers[rank][row] for row in layer.route.send_rows.tolist()]
    for rank, layer in enumerate(layers):
        own, mixed, x = frontiers[rank], frontiers[rank] + received[rank], LEFT[rank] + 20
        rows, target = layer.block.edge_index()[0].tolist(), own[0]
        picture.box(rank, 0, tops[0], target)
        picture.box(rank, 0, tops[1], target)
        for slot, row in enumerate(rows):
            picture.box(rank, slot + 2, tops[1], mixed[row], received=mixed[row] in received[rank])
        picture.text(x + BOX + 18, tops[1] + 25, "&#8592;")
        words = ", ".join(map(str, received[rank]))
        picture.text(x, tops[2] + 24, f"needs {words} of rank {1 - rank}; is asked for {received[1 - rank][0]}")
        for slot, vertex in enumerate(own):
            picture.box(rank, slot, tops[3], vertex)
        picture.text(x + len(own) * (BOX + 14), tops[3] + 24, "each once")
        for slot, vertex in enumerate(mixed):
            picture.box(rank, slot, tops[4], vertex, received=slot >= len(own))
        picture.box(rank, 0, tops[5], target)
        picture.text(x + BOX + 14, tops[5] + 24, f"= layer({', '.join(str(mixed[row]) for row in rows)}; {target})")
        picture.text(x, tops[6] + 24, "mean over both targets;")
        picture.text(x, tops[6] + 44, "gradients go back along the arrows")
    for rank, layer in enumerate(layers):  # rows that cross, from the owner's frontier to the other's tail
        for row in layer.route.send_rows.tolist():
            x1 = LEFT[rank] + 20 + row * (BOX + 14) + BOX // 2
            x2 = LEFT[1 - rank] + 20 + len(frontiers[1 - rank]) * (BOX + 14) + BOX // 2
            picture.arrow(x1, tops[3] + BOX + 2, x2, tops[4] - 3, rank)
    height = tops[-1] + 84
    picture.text(20, height - 14, "solid: a vertex its rank owns; dashed: a row received from the owner", size=12)
    return picture.svg(LEFT[1] + WIDTH + 10, height)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(draw())
