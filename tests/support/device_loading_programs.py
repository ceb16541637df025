"""What ranks run in the tests of loading for a device: the host or the device samples, the device gathers."""

import threading
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.device.devices import DEVICE_MARGIN, SideStream
from gsplit.distributed.comm.mesh import Mesh
from gsplit.loading import tiers
from gsplit.minibatch.batch import Batch
from gsplit.run.config import TrainSettings
from gsplit.run.results import RunView
from gsplit.run.training import train_run
from gsplit.sampling import neighbor_triton
from gsplit_bench import simulated
from gsplit_bench.simulated import switched_on


@dataclass(frozen=True)
class Loaded:
    """What making the batches of an epoch cost: the most waits and launches of a batch; bytes and rows of all.

    ``copied_bytes`` were copied to the device. ``index_bytes`` are those of the batch's index tensors and labels,
    ``missed_bytes`` those of the rows that the device had not.
    """

    waits: int
    launches: int
    copied_bytes: int
    index_bytes: int
    missed_bytes: int
    rows: int
    hits: int


@dataclass(frozen=True)
class Registered:
    """Host memory that the device reads in place, of two loaders of the same rows; and whether they share it."""

    num_bytes: int
    num_rows: int
    is_shared: bool


def count_registered(mesh: Mesh, path: str, cases: list[dict[str, Any]]) -> list[Registered]:
    """What two loaders register, per case."""
    out = []
    for options in cases:
        loaders = [_loader(mesh, path, options) for _ in range(2)]
        first, second = (loader._makers[0].step_loader._device_rows for loader in loaders)
        num_bytes = sum(switched_on().state.registered.values())
        out.append(Registered(num_bytes, loaders[0]._graph.owned.stop - loaders[0]._graph.owned.first, first is second))
        del loaders, first, second
    return out


def rows_read_ahead(mesh: Mesh, path: str, cases: list[dict[str, Any]]) -> list[list[int]]:
    """How many rows are read into memory of the host or the device to be kept there, one number for each time: by a
    loader, then by the batches that the comparison of the first step makes.
    """
    read = tiers._read
    out: list[list[int]] = []

    def count(source: Any, order: Any, num_rows: int) -> Tensor:
        out[-1].append(num_rows)
        return read(source, order, num_rows)

    with patch("gsplit.loading.tiers._read", count):
        for options in cases:
            out.append([])
            assert len(list(_loader(mesh, path, options).small_batches(alone=False))) == 2
    return out


Trained = tuple[list[float], list[list[float]]]


def _loader(mesh: Mesh, path: str, options: dict[str, Any]) -> gsplit.NeighborLoader:
    return gsplit.NeighborLoader(gsplit.open(path), [4, 4], "train", batch_size=100, mesh=mesh, seed=5, **options)


def train_tiers(mesh: Mesh, path: str, cases: list[dict[str, Any]]) -> list[Trained]:
    """Losses and weights of an epoch, per case of loader options; on a device under NCCL's rules and without races."""
    graph, out, rules = gsplit.open(path), [], None
    if mesh.device.type != "cpu":
        switched_on().tracker.check = True
        rules = simulated.CollectiveRules(switched_on().tracker)
        mesh = simulated.checked_mesh(mesh, rules)
    for options in cases:
        if rules is None:
            options = {name: value for name, value in options.items() if name != "device_cache"}
        loader = _loader(mesh, path, options)
        torch.manual_seed(0)
        model = gsplit.parallelize(GraphSAGE(graph.num_features, 16, 2, graph.num_classes, dropout=0.3).double(), mesh)
        trainer = gsplit.Trainer(model, torch.optim.Adam(model.parameters(), 1e-2), loader)
        losses = trainer.train_epoch(2) + trainer.train_epoch()
        if rules is not None and mesh.host_samples:  # layer 0 has no gradient of its rows
            made = [block.by_source is not None for block in loader.make_batch(0, 0).blocks]
            assert made == [False, True]
        out.append((losses, [parameter.detach().cpu().view(-1).tolist() for parameter in model.parameters()]))
    if rules is not None:
        rules.compare_ranks(mesh.control)
        assert switched_on().tracker.errors == []
        assert switched_on().tracker.num_launches > 1000
    return out


def _indices(batch: Batch) -> list[Tensor]:
    found = [batch.input_ids, batch.n_id, batch.y]
    for layer in batch.layers:
        found += [layer.block.indptr, layer.block.src_rows]
        found += [] if layer.route is None else [layer.route.send_rows]
    return found


def count_loading(mesh: Mesh, path: str, cases: list[dict[str, Any]]) -> list[Loaded]:
    """What making batches costs, per case."""
    log, out = switched_on().log, []
    for options in cases:
        loader, found = _loader(mesh, path, options), []
        for step in range(len(loader)):
            torch.get_device_module(mesh.device).synchronize()  # as a trainer that has read the loss of a step
            start = log.counts()
            batch = loader.make_batch(0, step)
            cost, counts = log.counts() - start, batch.telemetry.counts
            batch.telemetry.synchronize()
            index_bytes = sum(tensor.nbytes for tensor in _indices(batch))
            rows = (counts["bytes_loaded"], counts["rows_loaded"], counts["cache_hits"])
            found.append((cost.num_waits, cost.launches, cost.bytes_to_device, index_bytes, *rows))
        waits, launches, *amounts = zip(*found, strict=True)
        out.append(Loaded(max(waits), max(launches), *(sum(amount) for amount in amounts)))
    return out


def notes_of_a_run(mesh: Mesh, path: str) -> list[str]:
    """What a run shows of a step of training."""
    view = RunView()
    shown: list[str] = []
    with patch.object(view, "note", shown.append):
        settings = TrainSettings(fanout=[4, 4], batch_size=100, hidden=4, steps=1)
        train_run(settings, gsplit.open(path), mesh, None, view=view)
    return shown


def read_inputs(mesh: Mesh, path: str, cases: list[dict[str, Any]]) -> list[bytes]:
    """The bits of the input rows of a batch, per case."""
    return [_loader(mesh, path, options).make_batch(0, 0).x.cpu().numpy().tobytes() for options in cases]


def with_little_memory(mesh: Mesh, path: str, num_bytes: int, caches: list[str]) -> dict[str, str]:
    """What making two batches says on a device with so much memory, by size of its cache."""
    state, said = switched_on().state, {}
    for cache in caches:
        state.memory_bytes = num_bytes
        try:
            loader = gsplit.NeighborLoader(
                gsplit.open(path), [4, 4], "train", batch_size=5, mesh=mesh, device_cache=cache
            )
            said[cache] = str([loader.make_batch(0, step).batch_size for step in range(2)])
        except gsplit.InputError as error:
            said[cache] = str(error)
        state.memory_bytes = None
    return said


@dataclass(frozen=True)
class Sampled:
    """A batch that a device has sampled: whether it equals the host's bit for bit, and what making it cost."""

    is_equal: bool
    waits: Counter[str]
    launches: int
    hits: int
    rows: int


def sample_on_both(
    mesh: Mesh, path: str, fanouts: list[int], options: dict[str, Any], edge_bytes: int
) -> list[Sampled]:
    """Batches made ahead on the device that samples, beside those that the host samples for it.

    ``edge_bytes``: the memory of the device for edges.
    """
    switched_on().tracker.check = True
    log, found = switched_on().log, []
    few: dict[str, Any] = {"input_nodes": torch.arange(0, 1300, 40), "batch_size": 12, "seed": 5}
    with patch("gsplit.sampling.neighbor_triton.free_memory", lambda device: DEVICE_MARGIN + edge_bytes):
        there, here = (
            gsplit.NeighborLoader(gsplit.open(path), fanouts, mesh=each, **few, **options)
            for each in (mesh, replace(mesh, sample_device=torch.device("cpu")))
        )
    sampler: Any = there._makers[0].strategy._own
    assert sampler.edges.cached.nbytes == min(edge_bytes, sampler.edges.indices.nbytes)
    for batch in list(there):  # so that counts are not of batches made ahead
        start = log.counts()
        again = there.make_batch(0, batch.key.step)
        cost = log.counts() - start
        wanted = here.make_batch(0, batch.key.step)
        pairs = [(each.x, wanted.x) for each in (batch, again)]
        pairs += [pair for each in (batch, again) for pair in zip(_indices(each), _indices(wanted), strict=True)]
        batch.telemetry.synchronize()
        counts = batch.telemetry.counts
        is_equal = all(torch.equal(one.cpu(), two.cpu()) for one, two in pairs)
        found.append(Sampled(is_equal, cost.waits, cost.launches, counts["cache_hits"], counts["rows_loaded"]))
    assert switched_on().tracker.errors == []
    return found


def count_edge_copies(mesh: Mesh, path: str) -> int:
    """How often the rank's edges are copied for the device: for two loaders, evaluation and first batches again."""
    store = gsplit.open(path)
    with patch("gsplit.sampling.neighbor_triton._place_edges", wraps=neighbor_triton._place_edges) as copies:
        loaders = [
            gsplit.NeighborLoader(store, [2, 2], "train", batch_size=100, mesh=mesh, prefetch=prefetch)
            for prefetch in (2, 0)
        ]
        assert len(list(loaders[0].small_batches(alone=False))) == 2
        model = gsplit.parallelize(GraphSAGE(store.num_features, 4, 2, store.num_classes), mesh, verify_every=0)
        gsplit.evaluate(model, store, ["train"])
        samplers: list[Any] = [maker.strategy._own for loader in loaders for maker in loader._makers]
    assert len({id(sampler.state) for sampler in samplers}) == len(samplers) == 2
    return copies.call_count


@dataclass(frozen=True)
class Filled:
    """Communicators when a loader was opened and after an epoch, and the bytes that were free then and of its cache."""

    opened: int
    after_training: int
    free_bytes: int
    cache_bytes: int


def fill_the_device(mesh: Mesh, path: str, communicator_bytes: int, num_communicators: int, cache_bytes: int) -> Filled:
    """Train with as many rows on the device as fit beside the margin and so many communicators."""
    state = switched_on().state
    state.communicator_bytes = communicator_bytes
    state.memory_bytes = DEVICE_MARGIN + num_communicators * communicator_bytes + cache_bytes
    opened = len(state.communicators)
    loader = _loader(mesh, path, {})
    before = state.used_bytes
    model = gsplit.parallelize(GraphSAGE(24, 16, 2, 4), mesh)
    gsplit.Trainer(model, torch.optim.Adam(model.parameters()), loader).train_epoch()
    free, _ = torch.get_device_module(mesh.device).mem_get_info(mesh.device)
    return Filled(opened, len(state.communicators), free, before)


def count_waits_by_thread(mesh: Mesh, path: str) -> tuple[int, dict[str, int]]:
    """The steps of an epoch with prefetching, and how often each thread has waited for the device meanwhile."""
    graph, log, found = gsplit.open(path), switched_on().log, Counter[str]()
    model = gsplit.parallelize(GraphSAGE(graph.num_features, 4, 2, graph.num_classes), mesh)
    trainer = gsplit.Trainer(model, torch.optim.SGD(model.parameters(), 1e-2), _loader(mesh, path, {"prefetch": 2}))
    trainer.train_epoch()  # the first epoch also copies tables of a few numbers
    wait = log.wait

    def note(reason: str) -> None:
        found[threading.current_thread().name] += 1
        wait(reason)

    with patch.object(log, "wait", note):
        losses = trainer.train_epoch()
    return len(losses), dict(found)


def forget_to_join(mesh: Mesh, path: str) -> None:
    """Train on batches whose copy and gathering nobody has waited for."""
    with patch.object(SideStream, "join", lambda side, mark, tensors: None):
        train_tiers(mesh, path, [{"prefetch": 2, "device_cache": "20KB"}])


def make_many_between_steps(mesh: Mesh, path: str) -> list[bool]:
    """Whether the steps of a loop are right in which batches are made by name: more than buffers wait to be used."""
    loader, plain = _loader(mesh, path, {"prefetch": 2}), _loader(mesh, path, {})
    right = []
    for batch in loader:
        if batch.key.step == 1:
            _ = [loader.make_batch(0, step) for step in (3, 4, 2, 4, 3)]
        wanted = plain.make_batch(0, batch.key.step)
        pairs = [(batch.x, wanted.x), *zip(_indices(batch), _indices(wanted), strict=True)]
        right.append(all(torch.equal(one.cpu(), two.cpu()) for one, two in pairs))
    return right


def steps_before_an_error(mesh: Mesh, path: str, prefetch: int) -> tuple[list[int], str]:
    """The steps that are handed out before one whose rows cannot be read, and what is said then."""
    loader = _loader(mesh, path, {"prefetch": prefetch})
    rows: Any = loader._makers[0].step_loader._device_rows
    reads, locate = iter(range(100)), rows.locate

    def fail_at_three(ids: Tensor) -> Any:
        if next(reads) == 3:
            raise OSError(5, "Input/output error", "features/x")
        return locate(ids)

    steps: list[int] = []
    with patch.object(rows, "locate", fail_at_three):
        try:
            for batch in loader:
                steps.append(batch.key.step)
        except OSError as error:
            return steps, str(error)
    return steps, "nothing"
