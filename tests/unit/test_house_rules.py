"""What a user imports: the public names, the version, a light import, modules without circles, minimum versions."""

import inspect
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

import gsplit

ROOT = Path(__file__).resolve().parents[2]


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


def test_import_takes_nothing_but_the_standard_library() -> None:
    code = "import sys; before = set(sys.modules); import gsplit; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    packages = {module.partition(".")[0] for module in done.stdout.split()}
    assert packages - sys.stdlib_module_names == {"gsplit"}  # neither torch nor numba, which take seconds


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("gsplit")
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert sum(map(len, imports.values())) > 500
    TopologicalSorter(imports).prepare()  # raises CycleError with the circle


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
