"""Benchmarks, the simulated device and other development code of GSplit. Not in the wheel.

``python -m gsplit_bench COMMAND`` runs a measurement; ``python -m gsplit_bench --help`` lists them.
"""

__all__: list[str] = []
