"""Hooks of the documentation site: changes to the pages of docs/ when it is built (``hooks`` in mkdocs.yml).

- Links that leave docs/, such as ``../src/gsplit/minibatch/split.py``, work on a forge as they stand; in the site they become
  links to the repository (``repo_url``). A link to a missing file fails the build.
- ``<!-- command line -->`` in cli.md becomes the reference of every ``gsplit`` command, generated from the commands.
"""

import re
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from gsplit.cli.grouped_options import GroupedCommand, option_groups
from gsplit.cli.main import app

__all__ = ["command_line", "link_out", "on_page_markdown"]

ROOT = Path(__file__).resolve().parents[1]
BRANCH = "main"
MARKER = "<!-- command line -->"
FOR_TESTS = re.compile(r"^<!-- (setup|not run|same as|runs).*?-->\n", re.MULTILINE | re.DOTALL)  # tests/docs
LINK = re.compile(r"(?<=\]\()(\.\./[^)#\s]+)(#[^)\s]*)?(?=\))")


def link_out(page: str, link: str, repo_url: str) -> str:
    """The repository address of ``link`` on a page of docs/, or ``link`` itself if it points into docs/."""
    target = (ROOT / "docs" / page).parent.joinpath(link).resolve()
    if target.is_relative_to(ROOT / "docs"):
        return link
    if not target.exists():
        raise PluginError(f"{page} links to {link}, which is not there")
    kind = "tree" if target.is_dir() else "blob"
    return f"{repo_url.rstrip('/')}/{kind}/{BRANCH}/{target.relative_to(ROOT)}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _parameter(parameter: Any) -> str:
    """A row of a command's table: syntax, help text and default of a parameter."""
    is_flag = getattr(parameter, "is_flag", False)
    written = parameter.metavar or parameter.name.upper() if parameter.param_type_name == "argument" else ""
    if not written:
        value = "" if is_flag else f" {parameter.metavar or 'VALUE'}"
        written = ", ".join([*parameter.opts, *parameter.secondary_opts]) + value
    default = parameter.default
    if default is None or default == () or default is False or callable(default) or repr(default) == "Sentinel.UNSET":
        shown = "required" if parameter.required else ""
    else:
        shown = f"`{default}`"
    return f"| `{written}` | {_cell(parameter.help or '')} | {shown} |"


def _command(name: str, command: Any, depth: int) -> list[str]:
    lines = [f"{'#' * depth} {name}", "", command.help or "", ""]
    if hasattr(command, "commands"):
        for word, below in command.commands.items():
            lines += _command(f"{name} {word}", below, depth + (depth > 1))
        return lines
    if not isinstance(command, GroupedCommand):
        return [*lines, *_table(command.params)]
    for title, parameters in option_groups(command.params):
        lines += [f"**{title}**", "", *_table(parameters)]
    return lines


def _table(parameters: list[Any]) -> list[str]:
    rows = [_parameter(parameter) for parameter in parameters if parameter.name != "help"]
    return ["| | | default |", "|---|---|---|", *rows, ""]


def command_line() -> str:
    """Every command with its arguments and options, as Markdown, from the typer application."""
    words = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    order = sorted(words, key=lambda word: word != "import")  # the order of use
    return "\n".join(line for word in order for line in _command(f"gsplit {word}", words[word], 2))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Called by mkdocs for every page before it is rendered."""
    name, repo_url = page.file.src_uri, config.repo_url or ""
    if MARKER in markdown:
        markdown = markdown.replace(MARKER, command_line())
    markdown = FOR_TESTS.sub("", markdown)
    return LINK.sub(lambda found: link_out(name, found[1], repo_url) + (found[2] or ""), markdown)
