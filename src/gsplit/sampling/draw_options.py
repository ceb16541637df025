"""The options of the built-in samplers, by the names of ``NeighborLoader``. ``draws`` has what each of them draws.

The command line checks them before it imports torch.
"""

from dataclasses import dataclass

from gsplit.errors import InputError, explain

__all__ = ["DrawOptions"]

_SAMPLERS = ("uniform", "labor")
_TEMPORAL_STRATEGIES = ("uniform", "last")
_OF_A_WHOLE_LAYER = ("ladies", "fastgcn", "labor-")


@dataclass(frozen=True, kw_only=True)
class DrawOptions:
    """The options of a built-in sampler, with the names of ``NeighborLoader``; checked.

    >>> str(DrawOptions()), str(DrawOptions(sampler="labor", weight_attr="w"))
    ('', 'labor, weight_attr w')
    """

    sampler: str = "uniform"
    weight_attr: str | None = None
    replace: bool = False
    layer_dependency: bool = False
    time_attr: str | None = None
    temporal_strategy: str = "uniform"

    def __post_init__(self) -> None:
        if self.sampler not in _SAMPLERS:
            raise _unknown_sampler(self.sampler)
        if self.temporal_strategy not in _TEMPORAL_STRATEGIES:
            expected = "'uniform', or 'last' for the latest in-edges"
            fix = "use one of these"
            raise InputError(explain("temporal_strategy", expected, repr(self.temporal_strategy), fix))
        if self.time_attr is not None and (self.sampler != "uniform" or self.weight_attr is not None or self.replace):
            fix = "leave the other options out, or time_attr"
            raise InputError(explain("time_attr", "the uniform sampler without weights or replacement", str(self), fix))
        if self.time_attr is None and self.temporal_strategy != "uniform":
            fix = "name the stored times: time_attr='time'"
            raise InputError(explain("temporal_strategy", "time_attr", f"time_attr={self.time_attr}", fix))
        if self.replace and (self.sampler != "uniform" or self.weight_attr is not None):
            got = f"replace=True with {self}"
            fix = "leave replace out, or draw uniformly and without weights"
            raise InputError(explain("replace", "the uniform sampler without weights", got, fix))

    def __str__(self) -> str:
        """What differs from the default; empty if nothing does."""
        found = [] if self.sampler == "uniform" else [self.sampler]
        found += [] if self.weight_attr is None else [f"weight_attr {self.weight_attr}"]
        found += [name for name in ("replace", "layer_dependency") if getattr(self, name)]
        found += [] if self.time_attr is None else [f"time_attr {self.time_attr}, {self.temporal_strategy}"]
        return ", ".join(found)


def _unknown_sampler(name: str) -> InputError:
    expected = "'uniform' or 'labor', which are built in, or a function that makes a sampler"
    fix = "use sampler='uniform' or sampler='labor', or give a function: docs/add-a-sampler.md"
    if isinstance(name, str) and name.lower().startswith(_OF_A_WHOLE_LAYER):
        expected = "a sampler whose draws for a vertex depend on this vertex and its in-edges alone"
        fix = f"{name} looks at all vertices of the layer, which differ between ranks; use sampler='labor'"
    elif name == "weighted":
        fix = "name the stored weights: weight_attr='edge_weight'"
    elif name == "replace":
        fix = "use replace=True"
    return InputError(explain("sampler", expected, repr(name), fix))
