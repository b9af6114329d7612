"""Ranks can be debugged with a client of the protocol that editors use, and with the shipped editor configurations."""

from __future__ import annotations

import json
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
from runs import SHORT, free_port, launch, losses, started, taken_port

pytestmark = pytest.mark.slow

SHORT_TIMEOUTS = "--distributed.timeout_seconds 1 --distributed.startup_timeout_seconds 1".split()
PAUSE = 5  # Seconds; longer than these timeouts, which must not apply while debugging.
Stop = tuple[Session, int]  # A session, and the id of its stopped thread.


def package_of(project: Path) -> Path:
    """Return the folder of the project's package."""
    return next((project / "src").iterdir())


@pytest.fixture(scope="module")
def expected_losses(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run without a debugger."""
    folder = tmp_path_factory.mktemp("expected")
    launch(plain, "train", *SHORT, "--run.dir", folder)
    return losses(folder)


def wait_for_text(path: Path, text: str) -> None:
    """Wait until a file exists and contains ``text``."""
    deadline = time.monotonic() + 180
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, f"no {text!r} in {path.read_text()}"
        time.sleep(0.05)


@contextmanager
def start_launcher(project: Path, output: Path, port: int, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Start two ranks with the shipped launcher, yield it when rank 1 waits for a debugger, and kill it at the end."""
    environment = {"NPROC": "2", "DEBUG_RANK": "1", "DEBUG_PORT": str(port)}
    command = (project / "scripts/launch.sh", "train", *arguments)
    with started(*command, cwd=project, log=output, **environment) as launcher:
        wait_for_text(output, f"rank 1 waits for a debugger at 127.0.0.1:{port}\n")
        yield launcher


# At the second breakpoint, a thread of the other rank waits in the process group of sharded checkpoints.
BREAKPOINTS = [
    ("torchrun", "train.py", "progress.step += 1", "self.progress.step == 3", ["--checkpoint.format", "full"]),
    (
        "spawn",
        "checkpoint/checkpointer.py",
        "sharded.start_save(",
        "progress.step == 3",
        ["--checkpoint.format", "sharded"],
    ),
]


@pytest.mark.parametrize(("launcher", "file", "line", "condition", "arguments"), BREAKPOINTS, ids=["torchrun", "spawn"])
def test_a_run_continues_after_a_breakpoint_in_rank_1(
    baked: Bake,
    tmp_path: Path,
    expected_losses: list[float],
    launcher: str,
    file: str,
    line: str,
    condition: str,
    arguments: Any,
) -> None:
    project, port = baked(launcher=launcher), free_port()
    source = package_of(project) / file
    arguments = [*SHORT, *SHORT_TIMEOUTS, "--checkpoint.every_steps", "3", *arguments, "--run.dir", tmp_path / "run"]
    settings = {"request": "attach", "connect": {"host": "127.0.0.1", "port": port}, "justMyCode": False}
    with start_launcher(project, tmp_path / "output", port, *arguments) as process:
        with Session(port, "attach", settings) as session:
            session.set_breakpoints(source, {"line": line_of(source, line), "condition": condition})
            time.sleep(PAUSE)  # Rank 0 waits for rank 1 to join the process group.
            session.go()
            thread = session.event("stopped")["threadId"]
            assert session.evaluate("self.process.rank", thread) == "1"
            time.sleep(PAUSE)  # Rank 0 waits in a collective.
            session.set_breakpoints(source)
            session.request("continue", threadId=thread)
            session.request("disconnect", terminateDebuggee=False)
        assert process.wait(timeout=180) == 0, (tmp_path / "output").read_text()
    assert losses(tmp_path / "run") == expected_losses
    # The configuration file keeps the requested timeout.
    assert "timeout_seconds: 1.0\n" in (tmp_path / "run" / "config.yaml").read_text()
    deadline = time.monotonic() + 60
    while socket.socket().connect_ex(("127.0.0.1", port)) == 0:
        assert time.monotonic() < deadline, "the port of the debugger is still open"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"DEBUG_RANK": "one"}, "DEBUG_RANK is 'one'; give the rank that waits for a debugger: 0 to 1"),
        ({"DEBUG_RANK": "2"}, "DEBUG_RANK is '2'; give the rank that waits for a debugger: 0 to 1"),
        ({"DEBUG_RANK": "1", "NPROC": "1"}, "DEBUG_RANK is '1'; give the rank that waits for a debugger: 0\n"),
        ({"DEBUG_RANK": "1", "DEBUG_PORT": "65536"}, "DEBUG_PORT is '65536'; give a port from 1 to 65535"),
        ({"DEBUG_RANK": "1", "DEBUG_PORT": "TAKEN"}, "(Address already in use); set DEBUG_PORT to another"),
    ],
)
def test_invalid_debugger_settings_are_reported_in_one_line(
    plain: Path, tmp_path: Path, environment: dict[str, str], message: str
) -> None:
    with taken_port() as port:
        environment = {name: value.replace("TAKEN", str(port)) for name, value in environment.items()}
        command = (plain / "scripts/launch.sh", "train", *SHORT, "--run.dir", tmp_path / "run")
        result = run(*command, cwd=plain, expect=2, **{"NPROC": "2", **environment})
    assert result.stderr.startswith("error: ") and message in result.stderr and result.stderr.count("\n") == 1, (
        result.stderr
    )
    assert not (tmp_path / "run").exists()


def test_a_rank_started_without_launch_sh_checks_the_debugger_settings(plain: Path, tmp_path: Path) -> None:
    environment = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": "src"}
    command = (sys.executable, "-m", package_of(plain).name, "train", *SHORT, "--run.dir", tmp_path / "run")
    result = run(*command, cwd=plain, expect=2, DEBUG_RANK="1", DEBUG_PORT="none", **environment)
    assert result.stderr == "error: DEBUG_PORT is 'none'; give a port from 1 to 65535\n"


def test_missing_debugpy_is_reported_with_the_install_command(plain: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", "bare", cwd=tmp_path)
    (site_packages,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    for package in Path(pytest.__file__).parents[1].iterdir():
        if not package.name.startswith("debugpy"):
            (site_packages / package.name).symlink_to(package)
    command = (plain / "scripts/launch.sh", "train", *SHORT, "--run.dir", tmp_path / "run")
    result = run(*command, cwd=plain, expect=2, PYTHON=str(tmp_path / "bare/bin/python"), NPROC="2", DEBUG_RANK="1")
    assert result.stderr == "error: DEBUG_RANK needs the package debugpy; install it: pip install debugpy\n"


def read_vscode(project: Path) -> dict[str, dict[str, Any]]:
    """Return the VS Code configurations by name, with the workspace folder filled in."""
    text = (project / ".vscode" / "launch.json").read_text().replace("${workspaceFolder}", str(project))
    return {configuration["name"]: configuration for configuration in json.loads(text)["configurations"]}


def read_pycharm(project: Path) -> dict[str, dict[str, Any]]:
    """Return the PyCharm configurations by name, with the keys that VS Code uses."""
    found = {}
    for path in (project / ".run").iterdir():
        configuration = ElementTree.fromstring(path.read_text().replace("$PROJECT_DIR$", str(project)))[0]
        options = {option.attrib["name"]: option.attrib["value"] for option in configuration.iterfind("option")}
        assert configuration.attrib["type"] == "PythonConfigurationType" and options["MODULE_MODE"] == "true"
        assert configuration.find("module").attrib["name"] == project.name  # PyCharm's name for the only module.
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
    vscode, pycharm = read_vscode(project), read_pycharm(project)
    attach = vscode.pop("attach to the rank that waits (DEBUG_RANK)")
    assert attach["connect"] == {"host": "127.0.0.1", "port": 5678}  # The default of DEBUG_PORT.
    assert {name.split()[-1] for name in vscode} == {"process", *ranks}
    commands = {name: {key: each[key] for key in ("module", "args", "cwd", "env")} for name, each in vscode.items()}
    assert pycharm == commands


@contextmanager
def start_adapter(folder: Path) -> Iterator[int]:
    """Start debugpy's adapter, as VS Code does for a session, yield its port, and kill it at the end."""
    endpoints = folder / "endpoints.json"
    command = [sys.executable, "-m", "debugpy.adapter", "--host", "127.0.0.1", "--port", "0"]
    with started(*command, cwd=folder, log=folder / "adapter.log", DEBUGPY_ADAPTER_ENDPOINTS=str(endpoints)):
        wait_for_text(endpoints, "}}")
        yield json.loads(endpoints.read_text())["client"]["port"]


def debug_process(port: int, settings: dict[str, Any], file: Path, point: dict[str, Any], stops: Queue[Stop]) -> None:
    """Debug one child process, and put its stop into ``stops``; some processes never reach the breakpoint."""
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
    settings["args"] += [*SHORT, *SHORT_TIMEOUTS, "--run.dir", str(tmp_path / "run")]
    settings |= {"python": [sys.executable], "console": "internalConsole"}  # VS Code fills these in.
    file = package_of(project) / "train.py"
    point = {"line": line_of(file, "progress.step += 1"), "condition": "progress.step == 2"}
    stops: Queue[Stop] = Queue()

    with ThreadPoolExecutor() as pool, start_adapter(tmp_path) as port, Session(port, "launch", settings) as session:

        def watch() -> int:
            """Debug each process that is started, as VS Code does; return the program's exit code."""
            while True:
                message = session.wait_for(lambda message: message.get("event") in ("debugpyAttach", "exited"))
                if message["event"] == "exited":
                    return message["body"]["exitCode"]
                pool.submit(debug_process, port, message["body"], file, point, stops)

        session.set_breakpoints(file, point)
        session.go()
        exit_code: Future[int] = pool.submit(watch)
        stopped = [stops.get(timeout=180) for _ in range(2)]
        assert sorted(rank.evaluate("self.process.rank", thread) for rank, thread in stopped) == ["0", "1"]
        for pause, (rank, thread) in zip((0, PAUSE), stopped, strict=True):
            time.sleep(pause)  # The first rank waits for the second in a collective.
            rank.set_breakpoints(file)
            rank.request("continue", threadId=thread)
        assert exit_code.result(timeout=180) == 0
        for rank, _ in stopped:
            rank.close()
    assert len(losses(tmp_path / "run")) == 6


def test_an_editor_can_train_in_one_process(plain: Path, tmp_path: Path) -> None:
    settings = read_vscode(plain)["train in one process"]
    arguments = [*settings["args"], *SHORT, "--run.dir", tmp_path / "run"]
    run(sys.executable, "-m", settings["module"], *arguments, cwd=Path(settings["cwd"]), **settings["env"])
    assert json.loads((tmp_path / "run" / "provenance.json").read_text())["world_size"] == 1
