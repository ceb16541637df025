"""``gsplit.parallelize``: an unmodified PyG model that runs on mini-batches of any strategy and number of ranks.

No module is wrapped or renamed, so ``state_dict`` keys do not change. A hook on the model opens a forward pass
(``nn.runtime``), and each message-passing layer gets a ``forward`` that runs it on its part of the mini-batch
(``nn.split_forward``). How it runs there is decided here, once, by running the model on toy batches. Called with plain
tensors the model computes what it did before. Gradients are averaged over all ranks during backward.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parameter import UninitializedParameter

from gsplit.device.devices import fork_random_states
from gsplit.distributed.comm.comm import Call, assert_same_on_all_ranks
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.link_batch import LinkBatch, PairModeError
from gsplit.nn.calls import call_model, dtype_of
from gsplit.nn.checks.dry_run import (
    Recorder,
    TooDeepError,
    example_input,
    explain_failure,
    forbid_changed_buffers,
    forbid_random_draws,
    preserve_state,
)
from gsplit.nn.checks.modules import check_modules
from gsplit.nn.checks.row_independence import check_row_independence
from gsplit.nn.checks.toy import PAIR_KINDS, ExampleInput, ToyLinkBatch, Toys, toy_link_batch
from gsplit.nn.checks.toy_typed import TypedExample
from gsplit.nn.forward_pass import ForwardPass
from gsplit.nn.forward_plan import ForwardPlan, RowSpace
from gsplit.nn.layers import layers_of
from gsplit.nn.runtime import Runtime, install_runtime, last_template, remove_runtime, runtime_of
from gsplit.nn.wrappers_and_hooks import check_wrappers
from gsplit.store.conversion import as_graph_store
from gsplit.store.protocol import GraphStore

__all__ = ["parallelize", "call_wrapped", "finish_checks", "forward_plan_of", "mesh_of", "override_forward_pass"]

M = TypeVar("M", bound=Module)
T = TypeVar("T")


def _with_enough_layers(model: Module, like: Toys, run: Callable[[int], T]) -> T:
    """Run with a number of layers of the toy batch: one per module that passes messages.

    The modules of different relations are parallel, and a batch with a layer for each of 255 would not end. So a model
    with types runs on 2 layers first, then on twice as many, until they are enough.
    """
    most = max(len(layers_of(model)), 1)
    num_layers = most if isinstance(like, ExampleInput) else min(2, most)
    while True:
        try:
            return run(num_layers)
        except TooDeepError:
            if num_layers == most:
                raise
        num_layers = min(2 * num_layers, most)


def _record(model: Module, runtime: Runtime, like: Toys, pairs: str, num_layers: int) -> ForwardPlan:
    """Run the model on a toy batch, of vertices or of a kind of pairs, and record its layers, dropouts and norms."""
    takes_edge_attr = like.num_edge_features is not None
    found: tuple[Batch, dict[int, RowSpace]] = like.batch(num_layers)
    if pairs:
        assert isinstance(like, ExampleInput)
        found = toy_link_batch(num_layers, like, pairs)
    batch, space_of = found
    recorder = Recorder(batch, space_of)
    with preserve_state(model, like.device):
        model.train()
        runtime.override = recorder
        try:
            with forbid_random_draws(like.device), forbid_changed_buffers(model):
                out = explain_failure(lambda: call_model(model, batch, takes_edge_attr=takes_edge_attr))
                plan = recorder.plan(_encoded(batch) if isinstance(batch, ToyLinkBatch) else out)
        finally:
            runtime.override = None
    return replace(plan, takes_edge_attr=takes_edge_attr, pairs=pairs)


def _encoded(batch: ToyLinkBatch) -> Tensor:
    """The rows that a model that decodes pairs gave to ``batch.endpoints``."""
    if not batch.encoded:
        fix = "decode rows of z = batch.endpoints(h), where h is the output of the last layer"
        raise InputError(explain("the model", "a call of batch.endpoints", "0 calls", fix))
    return batch.encoded[0]


def _make_plan(model: Module, runtime: Runtime, like: Toys) -> None:
    """Run the model on toy batches: record its layers, dropouts and norms, and refuse it if it mixes rows.

    A model that reads what only batches of pairs have runs on every kind of them, until it is accepted.
    """
    try:
        _plan_for(model, runtime, like, "")
        return
    except InputError as error:
        cause = error.__cause__
        is_missing = isinstance(cause, AttributeError) and isinstance(cause.obj, Batch)
        if not (is_missing and hasattr(LinkBatch, str(getattr(cause, "name", "")))):
            raise
        if not isinstance(like, ExampleInput):
            fix = "return rows by vertex type, and score pairs outside, by a function without parameters"
            got = f"one that decodes pairs by batch.{getattr(cause, 'name', '')}"
            raise InputError(explain("the model", "an encoder of a heterogeneous graph", got, fix)) from None
    failures: list[InputError] = []
    for kind in PAIR_KINDS:
        try:
            _plan_for(model, runtime, like, kind)
            return
        except InputError as error:
            failures.append(error)
    raise next((error for error in failures if not isinstance(error, PairModeError)), failures[0])


def _plan_for(model: Module, runtime: Runtime, like: Toys, pairs: str) -> None:
    """The plan of a model on vertices, or on a kind of pairs."""
    runtime.plan = plan = _with_enough_layers(model, like, partial(_record, model, runtime, like, pairs))
    boundaries = check_row_independence(model, plan, like, override_forward_pass)
    runtime.plan = replace(plan, boundaries=boundaries)


def _make_sizes(model: Module, runtime: Runtime, like: Toys) -> None:
    """Run the model once, so that parameters whose size was not given (-1) get it from the rows of the graph.

    Their values are drawn from torch's generator, which is restored like by the dry run.
    """
    if not any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        return

    def run(num_layers: int) -> None:
        batch, space_of = like.batch(num_layers)
        runtime.override = Recorder(batch, space_of)
        runtime.override.allows_draws = True
        explain_failure(lambda: call_model(model, batch))

    try:
        with fork_random_states(like.device), torch.no_grad():
            _with_enough_layers(model, like, run)
    finally:
        runtime.override = None


def _example_of(
    model: Module, store: GraphStore | None, num_features: int | Mapping[str, int] | None, edges: int | None
) -> Toys:
    """Toy batches like those of the model's graph."""
    if store is None or store.types is None:
        if isinstance(num_features, Mapping):
            fix = "give the graph: gsplit.parallelize(model, mesh, graph=graph)"
            raise InputError(explain("num_features", "one number, without types", dict(num_features), fix))
        return example_input(model, num_features or (store.num_features if store is not None else 0) or None, edges)
    shapes = {
        name: tuple(store.stored_array(f"features/{name}/x").shape[1:])
        for name in store.types.vertex_types
        if f"features/{name}/x" in store.names
    }
    if isinstance(num_features, Mapping):
        shapes = {name: (width,) for name, width in num_features.items()}
    elif num_features is not None or edges is not None:
        fix = "give num_features={vertex type: number}, or leave it out; edges of typed graphs have no features here"
        raise InputError(explain("num_features", "numbers by vertex type", (num_features, edges), fix))
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    types = store.types
    counts = tuple(types.count(name) for name in types.vertex_types)
    values: dict[str, tuple[int, ...]] = {}
    if "edge_attr" in store.edge_names:
        values["edge_attr"] = tuple(store.stored_array("edges/edge_attr").shape[1:])
    if "edge_weight" in store.edge_names:
        values["edge_weight"] = ()
    return TypedExample(
        types.vertex_types,
        types.edge_types,
        counts,
        shapes,
        dtype_of(model),
        device,
        edge_values=types.edge_values,
        value_shapes=values,
    )


def _broadcast_weights(model: Module, mesh: Mesh) -> None:
    """Give every rank rank 0's parameters and buffers. A collective."""
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert_same_on_all_ranks(
        mesh.world, "parallelize", {name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()}
    )
    with torch.no_grad():
        for name, tensor in tensors.items():
            whole = tensor.detach().contiguous()
            flat = whole.view(torch.uint8) if whole.dtype == torch.bool else whole
            mesh.world.broadcast(Call(f"broadcast {name}"), flat)  # all ranks: same names, compared above
            tensor.copy_(whole)


def forward_plan_of(model: Module) -> ForwardPlan:
    """The plan of a wrapped model's forward."""
    plan = runtime_of(model).plan
    assert plan is not None
    return plan


def call_wrapped(model: Module, batch: Batch) -> Any:
    """Call a wrapped model as training called it last, or as ``call_model`` does before the first call."""
    runtime = runtime_of(model)
    if runtime.template is not None:
        return runtime.template.call(model, batch)
    return call_model(model, batch, takes_edge_attr=forward_plan_of(model).takes_edge_attr)


def mesh_of(model: Module) -> Mesh:
    """The mesh of a wrapped model."""
    mesh = runtime_of(model).mesh
    assert mesh is not None
    return mesh


def finish_checks(model: Module) -> None:
    """Run the checks of values that a device has not delivered yet; waits for it."""
    runtime_of(model).checks.finish()


@contextmanager
def override_forward_pass(model: Module, forward_pass: ForwardPass) -> Iterator[None]:
    """Use ``forward_pass`` for the calls of a wrapped model inside this context."""
    runtime = runtime_of(model)
    runtime.override = forward_pass
    try:
        yield
    finally:
        runtime.override = None


def parallelize(
    model: M,
    mesh: Mesh,
    *,
    graph: Any = None,
    num_features: int | Mapping[str, int] | None = None,
    num_edge_features: int | None = None,
) -> M:
    """Make a PyG model run on mini-batches of ``mesh``; returns the model, changed in place. A collective.

    Every rank starts from rank 0's weights. The model is then called with ``(batch.x, batch.edge_index)``, with
    ``batch.edge_weight`` or ``batch.edge_attr`` where it takes them, or with ``(batch)``. The widths of rows and edges
    are needed only if no module of the model declares them. A model that decodes pairs itself takes the batch and calls
    ``batch.endpoints(h)`` with the rows of its last layer. A model that cannot be exact on a split mini-batch is
    refused here, with the reason.

    ``graph``: the graph that the model trains on; needed if it is heterogeneous. The model is then called with
    ``(batch.x_dict, batch.edge_index_dict)``, or with ``(batch)``, and sizes of -1 are taken from the features ``x`` of
    the graph, or from ``num_features`` by vertex type.
    """
    check_wrappers(model)
    model.to(mesh.device)
    store = None if graph is None else as_graph_store(graph)
    check_modules(model, typed=store is not None and store.types is not None)
    template = last_template(model)
    remove_runtime(model)
    if mesh.num_replicas > 1 and any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        fix = "use replicas=1, or a row-wise norm such as LayerNorm"
        raise InputError(explain("batch norm", "one replica", mesh.num_replicas, fix))
    like = _example_of(model, store, num_features, num_edge_features)
    runtime = Runtime(None, mesh)
    install_runtime(model, runtime)
    try:
        _make_sizes(model, runtime, like)
        _make_plan(model, runtime, like)
        _broadcast_weights(model, mesh)
    except BaseException:
        remove_runtime(model)
        raise
    runtime.template = template
    return model
