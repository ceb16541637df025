"""The options that are settings: flags, help and defaults, made from the fields of ``TrainSettings``.

A command marked with ``settings_options`` takes one parameter ``flags: Flags``; on the command line that is
``--config`` and an option per setting. A flag that was not given leaves the setting to the file or its default.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from gsplit.cli.options import parse_fanout
from gsplit.run.config import TrainSettings, applies_to_verify, load_settings

__all__ = ["Flags", "settings_options"]

_METAVARS = {int: "INT", float: "FLOAT", str: "NAME", bool: None}
_SIZES = ("cache", "device_cache", "copies")


@dataclass(frozen=True)
class Flags:
    """What the user has given: a TOML file, and the flags that were set."""

    config: Path | None
    given: Mapping[str, object]

    def settings(self, resumed: TrainSettings | None = None) -> TrainSettings:
        """The settings that these mean; flags come before the file, and that before those of a resumed run."""
        given = dict(self.given)
        if isinstance(given.get("fanout"), str):
            given["fanout"] = parse_fanout(str(given["fanout"]))
        if resumed is not None and "epochs" in given:  # longer than it was: its number of steps goes
            given = {"steps": None, **given}
        return load_settings(self.config, given, resumed)


def settings_options(*, for_verify: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of all settings, or of those that ``gsplit verify`` takes."""
    names = [name for name in TrainSettings.model_fields if applies_to_verify(name) or not for_verify]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(*, config: Path | None, **values: Any) -> None:
            given = {name: value for name in names if (value := values.pop(name)) is not None}
            command(**values, flags=Flags(config, given))

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command).parameters.values():
            parameters += _parameters(names) if parameter.annotation is Flags else [parameter]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def _parameters(names: list[str]) -> list[inspect.Parameter]:
    config = typer.Option(metavar="TOML", help="a file with these settings; flags override it")
    options = {"config": Annotated[Path | None, config]}
    for name in names:
        field = TrainSettings.model_fields[name]
        kind, metavar = _kind(field)
        metavar = "SIZE" if name in _SIZES else metavar
        shown = "" if field.default is None or field.default is False else f" [default: {_text(field.default)}]"
        options[name] = Annotated[kind | None, typer.Option(metavar=metavar, help=f"{field.description}{shown}")]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return [inspect.Parameter(name, keyword, default=None, annotation=hint) for name, hint in options.items()]


def _kind(field: FieldInfo) -> tuple[Any, str | None]:
    """The type of a flag, and the word for its value."""
    hint: Any = field.annotation
    if get_origin(hint) in (Union, UnionType):  # None: not given
        (hint,) = (member for member in get_args(hint) if member is not NoneType)
    if get_origin(hint) is Literal:
        return str, "|".join(get_args(hint))
    if get_origin(hint) is list:
        return str, "N,N,..."
    return hint, _METAVARS[hint]


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
