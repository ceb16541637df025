"""GSplit: split-parallel mini-batch training of graph neural networks.

This package surface is everything a user needs; the rest is internal and may move. Names load on
first use, so that ``import gsplit`` costs milliseconds and pulls in neither torch nor numba.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gsplit import extending
    from gsplit.distributed.comm.mesh import Mesh, init
    from gsplit.errors import CommError, GSplitError, InputError, MissingDependencyError, StoreError
    from gsplit.graph.ownership import Ownership
    from gsplit.inference.evaluate import evaluate
    from gsplit.inference.evaluate_links import evaluate_links
    from gsplit.inference.infer import Predictions, infer, write_predictions
    from gsplit.loading.link_loader import LinkNeighborLoader
    from gsplit.loading.loader import NeighborLoader
    from gsplit.nn.owned_embedding import OwnedEmbedding
    from gsplit.nn.parallelize import parallelize
    from gsplit.partitioning.partition import partition
    from gsplit.store.importers.pyg import from_pyg, to_pyg
    from gsplit.store.pairs import add_pairs
    from gsplit.store.reader import Store, open_store
    from gsplit.training import callbacks, losses
    from gsplit.training.scalar_log import ScalarLog
    from gsplit.training.trainer import Trainer
    from gsplit.training.verification import Verification, verify, verify_step

    open = open_store
    __version__: str

_HOME = {
    "init": ("gsplit.distributed.comm.mesh", "init"),
    "Mesh": ("gsplit.distributed.comm.mesh", "Mesh"),
    "open": ("gsplit.store.reader", "open_store"),
    "Store": ("gsplit.store.reader", "Store"),
    "NeighborLoader": ("gsplit.loading.loader", "NeighborLoader"),
    "LinkNeighborLoader": ("gsplit.loading.link_loader", "LinkNeighborLoader"),
    "OwnedEmbedding": ("gsplit.nn.owned_embedding", "OwnedEmbedding"),
    "parallelize": ("gsplit.nn.parallelize", "parallelize"),
    "Trainer": ("gsplit.training.trainer", "Trainer"),
    "ScalarLog": ("gsplit.training.scalar_log", "ScalarLog"),
    "infer": ("gsplit.inference.infer", "infer"),
    "write_predictions": ("gsplit.inference.infer", "write_predictions"),
    "Predictions": ("gsplit.inference.infer", "Predictions"),
    "evaluate": ("gsplit.inference.evaluate", "evaluate"),
    "evaluate_links": ("gsplit.inference.evaluate_links", "evaluate_links"),
    "verify": ("gsplit.training.verification", "verify"),
    "verify_step": ("gsplit.training.verification", "verify_step"),
    "Verification": ("gsplit.training.verification", "Verification"),
    "partition": ("gsplit.partitioning.partition", "partition"),
    "Ownership": ("gsplit.graph.ownership", "Ownership"),
    "add_pairs": ("gsplit.store.pairs", "add_pairs"),
    "from_pyg": ("gsplit.store.importers.pyg", "from_pyg"),
    "to_pyg": ("gsplit.store.importers.pyg", "to_pyg"),
    "GSplitError": ("gsplit.errors", "GSplitError"),
    "StoreError": ("gsplit.errors", "StoreError"),
    "InputError": ("gsplit.errors", "InputError"),
    "CommError": ("gsplit.errors", "CommError"),
    "MissingDependencyError": ("gsplit.errors", "MissingDependencyError"),
}
_MODULES = {
    "losses": "gsplit.training.losses",
    "callbacks": "gsplit.training.callbacks",
    "extending": "gsplit.extending",
}

__all__ = [  # without open: ``from gsplit import *`` must not replace Python's own
    "init",
    "Mesh",
    "Store",
    "NeighborLoader",
    "LinkNeighborLoader",
    "OwnedEmbedding",
    "parallelize",
    "Trainer",
    "losses",
    "callbacks",
    "extending",
    "ScalarLog",
    "infer",
    "write_predictions",
    "Predictions",
    "evaluate",
    "evaluate_links",
    "verify",
    "verify_step",
    "Verification",
    "partition",
    "Ownership",
    "add_pairs",
    "from_pyg",
    "to_pyg",
    "GSplitError",
    "StoreError",
    "InputError",
    "CommError",
    "MissingDependencyError",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return import_module("importlib.metadata").version("gsplit")
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOME:
        raise AttributeError(f"module 'gsplit' has no attribute {name!r}")
    module, attribute = _HOME[name]
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*__all__, "open"])
