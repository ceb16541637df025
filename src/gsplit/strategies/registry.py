"""The strategies by name, for the loader and the command line."""

from gsplit.errors import InputError, explain
from gsplit.strategies.data import DataStrategy
from gsplit.strategies.split import SplitStrategy

__all__ = ["STRATEGIES", "strategy_class"]

STRATEGIES: dict[str, type[SplitStrategy] | type[DataStrategy]] = {
    strategy.name: strategy for strategy in (SplitStrategy, DataStrategy)
}
_PLANNED = ("push_pull", "data_cached", "hybrid", "auto")


def strategy_class(name: str) -> type[SplitStrategy] | type[DataStrategy]:
    """The strategy of a name; others are refused."""
    if name not in STRATEGIES:
        fix = "use one of these" + ("; this one is planned" if name in _PLANNED else "")
        raise InputError(explain("strategy", " or ".join(map(repr, STRATEGIES)), repr(name), fix))
    return STRATEGIES[name]
