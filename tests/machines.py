"""Two simulated machines: network namespaces, connected by a link that can be cut."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from runs import small

UNAVAILABLE = (
    "ip (Debian's iproute2) is not installed" if not shutil.which("ip")
    else "only root may create network namespaces" if os.geteuid()
    else ""
)  # fmt: skip


@dataclass(frozen=True)
class Machine:
    """A network namespace at one end of the link."""

    namespace: str
    address: str

    def ip(self, *words: str) -> str:
        """Run `ip` on this machine to configure its network, and return the output."""
        return subprocess.run(["ip", "-n", self.namespace, *words], check=True, capture_output=True, text=True).stdout

    def lose_packets(self) -> None:
        """Lose one in eight of the packets that leave this machine, by the numbers that TCP gives them.

        Not by netem, which many kernels lack: packets are sent into a device that is not up.
        """
        self.ip("link", "add", "sink", "type", "ifb")
        for words in (
            "qdisc add dev wire clsact",
            "filter add dev wire egress protocol ip u32 match u16 6 0xe at 4 action mirred egress redirect dev sink",
        ):
            subprocess.run(["ip", "netns", "exec", self.namespace, "tc", *words.split()], check=True)

    def retransmitted(self) -> int:
        """Return how many segments this machine has sent again."""
        words = ["ip", "netns", "exec", self.namespace, "cat", "/proc/net/snmp"]
        names, values = (
            line.split() for line in subprocess.check_output(words, text=True).splitlines() if line.startswith("Tcp:")
        )
        return int(values[names.index("RetransSegs")])

    def start(self, *words: str | Path, cwd: Path, log: Path, **environment: str) -> subprocess.Popen[str]:
        """Start a command on this machine, with its output in ``log``, and return the process."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *map(str, words)],
            cwd=cwd,
            env=os.environ | {"PYTHON": sys.executable, "GLOO_SOCKET_IFNAME": "wire"} | environment,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            text=True,
        )

    def processes(self) -> list[int]:
        """Return the ids of the processes on this machine."""
        words = ["ip", "netns", "pids", self.namespace]
        return [int(pid) for pid in subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()]


Machines = tuple[Machine, Machine]


@contextmanager
def two_machines() -> Iterator[Machines]:
    """Create two connected machines; at the end of the ``with`` block, kill their processes and delete them."""
    first, second = machines = tuple(Machine(f"ddp-{os.getpid()}-{n}", f"10.77.0.{n}") for n in (1, 2))
    try:
        for machine in machines:
            subprocess.run(["ip", "netns", "add", machine.namespace], check=True)
            machine.ip("link", "set", "lo", "up")
        first.ip("link", "add", "name", "wire", "type", "veth", "peer", "name", "wire", "netns", second.namespace)
        for machine in machines:
            machine.ip("address", "add", f"{machine.address}/24", "dev", "wire")
            machine.ip("link", "set", "wire", "up")
        yield first, second
    finally:
        for machine in machines:
            for pid in machine.processes():
                os.kill(pid, 9)
            subprocess.run(["ip", "netns", "delete", machine.namespace], check=False)


def start_on_both(
    machines: Machines, project: Path, *words: str | Path, logs: Path, **environment: str
) -> list[subprocess.Popen[str]]:
    """Start the shipped script on both machines, as a user would, and return the processes."""
    logs.mkdir(parents=True, exist_ok=True)
    shared = {"HEAD": machines[0].address, "NODES": "2", "NPROC": "1"} | environment
    return [
        machine.start(
            project / "scripts/multinode.sh",
            *small(project, *words),
            cwd=project,
            log=logs / f"{rank}.log",
            NODE_RANK=str(rank),
            LOCAL_ADDR=machine.address,
            **shared,
        )
        for rank, machine in enumerate(machines)
    ]
