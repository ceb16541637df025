"""Default settings; a module without imports, so that ``gsplit --help`` does not load numba."""

__all__ = ["C_E", "C_V", "EPOCHS", "TOLERANCE"]

C_V = 8.0
C_E = 1.0
"""Work of computing a vertex and of one of its edges: layers on one core take 4 to 15 to 1 (docs/decisions/0005)."""

EPOCHS = 10
"""Presampled, as in the paper."""

TOLERANCE = 1.05
"""Largest part's work over the mean."""
