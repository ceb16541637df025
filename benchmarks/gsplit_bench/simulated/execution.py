"""One operation on the simulated device: checked as CUDA would, counted, run on the host tensors and wrapped again."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gsplit_bench.simulated.backend import DEVICE_TYPE, SimTensor, correct_aliasing, sim_device, without_modes
from gsplit_bench.simulated.operations import INDEXING, Operation, operation_of, why_host_waits
from gsplit_bench.simulated.state import active, moved
from gsplit_bench.simulated.streams import ContextError

__all__ = ["copy", "host_tensors", "launch_triton", "run"]


def leaves(value: Any) -> Iterator[Any]:
    """What lies in tuples and lists; torch's own function for it takes most of an operation's time."""
    if isinstance(value, tuple | list):
        for inner in value:
            yield from leaves(inner)
    else:
        yield value


def _tensors_in(args: Any, kwargs: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
    return found


def _unwrap(value: Any) -> Any:
    """Host tensors in place of those of the device, in tuples and lists too."""
    if isinstance(value, SimTensor):
        return value.host
    return type(value)(map(_unwrap, value)) if isinstance(value, tuple | list) else value


def _wrap(value: Any) -> Any:
    """Tensors of the device in place of host tensors, in tuples and lists too."""
    if isinstance(value, Tensor):
        return value if isinstance(value, SimTensor) else SimTensor(value)
    return type(value)(map(_wrap, value)) if isinstance(value, tuple | list) else value


def _unwrap_options(kwargs: Any) -> Any:
    return {key: _unwrap(value) for key, value in kwargs.items()}


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """One operation: checked, counted, run on the host."""
    operation = operation_of(func)
    tensors = _tensors_in(args, kwargs)
    held = [tensor for tensor in tensors if isinstance(tensor, SimTensor)]
    if operation.is_collective:
        return _run_collective(func, args, kwargs, tensors, held)
    if operation.name == "prim::layout":
        return args[0].host.layout
    device = kwargs.get("device")
    makes_here = device is not None and torch.device(device).type == DEVICE_TYPE
    if not held and not makes_here:
        return _run_on_host(operation.short, func, args, kwargs)
    if operation.short == "copy_":
        return copy(args[0], args[1], bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False)))
    if operation.short == "_to_copy":
        return _to_copy(args[0], kwargs)
    if len(held) < len(tensors):
        _check_devices(operation.short, args, kwargs, tensors)
    return _run_kernel(operation, func, args, kwargs, held)


def _run_collective(func: Any, args: Any, kwargs: Any, tensors: list[Tensor], held: list[SimTensor]) -> Any:
    if held and len(held) < len(tensors):
        raise RuntimeError(f"{func._schema.name}: tensors of one collective on {sim_device()} and on the host")
    if any(not tensor.host.is_contiguous() for tensor in held):
        raise ValueError("Tensors must be contiguous")
    for value in args if held else ():
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            active().open_communicator(dist.ProcessGroup.unbox(value).group_name)
    return func(*_unwrap(args), **_unwrap_options(kwargs))


def _run_on_host(short: str, func: Any, args: Any, kwargs: Any) -> Any:
    """An operation without the device; pinning host memory is the device's business all the same."""
    state = active()
    if short == "is_pinned":
        return state.is_pinned(args[0])
    if short in ("_pin_memory", "pin_memory"):
        return state.pin(args[0].clone())
    if kwargs.get("pin_memory"):
        return state.pin(func(*args, **{**kwargs, "pin_memory": False}))
    return func(*args, **kwargs)


def copy(target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
    """``target.copy_(source)``, from and to the device or on it."""
    here, from_here = isinstance(target, SimTensor), isinstance(source, SimTensor)
    active().note_operation("aten::copy_", [target, source])
    _note_launch("copy_", [source], [target])
    if here != from_here:
        host = source if here else target
        num_bytes = (target if here else source).nbytes
        moved(num_bytes, "device" if here else "host", host, non_blocking=non_blocking)
        if not here and non_blocking and active().is_pinned(host):  # not there before the host has waited for it
            tracker = active().tracker
            clock = tracker.snapshot(tracker.current())
            active().start_copy(target, _unwrap(source).detach().clone(), clock)
            return target
    _unwrap(target).copy_(_unwrap(source))
    return target


def _to_copy(source: Tensor, kwargs: Any) -> Tensor:
    active().note_operation("aten::_to_copy", [source])
    target = torch.device(kwargs.get("device") or source.device)
    options = {key: value for key, value in kwargs.items() if key not in ("device", "non_blocking", "pin_memory")}
    inner: Tensor = torch.ops.aten._to_copy.default(_unwrap(source), **options)
    non_blocking = bool(kwargs.get("non_blocking"))
    if target.type == "cpu":
        _note_launch("_to_copy", [source], [])
        if kwargs.get("pin_memory"):
            active().pin(inner)
        moved(inner.nbytes, "host", inner, non_blocking=non_blocking)
        return inner
    out = SimTensor(inner)
    _note_launch("_to_copy", [source], [out])
    if not isinstance(source, SimTensor):
        moved(inner.nbytes, "device", source, non_blocking=non_blocking)
    return out


def _check_devices(short: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
    """Refuse host tensors beside those of the device; CUDA takes single numbers, and index tensors, which it copies."""
    hosts = [tensor for tensor in tensors if not isinstance(tensor, SimTensor) and tensor.dim() > 0]
    if short in INDEXING and isinstance(args[0], SimTensor):
        for index in args[1]:
            if isinstance(index, Tensor) and not isinstance(index, SimTensor):
                moved(index.nbytes, "device", index, non_blocking=False, reason="index on the host")
                hosts = [tensor for tensor in hosts if tensor is not index]
    out = kwargs.get("out")
    if hosts or (isinstance(out, Tensor) and not isinstance(out, SimTensor)):
        shapes = ", ".join(f"{list(tensor.shape)} on {tensor.device}" for tensor in tensors)
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {shapes} ({short})")


def _run_kernel(operation: Operation, func: Any, args: Any, kwargs: Any, held: list[SimTensor]) -> Any:
    state, short = active(), operation.short
    state.note_operation(operation.full, held)
    reason = why_host_waits(short, func, args, kwargs)
    options = _unwrap_options(kwargs)
    if "device" in options:
        options["device"] = torch.device("cpu")
    options.pop("pin_memory", None)
    with state.own_random_numbers() if operation.draws else nullcontext():
        out = func(*_unwrap(args), **options)
    if short == "_local_scalar_dense":
        state.log.copy(args[0].host.element_size(), "host")
        wrapped = out
    else:
        wrapped = _wrap(out)
    if operation.launches:
        state.log.launch()
        reads, writes = _accesses(func, args, kwargs) if state.tracker.check else ([], [])
        _note_access(short, reads, writes + [leaf for leaf in leaves(wrapped) if isinstance(leaf, SimTensor)])
    elif reason is not None:
        _note_access(short, [args[0]])
    if reason is not None:
        state.log.wait(reason)
        state.tracker.host_waited(state.tracker.snapshot(state.tracker.current()))
    if not operation.aliases or not held:
        return wrapped
    return correct_aliasing(func, args, kwargs, wrapped)  # type: ignore[no-untyped-call]


def _accesses(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors of the device that an operation reads, and those it writes, by its schema."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    for argument in func._schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        found = [leaf for leaf in leaves(given.get(argument.name)) if isinstance(leaf, SimTensor)]
        (writes if is_written else reads).extend(found)
    return reads, writes


def _note_launch(operation: str, reads: list[Any], writes: list[Any]) -> None:
    active().log.launch()
    _note_access(operation, reads, writes)


def _note_access(operation: str, reads: list[Any], writes: list[Any] | None = None) -> None:
    tracker = active().tracker
    if not tracker.check:
        reads, writes = [], []
    tracker.launch(tracker.current(), host_tensors(reads), host_tensors(writes or []), operation)


def host_tensors(values: list[Any]) -> list[Tensor]:
    """The host tensors behind those values that are tensors of the device."""
    return [value.host for value in values if isinstance(value, SimTensor)]


def launch_triton(
    kernel: Any, grid: tuple[int, ...], args: Sequence[Any], constants: Mapping[str, Any], writes: Sequence[Tensor]
) -> None:
    """A Triton kernel on tensors of the device: the launcher of its state runs it on the host tensors."""
    name = getattr(kernel, "__name__", "kernel")
    state = active()
    if state.tracker.current_device() != sim_device().index:
        raise ContextError(f"{name} is launched on sim:{state.tracker.current_device()}, the device of another rank")
    hosts = [arg for arg in args if isinstance(arg, Tensor) and not isinstance(arg, SimTensor) and arg.dim() > 0]
    if any(not state.is_pinned(tensor) for tensor in hosts):
        raise ValueError(f"Pointer argument cannot be accessed from Triton (cpu tensor?): {name}")
    _note_launch(name, list(args), list(writes))
    with without_modes():
        state.launcher(kernel, grid, _unwrap(tuple(args)), constants, _unwrap(tuple(writes)))
