"""A real Slurm with two nodes on this machine: it has its own daemons, and all their files are in one folder."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from runs import free_ports, processes, started, wait_until

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # The daemons are in sbin, which is not on every user's path.
MISSING = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name, path=PATH) is None]
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}

# As on a cluster, a node's name is an address at which other nodes reach it: all of 127/8 is this machine. Empty files
# represent its GPUs, so that jobs can request them. A requeued job waits for cred_expire seconds.
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SwitchType=switch/none
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2
FirstJobId={first_job}
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs=32 Gres=gpu:8
NodeName=127.0.0.2 NodeHostname={host} Port={ports[2]} CPUs=32 Gres=gpu:8
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE
"""


@dataclass
class Slurm:
    """A running Slurm.

    Attributes:
        environment: The variables with which its commands find it.
    """

    environment: dict[str, str]

    def command(self, *words: str | Path, cwd: Path | None = None, **environment: str) -> str:
        """Run one of Slurm's commands, and return its output."""
        result = subprocess.run(
            [str(word) for word in words],
            cwd=cwd,
            env=os.environ | self.environment | environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert result.returncode == 0, f"{words}: exit code {result.returncode}\n{result.stdout}\n{result.stderr}"
        return result.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return the fields that scontrol prints for a job: JobState, ExitCode, Restarts, StdOut, ..."""
        return dict(re.findall(r"(\w+)=(\S+)", self.command("scontrol", "show", "job", number)))

    def wait(self, number: str) -> dict[str, str]:
        """Wait until a job and all its processes have ended, and return its fields."""
        deadline = time.monotonic() + 900  # A timeout that no machine should need.
        while (job := self.job(number))["JobState"] not in ENDED:
            assert time.monotonic() < deadline and int(job["Restarts"]) < 3, job
            time.sleep(0.2)
        wait_until(lambda: not self.processes(job["JobId"]), f"no process of job {number} is left", 60)
        return job

    def processes(self, number: str) -> list[int]:
        """Return the ids of a job's processes."""
        variables = {f"SLURM_CONF={self.environment['SLURM_CONF']}".encode(), f"SLURM_JOB_ID={number}".encode()}
        return processes(lambda environment, _: variables <= set(environment.split(b"\0")))


@contextmanager
def daemon(*words: str, log: Path, environment: dict[str, str]) -> Iterator[None]:
    """Run a program until the end of a ``with`` block."""
    with started(*words, cwd=log.parent, log=log, **environment) as process:
        try:
            yield
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)


def write_files(folder: Path) -> dict[str, str]:
    """Write the configuration, and return the environment variables with which daemons and commands find it."""
    folder.chmod(0o711)  # munged refuses to listen in a folder that other users cannot enter.
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    host = socket.gethostname().split(".")[0]
    # A job's rendezvous port depends on its number, which should differ from those of another Slurm on this machine.
    settings = {"folder": folder, "host": host, "ports": free_ports(3), "first_job": os.getpid()}
    (folder / "slurm.conf").write_text(CONFIG.format(user=getpass.getuser(), **settings))
    # Do without control groups, which a container may lack; Slurm has a setting for that since 23.02.
    output = subprocess.run(["slurmctld", "-V"], env=os.environ | {"PATH": PATH}, capture_output=True, text=True).stdout
    old = [int(part) for part in re.findall(r"\d+", output)] < [23, 2]
    disabled = f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}\n" if old else "CgroupPlugin=disabled\n"
    (folder / "cgroup.conf").write_text(disabled)
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    for number in range(8):
        (folder / f"gpu{number}").touch()
    return {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}


@contextmanager
def start_slurm() -> Iterator[Slurm]:
    """Start the daemons; at the end of the ``with`` block, end their jobs and stop them."""
    # Not in pytest's folder, whose path is too long: the path of a socket has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    files = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed")]
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        environment = write_files(folder)

        def start(name: str, *words: str) -> None:
            stack.enter_context(daemon(*words, log=folder / f"{name}.log", environment=environment))

        start("munged", "munged", "--foreground", f"--socket={folder}/munge.socket", *files)
        wait_until((folder / "munge.socket").exists, "munged listens", 60)
        start("slurmctld", "slurmctld", "-D", "-i")
        for node in ("127.0.0.1", "127.0.0.2"):
            start(f"slurmd-{node}", "slurmd", "-D", "-N", node)
        slurm = Slurm(environment)
        sinfo = ["sinfo", "--noheader", "--format=%D %t"]

        def is_up() -> bool:
            result = subprocess.run(sinfo, env=os.environ | environment, capture_output=True, text=True, timeout=300)
            return result.stdout.split() == ["2", "idle"]

        try:
            wait_until(is_up, "both nodes are up", 180)
            stack.callback(end_jobs, slurm)
        except AssertionError:
            print(*(f"{log.name}:\n{log.read_text()}" for log in folder.glob("*.log")), sep="\n")
            raise
        yield slurm


def end_jobs(slurm: Slurm) -> None:
    """End the jobs that a failed test has left."""
    numbers = slurm.command("squeue", "--noheader", "--format=%A").split()
    for number in numbers:
        slurm.command("scancel", "--signal=KILL", "--full", number)
        slurm.command("scancel", number)
    wait_until(lambda: not any(slurm.processes(number) for number in numbers), "the jobs have ended", 120)
