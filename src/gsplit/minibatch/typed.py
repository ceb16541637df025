"""Cutting a split mini-batch of a heterogeneous graph by vertex type and by relation, on each rank alone.

Sampling and splitting use fused ids and know no types. Afterwards the rows of a type are picked out of every frontier
and route, and the edges of a relation out of every block, without communication. A filter keeps the order of rows. So
law 4 holds type by type: destinations are the first local rows, local rows are the first mixed rows, and received rows
are grouped by owner. ``shuffle`` moves the rows of a type along its route, and layers run on the block of a relation,
like those of a graph without types.

A row's place is its number among the rows of its type. The mixed frontier [p7, a1, p9, a4], where p are papers and a
are authors, has the places [0, 0, 1, 1].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gsplit.array_types import Ids
from gsplit.errors import StoreError, explain
from gsplit.graph.blocks import Block, FrontierIds
from gsplit.graph.types import GraphTypes
from gsplit.kernels.csr import destination_rows
from gsplit.kernels.dispatch import kernel_for
from gsplit.kernels.jit import kernel
from gsplit.minibatch.route import Relay, Route, count_kept

__all__ = ["RowTypes", "StepRows", "cut_block", "cut_route"]


def _on_host(rows: Tensor) -> bool:
    return kernel_for("sample", rows.device) == "numba"


@dataclass(frozen=True, slots=True)
class RowTypes:
    """The types of the rows of a frontier, and each row's place among the rows of its type.

    >>> rows = RowTypes.of(torch.tensor([1, 0, 1, 0]), num_types=2)
    >>> rows.places.tolist(), rows.counts(), rows.counts(3)
    ([0, 0, 1, 1], (2, 2), (1, 2))
    """

    types: Tensor
    places: Tensor
    num_types: int

    @classmethod
    def of(cls, types: Tensor, num_types: int) -> "RowTypes":
        """Number the rows of every type."""
        places = torch.empty_like(types)
        if _on_host(types):
            _number_rows(types.numpy(), np.zeros(num_types, np.int64), places.numpy())
            return cls(types, places, num_types)
        for number in range(num_types):
            mine = types == number
            places = torch.where(mine, mine.cumsum(0) - 1, places)
        return cls(types, places, num_types)

    def prefix(self, num_rows: int) -> "RowTypes":
        """The first rows; they keep their places."""
        return RowTypes(self.types[:num_rows], self.places[:num_rows], self.num_types)

    def extend(self, types: Tensor) -> "RowTypes":
        """These rows, followed by others."""
        appended = RowTypes.of(types, self.num_types)
        before = torch.tensor(self.counts(), device=types.device)
        places = torch.cat([self.places, appended.places + before[types]])
        return RowTypes(torch.cat([self.types, types]), places, self.num_types)

    def counts(self, num_rows: int | None = None) -> tuple[int, ...]:
        """The number of rows of every type among the first ``num_rows``."""
        types = self.types[:num_rows]
        if _on_host(types):
            return tuple(_count_types(types.numpy(), self.num_types).tolist())
        return tuple(torch.bincount(types, minlength=self.num_types).tolist())  # device sync

    def rows(self) -> tuple[Tensor, ...]:
        """The rows of every type, in order."""
        counts = self.counts()
        firsts = [sum(counts[:number]) for number in range(self.num_types)]
        order = torch.empty_like(self.types)
        if _on_host(order):
            _order_rows(self.types.numpy(), self.places.numpy(), np.array(firsts), order.numpy())
        else:
            places = torch.tensor(firsts, device=order.device)[self.types] + self.places
            order[places] = torch.arange(order.numel(), device=order.device)
        return tuple(order.split(counts))


@dataclass(frozen=True, slots=True)
class StepRows:
    """The types of all rows of a step: of its local frontiers, and of the mixed rows of every layer."""

    frontiers: tuple[RowTypes, ...]
    mixed: tuple[RowTypes, ...]

    @classmethod
    def of(
        cls,
        frontiers: Sequence[FrontierIds],
        blocks: Sequence[Block],
        routes: Sequence[Route | None],
        foreign_ids: Sequence[Tensor],
        types: GraphTypes,
    ) -> "StepRows":
        """``foreign_ids[l]``: the vertices of the rows that layer l appends to its local ones, if its route does so."""
        found = tuple(RowTypes.of(types.of(frontier.ids), types.num_types) for frontier in frontiers)
        mixed = []
        for layer, (block, route) in enumerate(zip(blocks, routes, strict=True)):
            at_boundary = route is not None and not route.destinations_are_local
            level = layer + 1 if at_boundary else layer  # the mixed rows of a boundary are those of the level above
            local = next(rows for rows, ids in zip(found[::-1], frontiers[::-1], strict=True) if ids.level <= level)
            if route is None or at_boundary:
                mixed.append(local.prefix(block.num_src))
            else:
                mixed.append(local.prefix(route.num_local).extend(types.of(foreign_ids[layer])))
        return cls(found, tuple(mixed))


@kernel
def _number_rows(types: Ids, counts: Ids, places: Ids) -> None:
    for i in range(types.size):
        places[i] = counts[types[i]]
        counts[types[i]] += 1


@kernel
def _count_types(types: Ids, num_types: int) -> Ids:
    counts = np.zeros(num_types, np.int64)
    for i in range(types.size):
        counts[types[i]] += 1
    return counts


@kernel
def _order_rows(types: Ids, places: Ids, firsts: Ids, order: Ids) -> None:
    for i in range(types.size):
        order[firsts[types[i]] + places[i]] = i


def cut_route(route: Route, local: RowTypes, mixed: RowTypes, types: GraphTypes) -> tuple[Route, ...]:
    """The routes of the rows of every type. ``local`` has the types of the local rows, or of more.

    Destinations are counted among the mixed rows: at a boundary these are other vertices than the local rows.
    """
    received = mixed.types[route.num_local :] if route.recv_places is None else mixed.types[route.recv_places]
    sent = local.types[route.send_rows]
    num_local = local.counts(route.num_local)
    num_dst = mixed.counts(route.num_dst)
    relays: list[Relay | None] = [None] * mixed.num_types
    if route.relay is not None:
        relayed = types.of(route.relay.ids)
        relays = [route.relay.keep(relayed == number) for number in range(mixed.num_types)]
    return tuple(
        Route(
            send_rows=local.places[route.send_rows[sent == number]],
            send_counts=count_kept(sent == number, route.send_counts),
            recv_counts=count_kept(received == number, route.recv_counts),
            num_local=num_local[number],
            num_dst=num_dst[number],
            own_places=_cut_places(route.own_places, mixed, number),
            recv_places=_cut_places(route.recv_places, mixed, number),
            relay=relays[number],
        )
        for number in range(mixed.num_types)
    )


def _cut_places(places: Tensor | None, mixed: RowTypes, number: int) -> Tensor | None:
    return None if places is None else mixed.places[places[mixed.types[places] == number]]


def cut_block(block: Block, kinds: Tensor, mixed: RowTypes, types: GraphTypes) -> tuple[Block, ...]:
    """The edges of every relation. ``kinds``: the relation of every edge; ``mixed``: the types of the source rows."""
    src_types = [types.number(relation[0]) for relation in types.edge_types]
    dst_types = [types.number(relation[2]) for relation in types.edge_types]
    num_src = mixed.counts()
    num_dst = mixed.counts(block.num_dst)
    cut = _cut_on_host if _on_host(kinds) else _cut_on_device
    edges = cut(block, kinds, mixed, src_types, dst_types, num_dst)
    return tuple(
        Block(indptr, src_rows, num_src[src]) for (indptr, src_rows), src in zip(edges, src_types, strict=True)
    )


def _cut_on_host(
    block: Block,
    kinds: Tensor,
    mixed: RowTypes,
    src_types: Sequence[int],
    dst_types: Sequence[int],
    num_dst: tuple[int, ...],
) -> list[tuple[Tensor, Tensor]]:
    counts = np.bincount(kinds.numpy(), minlength=len(src_types))
    if counts.size > len(src_types):
        raise _damaged(f"{counts.size - 1} in edge_type")
    firsts = np.concatenate([[0], np.cumsum(counts)])
    ptr_firsts = np.concatenate([[0], np.cumsum([num_dst[number] + 1 for number in dst_types])])
    indptr = np.zeros(int(ptr_firsts[-1]), np.int64)
    src_rows = np.empty(int(firsts[-1]), np.int64)
    fits = _cut_edges(
        block.indptr.numpy(),
        block.src_rows.numpy(),
        kinds.numpy(),
        mixed.types.numpy(),
        mixed.places.numpy(),
        np.array(src_types),
        np.array(dst_types),
        firsts,
        ptr_firsts,
        src_rows,
        indptr,
    )
    if not fits:
        raise _damaged("an edge between other types")
    return [
        (
            torch.from_numpy(indptr[ptr_firsts[relation] : ptr_firsts[relation + 1]]),
            torch.from_numpy(src_rows[firsts[relation] : firsts[relation + 1]]),
        )
        for relation in range(len(src_types))
    ]


@kernel
def _cut_edges(
    indptr: Ids,
    src_rows: Ids,
    kinds: npt.NDArray[Any],
    types: Ids,
    places: Ids,
    src_types: Ids,
    dst_types: Ids,
    firsts: Ids,
    ptr_firsts: Ids,
    out_src: Ids,
    out_indptr: Ids,
) -> bool:
    """Write the edges of every relation, destination after destination. Returns whether all edges fit their types."""
    num_relations = src_types.size
    at = firsts[:num_relations].copy()
    for i in range(indptr.size - 1):
        for edge in range(indptr[i], indptr[i + 1]):
            relation = np.int64(kinds[edge])
            row = src_rows[edge]
            if types[row] != src_types[relation] or types[i] != dst_types[relation]:
                return False
            out_src[at[relation]] = places[row]
            at[relation] += 1
        for number in range(num_relations):
            if dst_types[number] == types[i]:
                out_indptr[ptr_firsts[number] + places[i] + 1] = at[number] - firsts[number]
    return True


def _cut_on_device(
    block: Block,
    kinds: Tensor,
    mixed: RowTypes,
    src_types: Sequence[int],
    dst_types: Sequence[int],
    num_dst: tuple[int, ...],
) -> list[tuple[Tensor, Tensor]]:
    dst_rows = destination_rows(block.indptr, block.num_edges)
    order = torch.argsort(kinds, stable=True)
    counts = torch.bincount(kinds, minlength=len(src_types)).tolist()  # device sync
    if len(counts) > len(src_types):
        raise _damaged(f"{len(counts) - 1} in edge_type")
    wanted = torch.tensor([src_types, dst_types], device=kinds.device)[:, kinds]
    if not torch.equal(wanted, torch.stack([mixed.types[block.src_rows], mixed.types[dst_rows]])):  # device sync
        raise _damaged("an edge between other types")
    edges = []
    sources = mixed.places[block.src_rows[order]].split(counts)
    destinations = mixed.places[dst_rows[order]].split(counts)
    for src, dst, number in zip(sources, destinations, dst_types, strict=True):
        degrees = torch.bincount(dst, minlength=num_dst[number])
        edges.append((torch.cat([degrees.new_zeros(1), degrees.cumsum(0)]), src))
    return edges


def _damaged(got: str) -> StoreError:
    fix = "run gsplit inspect --verify, then restore the store or import it again"
    return StoreError(explain("the graph", "edges whose types are those of their vertices", got, fix))
