"""``gsplit doctor``: whether this machine, its settings and a store are fit for a run, and what to fix.

With a device, it also checks what the machine computes: models and kernels on the device against the host, data rates,
waits and races. GSplit was written without a GPU, so reports from real ones are welcome.
"""

__all__: list[str] = []
