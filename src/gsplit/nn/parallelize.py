"""``gsplit.parallelize``: an unmodified PyG model that runs on mini-batches of any strategy and number of ranks.

No module is wrapped or renamed, so ``state_dict`` keys do not change. A hook on the model opens a forward pass
(``nn.runtime``), and each message-passing layer gets a ``forward`` that runs it on its part of the mini-batch
(``nn.split_forward``). How it runs there is decided here, once, by running the model on toy batches. Called with plain
tensors the model computes what it did before. Gradients are averaged over all ranks during backward.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.parameter import UninitializedParameter

from gsplit.device.devices import fork_random_states
from gsplit.distributed.comm.comm import Call, assert_same_on_all_ranks
from gsplit.distributed.comm.mesh import Mesh
from gsplit.errors import InputError, explain
from gsplit.graph.types import EdgeType
from gsplit.minibatch.batch import Batch
from gsplit.minibatch.link_batch import PairModeError
from gsplit.minibatch.local_graph import Features, find_edge_array
from gsplit.minibatch.typed_batch import TypedLinkBatch
from gsplit.nn.calls import call_model, dtype_of
from gsplit.nn.checks.dry_run import (
    Recorder,
    TooDeepError,
    changed_buffers,
    example_input,
    explain_failure,
    forbid_random_draws,
    preserve_state,
)
from gsplit.nn.checks.modules import check_modules
from gsplit.nn.checks.one_process import OneProcessCheck
from gsplit.nn.checks.row_independence import check_row_independence
from gsplit.nn.checks.toy import PAIR_KINDS, ExampleInput, ToyLinkBatch, Toys
from gsplit.nn.checks.toy_typed import TypedExample
from gsplit.nn.forward_pass import ForwardPass
from gsplit.nn.forward_plan import ForwardPlan, RowSpace
from gsplit.nn.gradients import averages_of
from gsplit.nn.heads import refuse_wrapped, wrap_head
from gsplit.nn.layers import layers_of
from gsplit.nn.runtime import Runtime, install_runtime, last_template, remove_runtime, runtime_of
from gsplit.nn.wrappers_and_hooks import check_wrappers
from gsplit.store.conversion import as_graph_store
from gsplit.store.protocol import GraphStore

__all__ = [
    "parallelize",
    "call_wrapped",
    "check_features",
    "count_evaluation",
    "finish_checks",
    "forward_plan_of",
    "mesh_of",
    "override_forward_pass",
]

_LOG = logging.getLogger(__name__)
M = TypeVar("M", bound=Module | Parameter)
T = TypeVar("T")


def _with_enough_layers(model: Module, like: Toys, pairs: str, run: Callable[[int], T]) -> T:
    """Run with a number of layers of the toy batch: one per module that passes messages.

    The modules of different relations are parallel, and a batch with a layer for each of 255 would not end. So a model
    with types runs on 2 layers first, then on twice as many, until they are enough. A model that decodes pairs takes
    the rows of the last layer, so its batch must not have more layers than the model.
    """
    most = max(len(layers_of(model)), 1)
    num_layers = most if isinstance(like, ExampleInput) else min(2, most)
    if pairs:
        num_layers = 1
    while True:
        try:
            return run(num_layers)
        except TooDeepError:
            if num_layers == most:
                raise
        num_layers = min(num_layers + 1 if pairs else 2 * num_layers, most)


def _record(model: Module, runtime: Runtime, like: Toys, pairs: str, num_layers: int) -> ForwardPlan:
    """Run the model on a toy batch, of vertices or of a kind of pairs, and record its layers, dropouts and norms."""
    takes_edge_attr = like.num_edge_features is not None
    batch, space_of = _toy_batch(like, pairs, num_layers)
    recorder = Recorder(batch, space_of)
    with preserve_state(model, like.device):
        model.train()
        runtime.override = recorder
        try:
            with forbid_random_draws(like.device), changed_buffers(model) as changed, recorder.readers:
                out = explain_failure(lambda: call_model(model, batch, takes_edge_attr=takes_edge_attr))
                plan = recorder.plan(_encoded(batch) if isinstance(batch, ToyLinkBatch) else out)
        finally:
            runtime.override = None
    plan = replace(plan, takes_edge_attr=takes_edge_attr, pairs=pairs, changed_buffers=tuple(changed))
    if isinstance(like, TypedExample):
        plan = replace(plan, types=(like.vertex_types, like.edge_types), pair_type=like.pair_type if pairs else None)
    return plan


def _toy_batch(like: Toys, pairs: str, num_layers: int) -> tuple[Batch, dict[int, RowSpace]]:
    return like.pair_batch(num_layers, pairs) if pairs else like.batch(num_layers)


def _encoded(batch: ToyLinkBatch) -> Any:
    """The rows that a model that decodes pairs gave to ``batch.endpoints``."""
    if not batch.encoded:
        fix = "decode rows of z = batch.endpoints(h), where h is the output of the last layer"
        raise InputError(explain("the model", "a call of batch.endpoints", "0 calls", fix))
    return batch.encoded[0]


def _find_kind(like: Toys, run: Callable[[str], None]) -> None:
    """Run on batches of vertices; if the model reads what only batches of pairs have, on every kind of them.

    The first kind with which the run does not fail is taken.
    """
    try:
        run("")
        return
    except InputError as error:
        cause = error.__cause__
        name = str(getattr(cause, "name", ""))
        is_missing = isinstance(cause, AttributeError) and isinstance(cause.obj, Batch)
        if not (is_missing and (hasattr(TypedLinkBatch, name) or name == "pair_type")):
            raise
        if isinstance(like, TypedExample) and like.pair_type is None:
            fix = "give it: gsplit.parallelize(model, mesh, graph=graph, pair_type=('user', 'rates', 'item'))"
            got = f"None, and the model decodes pairs by batch.{name}"
            raise InputError(explain("pair_type", "the edge type of the pairs", got, fix)) from None
    failures: list[InputError] = []
    for kind in PAIR_KINDS:
        try:
            run(kind)
            return
        except InputError as error:
            failures.append(error)
    raise next((error for error in failures if not isinstance(error, PairModeError)), failures[0])


def _make_plan(model: Module, runtime: Runtime, like: Toys) -> None:
    """Run the model on toy batches: record its layers, dropouts and norms, and refuse it if it mixes rows."""

    def run(pairs: str) -> None:
        runtime.plan = plan = _with_enough_layers(model, like, pairs, partial(_record, model, runtime, like, pairs))
        boundaries = check_row_independence(model, plan, like, override_forward_pass)
        runtime.plan = replace(plan, boundaries=boundaries)

    _find_kind(like, run)


def _make_sizes(model: Module, runtime: Runtime, like: Toys) -> None:
    """Run the model once, so that parameters whose size was not given (-1) get it from the rows of the graph.

    Their values are drawn from torch's generator, which is restored like by the dry run.
    """
    if not any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        return

    def run(pairs: str, num_layers: int) -> None:
        batch, space_of = _toy_batch(like, pairs, num_layers)
        runtime.override = Recorder(batch, space_of)
        runtime.override.allows_draws = True
        explain_failure(lambda: call_model(model, batch))

    try:
        with fork_random_states(like.device), torch.no_grad():
            _find_kind(like, lambda pairs: _with_enough_layers(model, like, pairs, partial(run, pairs)))
    finally:
        runtime.override = None


def _example_of(
    model: Module,
    store: GraphStore | None,
    num_features: int | Mapping[str, int] | None,
    edges: int | None,
    pair_type: EdgeType | None,
    value_names: Mapping[str, str | None],
) -> Toys:
    """Toy batches like those of the model's graph."""
    known = () if store is None or store.types is None else store.types.edge_types
    if pair_type is not None and pair_type not in known:
        fix = "name one of them, and give the graph: gsplit.parallelize(model, mesh, graph=graph, pair_type=...)"
        raise InputError(explain("pair_type", f"an edge type of the graph: {list(known)}", pair_type, fix))
    if store is None or store.types is None:
        if isinstance(num_features, Mapping):
            fix = "give the graph: gsplit.parallelize(model, mesh, graph=graph)"
            raise InputError(explain("num_features", "one number, without types", dict(num_features), fix))
        return example_input(model, num_features or (store.num_features if store is not None else 0) or None, edges)
    shapes = {
        name: tuple(store.shape(f"features/{name}/x")[1:])
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
    found = {role: find_edge_array(store, name, role) for role, name in value_names.items()}
    shown = {role: name for role, name in found.items() if name is not None}
    values = {role: tuple(store.shape(f"edges/{name}")[1:]) for role, name in shown.items()}
    if "edge_weight" in values:
        values["edge_weight"] = ()
    return TypedExample(
        types.vertex_types,
        types.edge_types,
        counts,
        shapes,
        dtype_of(model.parameters()),
        device,
        edge_values=tuple(tuple(role for role, name in shown.items() if name in names) for names in types.edge_values),
        value_shapes=values,
        pair_type=pair_type,
    )


def _broadcast_weights(model: Module | Parameter, mesh: Mesh) -> None:
    """Give every rank rank 0's parameters and buffers. A collective."""
    tensors: dict[str, Tensor] = {"the parameter": model} if isinstance(model, Tensor) else {}
    if isinstance(model, Module):
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert_same_on_all_ranks(
        mesh.control, "parallelize", {name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()}
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
    """Call a wrapped model as training called it last, with the rows of the batch.

    As ``call_model`` does before the first call, and after one with other tensors, which the batch does not have.
    """
    template = runtime_of(model).template
    if template is not None and template.takes_rows:
        return template.call(model, batch)
    return call_model(model, batch, takes_edge_attr=forward_plan_of(model).takes_edge_attr)


def check_features(model: Module, features: Features) -> None:
    """Refuse to call a model with features of the graph in place of other tensors that training called it with."""
    template = last_template(model)
    if template is not None:
        template.check_features(features)


def mesh_of(model: Module) -> Mesh:
    """The mesh of a wrapped model."""
    mesh = runtime_of(model).mesh
    assert mesh is not None
    return mesh


def count_evaluation(model: Module) -> None:
    """Tell a wrapped model that it was evaluated: after the first time, its next step is compared with one process."""
    averages = averages_of(mesh_of(model))
    if averages.heads and "evaluated" not in averages.warned and mesh_of(model).rank == 0:
        averages.warned.add("evaluated")
        names = ", ".join(type(head).__name__ for head in averages.heads)
        _LOG.warning(
            "evaluated: the output of the model, without what is trained beside it (%s). Put a head into the model, or "
            "apply it to what gsplit.infer returns",
            names,
        )
    step_check = runtime_of(model).step_check
    if step_check is not None:
        step_check.count_evaluation()


def finish_checks(model: Module) -> None:
    """Run the checks of values that a device has not delivered yet; waits for it."""
    runtime_of(model).checks.finish()
    averages_of(mesh_of(model)).checks.finish()


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
    pair_type: EdgeType | None = None,
    edge_attr: str | None = "edge_attr",
    edge_weight: str | None = "edge_weight",
    verify_every: int | None = None,
) -> M:
    """Make a PyG model run on mini-batches of ``mesh``; returns the model, changed in place. A collective.

    A module without message passing, such as a head that is trained behind the model, and a single parameter are taken,
    too: every rank gets rank 0's weights, and their gradients are averaged with the model's. The other arguments are
    for models.

    Every rank starts from rank 0's weights. The model is then called with ``(batch.x, batch.edge_index)``, with
    ``batch.edge_weight`` or ``batch.edge_attr`` where it takes them, or with ``(batch)``. The widths of rows and edges
    are needed only if no module of the model declares them. A model that decodes pairs itself takes the batch and calls
    ``batch.endpoints(h)`` with the rows of its last layer. A model that cannot be exact on a split mini-batch is
    refused here, with the reason.

    ``graph``: the graph that the model trains on; needed if it is heterogeneous. The model is then called with
    ``(batch.x_dict, batch.edge_index_dict)``, or with ``(batch)``, and sizes of -1 are taken from the features ``x`` of
    the graph, or from ``num_features`` by vertex type. ``pair_type``: the edge type of the pairs, if the model decodes
    pairs of a heterogeneous graph itself. ``edge_attr``, ``edge_weight``: the stored values of edges that the loader
    gives under these names, if it takes others.

    ``verify_every``: before the first step, after the first evaluation and when other parameters are trained, the
    outputs and gradients of all ranks are compared with those of one process, on small mini-batches, and a difference
    raises; a number: also before every so many mini-batches; 0: never (docs/verify.md).
    """
    if isinstance(model, Parameter):
        if model.device != mesh.device:
            fix = "make it there: torch.nn.Parameter(torch.ones(1, device=mesh.device))"
            raise InputError(explain("parallelize", f"a parameter on {mesh.device}", model.device, fix))
        wrap_head(model, mesh)
        _broadcast_weights(model, mesh)
        return model
    check_wrappers(model)
    if not layers_of(model):
        model.to(mesh.device)
        wrap_head(model, mesh)
        _broadcast_weights(model, mesh)
        return model
    step_check = OneProcessCheck(verify_every)
    model.to(mesh.device)
    store = None if graph is None else as_graph_store(graph)
    check_modules(model, typed=store is not None and store.types is not None)
    template = last_template(model)
    remove_runtime(model)
    refuse_wrapped(averages_of(mesh), list(model.parameters()))
    if mesh.num_replicas > 1 and any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        fix = "use replicas=1, or a row-wise norm such as LayerNorm"
        raise InputError(explain("batch norm", "one replica", mesh.num_replicas, fix))
    value_names = {"edge_attr": edge_attr, "edge_weight": edge_weight}
    like = _example_of(model, store, num_features, num_edge_features, pair_type, value_names)
    runtime = Runtime(None, mesh)
    install_runtime(model, runtime)
    try:
        _make_sizes(model, runtime, like)
        _make_plan(model, runtime, like)
        _broadcast_weights(model, mesh)
        runtime.follow(model)
    except BaseException:
        remove_runtime(model)
        raise
    runtime.template = template
    runtime.step_check = step_check
    return model
