"""The doctor passes on healthy machines, fails the row of a planted fault, and names a machine that does not come."""

from __future__ import annotations

import re
from contextlib import ExitStack

import pytest
from conftest import Bake, free_ports, launch, run_alone, started
from machines import needs_root, two_machines
from training import CPU

pytestmark = pytest.mark.long


def rows(output: str) -> dict[str, str]:
    """Return the state of each row by name; of rows that the ranks do not share, the last."""
    return {name: state for state, name in re.findall(r"^(pass|warn|fail)  (\S+(?: \S+)*) ", output, re.MULTILINE)}


def check(output: str) -> None:
    """Check that the whole report is there, and that nothing failed."""
    states = rows(output)
    assert {"versions", "code", "settings", "host name", "interface", "disk", "clocks", "all-reduce"} <= states.keys()
    assert "fail" not in states.values() and states["all-reduce"] == "pass", output


def test_two_ranks_on_this_machine_pass(baked: Bake) -> None:
    check(launch(baked(cluster="slurm"), "doctor", *CPU).stdout)


@needs_root
def test_two_machines_pass(baked: Bake) -> None:
    with two_machines() as machines, machines.start(baked(cluster="slurm"), "doctor", *CPU) as launchers:
        check(machines.wait(launchers, code=0)[0])


def test_an_interface_that_does_not_exist_fails_its_row(baked: Bake) -> None:
    out = run_alone(baked(cluster="slurm"), "doctor", *CPU, code=1, GLOO_SOCKET_IFNAME="nope0").stdout
    states = rows(out)
    assert [name for name, state in states.items() if state == "fail"] == ["interface"]


def test_a_machine_that_does_not_come_is_named(baked: Bake) -> None:
    words = (baked(cluster="slurm") / "scripts" / "launch.sh", "doctor", *CPU)
    environment = {"NODES": "3", "HEAD": "127.0.0.1", "PORT": str(free_ports(1)[0]), "NPROC": "1"}
    with ExitStack() as stack:
        for launcher in [
            stack.enter_context(started(*words, cwd=baked(cluster="slurm"), NODE_RANK=rank, **environment))
            for rank in ("0", "2")
        ]:
            out, _ = launcher.communicate(timeout=90)
            assert launcher.returncode == 1 and len(out.splitlines()) == 1, out
            assert out.startswith("fail  rendezvous ") and "no machine 1;" in out, out
