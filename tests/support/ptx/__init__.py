"""Triton's kernels as compiled for NVIDIA's GPUs, executed on the host: what a GPU would run where there is none.

Triton compiles to PTX without a device. The programs of a launch are executed by numpy, many threads at a time, in an
order that no kernel may rely on; every access is checked. Reading order: ``module`` (the text), ``values`` and
``arithmetic`` (what is computed), ``memory``, ``machine`` (who executes what), ``instructions`` (the table of them),
``launcher`` (from a call to a result).

Not covered: the assembler; the memory model between running programs, as a store is seen at once here; the errors of
approximate instructions (``ex2.approx``, ``div.full``), which give the nearest number here; and time. Programs that
wait for each other would never end.
"""
