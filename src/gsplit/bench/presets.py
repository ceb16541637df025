"""The paper's studies by name, each as what to run; every field can be given otherwise on the command line.

Sizes are those of the paper where this kind of machine can hold them: fanout 15 over 3 layers, hidden 256, 1024
targets, GAT with 4 heads. Its three graphs are whatever graphs the user gives.
"""

from gsplit.bench.train_study import ALLOCATORS, PEERS, Study
from gsplit.errors import InputError, explain

__all__ = ["DEFAULT", "PRESETS", "find_preset"]

_OURS = ("split", "hybrid(2)", "hybrid(1)", "data_cached", "data(owner)", "data")

DEFAULT = Study("our two ends, split and data, and the peers")

PRESETS: dict[str, Study] = {
    "redundancy": Study(
        "Table 1: edges computed and input rows loaded, data parallel against split; counted",
        systems=(),
        batch_sizes=(1024, 4096),
        counted_ranks=(1, 2, 4, 8),
        counted_strategies=("split", "data", "data(owner)"),
    ),
    "main": Study(
        "Table 3: every strategy and the peers, SAGE and GAT, as users run them and with the allocator tuned",
        systems=(*_OURS, *PEERS),
        ranks=(1, 2, 4),
        allocators=ALLOCATORS,
    ),
    "partition": Study(
        "Figure 5: split on partitions of the same graph by several objectives; give a store of each",
        systems=("split",),
        models=("sage",),
        ranks=(4,),
        counted_ranks=(4,),
        counted_strategies=("split",),
    ),
    "ranks": Study(
        "Figure 6: 1, 2 and 4 ranks measured, up to 64 counted",
        systems=("split", "data_cached", "data"),
        ranks=(1, 2, 4),
        counted_ranks=(1, 2, 4, 8, 16, 32, 64),
        counted_strategies=_OURS,
        counted_steps=2,
    ),
    "replicas": Study(
        "Figure 6: 4 ranks as 1, 2 and 4 replicas",
        systems=("split",),
        models=("sage",),
        ranks=(4,),
        replicas=(1, 2, 4),
    ),
    "hidden": Study(
        "Figure 6: hidden widths",
        systems=("split", "data_cached", "data"),
        hidden=(64, 128, 256, 512),
    ),
    "batch": Study(
        "Figure 6: sizes of the mini-batch, from little overlap to much; also counted",
        systems=("split", "data_cached", "data"),
        batch_sizes=(256, 1024, 4096),
        hidden=(128,),
        counted_ranks=(2, 4),
        counted_strategies=_OURS,
    ),
    "layers": Study(
        "Figure 6: 2, 3 and 4 layers, with fanouts that keep the mini-batch small",
        systems=("split", "data_cached", "data"),
        hidden=(128,),
        fanouts=((15, 15), (15, 15, 15), (5, 5, 5, 5)),
    ),
    "accuracy": Study(
        "Figure 7: loss and exact accuracy after every epoch; the curves of all strategies are one",
        systems=("split", "data_cached", "data"),
        models=("sage",),
        epochs=5,
    ),
}


def find_preset(name: str) -> Study:
    """A preset by its name."""
    if name not in PRESETS:
        raise InputError(explain("--preset", f"one of {', '.join(PRESETS)}", name, "choose one of these"))
    return PRESETS[name]
