"""What the texts name exists: functions and their parameters, commands and options, measurements, tests, messages."""

import ast
import inspect
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer.main
from doc_blocks import ROOT, pages

import gsplit
from gsplit.distributed.launch.allocator import ALLOCATOR
from gsplit.minibatch.strategy_names import parse_strategy
from gsplit_bench.commands import app as benchmarks
from gsplit_bench.paper import EXPERIMENTS
from gsplit_bench.train_study import PRESETS

DOCS = ROOT / "docs"
TEXTS = [*pages(), ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
COMMAND_LINE = json.loads((ROOT / "tests" / "assets" / "command_line.json").read_text())
MEASUREMENTS = vars(typer.main.get_command(benchmarks))["commands"]
ARGUMENT_OF_A_CALL = r"(?:\((?:(\w+)=)?[^`]*\))?"


def _quoted(page: Path) -> list[str]:
    """What stands between single backticks, and not in a block of code."""
    return re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))


def _find(name: str) -> Any:
    """The object of a dotted name: a module, then attributes."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def test_every_name_in_the_code_exists() -> None:
    matches = [
        (page, match)
        for page in TEXTS
        for quoted in _quoted(page)
        if (match := re.fullmatch(rf"(gsplit(?:_bench)?(?:\.\w+)+){ARGUMENT_OF_A_CALL}", quoted))
    ]
    assert len(matches) > 150
    for page, match in matches:
        named = _find(match[1])
        assert match[2] is None or match[2] in inspect.signature(named).parameters, f"{page.name}: {match[0]}"


def test_a_name_that_does_not_exist_is_found() -> None:
    with pytest.raises(AttributeError):
        _find("gsplit.minibatch.split.sp_sample")
    assert _find("gsplit.NeighborLoader") is gsplit.NeighborLoader


def test_every_public_name_is_in_the_api_reference() -> None:
    text = (DOCS / "api.md").read_text()
    errors = text.split("::: gsplit.errors")[1]
    for name in set(dir(gsplit)) - {"__version__"}:
        assert f"::: gsplit.{name}\n" in text or name in errors, name
    for handle, members in re.findall(r"::: ([\w.]+)\n    options:\n      members: \[(.*)\]", text):
        owner = _find(handle)
        assert [name for name in members.split(", ") if not hasattr(owner, name)] == [], handle


def test_every_module_has_a_place_in_the_tour() -> None:
    """A folder that the layout names stands for its modules; nothing is named that does not exist."""
    layout = (DOCS / "tour.md").read_text().split("```text\n")[1].split("```")[0]
    package = ROOT / "src" / "gsplit"
    paths = [path for path in package.iterdir() if path.name not in ("py.typed", "__main__.py", "__pycache__")]
    names = {path.stem if path.suffix == ".py" else f"{path.name}/" for path in paths}
    first, *lines = layout.splitlines()
    modules = set(re.findall(r"\w+", first.split("  ")[0]))
    folders = {name for line in lines for name in re.match(r"(?:\w+/ ?)+", line)[0].split()}  # type: ignore[index]
    assert modules | folders == names


def _unknown(words: list[str]) -> list[str]:
    """Words of a command that the command line does not have."""
    level: Any = COMMAND_LINE
    while isinstance(level, dict):
        if not words or words[0] not in level:
            return words[:1]
        level, words = level[words[0]], words[1:]
    return [word for word in words if word.startswith("--") and word != "--help" and word not in level]


def test_every_command_that_a_text_names_exists() -> None:
    """In a sentence, in a synopsis and in a block that is not run, too."""
    commands = [
        (page.name, command)
        for page in TEXTS
        for command in re.findall(r"(?<![\w.])gsplit ((?:[a-z]+ )+[^`\n|#]*--[^`\n#]*)", _joined(page))
    ]
    commands += [
        (page.name, command)
        for page in TEXTS
        if page.parent.name != "decisions"  # which name what a command was called before
        for command in re.findall(r"`gsplit ([a-z]+(?: [a-z]+)?)(?=[ `])", _joined(page))
    ]
    assert len(commands) > 200
    for page, command in commands:
        verbs, *options = re.findall(r"--[a-z-]+\b(?!<)|^[a-z]+(?: [a-z]+)?", re.sub(r"[\[\]]", " ", command))
        first, *_ = words = verbs.split()
        known = words[:2] if isinstance(COMMAND_LINE.get(first), dict) else words[:1]
        assert _unknown([*known, *options]) == [], f"{page}: gsplit {command}"


def _joined(page: Path) -> str:
    """The text of a page, with continued lines of commands as one line."""
    return page.read_text().replace("\\\n", " ")


def test_every_measurement_option_and_preset_that_a_text_names_exists() -> None:
    commands = {
        (page.name, command)
        for page in [*TEXTS, *ROOT.glob("*.md")]
        for command in re.findall(r"gsplit_bench ([a-z][\w-]*[^`\n|#]*)", _joined(page))
    }
    assert len(commands) > 60
    for page, command in commands:
        name, *words = command.split()
        assert name in MEASUREMENTS, f"{page}: {command}"
        options = {option for parameter in MEASUREMENTS[name].params for option in parameter.opts}
        unknown = {word for word in words if word.startswith("--")} - options - {"--help"}
        assert not options or unknown == set(), f"{page}: {command}"  # other commands read their arguments themselves
        assert "--preset" not in words or words[words.index("--preset") + 1] in PRESETS, f"{page}: {command}"


def test_every_strategy_and_every_experiment_of_the_paper_exists() -> None:
    strategies = {
        quoted
        for page in TEXTS
        for quoted in _quoted(page)
        if re.fullmatch(r"split|data|data_cached|(data|hybrid|data_cached)\((\d|[a-z]{2,})\)", quoted)
    }
    assert len(strategies) > 5
    for name in strategies:
        assert parse_strategy(name, 3).name  # or it raises
    assert {quoted for quoted in _quoted(DOCS / "paper.md") if re.fullmatch(r"(table|figure)\d\w?", quoted)} == set(
        EXPERIMENTS
    )


def test_every_capability_has_a_command_or_call_and_a_test_that_exist() -> None:
    rows = [line.split(" | ") for line in (DOCS / "capabilities.md").read_text().splitlines() if line.startswith("| ")]
    claims = [row for row in rows if row[0] != "| capability"]
    assert len(claims) > 50
    for claim, calls, tests in claims:
        named = re.findall(r"tests/[\w/]+\.py", tests)
        assert named and all((ROOT / name).is_file() for name in named), (claim, tests)
        assert "`" in calls, claim
        for call in re.findall(r"`([^`]+)`", calls):
            words = call.split()
            if words[0] == "python":
                assert words[:3] == ["python", "-m", "gsplit_bench"] and words[3] in MEASUREMENTS, call
            elif words[0] == "gsplit":
                assert _unknown(words[1:]) == [], call
            else:
                function, arguments = re.fullmatch(r"gsplit\.(\w+)(?:\((.*)\))?", call).groups()  # type: ignore[union-attr]
                assert function in dir(gsplit), call
                keyword = (arguments or "").partition("=")
                assert not keyword[1] or keyword[0] in inspect.signature(getattr(gsplit, function)).parameters, call


def test_every_test_that_a_text_names_exists() -> None:
    tests = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    functions = set(re.findall(r"^def (test_\w+)", "\n".join(tests.values()), re.MULTILINE))
    named = [
        (page.name, *found)
        for page in TEXTS
        for found in re.findall(r"(tests/[\w/]+/test_[a-z_]+\.py)(?:::(test_\w+))?", page.read_text())
    ]
    assert len(named) > 200
    for page, file, function in named:
        assert file in tests, (page, file)
        assert not function or f"\ndef {function}(" in tests[file], (page, file, function)
    alone = {
        (page.name, quoted) for page in TEXTS for quoted in _quoted(page) if re.fullmatch(r"test(_\w+){3,}", quoted)
    }
    assert len(alone) > 10
    assert [(page, quoted) for page, quoted in alone if quoted not in functions] == []


def _quoted_messages(page: Path) -> Iterator[str]:
    """The messages in the first column of all tables of messages."""
    inside = False
    for line in page.read_text().splitlines():
        first = line.split(" | ")[0].removeprefix("| ")
        if not line.startswith("|"):
            inside = False
        elif first.startswith("message"):
            inside = True
        elif inside and first.startswith("`"):
            yield from re.findall(r"`([^`]+)`", first)


def _strings() -> Iterator[str]:
    """Every string of the program but its docstrings, which are expressions that stand alone."""
    for path in (ROOT / "src").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
                yield node.value


def test_every_message_in_troubleshooting_is_one_of_ours() -> None:
    messages = list(_quoted_messages(DOCS / "troubleshooting.md"))
    assert len(messages) > 40
    strings = "\n".join(_strings())
    assert [message for message in messages if message not in strings] == []


def test_the_allocator_settings_to_export_are_the_launchers() -> None:
    export = " ".join(["export", *(f"{name}={value}" for name, value in ALLOCATOR.items())])
    assert export in (DOCS / "performance.md").read_text()
