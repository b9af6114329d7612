"""Two simulated machines: network namespaces, connected by a link that can be cut."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from conftest import find_processes, started, wait_until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may create network namespaces")


class Machines:
    """Two network namespaces, of this process, at 10.77.0.1 and fd77::1, and at 10.77.0.2 and fd77::2."""

    names = (f"ddp-{os.getpid()}-0", f"ddp-{os.getpid()}-1")

    def ip(self, number: int, words: str) -> None:
        """Configure the network of a machine."""
        subprocess.run(["ip", "-n", self.names[number], *words.split()], check=True)

    @contextmanager
    def start(
        self, project: Path, *words: str | Path, **environment: str
    ) -> Iterator[tuple[subprocess.Popen[str], ...]]:
        """Start the shipped script on both machines, with one rank each."""
        environment = {"NODES": "2", "HEAD": "10.77.0.1", "NPROC": "1", "GLOO_SOCKET_IFNAME": "wire"} | environment
        with ExitStack() as stack:
            yield tuple(
                stack.enter_context(
                    started(
                        *("ip", "netns", "exec", name, project / "scripts" / "launch.sh", *words),
                        **(environment | {"NODE_RANK": str(number), "MARK": name}),
                        cwd=project,
                    )
                )
                for number, name in enumerate(self.names)
            )

    def wait(self, launchers: tuple[subprocess.Popen[str], ...], code: int) -> list[str]:
        """Check that both launchers end with an exit code and leave no process; returns what each has printed."""
        outputs = ["".join(launcher.communicate(timeout=200)) for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [code, code], "\n".join(outputs)
        wait_until(lambda: not any(find_processes(f"MARK={name}") for name in self.names), "all processes end", 30)
        return outputs


@contextmanager
def two_machines() -> Iterator[Machines]:
    """Create two connected machines; at the end of the ``with`` block, delete them."""
    machines = Machines()
    try:
        for name in machines.names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        machines.ip(0, f"link add name wire type veth peer name wire netns {machines.names[1]}")
        for number in (0, 1):
            machines.ip(number, "link set lo up")
            machines.ip(number, f"address add 10.77.0.{number + 1}/24 dev wire")
            machines.ip(number, f"address add fd77::{number + 1}/64 dev wire nodad")
            machines.ip(number, "link set wire up")
        yield machines
    finally:
        for name in machines.names:
            subprocess.run(["ip", "netns", "delete", name], check=False)
