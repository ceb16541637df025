"""Device kernels written in Triton: twins of the host's kernels, for devices that Triton compiles for.

The triton library is imported by the files of this folder and by nothing else. ``availability`` and ``launch`` import
without it: the first tells ``kernels.dispatch`` whether Triton runs, a simulated device replaces the launcher of the
second. Callers import the other files inside the branch that ``dispatch`` chose. What each kernel compiles to is
executed on the host and checked against its host twin; what was proven how is in docs/gpu-kernels.md.

Rules for kernels here: offsets into tensors are int64; a 64-bit word or a float64 goes to a kernel as two signed 32-bit
halves (``words``), because an integer argument's type follows its value and a float argument becomes float32; no result
depends on the order of programs; no sum is made by atomics.
"""

__all__: list[str] = []
