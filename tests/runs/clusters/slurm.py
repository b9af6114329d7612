"""A real Slurm with two nodes on this machine: its own daemons, with all their files in one folder."""

from __future__ import annotations

import getpass
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from conftest import find_processes, free_ports, run, started, wait_until

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"  # The daemons are in sbin, which is not on every user's path.
ENDED = r"JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL|OUT_OF_MEMORY)|Restarts=[2-9]"

# As on a cluster, a node's name is an address at which other nodes reach it: all of 127/8 is this machine. A requeued
# job waits for cred_expire seconds.
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
ProctrackType=proctrack/linuxproc
SchedulerParameters=sched_interval=2
FirstJobId={first_job}
SlurmdParameters=config_overrides
SelectType=select/cons_tres
GresTypes=gpu
NodeName=127.0.0.1 NodeHostname={host} Port={ports[1]} CPUs=32 Gres=gpu:2
NodeName=127.0.0.2 NodeHostname={host} Port={ports[2]} CPUs=32 Gres=gpu:2
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE
"""


@dataclass
class Slurm:
    """A running Slurm; its commands find it by the variables of ``environment``."""

    environment: dict[str, str]

    def command(self, *words: str | Path, cwd: Path = Path("/"), **environment: str) -> str:
        """Run one of Slurm's commands, and return its output."""
        return run(*words, cwd=cwd, **self.environment, **environment).stdout.strip()

    def wait(self, number: str) -> list[str]:
        """Wait until a job has ended, or was requeued twice; returns its state, number of requeues, and exit code."""
        show = ("scontrol", "show", "job", number)
        wait_until(lambda: re.search(ENDED, self.command(*show)), f"job {number} has ended", 300)
        return re.findall(r"\b(?:JobState|Restarts|ExitCode)=(\S+)", self.command(*show))


def write_files(folder: Path) -> dict[str, str]:
    """Write the configuration; returns the variables with which daemons and commands find it."""
    folder.chmod(0o711)  # munged refuses to listen in a folder that other users cannot enter.
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    # A job's rendezvous port depends on its number, which should differ from those of another Slurm on this machine.
    settings = {"folder": folder, "ports": free_ports(3), "first_job": os.getpid()}
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(CONFIG.format(user=getpass.getuser(), host=host, **settings))
    # Slurm asks of a GPU only that it is a device.
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    # Do without control groups, which a container may lack; Slurm has a setting for that since 23.02.
    version = subprocess.check_output(["slurmctld", "-V"], env=os.environ | {"PATH": PATH}, text=True)
    old = [int(part) for part in re.findall(r"\d+", version)] < [23, 2]
    disabled = f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}\n" if old else "CgroupPlugin=disabled\n"
    (folder / "cgroup.conf").write_text(disabled)
    return {"PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}


@contextmanager
def start_slurm() -> Iterator[Slurm]:
    """Start the daemons; at the end of the ``with`` block, kill them and what is left of their jobs."""
    # Not in pytest's folder, whose path is too long: the path of a socket has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix=f"slurm-{uuid4().hex[:4]}-"))
    environment = write_files(folder)
    munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed")]
    daemons = [["munged", "--foreground", f"--socket={folder}/munge.socket", *munge], ["slurmctld", "-D", "-i"]]
    daemons += [["slurmd", "-D", "-N", node] for node in ("127.0.0.1", "127.0.0.2")]
    slurm = Slurm(environment)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for words in daemons:
            script = f"exec {shlex.join(words)} >>{folder}/log 2>&1"
            stack.enter_context(started("sh", "-c", script, cwd=folder, **environment))
            wait_until((folder / "munge.socket").exists, "munged listens", 60)
        try:
            sinfo = ("sh", "-c", "sinfo --noheader --format='%D %t' || true")
            wait_until(lambda: slurm.command(*sinfo) == "2 idle", f"both nodes are up, see {folder}/log", 120)
            yield slurm
        finally:
            for pid in find_processes(f"SLURM_CONF={environment['SLURM_CONF']}"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
