"""The sizes of a case of attention, in a module that a process without Triton can import."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """``values``: rows of values per source, 1 for one row for all heads."""

    num_dst: int
    num_src: int
    most: int
    heads: int
    width: int
    values: int
    edge: bool = False
    p: float = 0.0
    loops: bool = False
