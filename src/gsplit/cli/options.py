"""Options of the commands: most are generated from a settings model, the rest are shared by several commands.

A command that is decorated with ``settings_options`` takes ``Flags[Model]``. On the command line that is one option per
field of the model that has a description, with its help, type and default. An option that was not given is not in
``Flags.given``, so that a file of settings or the model's default decides.
"""

import functools
import inspect
from collections.abc import Callable, Container, Mapping
from dataclasses import MISSING, dataclass
from dataclasses import fields as dataclass_fields
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from gsplit.errors import InputError, explain
from gsplit.run.config import refuse_settings

__all__ = [
    "Device",
    "Flags",
    "Json",
    "Output",
    "Overwrite",
    "SampleDevice",
    "StoreArgument",
    "parse_fanout",
    "settings_options",
]

Json = Annotated[bool, typer.Option("--json", help="print one JSON document and nothing else")]
StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="a store, made by gsplit import or partition")]
Output = Annotated[Path, typer.Argument(metavar="OUT.gsplit", help="the store to write")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace what has the same name")]
Device = Annotated[
    str | None, typer.Option(metavar="DEVICE", help="cpu or cuda [default: GPUs where there are any, else the CPU]")
]
SampleDevice = Annotated[
    str,
    typer.Option(
        metavar="DEVICE", help="sample mini-batches on cpu, on cuda, or on auto: cuda if Triton kernels run on it"
    ),
]

Model = TypeVar("Model")
_METAVARS = {int: "INT", float: "FLOAT", str: "NAME", bool: None, Path: "PATH"}


@dataclass(frozen=True)
class Flags(Generic[Model]):
    """The options of a settings model that were given, by field."""

    model: type[Model]
    given: Mapping[str, object]

    def values(self) -> dict[str, object]:
        """What was given, with lists of numbers parsed."""
        lists = {name for name, field in _fields(self.model).items() if _is_number_list(field)}
        return {
            name: _parse_numbers(value, name) if name in lists and isinstance(value, str) else value
            for name, value in self.given.items()
        }

    def parse(self, **others: object) -> Model:
        """The settings; ``others`` are fields that are not options. Errors name the option."""
        try:
            return TypeAdapter(self.model).validate_python({**self.values(), **others})
        except ValidationError as error:
            raise refuse_settings(error, self.given, _option_name) from error


def settings_options(
    *, only: Container[str] | None = None, defaults: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of its ``Flags`` parameter.

    ``only``: the fields that are options. ``defaults``: text for fields whose default differs from the model's.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        given = inspect.signature(command).parameters
        (flags,) = (parameter for parameter in given.values() if get_origin(parameter.annotation) is Flags)
        (model,) = get_args(flags.annotation)
        fields = {
            name: field
            for name, field in _fields(model).items()
            if field.description and (only is None or name in only)
        }

        @functools.wraps(command)
        def run(**values: Any) -> None:
            options = {name: values.pop(name) for name in fields}
            set_by_user = {name: value for name, value in options.items() if value is not None}
            command(**values, **{flags.name: Flags(model, set_by_user)})

        parameters: list[inspect.Parameter] = []
        for parameter in given.values():
            if parameter is not flags:
                parameters.append(parameter)
                continue
            for name, field in fields.items():
                default = (defaults or {}).get(name, _default(field))
                can_reset = "config" in given  # what a file can set, an option can reset
                parameters.append(_parameter(name, field, default, can_reset=can_reset))
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _fields(model: type[Any]) -> dict[str, FieldInfo]:
    """The fields of a pydantic model or a dataclass; those of a base class come last."""
    if issubclass(model, BaseModel):
        names = [name for kind in model.__mro__ for name in inspect.get_annotations(kind) if name in model.model_fields]
        return {name: model.model_fields[name] for name in names}
    hints = get_type_hints(model, include_extras=True)
    return {
        field.name: FieldInfo.from_annotation(hints[field.name])
        if field.default is MISSING
        else FieldInfo.from_annotated_attribute(hints[field.name], field.default)
        for field in dataclass_fields(model)
    }


def _parameter(name: str, field: FieldInfo, default: str, *, can_reset: bool) -> inspect.Parameter:
    kind, metavar = _kind(field)
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "metavar" in extra:
        metavar = str(extra["metavar"])
    names = (_option_name(name),) if kind is bool and not can_reset else ()
    text = f"{field.description} [default: {default}]" if default else field.description
    option = typer.Option(*names, metavar=metavar, help=text)
    required = field.is_required()
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else None,
        annotation=Annotated[kind if required else kind | None, option],
    )


def _kind(field: FieldInfo) -> tuple[Any, str | None]:
    """The type of an option, and the word for its value."""
    hint = _without_none(field.annotation)
    if _is_number_list(field):
        return str, "N,N,..."
    if get_origin(hint) in (list, tuple):
        return list[str], "NAME"
    if get_origin(hint) is Literal:
        return str, "|".join(get_args(hint))
    if issubclass(hint, Enum):
        return str, "|".join(str(member.value) for member in hint)
    return hint, _METAVARS[hint]


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (member for member in get_args(hint) if member is not NoneType)
    return hint


def _is_number_list(field: FieldInfo) -> bool:
    hint = _without_none(field.annotation)
    return get_origin(hint) in (list, tuple) and get_args(hint)[0] is int


def _default(field: FieldInfo) -> str:
    value = field.default
    if field.is_required() or value is None or value is False or value == ():
        return ""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _option_name(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def parse_fanout(text: str) -> list[int]:
    """Neighbours per hop.

    >>> parse_fanout("15,10,5")
    [15, 10, 5]
    """
    return _parse_numbers(text, "fanout")


def _parse_numbers(text: str, name: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        fix = "give whole numbers with commas between them"
        raise InputError(explain(_option_name(name), "numbers like 15,10,5", text, fix)) from None
