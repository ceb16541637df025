"""Gradients averaged over all ranks; on CPUs, while backward still runs.

On CPUs parameters are put into buckets in the reverse of their order in the model, which is about the order in which
backward reaches them. The all-reduce of a bucket starts when all its gradients exist. Buckets start in the same order
on every rank, and every rank starts every bucket in every backward (law 5). A parameter without a gradient on some
ranks counts as zero there. One without a gradient on any rank keeps its ``.grad``.

On devices there is one bucket, at the end of backward: NCCL needs the same order of ALL collectives on every rank, and
a rank on which a parameter has no gradient would start a bucket later, behind a shuffle. The gradients of a GNN are a
few MB. The host waits for the device only on a rank where a parameter has no gradient.

The average is of this backward's gradient, never of the accumulated ``.grad``, which is set aside while backward runs
and added afterwards.

Averaged gradients keep weights equal only if every rank starts from the same weights and changes them alike: with the
same learning rate, and with a state that was loaded on all ranks. At every ``COMPARE_EVERY``-th backward each bucket
also carries the sum of the absolute weights of every rank, and ranks whose sums differ are named. Sums are compared
with a tolerance, because the CPUs of two hosts may round an optimizer's step differently.

A bucket is always of the same length, with zeros in place of sums that are not compared. The order in which an
all-reduce adds the numbers of the ranks, and so the last digit of a gradient, depends on the length; backwards are
counted from the start of the process, and a resumed training must equal an uninterrupted one to the bit.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from gsplit.device.devices import DeferredChecks
from gsplit.distributed.comm.comm import Call, Comm, Work
from gsplit.distributed.watch.peers import join_differences
from gsplit.errors import CommError, InputError, RankFaultError, explain
from gsplit.minibatch.route import count_reduction
from gsplit.telemetry import StepTelemetry

__all__ = ["GradientAverage"]

_NUM_TAGS = 1 << 10
"""Tags are summed in the gradients' dtype: in float32 the sum over up to 2**14 ranks is exact."""
_TAGS_PER_MODEL = 37
BUCKET_BYTES = 1 << 20
"""Small enough that a model of a few MB, which is large for a GNN, has several buckets."""
COMPARE_EVERY = 16
"""Backwards between comparisons of the weights: summing them takes about as long as averaging their gradients."""
_ROUNDING = 64
"""Units of the last digit by which sums of the same weights may differ."""
_CHECKED = (torch.float32, torch.float64)  # other types do not hold a tag or a sum exactly enough


class _Bucket:
    """Parameters whose gradients are reduced together.

    The buffer holds the gradients, a flag per parameter (whether it has a gradient), the bucket's tag, a number that
    must be the same on all ranks, and the sum of absolute weights of every rank, each added by that rank, or zeros.
    """

    def __init__(self, tag: int, parameters: list[Parameter]) -> None:
        self.tag = tag
        self.parameters = parameters
        self._tail: Tensor | None = None  # of a complete bucket: copied to the device once
        self.grads: dict[int, Tensor] = {}
        self.flat: Tensor | None = None
        self.work: Work | None = None

    @property
    def complete(self) -> bool:
        return len(self.grads) == len(self.parameters)

    def start(self, comm: Comm, call: Call, *, with_weights: bool) -> None:
        pieces = [
            self.grads[id(p)].reshape(-1) if id(p) in self.grads else p.new_zeros(p.numel()) for p in self.parameters
        ]
        is_checked = pieces[0].dtype in _CHECKED
        pieces.append(self._flags_tag_and_zeros(comm.size if is_checked else 0))
        self.flat = torch.cat(pieces)
        if with_weights and is_checked:
            self.flat[comm.rank - comm.size] = self._sum_of_weights()
        self.work = comm.all_reduce(call, self.flat)

    def _sum_of_weights(self) -> Tensor:
        """Of their absolute values."""
        return torch.stack(
            [torch.linalg.vector_norm(p.detach(), 1, dtype=torch.float64) for p in self.parameters]
        ).sum()

    def _flags_tag_and_zeros(self, num_zeros: int) -> Tensor:
        if self.complete and self._tail is not None and self._tail.device == self.parameters[0].device:
            return self._tail
        flags = [float(id(p) in self.grads) for p in self.parameters]
        tail = self.parameters[0].new_tensor([*flags, float(self.tag), *([0.0] * num_zeros)])
        if self.complete:
            self._tail = tail
        return tail

    def finish(self, size: int, checks: DeferredChecks, backward: int, factor: int) -> list[tuple[Parameter, Tensor]]:
        """The gradients, over ``factor``, of all parameters that had one on any rank. ``backward``: its number."""
        assert self.work is not None and self.flat is not None
        self.work.wait()
        sizes = [*(p.numel() for p in self.parameters), len(self.parameters)]
        *pieces, flags, checked = self.flat.split([*sizes, self.flat.numel() - sum(sizes)])
        if self.flat.dtype in _CHECKED:
            checks.add(checked, partial(self._check, size=size, backward=backward))
        # flags are read, and a device waited for, only on a rank where a gradient is missing
        present = [True] * len(pieces) if self.complete else [count > 0 for count in flags.tolist()]
        self.flat = None
        self.work = None
        self.grads = {}
        return [
            (p, piece.view_as(p).div_(factor))
            for p, piece, is_present in zip(self.parameters, pieces, present, strict=True)
            if is_present
        ]

    def _check(self, checked: Tensor, size: int, backward: int) -> None:
        tag_sum, *weights = checked.tolist()
        if tag_sum != size * self.tag:
            fix = "use the same parameters on every rank, or call backward for one wrapped model at a time"
            got = f"bucket numbers with a mean of {tag_sum / size:g}"
            raise CommError(explain("averaged gradients", f"bucket {self.tag} on every rank", got, fix))
        differing = _differing(weights, _ROUNDING * torch.finfo(checked.dtype).eps)
        if differing:
            where = f"the weights before backward {backward}"
            got = f"sums of absolute values: {join_differences(differing)}"
            fix = "load weights on all ranks or on none, and train with the same learning rate on every rank"
            raise RankFaultError(explain(where, "the same on every rank", got, fix))


class GradientAverage:
    """Averages the gradients of some parameters after every backward that reaches them, while it exists.

    ``number`` distinguishes the models of a mesh, and the sets of trained parameters of one model; it is the same on
    every rank.
    """

    def __init__(self, parameters: list[Parameter], comm: Comm, checks: DeferredChecks, number: int = 0) -> None:
        for parameter in parameters:
            if parameter.is_complex():
                raise InputError(explain("parameters", "real numbers", str(parameter.dtype), "split them into two"))
        self.parameters = parameters
        self._dtypes = [parameter.dtype for parameter in parameters]
        self._comm = comm
        self._checks = checks
        self.telemetry = StepTelemetry()
        """Of the batch of the newest forward, in which the averaging is counted."""
        self.factor: int | None = None
        """``LossGuard.factor`` of that batch."""
        self._starts_early = comm.device.type == "cpu"
        buckets = enumerate(_fill_buckets(parameters, BUCKET_BYTES if self._starts_early else None))
        first_tag = _TAGS_PER_MODEL * number
        self._buckets = [_Bucket((first_tag + place) % _NUM_TAGS, part) for place, part in buckets]
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._aside: dict[int, Tensor | None] = {}
        self._started = 0
        self._running = False
        self._backwards = 0
        self._handles: list[RemovableHandle] = []
        self.refuse_other_hooks()
        for parameter in parameters:
            self._handles += [
                parameter.register_hook(partial(_weakly(self._before), ref(parameter))),  # type: ignore[no-untyped-call]
                parameter.register_post_accumulate_grad_hook(_weakly(self._after)),  # type: ignore[no-untyped-call]
            ]

    def averages(self, parameters: Sequence[Parameter]) -> bool:
        """Whether it averages the gradients of exactly these parameters, which have the types that they had."""
        return len(parameters) == len(self.parameters) and all(
            mine is other and other.dtype == dtype
            for mine, other, dtype in zip(self.parameters, parameters, self._dtypes, strict=True)
        )

    def refuse_other_hooks(self) -> None:
        """Refuse user hooks on the parameters: they would get this rank's gradients, before they are averaged."""
        ours = 1 if self._handles else 0
        for parameter in self.parameters:
            tables = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
            if any(len(table or ()) > ours for table in tables):
                fix = "work on p.grad after backward; a parameter belongs to one wrapped model"
                got = "user hooks, which would get one rank's gradient"
                raise InputError(explain("parameters", "no hooks but the average's", got, fix))

    def detach(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def recover(self) -> None:
        """Discard the gradients of a backward that failed, and restore the accumulated ones."""
        if not self._running:
            return
        for bucket in self._buckets:
            bucket.grads = {}
            bucket.flat = None
            bucket.work = None
        for parameter in self.parameters:
            if id(parameter) in self._aside:
                parameter.grad = self._aside[id(parameter)]
        self._aside = {}
        self._running = False
        self._started = 0

    def _before(self, parameter: "ref[Parameter]", grad: Tensor | None) -> None:
        """Called with the gradient of a parameter, before it is added to the accumulated one, which is put aside.

        It is None if a function has none for its input, and then nothing is added.
        """
        if grad is not None and grad.layout != torch.strided:
            fix = "use dense gradients (sparse=False)"
            raise InputError(explain("gradient", "a dense tensor", str(grad.layout), fix))
        if not self._running:
            self._running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        found = parameter()
        assert found is not None
        self._aside.setdefault(id(found), found.grad)  # a backward inside of another may have been here
        found.grad = None

    def _after(self, parameter: Tensor) -> None:
        """Called when a parameter's gradient of this backward is complete."""
        if parameter.grad is None:
            return
        bucket = self._bucket_of[id(parameter)]
        if bucket.work is not None:
            got = "a part of a gradient after the others had been averaged"
            fix = "checkpoint with use_reentrant=False: it has no backward inside of backward"
            raise InputError(explain("backward", "one gradient of every parameter", got, fix))
        part = bucket.grads.get(id(parameter))
        bucket.grads[id(parameter)] = parameter.grad if part is None else part + parameter.grad
        parameter.grad = None
        if self._starts_early:
            while self._started < len(self._buckets) and self._buckets[self._started].complete:
                self._start_next()

    def _start_next(self) -> None:
        bucket = self._buckets[self._started]
        call = Call(f"average gradients, bucket {self._started}", self._backwards)
        bucket.start(self._comm, call, with_weights=self._backwards % COMPARE_EVERY == 0)
        assert bucket.flat is not None
        count_reduction(bucket.flat.nbytes, self._comm.size, self.telemetry)
        self._started += 1

    def _finish(self) -> None:
        """At the end of backward: start the remaining buckets, wait for all, and add to the accumulated gradients."""
        aside = self._aside
        self._aside = {}
        self._running = False
        try:
            if not any(bucket.grads or bucket.work for bucket in self._buckets):
                got = "some, whose gradients would be this rank's own"
                fix = "call loss.backward() and read p.grad"
                raise InputError(explain("torch.autograd.grad", "no parameters of a wrapped model", got, fix))
            while self._started < len(self._buckets):
                self._start_next()
            for bucket in self._buckets:
                for parameter, average in bucket.finish(
                    self._comm.size, self._checks, self._backwards, self.factor or self._comm.size
                ):
                    before = aside.pop(id(parameter), parameter.grad)
                    parameter.grad = average if before is None else before.add_(average)
        finally:
            self._started = 0
            self._backwards += 1
            for parameter in self.parameters:
                if id(parameter) in aside:
                    parameter.grad = aside[id(parameter)]


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Calls a method while its object exists: hooks of a parameter that refer to it would keep it forever."""
    weak = WeakMethod(method)

    def call(*args: Any) -> None:
        found = weak()
        if found is not None:
            found(*args)

    return call


def _fill_buckets(parameters: list[Parameter], most_bytes: int | None) -> list[list[Parameter]]:
    """Parameters in reverse order, a bucket for every element type and about ``most_bytes``."""
    buckets: list[list[Parameter]] = []
    fill: dict[Any, tuple[list[Parameter], int]] = {}
    for parameter in reversed(parameters):
        kind = (parameter.dtype, parameter.device)
        bucket, size = fill.get(kind, ([], 0))
        if not bucket or (most_bytes is not None and size + parameter.nbytes > most_bytes):
            bucket = []
            size = 0
            buckets.append(bucket)
        bucket.append(parameter)
        fill[kind] = (bucket, size + parameter.nbytes)
    return buckets


def _differing(sums: list[float], tolerance: float) -> dict[int, str]:
    """The sums of all ranks as texts, the same for sums within a relative tolerance; empty if all are.

    >>> _differing([2.0, 2.0000001, 2.5], 1e-6)
    {0: '2', 1: '2', 2: '2.5'}
    >>> _differing([2.0, 2.0000001], 1e-6), _differing([float("nan")] * 2, 1e-6)
    ({}, {})
    """
    texts: dict[int, str] = {}
    for rank, value in enumerate(sums):
        same = (texts[other] for other in texts if abs(value - sums[other]) <= tolerance * abs(value))
        texts[rank] = next(same, f"{value:.9g}")
    return texts if len(set(texts.values())) > 1 else {}
