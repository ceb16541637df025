"""The rules of CONTRIBUTING.md hold, and the tools that check them notice when they do not."""

import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import networkx as nx
import pytest

import gsplit

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted((ROOT / "src" / "gsplit").rglob("*.py"))


def _run(*command: str, cwd: Path = ROOT, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, input=text, capture_output=True, text=True, timeout=300, check=False)


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("gsplit")
    edges = [(module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module)]
    assert len(edges) > 500
    circles = [sorted(found) for found in nx.strongly_connected_components(nx.DiGraph(edges)) if len(found) > 1]
    assert circles == []


def test_function_bodies_fit_a_screen() -> None:
    """Sizes of files are advice; a body over 60 lines is several functions. Triton kernels are one program each."""
    long = [
        f"{module.relative_to(ROOT)}:{node.lineno} {node.name}"
        for module in MODULES
        if "kernels/triton" not in module.as_posix()
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.FunctionDef)
        if node.body[-1].end_lineno is not None and node.body[-1].end_lineno - node.body[0].lineno >= 60
    ]
    assert long == []


def test_a_class_name_exists_once() -> None:
    names = [
        node.name
        for module in MODULES
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_a_small_module_has_several_importers_or_is_a_concept() -> None:
    """A few lines that one module uses belong into that module."""
    concepts = {
        "gsplit.extending": "public names",
        "gsplit.cli.report_command": "one file per command",
        "gsplit.device.environment": "the name a reader searches for",
        "gsplit.distributed.watch.stragglers": "the name a reader searches for",
        "gsplit.kernels.file_rows": "a kernel",
        "gsplit.kernels.triton.sums": "a kernel",
        "gsplit.nn.heads": "a concept of the interface",
        "gsplit.store.upload": "the name a reader searches for",
    }
    graph = grimp.build_graph("gsplit")
    small = [
        module
        for module in graph.modules
        if (path := ROOT / "src" / f"{module.replace('.', '/')}.py").is_file()
        if len(path.read_text().splitlines()) < 60 and len(graph.find_modules_that_directly_import(module)) == 1
    ]
    assert sorted(small) == sorted(concepts)


def test_only_documents_are_dictionaries_of_anything() -> None:
    """Dataclasses go between our own layers; free-form documents are made at the edges: JSON, settings, records."""
    edges = (
        "cli/",
        "run/results.py",
        "run/config.py",
        "run/folder.py",
        "training/train_state.py",
        "training/checkpoints/state_tree.py",
        "store/manifest.py",
        "store/importers/pyg.py",  # the attributes of a Data
    )
    found = [
        f"{module.relative_to(ROOT)}:{node.lineno}"
        for module in MODULES
        if not str(module.relative_to(ROOT / "src" / "gsplit")).startswith(edges)
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name != "as_dict" and node.returns is not None
        if ast.unparse(node.returns) == "dict[str, Any]"
    ]
    assert found == []


def test_public_names() -> None:
    assert gsplit.__all__ == [
        "init",
        "Mesh",
        "Store",
        "NeighborLoader",
        "LinkNeighborLoader",
        "OwnedEmbedding",
        "parallelize",
        "Trainer",
        "losses",
        "callbacks",
        "extending",
        "ScalarLog",
        "infer",
        "write_predictions",
        "Predictions",
        "evaluate",
        "evaluate_links",
        "verify",
        "verify_step",
        "Verification",
        "partition",
        "Ownership",
        "add_pairs",
        "from_pyg",
        "to_pyg",
        "GSplitError",
        "StoreError",
        "InputError",
        "CommError",
        "MissingDependencyError",
        "__version__",
    ]
    assert set(dir(gsplit)) == {*gsplit.__all__, "open"}  # not replaced by ``from gsplit import *``
    for name in set(dir(gsplit)) - {"__version__"}:
        found = getattr(gsplit, name)
        assert (found.__name__ if inspect.ismodule(found) else found.__module__).startswith("gsplit.")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = gsplit.nothing


def test_the_version_is_that_of_the_package() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert gsplit.__version__ == declared


def test_layers_hold_and_a_broken_layer_is_noticed(tmp_path: Path) -> None:
    linter = str(Path(sys.executable).parent / "lint-imports")
    command = (linter, "--no-cache", "--config", str(ROOT / "pyproject.toml"))
    assert _run(*command).returncode == 0
    shutil.copytree(ROOT / "src", tmp_path / "src")
    (tmp_path / "src" / "gsplit" / "graph" / "graph.py").write_text(
        "import gsplit.store.reader\nimport gsplit_bench.machine\n"
    )
    broken = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path / 'src'}:{ROOT / 'benchmarks'}", "PATH": "/usr/bin"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert broken.returncode == 1
    assert "gsplit.graph is not allowed to import gsplit.store" in broken.stdout
    assert "gsplit is not allowed to import gsplit_bench" in broken.stdout


@pytest.mark.parametrize(
    "file, line, caught",
    [
        ("src/gsplit/graph/graph.py", "import torch.distributed as dist", True),
        ("src/gsplit/graph/graph.py", "from torch import distributed", True),
        ("src/gsplit/distributed/comm/process_groups.py", "import torch.distributed as dist", False),
        ("src/gsplit/graph/graph.py", "import pickle", True),
    ],
)
def test_forbidden_imports_are_noticed(file: str, line: str, caught: bool) -> None:
    linter = str(Path(sys.executable).parent / "ruff")
    found = _run(linter, "check", "--select", "TID251", "--stdin-filename", file, "-", text=line + "\n")
    assert ("TID251" in found.stdout) == caught


def test_import_is_light_next_to_torch() -> None:
    code = (
        "import sys, time, json; t = time.perf_counter(); import gsplit; own = time.perf_counter() - t;"
        "heavy = [m for m in ('torch', 'numba', 'pyarrow', 'torch_geometric', 'matplotlib') if m in sys.modules];"
        "t = time.perf_counter(); import torch; print(json.dumps([own, time.perf_counter() - t, heavy]))"
    )
    for _ in range(3):  # a busy machine may get in the way
        own, torch_s, heavy = json.loads(_run(sys.executable, "-c", code).stdout)
        assert heavy == []
        if own < 0.1 * torch_s:
            return
    pytest.fail(f"importing gsplit takes {own:.2f} s, torch {torch_s:.2f} s")


def test_the_minimum_job_installs_the_versions_that_are_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        line
        for extra in ("arrow", "ogb", "log", "mtkahypar", "report")
        for line in project["optional-dependencies"][extra]
    ]
    declared = dict(line.partition(";")[0].split(">=") for line in [*project["dependencies"], *extras])
    lines = (ROOT / "requirements" / "minimum.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert pinned.keys() == declared.keys() | {"click", "pyparsing"}
    for name, version in declared.items():
        assert re.fullmatch(re.escape(version) + r"(\.0)*", pinned[name]), name
