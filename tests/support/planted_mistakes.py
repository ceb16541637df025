"""Mistakes that a GPU would punish with a crash, a hang or wrong numbers, and the same things done right.

Each function makes one mistake on the simulated device; the tests say who must find it.
"""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch_geometric.nn import GraphSAGE

import gsplit
from gsplit.device.devices import AsyncHostCopy, SideStream, StreamEvent, in_thread
from gsplit.distributed.comm.comm import Call, SoloComm
from gsplit.distributed.comm.mesh import Mesh
from gsplit.kernels.csr import csr_matrix
from gsplit.kernels.rows import copy_rows
from gsplit.kernels.sums import EdgeSums
from gsplit_bench.simulated import CheckedComm, CollectiveRules, checked_mesh, switched_on

__all__ = ["ALONE", "TOGETHER", "make_mistakes", "make_together"]


def _mixed_devices() -> None:
    torch.ones(3, device="sim") + torch.ones(3)


def _host_index_of_host_rows() -> None:
    torch.arange(3.0)[torch.ones(2, dtype=torch.int64, device="sim")]


def _out_on_the_host() -> None:
    rows = torch.zeros(2, dtype=torch.int64, device="sim")
    torch.index_select(torch.ones(3, 2, device="sim"), 0, rows, out=torch.empty(2, 2))


def _numpy() -> None:
    torch.ones(3, device="sim").numpy()


def _host_kernel() -> None:
    rows = torch.ones(3, 2, device="sim")
    places = torch.zeros(1, dtype=torch.int64).numpy()
    copy_rows(rows.numpy(), places, places, torch.empty(2).numpy(), 2)


def _address() -> None:
    torch.ones(3, device="sim").data_ptr()


def _unpinned_copy() -> None:
    _must_not_wait(lambda: torch.ones(3).to("sim", non_blocking=True))


def _pinned_copy() -> None:
    source = torch.ones(3).pin_memory()
    _must_not_wait(lambda: source.to("sim", non_blocking=True))


def _value_on_the_host() -> None:
    values = torch.ones(3, device="sim")
    _must_not_wait(lambda: float(values.sum()))


def _mask() -> None:
    values = torch.ones(3, device="sim")
    _must_not_wait(lambda: values[values > 0])


def _list_to_the_device() -> None:
    _must_not_wait(lambda: torch.tensor([1, 2], device="sim"))


def _must_not_wait(act: Callable[[], object]) -> None:
    log = switched_on().log
    before = log.counts()
    act()
    waits = (log.counts() - before).waits
    assert not waits, f"the host waited: {dict(waits)}"


def _side_stream(*, wait: bool) -> Tensor:
    device = switched_on()
    side, main = device.new_stream("side"), torch.sim.current_stream()  # type: ignore[attr-defined]
    with side:
        rows = torch.ones(4, device="sim") * 2
    if wait:
        main.wait_stream(side)
    return rows + 1


def _unwaited_side_stream() -> None:
    _side_stream(wait=False)


def _waited_side_stream() -> None:
    _side_stream(wait=True)


def _reused_buffer(*, wait: bool) -> None:
    device = switched_on()
    side, main = device.new_stream("side"), torch.sim.current_stream()  # type: ignore[attr-defined]
    buffer = torch.ones(4, device="sim")
    side.wait_stream(main)
    with side:
        read = buffer * 2
    if wait:
        main.wait_event(side.record_event())
    buffer.fill_(0.0)  # the next batch
    side.synchronize()
    del read


def _unwaited_reuse() -> None:
    _reused_buffer(wait=False)


def _waited_reuse() -> None:
    _reused_buffer(wait=True)


def _freed(*, record: bool) -> None:
    device = switched_on()
    device.tracker.errors.clear()
    side, main = device.new_stream("side"), torch.sim.current_stream()  # type: ignore[attr-defined]
    rows = torch.ones(4, device="sim")
    side.wait_stream(main)
    with side:
        kept = rows * 2
    if record:
        rows.record_stream(side)  # type: ignore[arg-type]
    del rows
    errors = list(device.tracker.errors)
    side.synchronize()
    del kept
    assert not errors, errors[0]


def _freed_too_early() -> None:
    _freed(record=False)


def _freed_after_recording() -> None:
    _freed(record=True)


class _Drawing(Module):
    """A model that draws from the device's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = GraphSAGE(4, 4, 1, 2)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        out: Tensor = self.inner(x, edge_index)
        noise: Tensor = torch.ops.aten.rand([1], device=out.device)
        return out + noise


def _draws() -> None:
    from gsplit.distributed.comm.mesh import solo_mesh

    gsplit.parallelize(_Drawing(), solo_mesh("sim:0"))


def _sparse_backward() -> None:
    """torch's own gradient of a sparse product converts the matrix."""
    offsets, rows = torch.tensor([0, 2, 3], device="sim"), torch.tensor([0, 2, 1], device="sim")
    matrix = csr_matrix(offsets, rows, torch.ones(3, device="sim"), num_columns=3)
    x = torch.ones(3, 2, device="sim", requires_grad=True)
    product = torch.sparse.mm(matrix, x).sum()
    _must_not_wait(product.backward)


def _cast_sum() -> None:
    """Autocast reaches torch's sparse product: rows are added in bf16 on CUDA, and its gradient fails."""
    offsets, rows = torch.tensor([0, 2, 3], device="sim"), torch.tensor([0, 2, 1], device="sim")
    matrix = csr_matrix(offsets, rows, torch.ones(3, device="sim"), num_columns=3)
    with torch.autocast("sim", torch.bfloat16):
        torch.sparse.mm(matrix, torch.ones(3, 2, device="sim"))


def _own_sum() -> None:
    x = torch.ones(3, 2, device="sim", dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("sim", torch.bfloat16):
        sums = EdgeSums(torch.tensor([0, 2, 3], device="sim"), torch.tensor([0, 2, 1], device="sim"), 3, None)
        sums(x, mean=True).sum().backward()


def _types_that_autocast_leaves() -> None:
    """A product casts its rows; an operation in no list of autocast does not, and refuses rows of two types."""
    x, weight = torch.ones(3, 2, device="sim"), torch.ones(2, 2, device="sim")
    with torch.autocast("sim", torch.bfloat16):
        (x @ weight).index_add_(0, torch.zeros(3, dtype=torch.int64, device="sim"), x)


def _late_value(*, launches: int) -> None:
    """Read a value after some launches; the device is 1000 behind."""
    rows = torch.ones(3, device="sim")
    value = AsyncHostCopy(torch.ones(1, device="sim"))
    for _ in range(launches):
        rows.add_(1.0)
    _must_not_wait(value.read)


def _value_at_once() -> None:
    _late_value(launches=0)


def _value_a_step_later() -> None:
    _late_value(launches=10)


def _value_much_later() -> None:
    _late_value(launches=1000)


def _from_a_thread(act: Callable[[], object]) -> None:
    """Do something in a thread of its own, which starts on the first device that the process sees."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            act()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def _launch_on_a_stream(*, on_device: bool) -> None:
    side = SideStream(torch.device("sim", 0))

    def act() -> None:
        with in_thread(torch.device("sim", 0)) if on_device else nullcontext(), side.running():
            pass

    _from_a_thread(act)


def _thread_without_its_device() -> None:
    _launch_on_a_stream(on_device=False)


def _thread_on_its_device() -> None:
    _launch_on_a_stream(on_device=True)


def _late_communicator() -> None:
    """A process group that is first used when the memory is full."""
    state = switched_on().state
    before = state.memory_bytes, state.communicator_bytes
    state.memory_bytes, state.communicator_bytes = 1 << 20, 1 << 20
    try:
        rows = torch.ones(10, device="sim")
        state.open_communicator("one more")
        del rows
    finally:
        state.memory_bytes, state.communicator_bytes = before
        state.communicators.discard("one more")


def _unfinished_time() -> None:
    start, stop = (torch.sim.Event(enable_timing=True) for _ in range(2))  # type: ignore[attr-defined]
    start.record()
    torch.ones(3, device="sim").add_(1.0)
    stop.record()
    start.elapsed_time(stop)


def _unwaited_copy() -> None:
    """A copy to pinned memory is read when the host has waited for something before it."""
    before = StreamEvent(torch.device("sim", 0))
    host = torch.zeros(3).pin_memory()
    host.copy_(torch.ones(3, device="sim"), non_blocking=True)
    before.wait()
    assert host.sum() == 3, f"read {host.tolist()} too early"


def _memory(*, keep: bool) -> None:
    state = switched_on().state
    state.memory_bytes = 3 << 20
    try:
        held = [torch.ones(1 << 18, device="sim")]
        for _ in range(5):
            held = [*(held if keep else ()), torch.ones(1 << 18, device="sim")[:5]]
    finally:
        state.memory_bytes = None


def _too_much_memory() -> None:
    _memory(keep=True)


def _memory_used_again() -> None:
    _memory(keep=False)


ALONE: dict[str, tuple[Callable[[], object], str | None]] = {
    "mixed devices": (_mixed_devices, "RuntimeError: Expected all tensors to be on the same device"),
    "host rows by an index of the device": (_host_index_of_host_rows, "RuntimeError: Expected all tensors"),
    "out= on the host": (_out_on_the_host, "RuntimeError: Expected all tensors to be on the same device"),
    "numpy()": (_numpy, "TypeError: can't convert sim:0"),
    "a host kernel": (_host_kernel, "TypeError: can't convert sim:0"),
    "an address": (_address, "RuntimeError: a tensor on sim:0 has no address"),
    "copy from unpinned memory": (_unpinned_copy, "from unpinned memory"),
    "copy from pinned memory": (_pinned_copy, None),
    "a value on the host": (
        _value_on_the_host,
        f"planted_mistakes.py:{_value_on_the_host.__code__.co_firstlineno + 2} item",
    ),
    "a sparse product's gradient": (_sparse_backward, "CSC converted to CSR"),
    "a mask": (_mask, "mask"),
    "a list to the device": (_list_to_the_device, "copy to device"),
    "unwaited side stream": (_unwaited_side_stream, "RaceError: add on stream default reads what mul on stream side"),
    "waited side stream": (_waited_side_stream, None),
    "buffer written while it is read": (_unwaited_reuse, "RaceError: fill_ on stream default writes what mul"),
    "buffer written after it was read": (_waited_reuse, None),
    "memory freed too early": (_freed_too_early, "freed while mul on stream side may still read it"),
    "memory freed after recording": (_freed_after_recording, None),
    "a sum over edges that autocast casts": (_cast_sum, "NotImplementedError"),
    "a sum over edges in float32": (_own_sum, None),
    "types that autocast leaves": (
        _types_that_autocast_leaves,
        "RuntimeError: index_add_(): self (BFloat16) and source",
    ),
    "a value at once": (_value_at_once, "event.synchronize of the last launch"),
    "a value a step later": (_value_a_step_later, "event.synchronize'"),
    "a value that has come": (_value_much_later, None),
    "the time of work that runs": (_unfinished_time, "RuntimeError: Both events must be completed"),
    "a copy that the host did not wait for": (_unwaited_copy, "AssertionError: read [0.0, 0.0, 0.0] too early"),
    "more memory than there is": (_too_much_memory, "OutOfMemoryError: simulated device out of memory. Tried to alloc"),
    "memory that is used again": (_memory_used_again, None),
    "a stream of a thread without its device": (_thread_without_its_device, "ContextError: a context on sim:1"),
    "a stream of a thread on its device": (_thread_on_its_device, None),
    "a communicator that finds the memory full": (_late_communicator, "RuntimeError: NCCL error: out of memory"),
    "draws from the device's generator": (_draws, "InputError: the model: expected no randomness of its own"),
}
"""What is done, and what must be said; None where nothing is wrong."""


def _said(act: Callable[[], object]) -> str | None:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def make_mistakes(mesh: Mesh) -> dict[str, str | None]:
    """What was said of each mistake on one process."""
    switched_on().tracker.check = True
    return {name: _said(act) for name, (act, _) in ALONE.items()}


def _exchange(mesh: Mesh) -> tuple[Tensor, Tensor]:
    """The rows that were sent, and those that were received."""
    rows, out = torch.ones(2, 3, device="sim"), torch.empty(2, 3, device="sim")
    mesh.shuffles.all_to_all(Call("exchange"), out, rows, (1, 1), (1, 1)).wait()
    assert out.sum().item() == 6
    return rows, out


def _host_tensor(mesh: Mesh) -> None:
    mesh.world.all_reduce(Call("sum"), torch.ones(2)).wait()


def _not_contiguous(mesh: Mesh) -> None:
    mesh.world.all_reduce(Call("sum"), torch.ones(2, 3, device="sim").t()).wait()


def _two_threads(mesh: Mesh) -> None:
    """Rank 1 comes later, so that rank 0's first thread is still in its collective."""
    import time

    said: list[str | None] = []
    if mesh.rank == 1:
        time.sleep(0.5)
        mesh.world.all_to_all_counts(Call("first"), (1, 1))
        raise RuntimeError("rank 1 did as it should")
    first = threading.Thread(target=lambda: mesh.world.all_to_all_counts(Call("first"), (1, 1)))
    first.start()
    time.sleep(0.1)
    said.append(_said(lambda: mesh.gradients.all_to_all_counts(Call("second"), (1, 1))))
    first.join()
    raise RuntimeError(said[0])


def _other_order(mesh: Mesh) -> None:
    """One more group of the device, which only rank 0 uses."""
    assert isinstance(mesh.world, CheckedComm)
    if mesh.rank == 0:
        alone = CheckedComm(SoloComm("sim"), "alone", mesh.world.rules)
        alone.all_reduce(Call("sum"), torch.ones(2, device="sim")).wait()


def _two_streams(mesh: Mesh, *, wait: bool) -> None:
    """The second collective is issued on another stream, so the device may run both at once."""
    sums = [torch.ones(2, device="sim") for _ in range(2)]
    side, main = switched_on().new_stream("side"), torch.sim.current_stream()  # type: ignore[attr-defined]
    side.wait_stream(main)
    mesh.world.all_reduce(Call("sum"), sums[0]).wait()
    if wait:
        side.wait_stream(main)
    with side:
        mesh.gradients.all_reduce(Call("sum"), sums[1]).wait()
    side.synchronize()


def _late_rank(mesh: Mesh, wait_in: str) -> None:
    """Rank 0 works alone for longer than torch waits on a device, or as long as ranks wait on the host."""
    comm: CheckedComm = getattr(mesh, wait_in)
    comm.rules.start_clocks()
    if mesh.rank == 0:
        comm.rules.work_alone(599 if wait_in == "control" else 700)
    if wait_in == "control":
        comm.gather_text(Call("finish file", long_wait=True), "")
    mesh.world.all_reduce(Call("sum"), torch.ones(2, device="sim")).wait()


def _reads_too_early(mesh: Mesh) -> None:
    """Another stream reads what was received, and does not wait for the exchange."""
    side = switched_on().new_stream("side")
    rows, out = torch.ones(2, 3, device="sim"), torch.empty(2, 3, device="sim")
    side.wait_stream(torch.sim.current_stream())  # type: ignore[attr-defined]
    mesh.shuffles.all_to_all(Call("exchange"), out, rows, (1, 1), (1, 1)).wait()
    with side:
        out.sum()


def _writes_too_early(mesh: Mesh) -> None:
    """Another stream writes what was sent, and does not wait for the exchange."""
    side = switched_on().new_stream("side")
    rows, out = torch.ones(2, 3, device="sim"), torch.empty(2, 3, device="sim")
    side.wait_stream(torch.sim.current_stream())  # type: ignore[attr-defined]
    mesh.shuffles.all_to_all(Call("exchange"), out, rows, (1, 1), (1, 1)).wait()
    with side:
        rows.fill_(0.0)


TOGETHER: dict[str, tuple[Callable[[Mesh], object], str | None]] = {
    "an exchange": (_exchange, None),
    "an exchange that nobody waits for": (_reads_too_early, "RaceError: sum on stream side reads what exchange on"),
    "rows written while they are sent": (_writes_too_early, "RaceError: fill_ on stream side writes what exchange"),
    "a host tensor": (_host_tensor, "RuleError: sum: a tensor of the host, [2]"),
    "a tensor that is not contiguous": (_not_contiguous, "RuleError: sum: a tensor that is not contiguous, [3, 2]"),
    "two threads": (_two_threads, "two threads issue collectives at once"),
    "two streams": (lambda mesh: _two_streams(mesh, wait=False), "on stream side and on stream default are in flight"),
    "two streams in order": (lambda mesh: _two_streams(mesh, wait=True), None),
    "a rank that works alone": (lambda mesh: _late_rank(mesh, "world"), "RuleError: sum: rank 0 comes 700 s late"),
    "a rank that others wait for on the host": (lambda mesh: _late_rank(mesh, "control"), None),
    "another order on rank 1": (_other_order, "RuleError: collective 0 is not the same on all ranks. rank 0: alone"),
}


def make_together(mesh: Mesh, name: str) -> str | None:
    """What was said of a mistake of two ranks."""
    device = switched_on()
    device.tracker.check = True
    rules = CollectiveRules(device.tracker)
    checked = checked_mesh(mesh, rules)
    said = _said(lambda: TOGETHER[name][0](checked))
    return said if said is not None else _said(lambda: rules.compare_ranks(mesh.control))
