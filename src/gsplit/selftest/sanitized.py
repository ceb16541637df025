"""Training on one GPU under torch's CUDA sanitizer, which has to be on when torch is imported: a program of its own."""

from gsplit.bench.exactness import Case, train_cases
from gsplit.distributed.mesh import solo_mesh

__all__: list[str] = []

if __name__ == "__main__":
    train_cases(solo_mesh("cuda:0"), [Case(model, "split", "random", 0.5, None, None) for model in ("sage", "gat")], 1)
