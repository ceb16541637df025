"""What the loader takes, what it will, and what it cannot: options of PyG's loader are refused with the reason."""

import hashlib
from collections.abc import Iterable
from functools import partial

from torch import Tensor

from gsplit.distributed.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.features.budget import parse_bytes
from gsplit.local_graph import ArrayNames
from gsplit.planner.auto import AUTO
from gsplit.sampling.drawn import require_drawn
from gsplit.sampling.neighbor import check_fanouts, uniform_sampler
from gsplit.sampling.protocol import SamplerFactory
from gsplit.store.files import Array, raw_bytes
from gsplit.store.memory import MemoryStore
from gsplit.store.protocol import GraphStore
from gsplit.store.reader import Store
from gsplit.strategies.assembly import RowOptions
from gsplit.strategies.spec import StrategySpec

__all__ = [
    "check_auto",
    "check_options",
    "check_prefetch",
    "describe_sampler",
    "fingerprint",
    "row_options",
    "sampler_factory",
    "stored_checksums",
]

_HASHED_BYTES = 64 << 20  # of an array in memory
_PLANNED_SAMPLERS = ("weighted", "labor", "replace")
_REFUSED = {
    "replace": "neighbours are drawn without replacement",
    "weight_attr": "weighted sampling is not built yet",
    "disjoint": "a mini-batch is one graph, shared by all targets",
    "time_attr": "temporal sampling is not built",
    "input_time": "temporal sampling is not built",
    "temporal_strategy": "temporal sampling is not built",
    "subgraph_type": "blocks hold the sampled edges, in their direction",
    "directed": "blocks hold the sampled edges, in their direction",
    "transform": "change the batch in the training loop",
    "transform_sampler_output": "change the batch in the training loop",
    "neighbor_sampler": "sampling is built in, or sampler=FUNCTION; see gsplit.extending",
    "num_workers": "sampling runs compiled in this process; leave it out",
    "persistent_workers": "there are no workers; leave it out",
    "prefetch_factor": "there are no workers; say prefetch=N to make N batches ahead",
    "pin_memory": "batches are made on the mesh's device; leave it out",
    "filter_per_worker": "there are no workers; leave it out",
    "is_sorted": "the store is sorted; leave it out",
}


def check_options(
    num_neighbors: list[int], batch_size: int, sampler: str | SamplerFactory, seed: int, options: dict[str, object]
) -> None:
    """Refuse what is not an option of this loader, and values out of range."""
    check_fanouts(num_neighbors)
    if not isinstance(batch_size, int) or batch_size < 1:
        fix = "give the size of the global mini-batch"
        raise InputError(explain("batch_size", "a positive number", batch_size, fix))
    if not hasattr(seed, "__index__") or not 0 <= seed < 1 << 63:
        raise InputError(explain("seed", "0 to 2**63 - 1", seed, "choose another seed"))
    if sampler != "uniform" and not callable(sampler):
        fix = "use sampler='uniform'" + ("; this one is planned" if sampler in _PLANNED_SAMPLERS else "")
        expected = "'uniform', the only one built so far, or a function that makes a sampler"
        raise InputError(explain("sampler", expected, repr(sampler), fix))
    for name, value in options.items():
        fix = _REFUSED.get(name, "see the signature of NeighborLoader")
        raise InputError(explain(f"option {name}", "an option of this loader", f"{name}={value!r}", fix))


def check_auto(strategy: str, sampler: str | SamplerFactory, arrays: ArrayNames) -> None:
    """Refuse to have the planner choose for what it cannot count."""
    own = ["sampler"] if callable(sampler) else []
    own += ["features"] if len(arrays.stored_features) < len(arrays.features) else []
    if strategy == AUTO and own:
        expected = "the sampler that is built in, and stored features: the planner counts with these"
        fix = "name a strategy, such as strategy='split'"
        raise InputError(explain("strategy='auto'", expected, f"{' and '.join(own)} of the program's own", fix))


def sampler_factory(sampler: str | SamplerFactory) -> SamplerFactory:
    """What makes samplers; those of the program's own are checked."""
    return require_drawn(sampler) if callable(sampler) else uniform_sampler


def describe_sampler(sampler: str | SamplerFactory) -> dict[str, str]:
    """A sampler of the program's own in short, to compare; nothing for the one that is built in."""
    if not callable(sampler):
        return {}
    more, made_by = getattr(sampler, "fingerprint", None), sampler
    while isinstance(made_by, partial):
        made_by = made_by.func
    name = getattr(made_by, "__qualname__", type(made_by).__qualname__)
    return {"sampler": name if more is None else f"{name} {more}"}


def check_prefetch(depth: int, mesh: Mesh) -> int:
    """The number of steps to make ahead, refused where that cannot be done."""
    if not isinstance(depth, int) or depth < 0:
        raise InputError(explain("prefetch", "a number of batches, 0 for none", depth, "choose 2, or leave it out"))
    if depth and mesh.sample_device.type != "cpu":
        got, fix = f"prefetch={depth} with sample_device={mesh.sample_device}", "leave sample_device out, or prefetch"
        raise InputError(explain("prefetch", "mini-batches that are sampled on the CPU", got, fix))
    return depth


def row_options(
    spec: StrategySpec,
    mesh: Mesh,
    cache: int | str,
    device_cache: int | str,
    copies: int | str,
    on_disk: bool,
    num_ahead: int,
) -> RowOptions:
    """Where input rows come from, refused where the strategy or the mesh cannot have it."""
    if parse_bytes(device_cache, "device_cache") and not mesh.host_samples:
        got, fix = f"{device_cache} with {mesh}", "use cache= for the host's memory, or leave it out"
        raise InputError(explain("device_cache", "a model on a device, and sampling on the CPU", got, fix))
    copied = parse_bytes(copies, "copies")
    if copied and spec.family not in ("split", "hybrid"):
        expected, fix = (
            "a strategy that shuffles input rows: split or hybrid(k)",
            "leave it out, or change the strategy",
        )
        raise InputError(explain("copies", expected, f"strategy={spec.name!r}", fix))
    if spec.family == "push_pull" and (on_disk or parse_bytes(cache) or parse_bytes(device_cache)):
        got, fix = "a cache, or features on disk", "leave them out, or use another strategy"
        raise InputError(explain("push_pull", "columns of the features, held in memory", got, fix))
    return RowOptions(cache=cache, device_cache=device_cache, copies=copied, on_disk=on_disk, num_ahead=num_ahead)


def fingerprint(nodes: str | Tensor | None) -> str:
    """The targets' list in short, to compare between ranks."""
    if nodes is None or isinstance(nodes, str):
        return str(nodes)
    return hashlib.sha256(nodes.cpu().contiguous().numpy().tobytes()).hexdigest()


def stored_checksums(store: GraphStore, names: Iterable[str]) -> dict[str, str]:
    """What arrays of a store hold, in short; nothing of shards, which differ between hosts."""
    wanted = dict.fromkeys(names)
    if isinstance(store, MemoryStore):
        return {f"graph {name}": _checksum(store.arrays[name]) for name in wanted if name in store.arrays}
    if not isinstance(store, Store) or store.manifest.shard is not None:
        return {}
    arrays = store.manifest.arrays
    return {f"store {name}": arrays[name].sha256[:16] for name in wanted if name in arrays}


def _checksum(array: Array) -> str:
    """Of all of an array, or of evenly spaced rows of a large one: every loader that is made pays for it."""
    rows = array[:: max(1, -(-array.nbytes // _HASHED_BYTES))]
    digest = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    digest.update(raw_bytes(rows))
    return digest.hexdigest()[:16]
