"""What ``python -m gsplit_bench record`` measures, the most valuable first: commands, and the minutes that they take.

Commands are those that a user types. Fields are filled in: ``{out}`` is the path of the record without suffix,
``{folder}`` the folder of all records, ``{work}`` a folder for other files, ``{arxiv}`` the store of a graph in 8 parts,
``{arxiv_64}`` in 64, ``{arxiv_raw}`` not partitioned, ``{quick}`` the options of a small form. What a command prints goes
to the file behind ``>``; behind ``#`` stands the place in the document, such as ``rows``, ``quality/arxiv`` or, to
append to a list, ``runs[]``.
"""

import re
import string
from dataclasses import dataclass

__all__ = ["GRAPHS", "MEASUREMENTS", "Measurement", "split_field"]

GRAPHS: dict[str, str] = {
    "arxiv": "ogbn_arxiv_nofeat",
    "debian": "debian_packages",
    "ego": "ego_twitter_topology",
    "planted500k": "--vertices 500000 --edges 7500000 --features 128 --symmetrise --target-share 0.1",
    "planted1m": "--vertices 1000000 --edges 15000000 --features 128 --symmetrise --target-share 0.1",
    "planted5m": "--vertices 5000000 --edges 50000000 --features 128 --symmetrise --target-share 0.02",
}
"""Real graphs by their names in GSPLIT_TEST_DATA, planted ones by the options of ``gsplit import synthetic``."""


@dataclass(frozen=True)
class Measurement:
    """Commands whose files are one record.

    ``minutes``: on two idle cores, of the last record or from the seconds of its steps; None: not known.
    ``quick``: options of the small form; None: there is none.
    """

    name: str
    minutes: float | None
    commands: tuple[str, ...]
    quick: str | None = None

    @property
    def stores(self) -> tuple[str, ...]:
        """The fields that are stores."""
        fields = {field for line in self.commands for _, field, _, _ in string.Formatter().parse(line) if field}
        return tuple(sorted(fields - {"out", "folder", "work", "quick"}))

    @property
    def needs(self) -> tuple[str, ...]:
        """The records that the commands read."""
        return tuple(
            sorted({name for line in self.commands for name in re.findall(r"\{folder\}/([\w-]+)\.json", line)})
        )


def split_field(field: str) -> tuple[str, str]:
    """The graph and the number of parts of a store, or "raw".

    >>> split_field("arxiv"), split_field("arxiv_64"), split_field("planted5m_raw")
    (('arxiv', '8'), ('arxiv', '64'), ('planted5m', 'raw'))
    """
    graph, _, parts = field.partition("_")
    return graph, parts or "8"


_BENCH = "python -m gsplit_bench"
_TINY = "--ranks 2 --hidden 16 --fanout 3,3 --batch-size 64 --warm-up 1 --steps 1 --repeats 1"


def _train(name: str, minutes: float | None, words: str) -> Measurement:
    """A document of the command train, and its tables."""
    page = f"{_BENCH} report {{out}}.json --out {{out}}.html --markdown {{out}}.md"
    return Measurement(name, minutes, (f"{_BENCH} train {words} --out {{out}}.json {{quick}}", page), _TINY)


def _loading() -> Measurement:
    """Rows and hits, counted: an epoch of every graph, at two sizes of the mini-batch."""
    stores = ("arxiv_16", "debian_16", "ego_16", "planted1m_16", "planted500k_16", "planted5m_16")
    counted = {(store, size): f"{{work}}/loading-{store}-{size}.json" for store in stores for size in (1024, 4096)}
    ranks = "--ranks 2 --ranks 4 --ranks 8 --ranks 16 --run-steps 0"
    lines = [
        f"{_BENCH} loading {{{store}}} {ranks} --batch-size {size} {{quick}} --json > {path}"
        for (store, size), path in counted.items()
    ]
    named = " ".join(f"{split_field(store)[0]}={path}" for (store, _), path in counted.items())
    return Measurement("loading", 30, (*lines, f"{_BENCH} loading-record {{out}} {named}"), "--fanout 2,2 --steps 1")


def _curves() -> Measurement:
    """Losses of 60 steps on 1, 2 and 4 ranks, and exact accuracies after some epochs on 1 and 2."""
    widths = {"sage": "--hidden 256", "gat": "--hidden 128 --heads 4"}
    epochs = {"debian": 12, "arxiv": 8}
    common = "--fanout 15,15,15 --batch-size 1024 --dropout 0.5 {quick} --json > {out}.json"
    lines = [
        f"python -m gsplit train {{{graph}_raw}} --model {model} {width} --steps 60 --evaluate-every 0 --nproc {ranks}"
        f" --strategy {strategy} {common}#curves/{graph} {model} {ranks} {strategy}"
        for graph in epochs
        for model, width in widths.items()
        for ranks in (1, 2, 4)
        for strategy in ("split", "data")
    ]
    lines += [
        f"python -m gsplit train {{{graph}_raw}} --hidden 256 --norm batch_norm --lr 3e-3 --lr-scheduler cosine"
        f" --epochs {number} --nproc {ranks} {common}#full/{graph} sage {ranks} split"
        for graph, number in epochs.items()
        for ranks in (1, 2)
    ]
    return Measurement("training", 30, tuple(lines), "--fanout 2,2 --hidden 8 --batch-size 64")


def _partition() -> Measurement:
    """Expected and held-out traffic, objectives with seven seeds, and four ranks on a concentrated graph."""
    cases = (
        "--parts 8 --case gsplit:metis --case node:metis --case edge:metis --case random:random --case gsplit:restream"
    )
    studies, concentrated = "{work}/partition", "{work}/partition/concentrated.gsplit"
    size = "--vertices 5000000 --edges 52000000 --features 32 --symmetrise --target-share 0.125"
    return Measurement(
        "partition",
        None,
        (
            *(
                f"{_BENCH} partition {{{graph}_raw}} {cases} --json > {{out}}.json#quality/{name}"
                for graph, name in {"arxiv": "arxiv", "debian": "debian", "ego": "ego-twitter"}.items()
            ),
            f"{_BENCH} partition-studies seeds {studies} > {{out}}.json#seeds",  # makes the folder
            f"python -m gsplit import synthetic {concentrated} {size} --target-communities 0.1 --seed 1 --overwrite",
            f"{_BENCH} partition {concentrated} {cases} --case gsplit:kaminpar --json > {{out}}.json#quality/planted concentrated",
            f"{_BENCH} partition-studies cost {studies} > {{out}}.json#cost",
            f"{_BENCH} partition-studies train {studies} > {{out}}.json#train",
        ),
    )


_OURS = "split,hybrid(2),hybrid(1),data_cached,data(owner),data"
_CHECKED = "{folder}/training-main.json {folder}/training-disk.json"
_PEERS = "dgl,pyg,pyg_our_sampler"
_HOST = ("host-sage", "host-sage-1m", "host-sage-1m-4", "host-others")

MEASUREMENTS: tuple[Measurement, ...] = (
    _train(
        "host-sage",
        15,
        f"{{arxiv}} {{debian}} {{ego}} --preset host --models sage --systems 'split,data(owner),hybrid(1),{_PEERS}'",
    ),
    _train(
        "host-others",
        7,
        "{arxiv} {debian} --preset host --models gcn,gin,gat --ranks 2,4 --warm-up 5 --repeats 3 --steps 1"
        " --systems 'split,data(owner),dgl,pyg_our_sampler'",
    ),
    _train(
        "host-sage-1m",
        9.5,
        f"{{planted1m}} --preset host --models sage --ranks 1,2 --repeats 3 --systems 'split,data(owner),{_PEERS}'",
    ),
    _train(
        "host-sage-1m-4",
        2,
        "{planted1m} --preset host --models sage --ranks 4 --warm-up 5 --repeats 3 --steps 1"
        " --systems 'split,data(owner),dgl,pyg_our_sampler'",
    ),
    Measurement(
        "host",
        0.5,
        (
            f"{_BENCH} report {' '.join(f'{{folder}}/{name}.json' for name in _HOST)} --out {{out}}.html --markdown {{out}}.md",
        ),
        "",
    ),
    Measurement(
        "bare-loop",
        2,
        (f"{_BENCH} bare-loop {{arxiv}} --out {{out}} {{quick}}",),
        "--batches 1 --rounds 2 --models sage",
    ),
    Measurement("exactness", 120, (f"{_BENCH} exactness {{out}}.json {{quick}}",), "'pairs by sampler'"),
    _loading(),
    Measurement("resume", 5.5, (f"{_BENCH} resume --cost-store {{arxiv}} --out {{out}} {{quick}}",), "--quick"),
    Measurement(
        "sampling",
        3.5,
        (f"{_BENCH} sampling {{quick}} --json > {{out}}.json#runs[]",) * 3,
        "--vertices 1000 --edges 5000 --steps 1 --fanout 3 --batch-size 32",
    ),
    Measurement(
        "shuffle",
        6.5,
        (f"{_BENCH} shuffle {{quick}} --json > {{out}}.json#runs[]",) * 3,
        "--ranks 2 --rows 100 --repeats 1",
    ),
    Measurement(
        "attention",
        10.5,
        (f"{_BENCH} attention --out {{out}} {{quick}}",),
        "--rounds 1 --steps 1 --ranks 1 --kinds gat --no-layers",
    ),
    _train(
        "threads",
        4.5,
        "{arxiv} {planted1m} --preset threads --models sage --warm-up 5 --repeats 4 --steps 1"
        " --systems split,dgl,pyg_our_sampler",
    ),
    _train(
        "crossover",
        4.5,
        "{arxiv} {debian} --preset crossover --models sage --warm-up 4 --repeats 3"
        " --systems 'split,data(owner),data,hybrid(1),split+labor'",
    ),
    _train(
        "training-main",
        16,
        f"{{arxiv}} {{debian}} {{ego}} {{planted1m}} --batch-size 256,1024 --ranks 2,4 --warm-up 8 --steps 1 --repeats 4 --systems '{_OURS}'",
    ),
    _train(
        "training-default-allocator",
        6,
        "{arxiv} {debian} {ego} --allocator default --ranks 2,4 --warm-up 8 --steps 1 --repeats 3 --systems split,dgl,pyg_our_sampler",
    ),
    Measurement(
        "training-counted",
        None,
        (
            f"{_BENCH} train {{arxiv_64}} {{debian_64}} --preset redundancy --count 2,4,8,16,32,64 --out {{out}}.json {{quick}}",
        ),
        "--fanout 2,2 --batch-size 64",
    ),
    Measurement(
        "inference",
        3,
        (f"{_BENCH} inference {{arxiv_raw}} --work {{work}}/inference --out {{out}} {{quick}}",),
        "--steps 1",
    ),
    Measurement(
        "import",
        13,
        (f"{_BENCH} import-speed --billion --work {{work}}/import --out {{out}}",),
    ),
    Measurement(
        "typed-steps",
        1.5,
        tuple(
            f"{_BENCH} typed-steps --ranks {ranks} --steps 8 {{quick}} --json > {{out}}.json#rows[]" for ranks in (1, 2)
        ),
        "--scale 0.01 --batch-size 64",
    ),
    Measurement(
        "quality",
        None,
        tuple(
            f"{_BENCH} quality {study} {{work}}/quality > {{out}}.json#{study}"
            for study in ("links", "types", "samplers")
        ),
    ),
    Measurement(
        "profile",
        2.5,
        (f"{_BENCH} profile {{arxiv}} {{planted1m}} --ranks 1 2 --steps 6 --out {{out}} {{quick}}",),
        "--fanout 2 2 --batch-size 64",
    ),
    _curves(),
    _train(
        "training-disk",
        27,
        f"{{arxiv}} {{debian}} {{ego}} --features disk --batch-size 256,1024 --ranks 2,4 --warm-up 8 --steps 1 --repeats 3 --systems '{_OURS}'",
    ),
    Measurement(
        "planner",
        35,
        (
            f"{_BENCH} planner-check {_CHECKED} --stores {{work}} --by cpu --json > {{out}}-check.json",
            f"{_BENCH} planner-choice {{out}}-check.json --stores {{work}} --out {{out}}.json",
        ),
    ),
    _partition(),
    Measurement("fuzz", 41, ("python tests/fuzz/campaign.py --inputs 1000000 --out {out} {quick}",), "--inputs 200"),
)
"""In the order of their value: whoever has less time has the first of them."""
