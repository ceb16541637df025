"""Training on one GPU under torch's CUDA sanitizer, which has to be on when torch is imported: a program of its own."""

from gsplit.distributed.mesh import solo_mesh
from gsplit.selftest.training import train_models

__all__: list[str] = []

if __name__ == "__main__":
    train_models(solo_mesh("cuda:0"), ["sage", "gat"], 1)
