"""A rank is debugged for real, by a client of the protocol that editors speak, and with their configurations."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from conftest import Bake, run
from dap import Session, line_of
from runs import SHORT, launch, losses

pytestmark = pytest.mark.slow

IMPATIENT = "--distributed.timeout_seconds 1 --distributed.startup_timeout_seconds 1".split()
PAUSE = 5  # Seconds: well over those, so that a rank that counted them would end the run.
Stop = tuple[Session, int]  # With the number of the thread that stands still.


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def package_of(project: Path) -> Path:
    return next((project / "src").iterdir())


@pytest.fixture(scope="module")
def undisturbed(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run without a debugger."""
    folder = tmp_path_factory.mktemp("undisturbed")
    launch(plain, "train", *SHORT, "--run.dir", folder)
    return losses(folder)


def wait_for(path: Path, text: str) -> None:
    """Wait until a file holds a text."""
    give_up = time.monotonic() + 180
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < give_up, f"no {text!r} in {path.read_text()}"
        time.sleep(0.05)


@contextmanager
def started(project: Path, output: Path, port: int, *words: str | Path) -> Iterator[subprocess.Popen[str]]:
    """The shipped launcher, when rank 1 of two waits for a debugger; ended, if the test fails."""
    environment = {"PYTHON": sys.executable, "NPROC": "2", "DEBUG_RANK": "1", "DEBUG_PORT": str(port)}
    with output.open("w") as file:
        words = (project / "scripts/launch.sh", "train", *words)
        launcher = subprocess.Popen(words, cwd=project, env=os.environ | environment, stdout=file, stderr=file)
        try:
            wait_for(output, f"rank 1 waits for a debugger at 127.0.0.1:{port}\n")
            yield launcher
        finally:
            launcher.kill()
            launcher.wait()


# The second one stops where the other rank's thread waits in the group that sharded checkpoints have of their own.
PLACES = [
    ("torchrun", "train.py", "progress.step += 1", "self.progress.step == 3", ["--checkpoint.format", "full"]),
    ("spawn", "checkpoint.py", "sharded.start_save(", "progress.step == 3", ["--checkpoint.format", "sharded"]),
]


@pytest.mark.parametrize(("launcher", "file", "line", "condition", "words"), PLACES, ids=["torchrun", "spawn"])
def test_a_debugger_stops_rank_1_and_the_run_goes_on(
    baked: Bake,
    tmp_path: Path,
    undisturbed: list[float],
    launcher: str,
    file: str,
    line: str,
    condition: str,
    words: Any,
) -> None:
    project, port = baked(launcher=launcher), free_port()
    source = package_of(project) / file
    words = [*SHORT, *IMPATIENT, "--checkpoint.every_steps", "3", *words, "--run.dir", tmp_path / "run"]
    settings = {"request": "attach", "connect": {"host": "127.0.0.1", "port": port}, "justMyCode": False}
    with started(project, tmp_path / "output", port, *words) as process:
        with Session(port, "attach", settings) as session:
            session.set_breakpoints(source, {"line": line_of(source, line), "condition": condition})
            time.sleep(PAUSE)  # Rank 0 waits for rank 1 to join the group.
            session.go()
            thread = session.event("stopped")["threadId"]
            assert session.evaluate("self.world.rank", thread) == "1"
            time.sleep(PAUSE)  # Rank 0 waits in a collective.
            session.set_breakpoints(source)
            session.request("continue", threadId=thread)
            session.request("disconnect", terminateDebuggee=False)
        assert process.wait(timeout=180) == 0, (tmp_path / "output").read_text()
    assert losses(tmp_path / "run") == undisturbed
    assert "timeout_seconds: 1.0\n" in (tmp_path / "run" / "config.yaml").read_text()  # As it was asked for.
    give_up = time.monotonic() + 60
    while socket.socket().connect_ex(("127.0.0.1", port)) == 0:
        assert time.monotonic() < give_up, "something still listens for a debugger"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"DEBUG_RANK": "one"}, "DEBUG_RANK is 'one'; give the rank that is to wait for a debugger: 0 to 1"),
        ({"DEBUG_RANK": "2"}, "DEBUG_RANK is '2'; give the rank that is to wait for a debugger: 0 to 1"),
        ({"DEBUG_RANK": "1", "NPROC": "1"}, "DEBUG_RANK is '1'; give the rank that is to wait for a debugger: 0\n"),
        ({"DEBUG_RANK": "1", "DEBUG_PORT": "65536"}, "DEBUG_PORT is '65536'; give a port, from 1 to 65535"),
        ({"DEBUG_RANK": "1", "DEBUG_PORT": "TAKEN"}, "(Address already in use); set DEBUG_PORT to another"),
    ],
)
def test_a_debugger_that_cannot_come_is_told_in_one_line(
    plain: Path, tmp_path: Path, environment: dict[str, str], told: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = str(server.getsockname()[1])
        environment = {name: value.replace("TAKEN", taken) for name, value in environment.items()}
        words = (plain / "scripts/launch.sh", "train", *SHORT, "--run.dir", tmp_path / "run")
        done = run(*words, cwd=plain, expect=2, **{"NPROC": "2", **environment})
    assert done.stderr.startswith("error: ") and told in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / "run").exists()


def test_the_one_rank_that_cannot_wait_says_so_itself(plain: Path, tmp_path: Path) -> None:
    """Whoever starts the ranks without launch.sh has not been told before."""
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": "src"}
    words = (sys.executable, "-m", package_of(plain).name, "train", *SHORT, "--run.dir", tmp_path / "run")
    done = run(*words, cwd=plain, expect=2, DEBUG_RANK="1", DEBUG_PORT="none", **place)
    assert done.stderr == "error: DEBUG_PORT is 'none'; give a port, from 1 to 65535\n"


def test_without_debugpy_it_is_said_how_to_get_it(plain: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", "bare", cwd=tmp_path)
    (bare,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    for package in Path(pytest.__file__).parents[1].iterdir():
        if not package.name.startswith("debugpy"):
            (bare / package.name).symlink_to(package)
    words = (plain / "scripts/launch.sh", "train", *SHORT, "--run.dir", tmp_path / "run")
    done = run(*words, cwd=plain, expect=2, PYTHON=str(tmp_path / "bare/bin/python"), NPROC="2", DEBUG_RANK="1")
    assert done.stderr == "error: DEBUG_RANK needs the package debugpy; install it: pip install -e '.[dev]'\n"


def read_vscode(project: Path) -> dict[str, dict[str, Any]]:
    """The configurations of VS Code by name, with its variable filled in."""
    text = (project / ".vscode" / "launch.json").read_text().replace("${workspaceFolder}", str(project))
    return {configuration["name"]: configuration for configuration in json.loads(text)["configurations"]}


def read_pycharm(project: Path) -> dict[str, dict[str, Any]]:
    """The configurations of PyCharm by name, in the words of VS Code."""
    found = {}
    for path in (project / ".run").iterdir():
        configuration = ElementTree.fromstring(path.read_text().replace("$PROJECT_DIR$", str(project)))[0]
        options = {option.attrib["name"]: option.attrib["value"] for option in configuration.iterfind("option")}
        assert configuration.attrib["type"] == "PythonConfigurationType" and options["MODULE_MODE"] == "true"
        assert configuration.find("module").attrib["name"] == project.name  # What PyCharm calls a project's one module.
        found[configuration.attrib["name"]] = {
            "module": options["SCRIPT_NAME"],
            "args": shlex.split(options["PARAMETERS"]),
            "cwd": options["WORKING_DIRECTORY"],
            "env": {env.attrib["name"]: env.attrib["value"] for env in configuration.iterfind("envs/env")},
        }
        assert found[configuration.attrib["name"]]["env"].pop("PYTHONUNBUFFERED") == "1"
    return found


@pytest.mark.parametrize(
    ("answers", "ranks"),
    [({}, ["torchrun"]), ({"launcher": "spawn"}, ["spawn"]), ({"parallelism": "data_parallel"}, [])],
    ids=["torchrun", "spawn", "data_parallel"],
)
def test_editors_start_the_same_commands(baked: Bake, answers: dict[str, str], ranks: list[str]) -> None:
    project = baked(**answers)
    ours, theirs = read_vscode(project), read_pycharm(project)
    attach = ours.pop("attach to the rank that waits (DEBUG_RANK)")
    assert attach["connect"] == {"host": "127.0.0.1", "port": 5678}  # Where a rank waits unless it is told otherwise.
    assert {name.split()[-1] for name in ours} == {"process", *ranks}
    commands = {name: {key: each[key] for key in ("module", "args", "cwd", "env")} for name, each in ours.items()}
    assert theirs == commands


@contextmanager
def adapter(folder: Path) -> Iterator[int]:
    """debugpy's adapter, which VS Code starts for a session; gives its port."""
    told = folder / "endpoints.json"
    words = [sys.executable, "-m", "debugpy.adapter", "--host", "127.0.0.1", "--port", "0"]
    process = subprocess.Popen(words, env=os.environ | {"DEBUGPY_ADAPTER_ENDPOINTS": str(told)})
    try:
        wait_for(told, "}}")
        yield json.loads(told.read_text())["client"]["port"]
    finally:
        process.kill()
        process.wait()


def follow(port: int, settings: dict[str, Any], file: Path, point: dict[str, Any], stops: Queue[Stop]) -> None:
    """Debug one process that the program has started; not each of them comes to the breakpoint."""
    session = Session(port, "attach", settings)
    session.set_breakpoints(file, point)
    session.go()
    try:
        stops.put((session, session.event("stopped")["threadId"]))
    except EOFError:
        session.close()


@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_vscode_starts_two_ranks_and_stops_in_both(baked: Bake, tmp_path: Path, launcher: str) -> None:
    project = baked(launcher=launcher)
    (settings,) = [each for name, each in read_vscode(project).items() if "two ranks" in name]
    settings["args"] += [*SHORT, *IMPATIENT, "--run.dir", str(tmp_path / "run")]
    settings |= {"python": [sys.executable], "console": "internalConsole"}  # What VS Code fills in.
    file = package_of(project) / "train.py"
    point = {"line": line_of(file, "progress.step += 1"), "condition": "progress.step == 2"}
    stops: Queue[Stop] = Queue()

    with ThreadPoolExecutor() as pool, adapter(tmp_path) as port, Session(port, "launch", settings) as session:

        def watch() -> int:
            """Follow every process that is started, as VS Code does, until the program has ended."""
            while True:
                message = session.wait_for(lambda message: message.get("event") in ("debugpyAttach", "exited"))
                if message["event"] == "exited":
                    return message["body"]["exitCode"]
                pool.submit(follow, port, message["body"], file, point, stops)

        session.set_breakpoints(file, point)
        session.go()
        exit_code: Future[int] = pool.submit(watch)
        stopped = [stops.get(timeout=180) for _ in range(2)]
        assert sorted(rank.evaluate("self.world.rank", thread) for rank, thread in stopped) == ["0", "1"]
        for pause, (rank, thread) in zip((0, PAUSE), stopped, strict=True):
            time.sleep(pause)  # The first waits for the second one in a collective.
            rank.set_breakpoints(file)
            rank.request("continue", threadId=thread)
        assert exit_code.result(timeout=180) == 0
        for rank, _ in stopped:
            rank.close()
    assert len(losses(tmp_path / "run")) == 6


def test_an_editor_starts_one_process(plain: Path, tmp_path: Path) -> None:
    settings = read_vscode(plain)["train in one process"]
    words = [*settings["args"], *SHORT, "--run.dir", tmp_path / "run"]
    run(sys.executable, "-m", settings["module"], *words, cwd=Path(settings["cwd"]), **settings["env"])
    assert json.loads((tmp_path / "run" / "provenance.json").read_text())["world_size"] == 1
