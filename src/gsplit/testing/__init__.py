"""Help for tests that need several ranks: ``run_ranks`` starts real processes on this machine."""

from gsplit.testing.ranks import RankFailedError, run_ranks

__all__ = ["RankFailedError", "run_ranks"]
