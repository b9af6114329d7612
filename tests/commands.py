"""How each program that a document shows is run with small settings, or how its own parser checks the command."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from conftest import TEMPLATE, check_answers, run
from documents import SUBCOMMANDS
from runs import SMALL, free_port, started, task_of, wait_until
from slurm import Slurm

BIN = Path(sys.executable).parent
INSTALLED = f"{BIN}:{os.environ['PATH']}"  # A reader has cookiecutter and cruft on the path.
# What Open MPI asks for on a small machine or from root; MPICH ignores it.
MPI = dict.fromkeys(
    ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe"), "1"
)
# Without these, a client would talk to a server that the user of this machine has configured.
NO_SERVER = {"DOCKER_HOST": "unix:///nonexistent", "KUBECONFIG": "/nonexistent"}
UNREACHABLE = re.compile(r"Cannot connect to the Docker daemon|connection refused")


@dataclass(frozen=True)
class Command:
    """A command as a document shows it, and the project (or the template) in which a reader enters it."""

    text: str
    document: str
    project: Path

    def run(self, text: str | None = None, *, expect: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the command, or another text in its place, in its project, and return the completed process."""
        # Instead of an environment of the project's own, which takes minutes to install.
        text = (text or self.text).replace(".venv/bin/", f"{BIN}/")
        return run("bash", "-euc", text, cwd=self.project, expect=expect, **environment)

    def arguments(self) -> list[str]:
        """Return the subcommand of this project's program and what follows it; empty if the command has none."""
        words = shlex.split(self.text)
        return next((words[i:] for i, word in enumerate(words) if word in SUBCOMMANDS), [])


def small_settings(command: Command) -> list[str]:
    """Return the settings with which a command ends soon on a CPU; they stand behind its own."""
    subcommand, *options = command.arguments()
    if subcommand == "convert" or {"--help", "--print_config"} & set(options):
        return []
    steps = ["--train.max_steps", "2"] if subcommand in ("train", "benchmark") else []
    return [*steps, *SMALL.get(task_of(command.project), []), "--distributed.device", "cpu"]


def run_ours(command: Command, **environment: str) -> None:
    """Run a command of this project's program with small settings; one for a debugger is only checked."""
    if "DEBUG_RANK" in command.text:  # tests/test_debug.py attaches to such a run.
        return preflight(command, DEBUG_RANK=command.text.partition("=")[2][0])
    text = f"scripts/launch.sh {command.text}" if command.text.startswith(SUBCOMMANDS) else command.text
    provide_runs(command)
    command.run(f"{text} {shlex.join(small_settings(command))}", PYTHONPATH="src", **environment)


def preflight(command: Command, **environment: str) -> None:
    """Let this project's program check the settings of a command that is not run."""
    package = next((command.project / "src").iterdir()).name
    words = ["-m", package, "--preflight", *command.arguments(), "--distributed.device", "cpu"]
    run(sys.executable, *words, cwd=command.project, PYTHONPATH="src", **environment)


def provide_runs(command: Command) -> None:
    """Make the settings and checkpoints of earlier runs that the command names, by a run of two steps per format."""
    folder = command.project
    shutil.rmtree(folder / "runs", ignore_errors=True)
    for name, step in re.findall(r"(runs/\w+/(?:config\.yaml|checkpoints/(step-\d+\.\w+)))", command.text):
        source = made_run(folder, "sharded" if step.endswith(".dcp") else "full")
        made = next((source / "checkpoints").iterdir()) if step else source / "config.yaml"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if made.is_dir() else shutil.copy)(made, folder / name)


def made_run(project: Path, kind: str) -> Path:
    """Return the folder of a run with one checkpoint of this format; the first call trains it."""
    folder = project / "made" / kind
    if not folder.exists():
        text = f"scripts/launch.sh train --checkpoint.format {kind} --run.dir made/{kind}"
        command = Command(text, "", project)
        command.run(f"{text} {shlex.join(small_settings(command))}", NPROC="1")
    return folder


def run_both_machines(command: Command) -> None:
    """Run the command of the first machine, and that of the second, on this one."""
    texts = [command.text.replace("NODE_RANK=0", f"NODE_RANK={rank}") for rank in (0, 1)]
    first, second = (text.replace("HOST", "127.0.0.1") + f" {shlex.join(small_settings(command))}" for text in texts)
    command.run(f"({second}) & {first} && wait $!", PORT=str(free_port()), NPROC="1", GLOO_SOCKET_IFNAME="lo")


def run_chaos(command: Command) -> None:
    """Run the script for a short run, with one kill."""
    provide_runs(command)
    settings = small_settings(Command("train", command.document, command.project))
    command.run(f"{command.text} {shlex.join(settings)}", KILLS="1")


def run_under_mpi(command: Command) -> None:
    run_ours(command, **MPI)


def run_cookiecutter(command: Command) -> None:
    """Render with the command, from this template instead of its address; an option alone is only parsed."""
    if " gh:" not in command.text:
        return parse_options(command)
    with TemporaryDirectory() as folder:
        here = f"{TEMPLATE} --no-input --output-dir {folder}"
        command.run(re.sub(r"gh:\S+", here, command.text), PATH=INSTALLED)
        assert Path(folder, "my-experiment").exists()


def parse_options(command: Command) -> None:
    """Let the program parse the options: an unknown one is an error even before --help."""
    command.run(f"{command.text} --help", PATH=INSTALLED)


def change_directory(command: Command) -> None:
    assert Path(command.text.split()[-1]).name == "my-experiment", "the default project has another name"


def run_architecture(command: Command) -> None:
    """Run the command for a project with a package of one module."""
    with TemporaryDirectory() as folder:
        Path(folder, "src/package").mkdir(parents=True)
        Path(folder, "src/package/train.py").touch()
        assert "upward: none" in command.run(command.text.replace("PROJECT", folder)).stdout


def run_faults(command: Command) -> None:
    """Let the program print its table of no faults, and of one clean exit; tests/test_chaos.py injects some."""
    command.run(re.sub(r"--exits \d+", "--exits 1", re.sub(r"--kills \d+ --others", "--kills 0", command.text)))


def make(command: Command) -> None:
    """Let make plan the target; tests/test_project.py makes the targets, which takes minutes."""
    planned = command.run(re.sub(r"\bmake\b", "make -nB", command.text)).stdout
    given = dict(re.findall(r" (\w+)=(\S+)", command.text.partition("make")[2]))
    if command.project.joinpath("cookiecutter.json").exists():
        check_answers({name: value for name, value in given.items() if name.islower()})
    assert all(value in planned for value in given.values())


def parse_pip(command: Command) -> None:
    """Let pip parse the options; what it would install is in this environment, and an extra is in pyproject.toml."""
    code = "import sys; from pip._internal.commands import create_command as command;"
    code += "options, names = command('install').parse_args(sys.argv[1:]);"
    code += "import importlib.metadata as m; [m.version(name) for name in names];"
    code += "print(*options.editables, *options.constraints, sep='\\n')"
    _, install, *words = shlex.split(command.text)
    assert install == "install"
    named = run(sys.executable, "-c", code, *words, cwd=command.project).stdout.split()
    for name in named:
        path, _, extra = name.rstrip("]").partition("[")
        assert (command.project / path).exists()
        for each in filter(None, extra.split(",")):
            assert f"\n{each} = [" in (command.project / "pyproject.toml").read_text(), each


def without_server(command: Command) -> None:
    """Run a client without its server: it parses its options and reads its files before it misses the server."""
    result = subprocess.run(
        ["bash", "-euc", command.text.replace("docker push", "docker push name")],
        cwd=command.project,
        env=os.environ | NO_SERVER,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode and UNREACHABLE.search(result.stderr), result.stderr + result.stdout
    if command.arguments():
        preflight(command)


def serve(command: Command) -> None:
    """Start a server, at a free port, and wait until it prints its address; one that rejects its arguments ends."""
    words = [*shlex.split(command.text.replace(".venv/bin/", f"{BIN}/")), "--port", "0"]
    with TemporaryDirectory() as folder:
        log = Path(folder, "log")
        with started(*words, cwd=command.project, log=log) as server:
            wait_until(lambda: " at http://" in log.read_text() or server.poll() is not None, "it has an address", 240)
            assert server.poll() is None, log.read_text()


def add_option(option: str, expect: int = 0) -> Callable[[Command], None]:
    """Return a check that runs the program with an option with which it only parses the others."""

    def check(command: Command) -> None:
        program, _, rest = command.text.partition(" ")
        command.run(f"{program} {option} {rest}", expect=expect)

    return check


def run_as_shown(command: Command) -> None:
    command.run()


def run_pytest(command: Command) -> None:
    """Run the tests of a project; of the template's, only select them, and fail if there are none."""
    template = (command.project / "cookiecutter.json").exists()
    command.run(f"{command.text} -q -p no:cacheprovider {'--collect-only' if template else ''}")


def run_under_srun(command: Command, slurm: Slurm) -> None:
    run_ours(command, **slurm.environment)


def try_sbatch(command: Command, slurm: Slurm) -> None:
    """Let the scheduler check a job without starting it; the project's program checks the job's own arguments."""
    preflight(command)
    words = shlex.split(command.text.replace("sbatch", "sbatch --test-only", 1))
    environment = os.environ | slurm.environment
    result = subprocess.run(words, cwd=command.project, env=environment, capture_output=True, text=True, timeout=60)
    # The document's cluster has more nodes than this one.
    too_small = "--nodes=4" in words and "Requested node configuration is not available" in result.stderr
    assert too_small or (result.returncode == 0 and " to start at " in result.stderr), result.stderr


def manage_job(command: Command, slurm: Slurm) -> None:
    """Run a command for jobs, with a running one."""
    job = slurm.command("sbatch", "--parsable", "--wrap", "sleep 60", cwd=command.project)
    wait_until(lambda: slurm.job(job)["JobState"] == "RUNNING", "the job runs", 60)
    command.run(re.sub(r"\bJOB\b", job, command.text), **slurm.environment)
    slurm.command("scancel", job)


def follow_log(command: Command, slurm: Slurm) -> None:
    """Follow the log that a job of the shipped script writes."""
    words = ("sbatch", "--parsable", "scripts/train.sbatch", "train", "--help")
    job = slurm.command(*words, cwd=command.project, PYTHON=sys.executable)
    slurm.wait(job)
    assert command.run(f"timeout 2 {command.text.replace('JOB', job)}", expect=124).stdout


@dataclass(frozen=True)
class Rule:
    """What is done with the commands of a program: ``run``, ``check`` or, for the ``reason``, neither.

    Attributes:
        act: Runs or checks a command; if ``slurm`` is set, it takes a running Slurm as well.
    """

    kind: str
    act: Callable[..., object] | None = None
    reason: str = ""
    slurm: bool = False


RULES = {
    # This project's program, and what starts it.
    **dict.fromkeys(("launch.sh", "my_experiment"), Rule("run", run_ours)),
    "chaos.sh": Rule("run", run_chaos),
    "multinode.sh": Rule("run", run_both_machines),
    **dict.fromkeys(("mpirun", "mpiexec"), Rule("run", run_under_mpi)),
    "srun": Rule("run", run_under_srun, slurm=True),
    "sbatch": Rule("check", try_sbatch, slurm=True),
    **dict.fromkeys(("scancel", "squeue"), Rule("run", manage_job, slurm=True)),
    "tail": Rule("run", follow_log, slurm=True),
    # What a reader enters before and afterwards.
    "cookiecutter": Rule("run", run_cookiecutter),
    **dict.fromkeys(("mkdir", "python", "pgrep", "ss"), Rule("run", run_as_shown)),
    "architecture.py": Rule("run", run_architecture),
    "chaos.py": Rule("run", run_faults),
    "pictures.py": Rule("neither", reason="replaces the pictures, and measures nothing"),
    "pytest": Rule("run", run_pytest),
    "cd": Rule("check", change_directory),
    "make": Rule("check", make),
    "cruft": Rule("check", parse_options),
    "pip": Rule("check", parse_pip),
    **dict.fromkeys(("uv", "python3"), Rule("neither", reason="tests/test_install.py makes these environments")),
    "tensorboard": Rule("check", serve),
    "ssh": Rule("check", add_option("-G")),
    "mount": Rule("check", add_option("--fake")),
    **dict.fromkeys(("docker", "kubectl"), Rule("check", without_server)),
    "git": Rule("neither", reason="changes the reader's repository; tests/test_cruft.py does the same"),
    "py-spy": Rule("neither", reason="is not installed with the project, and needs the right to trace processes"),
}
