"""``gsplit selftest``: what this machine computes and how fast it moves data, compared with what it should.

For whoever has the hardware: GSplit was written without a GPU, and everything a GPU does was proven on a simulated one.
The checks run the same programs on real devices; their report can be sent back.
"""

from gsplit.selftest.finding import Finding, Report
from gsplit.selftest.run import run_selftest

__all__ = ["Finding", "Report", "run_selftest"]
