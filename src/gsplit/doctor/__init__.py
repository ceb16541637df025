"""``gsplit doctor``: whether this machine, its settings and a store are fit for a run, and what to fix.

``gsplit selftest`` asks whether the machine computes what it should; this asks whether a run can start, talk and last.
"""

from gsplit.doctor.examination import examine
from gsplit.doctor.line import Diagnosis, Line

__all__ = ["Diagnosis", "Line", "examine"]
