"""Wheel and sdist: what is in them, that both make the same wheel, and that it works where no checkout is."""

import email
import subprocess
import sys
import sysconfig
import tarfile
import venv
from contextlib import chdir
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from hatchling.build import build_sdist, build_wheel

ROOT = Path(__file__).resolve().parents[2]

FOR_DEVELOPERS = {"bench", "test", "docs", "lint", "dev"}
FIRST_STEP = """
import gsplit
from typer.testing import CliRunner
from gsplit.cli.main import app

print(gsplit.__file__)
for words in (
    "doctor --nproc 1",
    "import synthetic demo.gsplit --vertices 300 --edges 2000 --features 4",
    "train demo.gsplit --steps 1 --hidden 8 --fanout 2,2 --batch-size 32 --evaluate-every 0",
):
    done = CliRunner().invoke(app, words.split(), catch_exceptions=False)
    assert done.exit_code == 0, (words, done.output)
print(done.output)
"""


@dataclass(frozen=True)
class Built:
    """The two distributions, built by the installed hatchling without the network."""

    wheel: Path
    sdist: Path

    def metadata(self) -> Message:
        with ZipFile(self.wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            return email.message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("distributions")
    with chdir(ROOT):
        return Built(folder / build_wheel(str(folder)), folder / build_sdist(str(folder)))


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    assert built.wheel.name.endswith("-py3-none-any.whl")  # no compiled code: one wheel for every machine
    with ZipFile(built.wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        described = archive.read(next(name for name in archive.namelist() if name.endswith("/WHEEL"))).decode()
    package = [path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert names == {str(path.relative_to(ROOT / "src")) for path in package}
    assert not {name for name in names if any(word in name for word in ("bench", "testing", "simulated", "baselines"))}
    assert "gsplit/py.typed" in names  # type checkers believe our annotations
    assert "Root-Is-Purelib: true" in described


def test_what_an_index_shows_is_there(built: Built) -> None:
    metadata = built.metadata()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    classifiers = metadata.get_all("Classifier") or []
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(classifiers)
    lines = metadata.get_all("Requires-Dist") or []
    assert len([line for line in lines if "extra ==" not in line]) < 12  # torch and PyG aside, little that can break
    extras = set(metadata.get_all("Provides-Extra") or []) - {"all", *FOR_DEVELOPERS}
    assert extras >= {"arrow", "ogb", "mtkahypar", "report"}
    brought = {
        extra: {line.split(";")[0] for line in lines if line.endswith(f"extra == '{extra}'")} for extra in extras
    }
    everything = {line.split(";")[0] for line in lines if line.endswith("extra == 'all'")}
    assert everything == set().union(*brought.values())  # what a user may want is what its parts bring


def test_the_sdist_builds_the_same_wheel_and_has_what_its_tests_read(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as archive:
        options: Any = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4 on
        archive.extractall(tmp_path, **options)
    (source,) = tmp_path.iterdir()
    with chdir(source):
        again = tmp_path / build_wheel(str(tmp_path))
    assert again.read_bytes() == built.wheel.read_bytes()
    for name in ("tests/conftest.py", "examples/own_model.py", "docs/step.svg", "Makefile", "LICENSE", "CITATION.cff"):
        assert (source / name).is_file(), name
    assert (source / "benchmarks" / "gsplit_bench" / "__main__.py").is_file()
    assert not (source / "benchmarks" / "results").exists()  # megabytes that nothing reads


def test_the_wheel_trains_where_only_its_dependencies_are(built: Built, tmp_path: Path) -> None:
    """Half a minute of a core: a Python of its own imports torch and PyG, and compiles the kernels of a step."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = str(tmp_path / "venv" / "bin" / "python")
    offline = ["--no-deps", "--no-index", "--no-compile", "--quiet", "--disable-pip-version-check"]
    _run(tmp_path, sys.executable, "-m", "pip", "--python", python, "install", *offline, str(built.wheel))
    site = next((tmp_path / "venv" / "lib").glob("python3*/site-packages"))
    # Only now, so that pip does not take the installed gsplit for one that is to be replaced. A path in such a file is
    # searched for modules, but the .pth files in it are not read: the editable install stays unseen.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    version = _run(tmp_path, python, "-m", "gsplit", "--version").strip()
    assert version == built.metadata()["Version"]
    assert _run(tmp_path, str(tmp_path / "venv" / "bin" / "gsplit"), "--version").strip() == version
    found, *said = _run(tmp_path, python, "-c", FIRST_STEP).splitlines()
    assert Path(found).is_relative_to(site)
    assert any(line.startswith("last loss") for line in said)


def _run(folder: Path, *words: str) -> str:
    plain = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=plain, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout
