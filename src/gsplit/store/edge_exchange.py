"""Edges that several hosts decode once, all together, and leave for each other in a shared folder.

An edge table that is not sorted has edges of every host in every piece (a row group of Parquet, a file of CSV). Instead
of each host decoding all pieces, a piece is decoded by one host, which leaves its edges in a file per host that needs
them. Memory is one chunk of edges; the files have two ids per edge, and its values.

    FOLDER/
      3.lock            held by the process that decodes task 3, some consecutive pieces
      3/0.src, 3/0.dst  edges of task 3 that host 0 needs
      3/counts          how many each host needs, then how many were dropped

Hosts take tasks that nobody has, so no host depends on another: one that runs alone does all of them. If a process
dies, the system releases its lock, and the next host to look takes the task. A task appears complete, by a rename.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from gsplit.array_types import Array, Ids
from gsplit.files.atomic import try_lock
from gsplit.graph.ownership import Ownership
from gsplit.kernels.jit import kernel
from gsplit.progress import Progress
from gsplit.store.files import read_exactly, storage_dtype, write_all
from gsplit.store.manifest import index_type
from gsplit.store.source import CHUNK_EDGES, EdgeChunk, EdgePieces, GraphSource, VertexRange
from gsplit.store.spill import Spill

__all__ = ["EdgeExchange"]

_TASKS_PER_HOST = 4
_POLL_SECONDS = 0.1
_COUNTS = "counts"
_FEW_HOSTS = 32


class EdgeExchange:
    """The exchange of one import. ``both_ends``: an edge is also needed by the host of its source."""

    def __init__(self, folder: Path, source: GraphSource, hosts: Ownership, *, both_ends: bool) -> None:
        assert source.edge_pieces is not None
        self._folder = folder
        self._source = source
        self._pieces: EdgePieces = source.edge_pieces
        self._hosts = hosts
        self._both_ends = both_ends
        self._num_tasks = min(self._pieces.count, _TASKS_PER_HOST * hosts.num_ranks)
        self._id_type = storage_dtype(index_type(source.num_vertices))

    @staticmethod
    def pays(source: GraphSource, held: VertexRange, num_hosts: int, *, both_ends: bool) -> bool:
        """Whether hosts would otherwise decode a piece twice or more on average, by the need of one of them."""
        pieces = source.edge_pieces
        if pieces is None or num_hosts < 2 or pieces.count < num_hosts:
            return False
        needed = VertexRange(held.first, held.stop, counts_dangling_edges=False)
        return num_hosts * pieces.count_near(needed, both_ends) >= 2 * pieces.count

    def edges_of(self, host: int, progress: Progress) -> Iterator[EdgeChunk]:
        """Decode the tasks that nobody has, wait for those of others, then yield the edges that a host needs."""
        self._folder.mkdir(exist_ok=True)
        first = host * self._num_tasks // self._hosts.num_ranks  # hosts begin at different tasks
        left = [(first + turn) % self._num_tasks for turn in range(self._num_tasks)]
        while left:
            waiting = []
            for place, task in enumerate(left):
                if not self._ensure(task):
                    waiting.append(task)
                done = self._num_tasks - (len(left) - place - 1) - len(waiting)
                progress("decode edges with other hosts", done, self._num_tasks)
            if waiting == left:
                time.sleep(_POLL_SECONDS)
            left = waiting
        for task in range(self._num_tasks):
            yield from self._read(task, host)

    def _ensure(self, task: int) -> bool:
        """Decode a task unless it is complete. False if another process is at it."""
        if self._is_complete(task):
            return True
        with (self._folder / f"{task}.lock").open("a") as file:
            if try_lock(file.fileno()) is False:
                return False
            if not self._is_complete(task):
                self._decode(task)
        return True

    def _is_complete(self, task: int) -> bool:
        """Whether a task was decoded, from the input as it is now."""
        with suppress(FileNotFoundError):
            return (self._folder / str(task) / _COUNTS).stat().st_mtime >= self._source.modified
        return False

    def _spills(self, folder: Path) -> list[Spill]:
        """The edges of a task, one spill per host."""
        ids = {"src": self._id_type, "dst": self._id_type}
        return [Spill(folder / str(host), ids, self._source.edge_values) for host in range(self._hosts.num_ranks)]

    def _decode(self, task: int) -> None:
        made = self._folder / f"{task}.{uuid4().hex}"
        made.mkdir()
        try:
            spills = self._spills(made)
            num_dropped = 0
            for chunk in self._pieces.read(self._pieces_of(task)):
                self._leave(chunk, spills)
                num_dropped += chunk.num_dropped
            write_all(made / _COUNTS, np.array([*(spill.size for spill in spills), num_dropped], np.int64))
            shutil.rmtree(self._folder / str(task), ignore_errors=True)  # of an input that changed
            made.rename(self._folder / str(task))
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise

    def _pieces_of(self, task: int) -> range:
        first, stop = (self._pieces.count * number // self._num_tasks for number in (task, task + 1))
        return range(first, stop)

    def _leave(self, chunk: EdgeChunk, spills: list[Spill]) -> None:
        """Append every edge to the spills of the hosts that need it."""
        into = self._hosts_of(chunk.dst)
        self._append(chunk, into, spills)
        if self._both_ends:
            out_of = self._hosts_of(chunk.src)
            other = np.flatnonzero(out_of != into)
            values = {name: column[other] for name, column in chunk.values.items()}
            self._append(EdgeChunk(chunk.src[other], chunk.dst[other], values), out_of[other], spills)

    def _hosts_of(self, ids: Ids) -> npt.NDArray[np.uint16]:
        hosts = np.empty(ids.size, np.uint16)
        _find_hosts(ids, np.array(self._hosts.boundaries), hosts)
        return hosts

    def _append(self, chunk: EdgeChunk, hosts: npt.NDArray[np.uint16], spills: list[Spill]) -> None:
        counts = np.bincount(hosts, minlength=len(spills))
        ends = np.cumsum(counts)
        src, dst = (np.empty(hosts.size, self._id_type) for _ in range(2))
        order = np.empty(hosts.size if chunk.values else 0, np.int64)
        _append_edges(chunk.src, chunk.dst, hosts, ends - counts, src, dst, order)
        types = self._source.edge_values
        values = {n: column.astype(storage_dtype(types[n].dtype))[order] for n, column in chunk.values.items()}
        for spill, start, stop in zip(spills, ends - counts, ends, strict=True):
            if start < stop:
                of_host = {name: column[start:stop] for name, column in values.items()}
                spill.append({"src": src[start:stop], "dst": dst[start:stop]}, of_host)

    def _read(self, task: int, host: int) -> Iterator[EdgeChunk]:
        """The edges of a task that a host needs. Host 0 counts those that were dropped."""
        folder = self._folder / str(task)
        *counts, num_dropped = read_exactly(folder / _COUNTS, np.dtype(np.int64), 0, self._hosts.num_ranks + 1).tolist()
        spill = self._spills(folder)[host]
        for start in range(0, counts[host], CHUNK_EDGES):
            ids, values = spill.read(start, min(start + CHUNK_EDGES, counts[host]))
            yield EdgeChunk(ids["src"], ids["dst"], values)
        if host == 0:
            ids, values = spill.read(0, 0)
            yield EdgeChunk(ids["src"], ids["dst"], values, num_dropped)


@kernel
def _find_hosts(ids: Ids, boundaries: Ids, hosts: npt.NDArray[np.uint16]) -> None:
    """The host of each vertex, by comparisons without branches: a guess would be wrong half of the time."""
    few = boundaries.size <= _FEW_HOSTS
    for i in range(ids.size):
        host = 0
        if few:
            for place in range(1, boundaries.size - 1):
                host += ids[i] >= boundaries[place]
        else:
            host = np.searchsorted(boundaries, ids[i], side="right") - 1
        hosts[i] = host


@kernel
def _append_edges(
    src: Ids,
    dst: Ids,
    hosts: npt.NDArray[np.uint16],
    cursors: Ids,
    grouped_src: Array,
    grouped_dst: Array,
    order: Ids,
) -> None:
    """Write each edge at the cursor of its host, and its position to ``order`` unless that is empty."""
    for i in range(src.size):
        at = cursors[hosts[i]]
        cursors[hosts[i]] = at + 1
        grouped_src[at] = src[i]
        grouped_dst[at] = dst[i]
        if order.size:
            order[at] = i
