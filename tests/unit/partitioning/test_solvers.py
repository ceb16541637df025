"""Every solver on planted communities and on graphs that are no fun; failures become messages."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from graphs import csc_of

from gsplit.errors import InputError, MissingDependencyError
from gsplit.partitioning.presample import Counts
from gsplit.partitioning.solvers import cluster, kaminpar, metis, run
from gsplit.partitioning.solvers.run import SOLVERS, run_solver
from gsplit.partitioning.weighted_graph import WeightedGraph
from gsplit.partitioning.weights import weigh


def _planted(
    folder: Path, communities: int = 8, size: int = 60, seed: int = 0, idle: slice = slice(0)
) -> tuple[WeightedGraph, Any, Any, Any]:
    """Communities in random order, edges mostly inside; weights follow a power law, those of ``idle`` are 0."""
    rng = np.random.default_rng(seed)
    n = communities * size
    label = rng.permutation(np.repeat(np.arange(communities), size))
    members = [np.flatnonzero(label == c) for c in range(communities)]
    src = rng.integers(0, n, 12 * n)
    inside = np.array([rng.choice(members[label[s]]) for s in src])
    dst = np.where(rng.random(src.size) < 0.9, inside, rng.integers(0, n, src.size))
    csc, src, dst = csc_of(n, src, dst)
    k = (rng.pareto(2.0, n) * 20 + 1).astype(np.uint32)
    k[idle] = 0
    counts = Counts(k, k.astype(np.uint64), k, rng.integers(0, 9, src.size).astype(np.uint32), 10)
    graph = weigh("gsplit", csc, counts, np.arange(n), folder, 1, 0)
    return graph, src, dst, label


def _cut(graph: WeightedGraph, parts: Any) -> float:
    rows = np.repeat(np.arange(graph.num_vertices), np.diff(graph.xadj))
    return float(graph.edge_weights[parts[rows] != parts[graph.adjncy]].sum() / graph.edge_weights.sum())


def _balance(graph: WeightedGraph, parts: Any, num_parts: int) -> float:
    loads = np.bincount(parts, weights=graph.vertex_weights[:, 0], minlength=num_parts)
    return float(loads.max() / loads.mean())


@pytest.mark.parametrize("solver", ["metis", "kaminpar", "mtkahypar", "cluster", "restream"])
def test_communities_are_found_and_loads_balanced(solver: str, tmp_path: Path) -> None:
    graph, *_ = _planted(tmp_path)
    found = run_solver(solver, graph, tmp_path, 4, 1.05, 0)
    assert found.parts.shape == (graph.num_vertices,)
    assert _cut(graph, found.parts) < 0.25  # at random 0.75; what is planted 0.09 inside of 8 communities
    assert _balance(graph, found.parts, 4) < 1.06
    assert found.peak_bytes > 0 and found.seconds > 0
    if solver != "mtkahypar":  # it draws by the time as well
        assert np.array_equal(found.parts, run_solver(solver, graph, tmp_path, 4, 1.05, 0).parts)


def test_random_parts_are_even_and_know_nothing(tmp_path: Path) -> None:
    graph, *_ = _planted(tmp_path)
    found = run_solver("random", graph, tmp_path, 4, 1.05, 0)
    assert _cut(graph, found.parts) == pytest.approx(0.75, abs=0.03)
    assert np.bincount(found.parts, minlength=4).min() > 80


def test_metis_balances_two_things_at_once(tmp_path: Path) -> None:
    graph, *_ = _planted(tmp_path)
    rng = np.random.default_rng(1)
    two = np.stack([graph.vertex_weights[:, 0], rng.integers(0, 2, graph.num_vertices)], axis=1)
    parts = metis.solve(WeightedGraph(graph.xadj, graph.adjncy, graph.edge_weights, two), 4, 1.1, 0)
    for column in range(2):
        loads = np.bincount(parts, weights=two[:, column], minlength=4)
        assert loads.max() / loads.mean() < 1.2


def _tiny(n: int, edges: list[tuple[int, int]], weights: int) -> WeightedGraph:
    pairs = sorted({p for a, b in edges if a != b for p in ((a, b), (b, a))})
    xadj = np.concatenate([[0], np.cumsum(np.bincount([a for a, _ in pairs], minlength=n))]).astype(np.int64)
    adjncy = np.array([b for _, b in pairs], np.int32)
    return WeightedGraph(xadj, adjncy, np.ones(adjncy.size, np.int64), np.full((n, 1), weights, np.int64))


@pytest.mark.parametrize("solver", ["metis", "kaminpar", "cluster", "restream", "random"])
@pytest.mark.parametrize(
    "graph",
    [
        _tiny(1, [], 1),
        _tiny(20, [], 1),
        _tiny(20, [(0, i) for i in range(1, 20)], 1),
        _tiny(20, [(i, i + 1) for i in range(0, 18, 2)], 0),
        _tiny(6, [(0, 1), (1, 2), (3, 4)], 5),
    ],
    ids=["one vertex", "no edges", "star", "no weights", "pieces"],
)
def test_graphs_that_are_no_fun(solver: str, graph: WeightedGraph) -> None:
    module = run.solver_module(solver)
    for num_parts in {1, min(2, graph.num_vertices), min(4, graph.num_vertices)}:
        parts = module.solve(graph, num_parts, 1.05, 0)
        assert parts.shape == (graph.num_vertices,)
        assert parts.min() >= 0 and parts.max() < num_parts


def test_what_cannot_be_done_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, *_ = _planted(tmp_path)
    with pytest.raises(
        InputError, match="solver: expected one of metis, kaminpar, mtkahypar, cluster, restream, random"
    ):
        run_solver("scotch", graph, tmp_path, 4, 1.05, 0)
    assert set(SOLVERS) == {"metis", "kaminpar", "mtkahypar", "cluster", "restream", "random"}
    (tmp_path / "xadj.npy").write_bytes(b"damaged")
    with pytest.raises(InputError, match="metis: expected a partition .got exit code 1"):
        run_solver("metis", graph, tmp_path, 4, 1.05, 0)
    monkeypatch.setattr(run, "free_bytes", lambda: 1000)
    with pytest.raises(InputError, match="metis: expected about .* of memory .*use --solver kaminpar or cluster"):
        run_solver("metis", graph, tmp_path, 4, 1.05, 0)
    with pytest.raises(InputError, match="kaminpar: expected about .* of memory .*use --solver cluster"):
        run_solver("kaminpar", graph, tmp_path, 4, 1.05, 0)
    with pytest.raises(InputError, match="cluster: expected about .* of memory .*use --solver restream"):
        run_solver("cluster", graph, tmp_path, 4, 1.05, 0)


def test_a_solver_that_is_killed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, *_ = _planted(tmp_path)
    start = subprocess.Popen

    def killed(command: list[str], **options: Any) -> Any:
        process = start(command, **options)
        process.kill()
        return process

    monkeypatch.setattr(subprocess, "Popen", killed)
    with pytest.raises(InputError, match="metis: expected a partition .got signal SIGKILL.*out of memory"):
        run_solver("metis", graph, tmp_path, 4, 1.05, 0)


@pytest.mark.parametrize(
    "module, name", [("pymetis._internal", "metis"), ("kaminpar", "kaminpar"), ("mtkahypar", "mtkahypar")]
)
def test_a_missing_package_is_named(module: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, *_ = _planted(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=f"the package {module.partition('.')[0]} .got .*another solver"):
        run.solver_module(name).solve(graph, 4, 1.05, 0)


def test_a_narrow_metis_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pymetis._internal as internal

    graph, *_ = _planted(tmp_path)
    monkeypatch.setattr(internal, "_idx_type_width", lambda: 32)
    with pytest.raises(MissingDependencyError, match="METIS: expected 64-bit integers .got 32"):
        metis.solve(graph, 4, 1.05, 0)


def test_metis_options_are_set_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """METIS 5.2 numbers its options differently from 5.1."""
    import pymetis

    graph, *_ = _planted(tmp_path)
    passed: dict[int, int] = {}

    class Library:
        def METIS_PartGraphRecursive(self, *args: Any) -> int:  # noqa: N802
            options = ctypes.cast(args[10], ctypes.POINTER(ctypes.c_int64))
            passed.update({key: options[key] for key in range(40) if options[key] != -1})
            return 1

    monkeypatch.setattr(metis, "_library", Library)
    monkeypatch.setattr(pymetis, "OptionKey", SimpleNamespace(NCUTS=11, SEED=12, NUMBERING=13))
    metis.solve(graph, 4, 1.05, 6)
    assert passed == {11: 4, 12: 7, 13: 0}


@pytest.mark.parametrize("seed", [3, 4, 6])
def test_kaminpar_ends_if_some_vertices_weigh_nothing(seed: int, tmp_path: Path) -> None:
    """Its balancing ran forever with these seeds when vertices were given to it with weight 0.

    One vertex is heavier than a part should be: the balance is as good as that allows.
    """
    graph, *_ = _planted(tmp_path, idle=slice(None, None, 2))
    assert (graph.vertex_weights == 0).mean() == 0.5
    command = [sys.executable, "-P", "-m", "gsplit.partitioning.solvers.run", "kaminpar", str(tmp_path)]
    subprocess.run([*command, "8", "1.05", str(seed), "1"], check=True, timeout=60)
    weights = graph.vertex_weights[:, 0]
    assert weights.max() > 1.05 * weights.sum() / 8
    assert np.bincount(np.load(tmp_path / "parts.npy"), weights).max() == weights.max()


@pytest.mark.parametrize("factor", [1, 1 << 31], ids=["32 bits", "64 bits"])
def test_kaminpar_reads_the_graph_that_was_written(factor: int, tmp_path: Path) -> None:
    graph, *_ = _planted(tmp_path)
    graph.edge_weights[...] *= factor
    path = tmp_path / "g.parhip"
    with path.open("wb") as file:
        kaminpar._write_parhip(graph, file)
    entry_bytes = 4 + (4 if factor == 1 else 8)
    assert path.stat().st_size == 24 + 8 * (2 * graph.num_vertices + 1) + entry_bytes * graph.adjncy.size
    package = kaminpar._package()
    loaded = package.load_graph(str(path), package.GraphFileFormat.PARHIP, compress=True)
    parts = np.arange(graph.num_vertices) % 3
    rows = np.repeat(np.arange(graph.num_vertices), np.diff(graph.xadj))
    both_ways = graph.edge_weights[parts[rows] != parts[graph.adjncy]].sum()
    assert 2 * package.edge_cut(loaded, parts.tolist()) == both_ways
    weights = 1024 * graph.vertex_weights[:, 0] + 1
    assert [loaded.node_weight(v) for v in range(loaded.n())] == weights.tolist()


@pytest.mark.parametrize("solver", ["metis", "kaminpar", "mtkahypar", "cluster", "restream"])
def test_memory_is_not_underestimated(solver: str, tmp_path: Path) -> None:
    graph, *_ = _planted(tmp_path, communities=20, size=200)
    found = run_solver(solver, graph, tmp_path, 300, 1.05, 0)  # numbers above 256 are objects of their own in Python
    idle = run_solver("random", graph, tmp_path, 300, 1.05, 0).peak_bytes  # of Python and NumPy
    assert found.peak_bytes - idle < found.estimated_bytes
    assert found.cpu_seconds > 0


def test_a_contracted_graph_has_the_weights_between_and_in_clusters(tmp_path: Path) -> None:
    graph, *_ = _planted(tmp_path / "graph")
    largest = int(graph.vertex_weights.max()) + 10
    clusters = cluster._find_clusters(graph, largest, seed=0)
    contracted = cluster._contract(graph, clusters, tmp_path)
    n = contracted.num_vertices
    assert n == len(np.unique(clusters)) == clusters.max() + 1 < 0.5 * graph.num_vertices
    rows = np.repeat(np.arange(graph.num_vertices), np.diff(graph.xadj))
    want = np.zeros((n, n), np.int64)
    np.add.at(want, (clusters[rows], clusters[graph.adjncy]), graph.edge_weights)
    np.fill_diagonal(want, 0)
    found = np.zeros((n, n), np.int64)
    found_rows = np.repeat(np.arange(n), np.diff(contracted.xadj))
    found[found_rows, contracted.adjncy] = contracted.edge_weights
    assert np.array_equal(found, want) and contracted.edge_weights.all()
    places = found_rows * n + contracted.adjncy
    assert (np.diff(places) > 0).all()  # neighbours ascend, each once
    loads = np.bincount(clusters, graph.vertex_weights[:, 0])
    assert np.array_equal(contracted.vertex_weights[:, 0], loads) and loads.max() <= largest


def test_vertices_without_neighbours_join_each_other_up_to_the_limit() -> None:
    clusters = cluster._find_clusters(_tiny(30, [(0, 1)], 2), largest=20, seed=0)
    assert np.bincount(clusters).tolist() == [2, 10, 10, 8]


def test_what_is_still_large_is_clustered_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, *_ = _planted(tmp_path, communities=20, size=200)
    sizes: list[int] = []
    solve = kaminpar.solve

    def noted(contracted: WeightedGraph, *args: Any) -> Any:
        sizes.append(contracted.num_vertices)
        return solve(contracted, *args)

    monkeypatch.setattr(kaminpar, "solve", noted)
    for most in (cluster._MOST_ENTRIES, 0):
        monkeypatch.setattr(cluster, "_MOST_ENTRIES", most)
        parts = cluster.solve(graph, 4, 1.05, 0)
        assert _cut(graph, parts) < 0.25 and _balance(graph, parts, 4) < 1.06
    assert sizes[1] < sizes[0] < 0.5 * graph.num_vertices
    monkeypatch.setattr(cluster, "free_bytes", lambda: 1000)
    with pytest.raises(InputError, match="cluster: expected about .* that hardly contracts .*use --solver restream"):
        cluster.solve(graph, 4, 1.05, 0)


def test_mt_kahypar_takes_weights_that_its_integers_do_not_hold(tmp_path: Path) -> None:
    graph, *_ = _planted(tmp_path)
    graph.vertex_weights[...] *= 1_000_000
    graph.edge_weights[...] *= 1_000_000
    assert min(graph.vertex_weights.sum(), graph.edge_weights.sum()) > 1 << 31
    found = run_solver("mtkahypar", graph, tmp_path, 4, 1.05, 1 << 40)
    assert _cut(graph, found.parts) < 0.25 and _balance(graph, found.parts, 4) < 1.06


@pytest.mark.parametrize("factor", [1 << 41, 1 << 47])
@pytest.mark.parametrize("solver", ["kaminpar", "cluster"])
def test_kaminpar_takes_weights_that_its_sums_do_not_hold(solver: str, factor: int, tmp_path: Path) -> None:
    graph, *_ = _planted(tmp_path)
    graph.vertex_weights[...] *= factor
    assert 1024 * int(graph.vertex_weights.astype(object).sum()) > 1 << 63
    found = run_solver(solver, graph, tmp_path, 4, 1.05, 0)
    assert _cut(graph, found.parts) < 0.25 and _balance(graph, found.parts, 4) < 1.06


def test_a_solver_ends_with_whoever_started_it(tmp_path: Path) -> None:
    """Killed with SIGKILL, which nobody can catch, a caller leaves no solver behind."""
    _planted(tmp_path, communities=40, size=600)
    program = (
        "import sys; from pathlib import Path; from gsplit.partitioning.weighted_graph import open_weighted;"
        "from gsplit.partitioning.solvers.run import run_solver;"
        "run_solver('metis', open_weighted(Path(sys.argv[1])), Path(sys.argv[1]), 64, 1.05, 0)"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path)]) as caller:
        solver = None
        while solver is None:
            time.sleep(0.01)
            children = Path(f"/proc/{caller.pid}/task/{caller.pid}/children").read_text().split()
            solver = next((c for c in children if "pymetis" in Path(f"/proc/{c}/maps").read_text()), None)
            assert caller.poll() is None
        os.kill(int(solver), signal.SIGSTOP)  # so that it cannot end by itself
        caller.kill()
    deadline = time.monotonic() + 300
    while Path(f"/proc/{solver}").exists() and _state(solver) != "Z" and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{solver}").exists() or _state(solver) == "Z"


def _state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
