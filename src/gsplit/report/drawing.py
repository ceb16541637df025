"""How pictures look: one colour per system and per stage in all of them, and a picture as bytes.

matplotlib is loaded when the first figure is made, and its object interface is used alone: no state of its own, no
window, no file but what is asked for.
"""

import io
from collections.abc import Iterable
from typing import Any

from gsplit.errors import MissingDependencyError, explain

__all__ = ["STAGES", "as_png", "graph_colours", "load_figure", "make_panels", "stage_colour", "system_colour", "tidy"]

_SYSTEMS = {
    "split": "#1b6ca8",
    "data": "#e09f3e",
    "data(owner)": "#f4d58d",
    "data_cached": "#9e2a2b",
    "data_cached(strided)": "#e5989b",
    "push_pull": "#7b4ea3",
    "p3": "#7b4ea3",
    "hybrid(1)": "#2a9d8f",
    "hybrid(2)": "#84c7b5",
    "hybrid(3)": "#17645b",
    "auto": "#59a14f",
    "dgl": "#6c757d",
    "pyg": "#212529",
}
_OTHERS = ("#b5838d", "#bc6c25", "#606c38", "#4361ee", "#c9184a")
STAGES = {
    "sample": "#1b6ca8",
    "split": "#7fb7dd",
    "exchange_ids": "#c6dbef",
    "load": "#2a9d8f",
    "copy": "#b7e4c7",
    "gather_features": "#52b788",
    "exchange_features": "#a3d9c9",
    "shuffle": "#9e2a2b",
    "forward": "#e09f3e",
    "backward": "#7b4ea3",
    "optimizer": "#495057",
    "wait_for_batch": "#dee2e6",
}
"""Colours of the stages in the order of a step."""
_GRAPHS = ("#1b6ca8", "#e09f3e", "#2a9d8f", "#9e2a2b", "#7b4ea3", "#495057", "#b5838d", "#606c38")


def load_figure() -> Any:
    """matplotlib's figure; called before a long measurement, too."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        fix = "pip install 'gsplit[report]'"
        raise MissingDependencyError(explain("the figure", "the package matplotlib", str(error), fix)) from error
    return Figure


def system_colour(label: str) -> str:
    """The colour of a system; a way to run it that has no colour of its own takes the system's."""
    name = label.split(", ")[0]
    return _SYSTEMS.get(name, _OTHERS[sum(map(ord, name)) % len(_OTHERS)])


def stage_colour(name: str) -> str:
    """The colour of a stage."""
    return STAGES.get(_stage(name), "#adb5bd")


def _stage(name: str) -> str:
    return "load" if name == "load_features" else name


def graph_colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for every graph."""
    return {name: _GRAPHS[number % len(_GRAPHS)] for number, name in enumerate(dict.fromkeys(names))}


def make_panels(rows: int, columns: int, size: tuple[float, float], **more: Any) -> tuple[Any, Any]:
    """A figure and its panels, ``panels[row][column]``; ``size`` in inches is that of the whole."""
    figure = load_figure()(figsize=size, layout="constrained", facecolor="white")
    return figure, figure.subplots(rows, columns, squeeze=False, **more)


def tidy(axes: Any, title: str = "", *, x: str = "", y: str = "", grid: str = "y") -> None:
    """Titles, and no more ink than needed."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(axis=grid, linewidth=0.4, color="#ced4da")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def as_png(figure: Any) -> bytes:
    """The picture, as the bytes of a PNG file."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=120)
    return stream.getvalue()
