"""What the tests of Triton kernels run in the interpreter's process: each kernel beside its host twin.

Tensors are the host's: Triton's interpreter reads and writes them in place. ``seed`` draws the numbers and, where it is
not 0, the order of programs.
"""

import itertools
from dataclasses import astuple
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton_order
from torch import Tensor

from gsplit.graph.graph import Graph
from gsplit.kernels import rows as host_rows
from gsplit.kernels.sums import EdgeSums
from gsplit.kernels.triton import dropout, gather, rows, words
from gsplit.kernels.triton.launch import set_launcher
from gsplit.keys import scalar
from gsplit.nn.dropout import keyed_dropout
from gsplit.sampling.draw_options import DrawOptions
from gsplit.sampling.draws import Draw
from gsplit.sampling.neighbor import HostNeighborSampler
from gsplit.sampling.neighbor_triton import TritonNeighborSampler, _place_edges

CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def bits(tensor: Tensor) -> Tensor:
    """Compares -0 and 0 as different and NaN as equal to itself."""
    return gather.as_bits(tensor.contiguous())


def assert_same_bits(got: Tensor, want: Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape, (got.dtype, got.shape, want.dtype, want.shape)
    assert torch.equal(bits(got), bits(want)), (got, want)


def interpreted() -> bool:
    """Whether kernels really are interpreted here."""
    return type(words.mix).__name__ == "InterpretedFunction"


def orders_of_programs(seed: int) -> list[list[int]]:
    """The orders in which a launch of several programs ran."""
    with triton_order.program_order(seed) as orders:
        out = torch.empty(64, 256, dtype=torch.float32)
        gather.gather_rows(torch.empty(0, 256), torch.zeros(1, 256), torch.zeros(64, dtype=torch.int64), out)
    return orders


def last_writer(seed: int) -> int:
    """A kernel that depends on the order of programs: all rows are gathered into one; returns the row that stayed."""
    target = torch.zeros(1, 128, dtype=torch.int32)
    positions = torch.arange(40)
    stored = torch.arange(40).to(torch.int32)[:, None].repeat(1, 128)
    with triton_order.program_order(seed):
        gather.gather_rows(target[:0], stored, positions, target.expand(40, 128))
    return int(target[0, 0])


def check_words(words_: list[int]) -> None:
    for word in words_:
        high, low = words.word_halves(word)
        assert -(2**31) <= high < 2**31 and -(2**31) <= low < 2**31
        assert ((high << 32) | (low & 0xFFFFFFFF)) & scalar.MASK == word


def check_gather(num_rows: int, width: int, num_cached: int, stride: int, dtype: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    stored = torch.randn(50, width, generator=generator).to(DTYPES[dtype])
    positions = torch.randint(0, 50, (num_rows,), generator=generator)
    positions[:2] = torch.tensor([min(num_cached, 49), max(num_cached - 1, 0)])[:num_rows]  # both sides of the border
    cached = torch.cat([stored[:num_cached], torch.full((1, width), 88).to(stored.dtype)])[:num_cached]
    stored_cold = stored.clone()
    stored_cold[:num_cached] = 77  # a hot row must not come from here
    behind = torch.full((num_rows, stride), 5.0).to(DTYPES[dtype])
    with triton_order.program_order(seed):
        gather.gather_rows(cached, stored_cold, positions, behind[:, :width])
    assert_same_bits(behind[:, :width], stored[positions])
    assert bool((behind[:, width:] == 5).all())


def check_scaled_gather(num_rows: int, width: int, num_cached: int, stride: int, seed: int) -> None:
    """Rows of int8 with scales, against the host's kernel."""
    rng = np.random.default_rng(seed)
    stored = rng.integers(-128, 128, (50, width)).astype(np.int8)
    scales = (rng.normal(size=50) * np.geomspace(1e-30, 1e30, 50)).astype(np.float32)
    positions = rng.integers(0, 50, num_rows)
    wanted = torch.empty(num_rows, width)
    host_rows.copy_rows(stored, positions, host_rows.NO_PLACES, wanted.view(-1).numpy(), width, scales)
    cold = stored.copy()
    cold[:num_cached] = 77  # a hot row must not come from here
    behind = torch.full((num_rows, stride), 5.0)
    hot_rows, all_rows, rows_wanted = (torch.from_numpy(array) for array in (stored[:num_cached], cold, positions))
    with triton_order.program_order(seed):
        gather.gather_rows(hot_rows, all_rows, rows_wanted, behind[:, :width], torch.from_numpy(scales))
    assert_same_bits(behind[:, :width], wanted)
    assert bool((behind[:, width:] == 5).all())


def check_dropout(shape: tuple[int, int], p: float, dtype: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if x.numel() > 4:
        x.view(-1)[:4] = torch.tensor([-0.0, float("inf"), float("nan"), 3.3e38])
    x = x.to(DTYPES[dtype])
    keys = torch.randint(-(2**63), 2**63 - 1, (shape[0],), generator=generator)
    want = keyed_dropout(x, keys, p)
    got = torch.full_like(want, 7.0)
    with triton_order.program_order(seed):
        dropout.scale_kept(x, keys, int(p * 2**32), 1.0 / (1.0 - p) if p < 1 else 0.0, got)
    numbers = ~want.isnan()
    assert torch.equal(numbers, ~got.isnan())
    assert_same_bits(got[numbers], want[numbers])


def check_rows(num_rows: int, num_sent: int, row_shape: tuple[int, ...], num_dst: int, dtype: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    send_rows = torch.randint(0, max(num_rows, 1), (num_sent if num_rows else 0,), generator=generator)
    h, g_mixed, g_dst, returned = (
        torch.randn(count, *row_shape, generator=generator, dtype=torch.float64).to(DTYPES[dtype])
        for count in (num_rows, num_rows + 3, min(num_dst, num_rows), send_rows.numel())
    )
    g_mixed[..., :1] = -0.0  # a row to which nothing returns keeps its sign
    got = [torch.full_like(t, 7.0) for t in (h, returned, h)]
    want = [torch.full_like(t, 7.0) for t in (h, returned, h)]
    host_rows.copy_and_gather(h, send_rows, want[0], want[1])
    host_rows.merge_gradient(g_mixed, g_dst, send_rows, (returned,), want[2])
    with triton_order.program_order(seed):
        rows.copy_and_gather(h, send_rows, got[0], got[1])
        rows.merge_gradient(g_mixed, g_dst, send_rows, returned, got[2])
    for one, two in zip(got, want, strict=True):
        assert_same_bits(one, two)


def check_sums(counts: list[int], width: int, dtype: str, weighted: bool, seed: int) -> None:
    """Sums and their gradients, by the kernel and by torch's operations, against a dense matrix in float64."""
    generator = torch.Generator().manual_seed(seed)
    num_src = len(counts) + 5
    indptr = torch.tensor([0, *np.cumsum(counts)])
    src_rows = torch.randint(0, num_src, (int(indptr[-1]),), generator=generator)
    weights = torch.rand(src_rows.numel(), generator=generator).double() if weighted else None
    x = torch.randn(num_src, width, generator=generator, dtype=torch.float64).to(DTYPES[dtype])
    g = torch.randn(len(counts), width, generator=generator, dtype=torch.float64).to(DTYPES[dtype])
    dense = torch.zeros(len(counts), num_src, dtype=torch.float64)
    places = (torch.repeat_interleave(torch.arange(len(counts)), indptr.diff()), src_rows)
    dense.index_put_(places, torch.ones(src_rows.numel()).double() if weights is None else weights, accumulate=True)
    bound = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 0.05}[dtype]
    for kernel, mean in itertools.product(("triton", "torch"), (False, True)):
        matrix = dense / indptr.diff().clamp(min=1).unsqueeze(1) if mean else dense
        rows = x.clone().requires_grad_()
        with patch("gsplit.kernels.sums.kernel_for", return_value=kernel), triton_order.program_order(seed):
            out = EdgeSums(indptr, src_rows, num_src, weights)(rows, mean=mean)
            out.backward(g)
        assert rows.grad is not None and out.dtype == rows.grad.dtype == x.dtype
        for got, want in ((out, matrix @ x.double()), (rows.grad, matrix.t() @ g.double())):
            torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound)


def random_graph(num_vertices: int, num_edges: int, skew: float, seed: int) -> Graph:
    rng = np.random.default_rng(seed)
    dst = (num_vertices * rng.random(num_edges) ** skew).astype(np.int64)
    src = (num_vertices * rng.random(num_edges) ** 1.5).astype(np.int64)
    order = np.lexsort((src, dst))
    counts = np.bincount(dst, minlength=num_vertices)
    return Graph(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), src[order].astype(np.int32), num_vertices)


def check_sampling(
    shape: tuple[int, int, float],
    owned: tuple[int, int],
    fanouts: list[int],
    renumbered: bool,
    edge_ids: bool,
    seed: int,
    options: DrawOptions | None = None,
) -> int:
    """Two mini-batches layer by layer on both samplers, with rows that others ask for; returns the edges compared."""
    rng = np.random.default_rng(seed)
    (first, stop), num_edges = owned, 0
    graph = random_graph(*shape, seed).restrict(first, stop)
    original = rng.permutation(shape[0])[first:stop] if renumbered else np.empty(0, np.int64)
    weights = np.random.default_rng(seed).exponential(1.0, graph.indices.size)
    draw = Draw(options or DrawOptions(), np.arange(shape[0])[::-1] if renumbered else np.arange(0), weights)
    host = HostNeighborSampler(graph, original, edge_ids=edge_ids, draw=draw)
    device = TritonNeighborSampler(graph, original, CPU, edge_ids=edge_ids, draw=draw)
    assert device.edges.indices.numel() == graph.num_edges
    for step in range(2):
        targets = torch.from_numpy(first + rng.permutation(stop - first)[: max(1, (stop - first) // 7)])
        with triton_order.program_order(seed):
            one, two = host.start(targets.clone()), device.start(targets)
            for hop, fanout in enumerate(fanouts):
                key = scalar.mix(seed, step, hop)
                a, b = one.sample_layer(key, fanout), two.sample_layer(key, fanout)
                num_edges += a.num_edges
                for name in ("indptr", "sources", "foreign_ids") + (("edge_ids",) if edge_ids else ()):
                    assert_same_bits(getattr(b, name), getattr(a, name))
                asked = torch.from_numpy(first + rng.integers(0, stop - first, 9))
                assert_same_bits(two.locate(asked), one.locate(asked))
                placed = torch.arange(a.foreign_ids.numel()) + one.num_rows
                assert_same_bits(two.resolve(b, placed), one.resolve(a, placed).clone())
            assert_same_bits(two.ids(two.num_rows), one.ids(one.num_rows))
            one.close()
            two.close()
        assert bool((device.state == 2**31 - 1).all())
    return num_edges


def refuse_sampling(what: str) -> str:
    """The message of what a sampler refuses."""
    graph = Graph(np.array([0, 1, 1]), np.array([1]), 4, first_vertex=1)
    if what == "damaged offsets":
        graph = Graph(np.array([0, 5, 1]), np.array([1]), 4, first_vertex=1)
    if what == "damaged ids":
        graph = Graph(np.array([0, 1, 1]), np.array([4]), 4, first_vertex=1)
    try:
        if what == "no room":
            with (
                patch("gsplit.sampling.neighbor_triton.free_memory", lambda device: 0),
                patch("gsplit.sampling.neighbor_triton.register_memory", lambda tensor, device: None),
            ):
                _place_edges(graph.indices, torch.device("meta"))
        sampler = TritonNeighborSampler(graph, np.empty(0, np.int64), CPU)
        frontier = sampler.start(torch.tensor([1, 2]))
        frontier.locate(torch.tensor([2, 3]))
    except ValueError as error:
        if what == "foreign ids":  # and the sampler can be used again
            assert sampler.start(torch.tensor([2])).ids(1).tolist() == [2]
        return str(error)
    return "nothing was refused"


def fail_and_go_on(failing: str) -> None:
    """A kernel that fails in a layer leaves nothing in the sampler."""
    graph = random_graph(60, 900, 1.5, 3)
    sampler = TritonNeighborSampler(graph, np.empty(0, np.int64), CPU)
    targets = torch.arange(5)
    frontier = sampler.start(targets)

    def fail(kernel: Any, grid: Any, args: Any, constants: Any, writes: Any) -> None:
        if kernel.__name__ == failing:
            raise RuntimeError("out of memory")
        before(kernel, grid, args, constants, writes)

    before = set_launcher(fail)
    try:
        frontier.sample_layer(1, 4)
    except RuntimeError:
        frontier.close()
    else:
        raise AssertionError("nothing failed")
    finally:
        set_launcher(before)
    assert bool((sampler.state == 2**31 - 1).all())
    want = HostNeighborSampler(graph, np.empty(0, np.int64)).start(targets.clone()).sample_layer(1, 4)
    assert_same_bits(sampler.start(targets).sample_layer(1, 4).sources, want.sources)


def random_block(num_dst: int, num_src: int, most: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    counts = torch.randint(0, most + 1, (num_dst,), generator=generator)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return indptr, torch.randint(0, num_src, (int(indptr[-1]),), generator=generator)


def compiled_usage(capability: int) -> dict[str, tuple[int, ...]]:
    """Registers, bytes of stack, local and shared memory, and vector loads of every kernel on an architecture."""
    from gsplit_bench.kernel_cases import CASES, compile_case

    return {case.name: astuple(compile_case(case, capability)) for case in CASES}


def compiled_usage_on_amd() -> dict[str, tuple[int, ...]]:
    """The same on a GPU of AMD."""
    from gsplit_bench.kernel_cases import CASES, compile_for_amd

    return {case.name: astuple(compile_for_amd(case)) for case in CASES}


def specialized_numbers() -> list[str]:
    """Arguments that are numbers and whose value decides how a kernel is compiled."""
    from gsplit_bench.kernel_cases import CASES

    found = set()
    for case in CASES:
        names = [name for name in case.kernel.arg_names if name not in case.constants]
        fixed = [
            case.kernel.arg_names[parameter.num] for parameter in case.kernel.params if parameter.do_not_specialize
        ]
        found |= {n for n, kind in zip(names, case.types.split(), strict=True) if kind[0] != "*" and n not in fixed}
    return sorted(found)


def compiled_names() -> set[str]:
    """The kernels that ``compiled_usage`` compiles."""
    from gsplit_bench.kernel_cases import CASES

    return {case.kernel.__name__ for case in CASES}
