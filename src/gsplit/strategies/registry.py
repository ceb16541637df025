"""The strategies by name, for the loader and the command line."""

from gsplit.strategies.data import DataStrategy
from gsplit.strategies.data_cached import DataCachedStrategy
from gsplit.strategies.hybrid import HybridStrategy
from gsplit.strategies.spec import Family, StrategySpec
from gsplit.strategies.split import SplitStrategy

__all__ = ["STRATEGIES", "strategy_class"]

AnyStrategy = SplitStrategy | DataStrategy | DataCachedStrategy | HybridStrategy
STRATEGIES: dict[Family, type[AnyStrategy]] = {
    "split": SplitStrategy,
    "data": DataStrategy,
    "data_cached": DataCachedStrategy,
    "hybrid": HybridStrategy,
}


def strategy_class(spec: StrategySpec) -> type[AnyStrategy]:
    """The class that computes a step in this way."""
    return STRATEGIES[spec.family]
