"""Looks at the first backward of a training loop: is what GSplit cannot see inside of the model exact on several ranks?

A wrapped model is exact, and a loop can still be wrong around it. In the first steps of a loop ``FirstBackward`` finds,
on every rank, and all ranks raise the same error, each with the call that is right:

- *parameters*: a tensor whose gradient goes through a sum of all ranks, and that nothing averages (a head that was not
  wrapped, a perturbed input). Found by a walk over the graph of autograd from the roots of backward down.
- *a term past the sums*: a path from the loss to the model's rows that goes through no sum, and a loss that is another
  number on another rank.
- *input*: rows of a vertex that differ between ranks, where a loop has changed ``batch.x`` before the model.
- *values*: the value of a target depends on other targets of its rank (``nn.checks.replay``).
- *numbers*: the loop has computed a number from rows of its rank, and used it in the loss.
- *masks*: random numbers for rows behind the model.

On one process nothing of this is wrong yet, and it is logged as a warning, so that a laptop tells it before the cluster
does. A loop whose loss cannot be followed is told so, once, with the call that compares it.
"""

import gc
import json
import logging
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.autograd.graph
from torch import Tensor
from torch.nn import Module, Parameter

from gsplit.distributed.comm.comm import Call
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.keys import kernels_torch
from gsplit.minibatch.batch import Batch, BatchContext
from gsplit.minibatch.link_batch import LinkBatch
from gsplit.minibatch.typed_batch import TypedBatch, TypedLinkBatch
from gsplit.nn.calls import LayerCall, tensors_of
from gsplit.nn.checks.replay import Recording, Rows, depends_on_others, program_difference
from gsplit.nn.function_mode import push_below
from gsplit.nn.gradients import averages_of

__all__ = ["FirstBackward"]

_LOG = logging.getLogger(__name__)
_GATES = ("GlobalSumBackward", "GatherRowsBackward")
"""Nodes above which a value is the same on every rank."""
_OWNED_ROWS = ("_LookUpBackward",)
"""Of ``OwnedEmbedding``: every row has its whole gradient on its owner."""
_NOT_FOLLOWED = "CheckpointFunctionBackward"
_ENGINE = getattr(getattr(torch.autograd.graph, "_engine_run_backward", None), "__code__", None)
"""The function that calls torch's engine, which is not public: a test fails if it is called otherwise."""
_NOT_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
"""Where the code of torch and of gsplit is."""
_NUM_COMPARED_ROWS = 256


class _Verdict(NamedTuple):
    expected: str
    fix: str


_GATHER = "compute it from the rows of all ranks: batch.gather(rows), or batch.sum(values)"
_VERDICTS = {
    "parameters": _Verdict(
        "parameters whose gradients are averaged over the ranks",
        "gsplit.parallelize(head, mesh) averages those of a module or a parameter; or put it into the model before "
        "wrapping it. A gradient of the input is only this rank's part",
    ),
    "a term past the sums": _Verdict(
        "a loss whose terms are from batch.mean, batch.sum or batch.gather",
        "give one value per target, and add it inside: batch.mean(loss + penalty)",
    ),
    "input": _Verdict(
        "input rows that depend on their own vertex only",
        "let a module inside the model change batch.x, with F.dropout for randomness, or store the features so",
    ),
    "values": _Verdict(
        "values of targets that depend on no other target of this rank; reduction='none' gives one per target", _GATHER
    ),
    "numbers": _Verdict("the same numbers in the loss on every rank", _GATHER),
    "masks": _Verdict(
        "a loss without random numbers of its own", "put the dropout into the model, where its masks are keyed"
    ),
}
"""In the order in which they are told."""


class FirstBackward:
    """The checks of one step of a loop, of all models that it calls; a ``LossCheck`` of its batches. See the module."""

    def __init__(self, mesh: Mesh) -> None:
        self.is_probing = False
        self._mesh = mesh
        self._averages = averages_of(mesh)
        self._recording = Recording()
        self._contexts: list[weakref.ref[BatchContext]] = []
        self._outputs: list[Tensor] = []
        self._rows: list[Rows] = []
        self._found: dict[str, list[str]] = {}
        self._input_rows: dict[str, float] = {}
        self._not_followed = ""
        self._num_backwards = 0
        self._averages.check = self

    def before_forward(self, batch: Batch, call: LayerCall, *, is_of_batch: bool) -> bool:
        """Look at the model's input; False if the step is over, because the batch is another one. A collective.

        ``is_of_batch``: whether the call has tensors of the batch only.
        """
        if self._num_backwards and all(known() is not batch.context for known in self._contexts):
            self.end()
            return False
        if all(known() is not batch.context for known in self._contexts):
            self._contexts.append(weakref.ref(batch.context, lambda _: self._end_with_batches()))
            batch.context.guard.check = self
        self._recording.is_paused = True
        self._compare_input(batch, {} if is_of_batch else _changed_inputs(batch, call))
        return True

    def after_forward(self, batch: Batch, out: Any) -> None:
        """Follow what the loop does with the model's output."""
        made = [tensor for tensor in tensors_of(out) if tensor.grad_fn is not None]
        rows = list(_rows_of(batch, out, made))
        self._outputs += made
        self._rows += [each for each in rows if each.tensor.requires_grad]
        parts = batch.parts.values() if isinstance(batch, TypedBatch) else ()
        for part in (batch, *parts):
            self._recording.row_counts |= {n for block in part.blocks for n in (block.num_src, block.num_dst)}
            self._recording.row_counts |= {part.num_targets, part.num_values}
            if part.pairs is not None:
                self._recording.row_counts |= set(part.pairs.negatives.shape)
        self._recording.row_counts |= {len(each.tensor) for each in rows}
        self._recording.row_counts -= {0, 1}
        self._recording.add(rows)
        push_below(self._recording)
        self._recording.is_paused = False

    def end(self) -> None:
        """Let go of the step: its tensors hold graphs of autograd, which refer to this object.

        The recording stays on torch's stack until the next forward: this may be called by the garbage collector, in the
        middle of a function of torch.
        """
        for known in self._contexts:
            context = known()
            if context is not None:
                context.guard.check = None
        if self._averages.check is self:
            self._averages.check = None
        self._recording.clear()
        for held in (self._contexts, self._outputs, self._rows, self._found, self._input_rows):
            held.clear()

    def _end_with_batches(self) -> None:
        """Called when a batch is gone, in any thread."""
        if not sys.is_finalizing() and all(known() is None for known in self._contexts):
            self.end()

    def pause(self, paused: bool) -> bool:
        """See ``LossCheck``."""
        before = self._recording.is_paused
        self._recording.is_paused = paused
        return before

    def check_values(self, batch: Batch, values: Tensor, weight: Tensor | None) -> None:
        """Whether the value of a target depends on other targets of this rank. No communication."""
        before = self.pause(True)
        try:
            for name, tensor in (("values", values), ("weight", weight)):
                if tensor is None:
                    continue
                self._recording.follow(tensor)
                where = "batch.mean or batch.sum" if name == "values" else "the weight of batch.mean"
                if self._recording.is_drawn(tensor):
                    self._add("masks", f"random numbers of rows in {where}")
                if tensor.size(0) > 1 and self._depends_on_others(tensor):
                    self._add("values", f"a value in {where} that changes with the rows of other targets")
        finally:
            self.pause(before)

    def follow(self, rows: Tensor) -> None:
        """See ``LossCheck``."""
        self._recording.follow(rows)

    def compare_gradient(self, gradient: Tensor) -> None:
        """Raise if the gradient of a sum over all ranks is another one on another rank. A collective."""
        if self._mesh.size == 1:
            return
        texts = self._mesh.control.gather_text(Call("compare the gradients of the loss"), json.dumps(gradient.tolist()))
        of_ranks = [torch.tensor(json.loads(text)) for text in texts]
        if not all(torch.allclose(other, of_ranks[0], rtol=1e-5, atol=0.0, equal_nan=True) for other in of_ranks):
            got = ", ".join(f"{value.tolist()} on rank {rank}" for rank, value in enumerate(of_ranks))
            expected = "the same gradient of the loss with respect to batch.mean or batch.sum on every rank"
            fix = (
                "use batch.mean, or divide batch.sum by batch.global_batch_size: batch.batch_size is this rank's number"
            )
            raise InputError(explain("backward", expected, got, fix))

    def _depends_on_others(self, values: Tensor) -> bool:
        found = self._recording.mixes(values)
        if found is not None or values.grad_fn is None:
            return bool(found)
        outputs = [rows for rows in self._rows if rows.of_values is not None or len(rows.tensor) == len(values)]
        if not outputs:
            return False
        self.is_probing = True
        try:
            return depends_on_others(values, outputs)
        except RuntimeError as error:  # of compiled functions and reentrant checkpoints, which run backward once
            self._not_followed = f"{type(error).__name__}: {error}".splitlines()[0][:160]
            return False
        finally:
            self.is_probing = False

    def _add(self, kind: str, what: str) -> None:
        known = self._found.setdefault(kind, [])
        if what not in known:
            known.append(what)

    def _compare_input(self, batch: Batch, changed: dict[str, Tensor]) -> None:
        """Sums of the input rows of some vertices, if a loop has changed ``batch.x``. A collective on several ranks."""
        if self._mesh.size == 1:
            return
        # all ranks: the first forwards; whether rows were changed may differ between ranks, and decides of the next
        texts = self._mesh.control.gather_text(Call("compare inputs"), json.dumps(sorted(changed)))
        for vertex_type in sorted({name for text in texts for name in json.loads(text)}):
            part = batch.part(vertex_type or None)
            ids = part.mixed_ids(0)
            rows = changed.get(vertex_type)
            if rows is None or len(ids) != len(rows):
                continue
            some = kernels_torch.mix(1, ids).argsort()[:_NUM_COMPARED_ROWS]
            sums = rows.detach()[some].double().flatten(1).square().sum(1)
            self._input_rows |= {
                f"{vertex_type} {vertex}": value
                for vertex, value in zip(ids[some].tolist(), sums.tolist(), strict=True)
            }

    def in_backward(self) -> None:
        """Called once in every backward, when it begins. A collective: every rank has reached the same loss."""
        self._recording.is_paused = True
        self._num_backwards += 1
        torch.autograd.Variable._execution_engine.queue_callback(self._go_on)
        roots = _roots_of_backward()
        values: list[tuple[float, float]] = []
        if roots is None:
            self._not_followed = self._not_followed or "the graph of the loss was not found"
        else:
            nodes = [node for node in (_node_of(root) for root in roots) if node is not None]
            self._walk(nodes)
            scalars = [root.detach() for root in roots if isinstance(root, Tensor) and root.numel() == 1]
            values = [(float(each), torch.finfo(each.dtype).eps ** 0.5) for each in scalars]
        text = json.dumps([self._found, values, self._recording.program(), self._input_rows])
        texts = [text]
        if self._mesh.size > 1:  # all ranks: see above
            texts = self._mesh.control.gather_text(Call("compare the first backward"), text)
        found = _judge([json.loads(text) for text in texts])
        self._tell(found)

    def _go_on(self) -> None:
        self._recording.is_paused = False

    def _tell(self, found: dict[str, list[str]]) -> None:
        """Raise, or warn on one process, of the first kind of what was found."""
        for kind, verdict in _VERDICTS.items():
            if kind not in found:
                continue
            first, *others = found[kind]
            got = first + (f" and {len(others)} more" if others else "")
            if self._mesh.size > 1:
                raise InputError(explain("backward", verdict.expected, got, verdict.fix))
            if kind not in self._averages.warned:
                self._averages.warned.add(kind)
                text = explain("backward", verdict.expected, got, verdict.fix)
                _LOG.warning("right on one process, and an error on several ranks: %s", text)
        if self._not_followed and self._mesh.rank == 0 and "" not in self._averages.warned:
            self._averages.warned.add("")
            _LOG.warning(
                "the loss of the loop was not followed (%s); gsplit.verify_step(model, loss_of, batch) compares it",
                self._not_followed,
            )

    def _walk(self, roots: list[Any]) -> None:
        """Find parameters that nothing averages, and paths to the model's rows past the sums of all ranks."""
        above, gates = _below(roots, stop=_GATES)
        under, _ = _below([node for gate in gates for node in _children(gate)], stop=_OWNED_ROWS)
        if any(type(node).__name__ == _NOT_FOLLOWED for node in under):
            self._not_followed = "a reentrant torch.utils.checkpoint is in the loss, use use_reentrant=False"
        averaged = {id(parameter) for average in self._averages.wrapped for parameter in average.parameters}
        for node in under:
            if _is_leaf(node) and id(node.variable) not in averaged and _will_run(node):
                self._add("parameters", _name_of(node.variable))
        forward, _ = _below([output.grad_fn for output in self._outputs])
        past = {node for node in above & forward if not _is_leaf(node) and self._makes_rows(node)}
        highest = past - {child for node in past for child in _children(node)}
        for node in highest:
            self._add(
                "a term past the sums", f"{type(node).__name__.removesuffix('0')} of this rank's rows beside them"
            )

    def _makes_rows(self, node: Any) -> bool:
        """Whether a node or one below it makes rows of vertices: not those that compute weights from parameters."""
        found, _ = _below([node])
        shapes = (getattr(made, "shape", None) for each in found for made in getattr(each, "_input_metadata", ()))
        return any(shape and shape[0] in self._recording.row_counts for shape in shapes)


def _judge(of_ranks: list[Any]) -> dict[str, list[str]]:
    """What was found on all ranks; the same on every rank."""
    found: dict[str, list[str]] = {}
    for of_rank, *_ in of_ranks:
        for kind, texts in of_rank.items():
            found[kind] = list(dict.fromkeys([*found.get(kind, []), *texts]))
    losses = [values for _, values, *_ in of_ranks]
    if len(set(map(len, losses))) == 1:
        for of_root in zip(*losses, strict=True):
            first, tolerance = of_root[0]
            if not all(_is_close(value, first, tolerance) for value, _ in of_root):
                got = ", ".join(f"{value:g} on rank {rank}" for rank, (value, _) in enumerate(of_root))
                found.setdefault("a term past the sums", []).append(f"a loss of {got}")
    difference = program_difference([program for _, _, program, _ in of_ranks])
    if difference:
        found.setdefault("numbers", []).append(difference)
    rows = [of_rank[3] for of_rank in of_ranks]
    pairs = [(a[key], b[key]) for number, a in enumerate(rows) for b in rows[:number] for key in a.keys() & b.keys()]
    differing = sum(not _is_close(a, b, 1e-5) for a, b in pairs)
    if differing:
        found.setdefault("input", []).append(f"{differing} of {len(pairs)} rows that differ from those of another rank")
    return found


def _is_close(value: float, other: float, tolerance: float) -> bool:
    is_nan = value != value and other != other
    return is_nan or value == other or abs(value - other) <= tolerance * max(abs(other), 1e-12)


def _rows_of(batch: Batch, out: Any, made: list[Tensor]) -> Iterator[Rows]:
    """The outputs and labels of which a value of the loss has its own rows."""
    outputs = [tensor for tensor in made if tensor.dim()]
    if isinstance(batch, LinkBatch):
        pairs = batch.pair_rows
        ends = {id(tensor): pairs.index for tensor in outputs}
        if isinstance(batch, TypedLinkBatch) and isinstance(out, dict):
            src, _, dst = batch.pair_type
            ends = {id(out[name]): pairs.index[number][None] for number, name in enumerate((src, dst)) if name in out}
            if src == dst:
                ends = {id(out[src]): pairs.index}
        for tensor in outputs:
            if len(tensor) == batch.num_values and batch.context.guard.has_endpoints:
                yield Rows(tensor)
            elif id(tensor) in ends:
                yield Rows(tensor, ends[id(tensor)], pairs.negatives)
        if pairs.label is not None:
            yield Rows(pairs.label)
        return
    yield from (Rows(tensor) for tensor in outputs if len(tensor) == batch.num_targets)
    if batch.labels is not None:
        yield Rows(batch.labels)


def _changed_inputs(batch: Batch, call: LayerCall) -> dict[str, Tensor]:
    """The tensors by vertex type that a model gets in place of the batch's input rows."""
    args, kwargs = call
    changed: dict[str, Tensor] = {}
    for value in (*args, *kwargs.values()):
        if isinstance(value, dict) and isinstance(batch, TypedBatch):
            changed |= {
                name: rows
                for name, rows in value.items()
                if isinstance(rows, Tensor) and rows.is_floating_point() and rows is not batch.x_dict.get(name)
            }
        elif isinstance(value, Tensor) and not isinstance(batch, TypedBatch) and value is not batch.x:
            is_rows = value.is_floating_point() and value.dim() > 1 and len(value) == len(batch.x)
            changed |= {"": value} if is_rows else {}
    return changed


def _roots_of_backward() -> list[Any] | None:
    """The tensors and edges from which the running backward has started; None if they are not known.

    They are read from torch's call of its engine, since no hook of torch gives them. The call is in this thread, or,
    for the thread of a device, in the one that called backward.
    """
    for frame in _callers():
        if frame.f_code is _ENGINE:
            return list(frame.f_locals["t_outputs"])
    return None


def _callers() -> Iterator[FrameType]:
    """The frames of this thread's callers, and those of the other threads, which may have called backward.

    Not that of the function that asks: a frame among its own variables would keep all of them.
    """
    caller = sys._getframe(1).f_back
    others = [frame for thread, frame in sys._current_frames().items() if thread != get_ident()]
    for start in (caller, *others):
        frame = start
        while frame is not None:
            yield frame
            frame = frame.f_back


def _node_of(root: Any) -> Any:
    return root.grad_fn if isinstance(root, Tensor) else root.node


def _children(node: Any) -> list[Any]:
    return [child for child, _ in node.next_functions if child is not None]


def _below(nodes: list[Any], stop: tuple[str, ...] = ()) -> tuple[set[Any], set[Any]]:
    """The nodes of autograd that are reached from some, down to those that are called ``stop``, and these."""
    found: set[Any] = set()
    stopped: set[Any] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node in found or node in stopped:
            continue
        if type(node).__name__ in stop:
            stopped.add(node)
            continue
        found.add(node)
        waiting += _children(node)
    return found, stopped


def _is_leaf(node: Any) -> bool:
    return type(node).__name__ == "AccumulateGrad"


def _will_run(node: Any) -> bool:
    """Whether the running backward computes the gradient of a leaf; not those left out by ``inputs=``."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # of a leaf of torch.autograd.grad
        return True


def _name_of(tensor: Tensor) -> str:
    """How the user calls a tensor: from the variables of the functions that called backward, or from all modules."""
    for frame in _callers():
        if frame.f_code.co_filename.startswith(_NOT_USERS):
            continue
        for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
            if value is tensor:
                return name
            for path, parameter in value.named_parameters() if isinstance(value, Module) else ():
                if parameter is tensor:
                    return f"{name}.{path}"
    for each in gc.get_objects():
        if issubclass(type(each), Module) and "_parameters" in vars(each):  # not isinstance: proxies may be dead
            for path, parameter in each.named_parameters():
                if parameter is tensor:
                    return f"{type(each).__name__}.{path}"
    kind = "a parameter" if isinstance(tensor, Parameter) else "a tensor that requires a gradient,"
    return f"{kind} {list(tensor.shape)}"
