"""The checkpoints of a run, as others see them: where the latest is, and how a run ends that can go on from it."""

from gsplit.run.layout import latest_checkpoint

__all__ = ["REQUEUE", "latest_checkpoint"]

REQUEUE = 75
"""Exit code of a run that was told to stop, has saved its state and wants to be started again (EX_TEMPFAIL)."""
