"""The environment: uv and pip install the same, PyTorch's build can be chosen, and constraints.txt is complete."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CHOICES, TEMPLATE, Bake, run
from documents import fences
from runs import started, wait_until
from test_project import normalize, read_constraints

INDEX = "https://download.pytorch.org/whl/"
UV = Path(sys.executable).parent / "uv"
# Prints its arguments in place of installing anything.
FAKE = '#!/bin/sh\necho pip "$@"\n'
# PyTorch itself fixes the versions of the packages that its build for CUDA needs.
CUDA = ("nvidia-", "cuda-", "triton")


def plan(folder: Path, *words: str, expect: int = 0) -> list[str]:
    """Return what make would do to set up an environment, or the lines of its error."""
    result = run("make", "--always-make", "--dry-run", ".venv/installed", *words, cwd=folder, expect=expect)
    return (result.stderr if expect else result.stdout.replace("\\\n", "")).splitlines()


def build_image(project: Path, folder: Path, build: str) -> subprocess.CompletedProcess[str]:
    """Run the Dockerfile's line that installs PyTorch, with a pip that prints its arguments."""
    (fake := folder / "pip").write_text(FAKE)
    fake.chmod(0o755)
    lines = re.findall(r"^RUN ((?:.*\\\n)*.*)$", (project / "Dockerfile").read_text(), re.MULTILINE)
    (line,) = [line for line in lines if "$TORCH" in line]
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "TORCH": build}
    return subprocess.run(["sh", "-c", line], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("build", ["cpu", "cu126"])
def test_the_build_of_pytorch_is_chosen_alike(bake: Bake, tmp_path: Path, build: str) -> None:
    project, chosen = bake(docker=True), rf"pip install .*--no-deps .*{re.escape(INDEX + build)} .*\btorch$"
    for planned in (plan(project, f"TORCH={build}", "UV="), plan(project, f"TORCH={build}", "UV=uv")):
        number = next(i for i, line in enumerate(planned) if re.search(chosen, line))
        assert "--group dev" in planned[number + 1] and "--index-url" not in planned[number + 1]
        assert sum(INDEX in line for line in planned) == 1
    assert (
        len([line for line in plan(TEMPLATE, f"TORCH={build}") if re.search(rf"{INDEX}{build} .* torch$", line)]) == 1
    )
    first, second = build_image(project, tmp_path, build).stdout.splitlines()
    assert first == f"pip install --no-deps -c constraints.txt --index-url {INDEX}{build} torch"
    assert second == "pip install -c constraints.txt torch"


def test_without_a_choice_no_index_is_named(bake: Bake, tmp_path: Path) -> None:
    project = bake(docker=True)
    for planned in (plan(project, "UV="), plan(project, "UV=uv"), plan(TEMPLATE)):
        assert "pip install" in "\n".join(planned) and "--index-url" not in "\n".join(planned)
    assert build_image(project, tmp_path, "").stdout == "pip install -c constraints.txt torch\n"


def test_a_build_that_does_not_exist_is_refused_in_one_line(bake: Bake, tmp_path: Path) -> None:
    project, line = bake(docker=True), "TORCH is gpu; give cpu, or a version of CUDA such as cu126"
    for folder in (project, TEMPLATE):
        (error,) = plan(folder, "TORCH=gpu", expect=2)
        assert line in error
    refused = build_image(project, tmp_path, "gpu")
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", f"error: {line}\n")


def test_uv_is_used_where_it_is_installed(bake: Bake, tmp_path: Path) -> None:
    project, programs = bake(), tmp_path / "programs"
    programs.mkdir()
    for name in ("make", "sh"):
        (programs / name).symlink_to(shutil.which(name))

    def planned() -> str:
        return run("make", "--dry-run", "setup", cwd=project, PATH=str(programs)).stdout

    assert "/uv pip install" not in planned() and ".venv/bin/pip install" in planned()
    (programs / "uv").write_text(FAKE)
    (programs / "uv").chmod(0o755)
    assert f"{programs}/uv pip install" in planned() and ".venv/bin/pip install" not in planned()


def test_a_stop_signal_to_make_reaches_the_launcher(bake: Bake, tmp_path: Path) -> None:
    """So the run saves; it would train on if the signal ended a shell between them."""
    project, launched = bake(), tmp_path / "launched"
    (project / ".venv").mkdir()
    (project / ".venv/installed").touch()
    (project / "scripts/launch.sh").write_text(f"#!/bin/sh\necho $$ $PYTHON >{launched}\nexec sleep 100\n")
    with started("make", "train", cwd=project, log=tmp_path / "log") as make:
        wait_until(lambda: launched.exists() and launched.read_text().endswith("\n"), "make has started it", 30)
        number, python = launched.read_text().split()
        assert python == ".venv/bin/python"
        make.terminate()
        make.wait(30)
        with pytest.raises(ProcessLookupError):
            os.kill(int(number), 0)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel of PyTorch that pip has; uv, which shares nothing with pip, would load another build."""
    folder = tmp_path_factory.mktemp("wheels")
    words = ("-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder)
    run(sys.executable, *words, "-c", TEMPLATE / "{{cookiecutter.project_slug}}/constraints.txt", "torch", cwd=folder)
    return folder


def shown(project: Path, program: str) -> str:
    """Return the README's commands that install the project without make, with ``uv`` or ``pip``."""
    blocks = fences((project / "README.md").read_text(), "bash")
    (block,) = [block for block in blocks if "--group dev" in block and ("uv " in block) == (program == "uv")]
    return block


def list_installed(python: Path) -> set[str]:
    """Return `name==version` of what is in an environment, without the project and what PyTorch brings for CUDA."""
    lines = run(UV, "pip", "freeze", "--exclude-editable", "--python", python, cwd=python.parent).stdout.split()
    names = {normalize(line) for line in lines if "==" in line}
    return {name for name in names if not name.startswith(CUDA)}


@pytest.mark.slow
def test_uv_installs_what_the_readme_shows(bake: Bake, wheels: Path, tmp_path: Path) -> None:
    """Into .venv, also if another environment is active; and then `make setup` has little left to do."""
    project, active = bake(tracker="tensorboard"), tmp_path / "active"
    run(UV, "venv", "--python", sys.executable, active, cwd=project)
    environment = {"UV_FIND_LINKS": str(wheels), "VIRTUAL_ENV": str(active)}
    commands = shown(project, "uv").replace("uv pip", f"{UV} pip").replace("uv venv", f"{UV} venv -p {sys.executable}")
    run("bash", "-euc", commands, cwd=project, **environment)
    assert list_installed(active / "bin/python") == set()
    installed = list_installed(project / ".venv/bin/python")
    assert {line.partition("==")[0] for line in installed} >= {"torch", "pip", "pytest"}
    assert installed <= read_constraints(project)
    assert "train" in run(project / ".venv/bin/python", "-m", "my_experiment", "--help", cwd=project).stdout
    run("make", "setup", f"UV={UV}", cwd=project, **environment)
    assert (project / ".git/hooks/pre-commit").exists()


@pytest.mark.weekly
@pytest.mark.slow
def test_pip_installs_what_the_readme_shows(bake: Bake) -> None:
    project = bake(task="control")
    run("bash", "-euc", shown(project, "pip"), cwd=project)
    assert list_installed(project / ".venv/bin/python") <= read_constraints(project)
    assert "train" in run(project / ".venv/bin/python", "-m", "my_experiment", "--help", cwd=project).stdout


# Every module of the package, and of all packages of the environment those that are meant to be imported.
IMPORT_ALL = """
import importlib, pkgutil, sys
from importlib.metadata import packages_distributions
import my_experiment
own = [module.name for module in pkgutil.walk_packages(my_experiment.__path__, "my_experiment.")]
others = [name for name in packages_distributions() if name.isidentifier() and not name.startswith("_")]
for name in [*own, *others]:
    if name not in sys.argv[1:] and not name.endswith(".__main__"):
        importlib.import_module(name)
print(len(own), len(others))
"""
# Programs, which run when they are imported; mypyc's compiler needs a package that only a build has.
NOT_IMPORTED = ("isympy", "pylab", "mypyc")


@pytest.mark.slow
@pytest.mark.parametrize("tracker", CHOICES["tracker"])
def test_the_constraints_are_complete(bake: Bake, wheels: Path, tmp_path: Path, tracker: str) -> None:
    """They have all that is needed, tools of development too, but no CUDA packages: PyTorch's build names those."""
    task = "control" if tracker == CHOICES["tracker"][-1] else "digits"
    project, python = bake(tracker=tracker, task=task), tmp_path / "fresh/bin/python"
    environment = {"UV_FIND_LINKS": str(wheels)}

    def pip(*words: str | Path) -> str:
        result = run(UV, "pip", *words, "--python", python, cwd=project, **environment)
        return result.stdout + result.stderr

    run(UV, "venv", "--python", sys.executable, tmp_path / "fresh", cwd=project)
    pip("install", "--no-deps", "-r", "constraints.txt")
    pip("install", "--no-deps", "--build-constraints", "constraints.txt", "--editable", ".")
    (extras,) = re.findall(r"-e '\.(.*?)' --group dev", (project / "Makefile").read_text())
    lacking = re.findall(r"^ [-+] (\S+)", pip("install", "--dry-run", f".{extras}", "--group", "dev"), re.MULTILINE)
    assert [name for name in lacking if not name.startswith(("my-experiment", *CUDA))] == []
    run(python, "-c", IMPORT_ALL, *NOT_IMPORTED, cwd=tmp_path, MPLBACKEND="agg", SDL_VIDEODRIVER="dummy")
