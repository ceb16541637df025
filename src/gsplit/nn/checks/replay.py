"""Records the functions of torch that a loop calls between a model's output and its loss, and repeats them.

The value of a target may depend on its own rows only: a value that changes both with the rows of one half of the
targets and with those of the other half depends on other targets of its rank, and is another one on other ranks. A
backward through the loss alone (``depends_on_others``) shows that as well, but neither thresholds nor weights that are
detached; it is for losses that cannot be repeated, such as compiled ones.

A value that was computed from random numbers, one for every row, is another one on other ranks, too (``is_drawn``).

What the recorded functions were given beside rows must be the same on every rank (``program``, ``program_difference``):
a number that a rank has computed from its own rows is not.

The mode is below those of the user on torch's stack: one that ends takes off the top.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["Recording", "Rows", "depends_on_others", "half_of", "program_difference"]

_RANDOM = {
    *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.bernoulli, torch.multinomial),
    *(torch.rand_like, torch.randn_like, torch.randint_like, F.dropout, F.gumbel_softmax),
    *(Tensor.bernoulli, Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.random_, Tensor.exponential_),
}
_READS = {Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__}
_SKIPPED = {Tensor.backward, Tensor.register_hook, *_READS}
_OPERATIONS = ("mul", "div", "add", "sub", "pow", "truediv", "rsub", "rdiv", "floordiv")
_ARITHMETIC = {
    f"{before}{name}{after}"
    for name in _OPERATIONS
    for before, after in (("", ""), ("", "_"), ("__", "__"), ("__r", "__"), ("__i", "__"))
}
"""Functions in which an integer is a number, and not a size or a dimension."""
_WRITES = ("setitem", "index_copy", "index_add", "index_put", "index_fill", "scatter", "scatter_add", "masked_scatter")
"""Functions whose first tensor may have rows by vertex, of which a rank writes its own."""
_INDEXING = (*_WRITES, "getitem", "index_select", "gather", "take", "one_hot")
"""Functions in which a tensor of integers has positions among the rows of a rank."""
_MOST_NUMBERS = 1 << 16
"""Of a tensor that is kept as it was, and compared between ranks."""
_MOST_CALLS = 4096


@dataclass(frozen=True)
class Rows:
    """A tensor of the model or the batch. Row i is of value i; or value i has the rows ``of_values[:, i]``.

    ``shared``: rows that any value may read, such as common negatives.
    """

    tensor: Tensor
    of_values: Tensor | None = None
    shared: Tensor | None = None

    def with_other_rows(self, chosen: Tensor) -> Tensor | None:
        """The tensor with other rows for the chosen values; None if that is not possible."""
        tensor = self.tensor.detach()
        if self.of_values is not None:
            like = torch.zeros(tensor.size(0), dtype=torch.bool, device=tensor.device)
            chosen = _flags(self.of_values[:, chosen], like) & ~_flags(self.of_values[:, ~chosen], like)
            if self.shared is not None:
                chosen &= ~_flags(self.shared, like)
        if chosen.size(0) != tensor.size(0):
            return None
        kept, changed = (~chosen).nonzero()[:, 0], chosen.nonzero()[:, 0]
        if not len(kept) or not len(changed):
            return None
        order = torch.arange(len(changed), device=tensor.device)
        others = tensor[kept[order % len(kept)]]
        if tensor.is_floating_point() and self.tensor.requires_grad:  # in the range of the outputs, as rows of the loss
            others = (others + tensor[kept[(order + 1) % len(kept)]]) / 2
        found = tensor.clone()
        found[changed] = others
        return found


@dataclass
class _Called:
    """A function that was called.

    ``externals``: the tensors that it was given besides recorded ones, as they were. ``changed``: the tensors that it
    has written to. ``is_in_loss``: whether the values of the loss were computed from it.
    """

    function: Any
    args: Any
    kwargs: dict[str, Any]
    out: Any
    generator: Tensor | None
    externals: dict[int, Tensor]
    changed: list[int]
    is_in_loss: bool = False
    is_compared: bool = False

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "?")

    @property
    def given(self) -> list[Any]:
        return tree_leaves((self.args, self.kwargs))

    def arguments(self, now: dict[int, Tensor]) -> dict[int, Tensor]:
        """The tensors to call it with: those that were computed anew, and copies of what the user has."""
        tensors = {id(each): each for each in self.given if isinstance(each, Tensor)}
        copies = {key: self.externals.get(key, each.detach()) for key, each in tensors.items() if key not in now}
        return {key: copies[key].clone() if key in copies else now[key] for key in tensors}

    @property
    def made(self) -> set[int]:
        return {id(each) for each in tree_leaves(self.out) if isinstance(each, Tensor)} | set(self.changed)


class Recording(TorchFunctionMode):
    """The functions called with ``sources`` and with what was computed from them; see the module."""

    ends_at_forward = True
    """Forwards take it off the stack: a model may have compiled parts."""

    def __init__(self) -> None:
        super().__init__()
        self.is_paused = True
        self.row_counts: set[int] = set()
        """The numbers of rows of this rank: they may differ between ranks."""
        self._is_complete = True
        self._drawn: dict[int, Tensor] = {}  # random numbers of rows, and what was computed from them
        self._sources: list[Rows] = []
        self._first: dict[int, Tensor] = {}  # the sources, as they were
        self._known: dict[int, Tensor] = {}
        self._calls: list[_Called] = []

    def add(self, sources: Iterable[Rows]) -> None:
        """Record what is computed from these as well."""
        for rows in sources:
            if id(rows.tensor) not in self._known:
                self._known[id(rows.tensor)] = rows.tensor
                self._first[id(rows.tensor)] = rows.tensor.detach().clone()
                self._sources.append(rows)

    def clear(self) -> None:
        """Forget everything: recorded tensors hold the graph of autograd."""
        self.is_paused = True
        for held in (self._sources, self._first, self._known, self._calls, self._drawn):
            held.clear()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # a constant to the compiler, so that graphs are not broken
            return function(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        if self.is_paused:
            return function(*args, **kwargs)
        tensors = {id(each): each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        is_known = not self._known.keys().isdisjoint(tensors)
        is_drawn = not self._drawn.keys().isdisjoint(tensors)
        if not (is_known or is_drawn or function in _RANDOM) or function in _SKIPPED:
            return function(*args, **kwargs)
        generator = torch.get_rng_state() if function in _RANDOM else None
        externals = {
            key: each.detach().clone()
            for key, each in tensors.items()
            if key not in self._known and each.numel() <= _MOST_NUMBERS
        }
        versions = {key: _version(each) for key, each in tensors.items()}
        out = function(*args, **kwargs)
        changed = [key for key, each in tensors.items() if _version(each) != versions[key]]
        made = {id(each): each for each in tree_leaves(out) if isinstance(each, Tensor)}
        made |= {key: tensors[key] for key in changed}
        if generator is not None:
            has_rows = any(each.dim() and len(each) in self.row_counts for each in made.values())
            has_drawn = kwargs.get("generator") is not None or not torch.equal(generator, torch.get_rng_state())
            is_drawn |= has_rows and has_drawn
        if is_drawn:
            self._drawn |= made
        if is_known and made:
            self._is_complete &= len(self._calls) < _MOST_CALLS
            self._is_complete &= all(key in externals or key in self._known for key in changed)
            if self._is_complete:
                self._calls.append(_Called(function, args, kwargs, out, generator, externals, changed))
                self._known |= made
        return out

    def is_drawn(self, values: Tensor) -> bool:
        """Whether random numbers of rows are in the values."""
        return id(values) in self._drawn

    def follow(self, values: Tensor) -> None:
        """Values of the loss: what they were computed from is part of the program."""
        needed = {id(values)}
        for call in reversed(self._calls):
            if not call.made.isdisjoint(needed):
                call.is_in_loss = True
                needed |= {id(each) for each in call.given if isinstance(each, Tensor)}

    @torch.no_grad()
    def mixes(self, values: Tensor) -> bool | None:
        """Whether some value depends on rows of other targets; None if that cannot be found out by repeating."""
        if id(values) not in self._known or not self._is_complete:
            return None
        chosen = half_of(values.size(0), values.device)
        changed = []
        for mask in (chosen, ~chosen):
            found = {id(rows.tensor): rows.with_other_rows(mask) for rows in self._sources}
            replaced = {key: tensor for key, tensor in found.items() if tensor is not None}
            if not replaced:
                return None
            try:
                new = self._repeat(replaced, values)
            except Exception:  # of a function that does not take other rows
                return None
            tolerance = torch.finfo(values.dtype).eps ** 0.5 if values.is_floating_point() else 0.5
            differs = (new - values.detach()).abs() > tolerance * values.detach().abs().clamp(min=1)
            differs |= new.isnan() != values.detach().isnan()
            changed.append(differs)
        return bool((changed[0] & changed[1]).any())

    def _repeat(self, replaced: dict[int, Tensor], values: Tensor) -> Tensor:
        """The values that the recorded calls compute from other rows."""
        now = {key: replaced.get(key, tensor).clone() for key, tensor in self._first.items()}
        generator = torch.get_rng_state()
        try:
            for call in self._calls:
                swapped = call.arguments(now)
                args, kwargs = tree_map(lambda each, of=swapped: of.get(id(each), each), (call.args, call.kwargs))
                if call.generator is not None:
                    torch.set_rng_state(call.generator)
                out = call.function(*args, **kwargs)
                for was, new in zip(tree_leaves(call.out), tree_leaves(out), strict=True):
                    if isinstance(was, Tensor):
                        now[id(was)] = new
                now |= {key: swapped[key] for key in call.changed}
        finally:
            torch.set_rng_state(generator)
        return now[id(values)]

    def program(self) -> str:
        """What the loss was computed from besides rows, but for what was told before, to be compared between ranks."""
        inside = set(self._first)
        listed: list[list[Any]] = []
        for call in self._calls:
            if call.is_in_loss and not call.is_compared:
                call.is_compared = True
                listed.append([call.name, _describe_call(call, inside, self.row_counts)])
            inside |= call.made
        return json.dumps(listed)


def _version(tensor: Tensor) -> int:
    """How often a tensor was written to."""
    return 0 if tensor.is_inference() else tensor._version


def _describe_call(call: _Called, inside: set[int], row_counts: set[int]) -> list[Any]:
    """The arguments that must be the same on every rank; None in place of those that may differ."""
    given = call.given
    sizes = {len(each) for each in given if isinstance(each, Tensor) and id(each) in inside and each.dim()}
    others = [each for each in given if not (isinstance(each, Tensor) and id(each) in inside)]
    name = call.name.strip("_")
    if name in _INDEXING:
        first = given[0] if name in _WRITES else None
        others = [each for each in others if each is not first and not _is_index(each)]
    found = []
    for each in others:
        if isinstance(each, Tensor):
            found.append(_describe(call.externals.get(id(each), each), row_counts, sizes))
        elif isinstance(each, int) and not isinstance(each, bool) and call.name not in _ARITHMETIC:
            found.append(None)
        else:
            found.append(
                str(each) if isinstance(each, bool | str) else float(each) if isinstance(each, int | float) else None
            )
    return found


def _is_index(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and not value.is_floating_point()


def _describe(tensor: Tensor, row_counts: set[int], sizes: set[int]) -> Any:
    """Numbers of a tensor without rows. ``sizes``: the lengths of the tensors of rows that it is computed with."""
    has_rows = bool(row_counts & set(tensor.shape)) or (tensor.dim() > 0 and len(tensor) in sizes)
    if has_rows or tensor.layout != torch.strided or tensor.numel() > _MOST_NUMBERS:
        return None
    numbers = tensor.detach().double()
    return [list(tensor.shape), float(numbers.sum()), float(numbers.square().sum())]


def program_difference(programs: Sequence[str]) -> str:
    """What differs between the programs of the ranks; empty if nothing does, or if ranks called other functions."""
    of_ranks = [json.loads(program) for program in programs]
    for calls in zip_longest(*of_ranks):
        if None in calls or len({(name, len(given)) for name, given in calls}) > 1:
            return ""
    for calls in zip(*of_ranks, strict=True):
        for values in zip(*(given for _, given in calls), strict=True):
            if None not in values and not all(_are_close(values[0], other) for other in values):
                got = ", ".join(f"{_shown(value)} on rank {rank}" for rank, value in enumerate(values))
                return f"an argument of {calls[0][0]}: {got}"
    return ""


def _shown(value: Any) -> str:
    return f"a tensor {value[0]} with the sum {value[1]:.6g}" if isinstance(value, list) else f"{value}"


def _are_close(first: Any, other: Any) -> bool:
    if isinstance(first, list) and isinstance(other, list):  # of another shape: rows after a mask
        return first[0] != other[0] or all(map(_are_close, first[1:], other[1:]))
    if isinstance(first, float) and isinstance(other, float):
        return first == other or abs(first - other) <= 1e-5 * abs(first) or (first != first and other != other)
    return bool(first == other)


def half_of(count: int, device: torch.device) -> Tensor:
    """A fixed half of some values, without a generator; some of them and not all, from 2 values on.

    >>> half_of(8, torch.device("cpu")).tolist()
    [False, True, False, True, False, True, True, False]
    """
    chosen = (((torch.arange(count, device=device) + 1) * 2654435761) >> 9) & 1 == 1
    if count > 1 and bool(chosen.all() | ~chosen.any()):
        chosen[::2] = ~chosen[::2]
    return chosen


def depends_on_others(values: Tensor, outputs: Sequence[Rows]) -> bool:
    """Whether gradients say that some value depends on rows of other targets: one backward through the loss alone."""
    chosen = half_of(values.size(0), values.device)
    tensors = [rows.tensor for rows in outputs]
    reached: list[list[Tensor | None]] = []
    retained = [(tensor, tensor.grad) for tensor in tensors if tensor.retains_grad]
    for mask in (chosen, ~chosen):
        weight = mask.to(values.dtype)
        grads = torch.autograd.grad(values, tensors, weight, retain_graph=True, allow_unused=True)
        reached.append([None if g is None else ((g != 0) & ~g.isnan()).reshape(len(g), -1).any(1) for g in grads])
    for tensor, grad in retained:
        tensor.grad = grad
    for rows, first, second in zip(outputs, *reached, strict=True):
        if first is None or second is None:
            continue
        outside = first & second
        if rows.of_values is not None:
            outside = first & ~_flags(rows.of_values[:, chosen], first)
            outside |= second & ~_flags(rows.of_values[:, ~chosen], first)
        if rows.shared is not None:
            outside &= ~_flags(rows.shared, first)
        if bool(outside.any()):
            return True
    return False


def _flags(rows: Tensor, like: Tensor) -> Tensor:
    """Which rows of a tensor with as many rows as ``like`` are among ``rows``."""
    found = torch.zeros_like(like)
    found[rows.flatten()] = True
    return found
