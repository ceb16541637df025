"""Attention layers by our kernels: PyG's own layer on the same block is the oracle, in outputs and gradients.

float64 to 1e-12. float32 to 2e-5 of the largest number, hubs of 10^4 edges included.
"""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv

from gsplit.graph.blocks import Block
from gsplit.kernels.csr import make_csr_edges
from gsplit.nn import attention
from gsplit.nn.attention import run_attention_layer
from gsplit.nn.layers import adds_self_loops

WIDTH = 7


@pytest.fixture(autouse=True)
def _weights() -> None:
    """Layers draw their weights from torch's generator; the bounds hold for these, not for any that could be drawn."""
    torch.manual_seed(0)


def _block(counts: list[int], num_src: int, seed: int = 0, *, self_loops: bool = True) -> Block:
    """Some edges are self-loops, some stand twice."""
    generator = torch.Generator().manual_seed(seed)
    indptr = torch.tensor([0, *counts]).cumsum(0)
    src = torch.randint(0, max(num_src, 1), (int(indptr[-1]),), generator=generator)
    block = Block(indptr, src, num_src)
    dst = block.edge_index()[1]
    if self_loops:
        src[::5] = dst[::5]
    for first, count in zip(indptr.tolist(), counts, strict=False):
        if count > 2:
            src[first + 1] = src[first + 2]
    return block


def _compare(layer: Any, block: Block, *, edge_dim: int | None = None, exact: Any = None) -> dict[str, float]:
    """Differences between our kernels and the layer itself, relative to the largest output, the largest gradient.

    ``exact``: compare with this layer in float64 instead.
    """
    generator, dtype = torch.Generator().manual_seed(1), next(layer.parameters()).dtype
    x = torch.randn(block.num_src, WIDTH, generator=generator, dtype=torch.float64)
    attr = None
    if edge_dim is not None:
        shape = (block.num_edges, edge_dim) if edge_dim else (block.num_edges,)
        attr = torch.randn(shape, generator=generator, dtype=torch.float64)
    g: Tensor | None = None

    def run(own: bool, conv: Any, kind: torch.dtype) -> dict[str, Tensor]:
        nonlocal g
        rows = x.to(kind, copy=True).requires_grad_()
        edge_attr = None if attr is None else attr.to(kind, copy=True).requires_grad_()
        pair = (rows, rows[: block.num_dst])
        if own:
            edges = make_csr_edges(block.indptr, block.src_rows, block.num_src, add_self_loops=adds_self_loops(conv))
            out = run_attention_layer(conv, pair, edge_attr, block, edges, None)
        else:
            out = conv(pair, block.edge_index(), edge_attr)
        if g is None:
            g = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        conv.zero_grad()
        out.backward(g.to(kind))
        found = {"out": out.detach(), "x": rows.grad, "attr": None if edge_attr is None else edge_attr.grad}
        found |= {name: None if p.grad is None else p.grad.clone() for name, p in conv.named_parameters()}
        return {name: value.double() for name, value in found.items() if value is not None}

    want = run(False, layer if exact is None else exact, dtype if exact is None else torch.float64)
    got = run(True, layer, dtype)
    assert got.keys() == want.keys()
    largest = {name: float(value.abs().max()) if value.numel() else 0.0 for name, value in want.items()}
    steepest = max(
        value for name, value in largest.items() if name != "out"
    )  # that of att_dst may be 0 but for rounding
    return {
        name: float((got[name] - value).abs().max()) / ((largest[name] if name == "out" else steepest) or 1.0)
        for name, value in want.items()
        if value.numel()
    }


GATS: list[dict[str, Any]] = [
    {},
    {"heads": 3},
    {"heads": 3, "concat": False, "residual": True},
    {"heads": 2, "add_self_loops": False, "bias": False},
    {"heads": 2, "negative_slope": -0.3},
    {"heads": 5, "negative_slope": 0.0, "residual": True},
    {"heads": 2, "negative_slope": 1.5, "concat": False, "bias": False},
    {"in_channels": (WIDTH, WIDTH), "heads": 2},
    {"out_channels": 33, "heads": 2},
    {"edge_dim": 3, "heads": 2},
    {"edge_dim": 3, "heads": 2, "add_self_loops": False},
    {"edge_dim": 3, "heads": 2, "fill_value": "max", "concat": False},
    {"edge_dim": 3, "fill_value": 0.5},
    {"edge_dim": 3, "fill_value": torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)},
]
TRANSFORMERS: list[dict[str, Any]] = [
    {},
    {"heads": 3},
    {"heads": 3, "concat": False},
    {"heads": 2, "root_weight": False},
    {"heads": 2, "beta": True},
    {"heads": 3, "beta": True, "concat": False, "bias": False},
    {"in_channels": (WIDTH, WIDTH), "heads": 2},
    {"out_channels": 33, "heads": 2},
]
LAYERS = [(kind, options) for kind in (GATConv, GATv2Conv) for options in GATS]
LAYERS += [(TransformerConv, options) for options in TRANSFORMERS]
LOOPS = [partial(kind, add_self_loops=loops) for kind in (GATConv, GATv2Conv) for loops in (True, False)]


@pytest.mark.parametrize("kind, options", LAYERS, ids=str)
@pytest.mark.parametrize("first", [True, False])
def test_layers_equal_pyg(kind: Any, options: dict[str, Any], first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the aggregation before the projection, and after it, for blocks for which the rule has the other."""
    monkeypatch.setattr(attention, "aggregates_first", lambda *sizes: first)
    layer = kind(**{"in_channels": WIDTH, "out_channels": 4, **options}).double()
    edge_dim = options.get("edge_dim")
    assert max(_compare(layer, _block([3, 0, 6, 1, 12, 0], 40), edge_dim=edge_dim).values()) < 1e-12
    worst = _compare(copy.deepcopy(layer).float(), _block([3, 0, 6, 1, 12, 0], 40), edge_dim=edge_dim)
    assert max(worst.values()) < 2e-5, worst


def test_edge_features_of_one_dimension_and_shared_weights() -> None:
    shared = GATv2Conv(WIDTH, 4, 2, share_weights=True).double()
    assert max(_compare(shared, _block([3, 0, 6, 1], 20)).values()) < 1e-12
    for kind in (GATConv, GATv2Conv):
        layer = kind(WIDTH, 4, 2, edge_dim=1).double()
        assert max(_compare(layer, _block([3, 0, 6, 1], 20), edge_dim=0).values()) < 1e-12


@pytest.mark.parametrize("kind", [*LOOPS, TransformerConv])
@pytest.mark.parametrize("counts, num_src", [([], 0), ([], 5), ([0, 0], 2), ([0, 0, 0], 9), ([1], 1)])
def test_blocks_with_nothing(kind: Any, counts: list[int], num_src: int) -> None:
    layer = kind(WIDTH, 4, 2).double()
    block = _block(counts, num_src)
    edges = make_csr_edges(block.indptr, block.src_rows, num_src, add_self_loops=adds_self_loops(layer))
    x = torch.randn(num_src, WIDTH, dtype=torch.float64, requires_grad=True)
    out = run_attention_layer(layer, (x, x[: block.num_dst]), None, block, edges, None)
    want = layer((x, x[: block.num_dst]), block.edge_index())
    assert out.shape == want.shape and torch.allclose(out, want, atol=1e-13)
    (grad,) = torch.autograd.grad(out.square().sum(), x)
    (wanted,) = torch.autograd.grad(want.square().sum(), x)
    assert torch.allclose(grad, wanted, atol=1e-13)


@pytest.mark.parametrize("kind", [GATConv, GATv2Conv, TransformerConv])
def test_hubs_in_float32_are_as_near_to_float64_as_pyg_or_nearer(kind: Any) -> None:
    """A destination with 10^4 edges; and all edges of all others from one source."""
    block = _block([10_000, *[30] * 300], 12_000, self_loops=False)
    block.src_rows[10_000:] = 11_999
    exact = kind(WIDTH, 16, 4).double()
    ours = _compare(copy.deepcopy(exact).float(), block, exact=exact)
    assert max(ours.values()) < 2e-5, ours


def test_scores_that_overflow_without_the_maximum() -> None:
    """Scores of thousands are rounded by 1e-12, and their weights with them (2.3e-12 at most for 300 draws)."""
    for kind in (GATConv, GATv2Conv, TransformerConv):
        layer = kind(WIDTH, 4, 2).double()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(60)
        assert max(_compare(layer, _block([3, 2, 6, 1], 20)).values()) < 1e-11


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=6),
    st.integers(0, 8),
    st.integers(1, 5),
    st.integers(1, 20),
    st.sampled_from([*LOOPS, TransformerConv]),
)
def test_any_block(counts: list[int], more: int, heads: int, width: int, kind: Any) -> None:
    layer: Any = kind(WIDTH, width, heads).double()
    block = _block(counts, len(counts) + more, seed=sum(counts))
    assert max(_compare(layer, block).values(), default=0.0) < 1e-12


def test_damaged_edges_are_refused() -> None:
    with pytest.raises(ValueError, match=r"source rows in \[0, 3\)"):
        make_csr_edges(torch.tensor([0, 2]), torch.tensor([0, 3]), 3, add_self_loops=True)
    with pytest.raises(ValueError, match="a CSR matrix of at most 3 rows"):
        make_csr_edges(torch.tensor([0, 2, 1, 2]), torch.tensor([0, 1]), 3, add_self_loops=False)
    with pytest.raises(ValueError, match="a CSR matrix of at most 1 rows"):
        make_csr_edges(torch.tensor([0, 1, 1]), torch.tensor([0]), 1, add_self_loops=False)
