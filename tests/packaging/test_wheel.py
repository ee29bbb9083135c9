"""The wheel holds the namespace package only, and the folders refuse their bare names."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("agents", "coordinator", "proto")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel that is built from a copy, so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    target = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (source / name).write_bytes((ROOT / name).read_bytes())
    for floor in FLOORS:
        for path in (ROOT / floor).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                copy = source / path.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes(path.read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check"]
    command += ["--no-deps", "--no-build-isolation", "--no-index", "-w", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = target.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        return set(archive.namelist())


def test_wheel_has_one_top_level_name(wheel: set[str]) -> None:
    """A bare `proto` or `agents` would overwrite other projects' modules."""
    tops = {name.split("/", 1)[0] for name in wheel}
    assert "rankgate" in tops
    (info,) = tops - {"rankgate"}
    assert info.startswith("rankgate-")
    assert info.endswith(".dist-info")
    assert "rankgate/__init__.py" not in wheel


def test_wheel_holds_every_module(wheel: set[str]) -> None:
    """A file that is in the checkout is in the wheel too."""
    modules = {
        f"rankgate/{path.relative_to(ROOT).as_posix()}"
        for floor in FLOORS
        for path in (ROOT / floor).rglob("*.py")
    }
    assert modules - wheel == set()


def test_wheel_holds_the_data(wheel: set[str]) -> None:
    """Type markers and the models that the demo plans for are shipped."""
    models = (ROOT / "coordinator/cli/demo/models").glob("*.json")
    expected = {f"rankgate/{path.relative_to(ROOT).as_posix()}" for path in models}
    assert expected
    expected |= {f"rankgate/{floor}/py.typed" for floor in FLOORS}
    assert expected - wheel == set()


def test_every_package_is_listed() -> None:
    """The list in pyproject.toml is complete: nothing is found through package-dir."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        listed = tomllib.load(file)["tool"]["setuptools"]["packages"]
    found = [
        ".".join(("rankgate", *init.parent.relative_to(ROOT).parts))
        for floor in FLOORS
        for init in (ROOT / floor).rglob("__init__.py")
    ]
    assert sorted(found) == listed


@pytest.mark.parametrize("floor", FLOORS)
def test_bare_import_is_refused(floor: str) -> None:
    """A second copy of a module under another name would break every isinstance."""
    code = f"import sys; sys.path.insert(0, '.'); import {floor}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"import rankgate.{floor}" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("floor", FLOORS)
def test_import_under_the_full_name_works(floor: str) -> None:
    """The same folder serves its full name, from this checkout."""
    code = f"import rankgate.{floor} as module; print(module.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).resolve() == ROOT / floor / "__init__.py"
