"""In continuous integration, a skipped test fails unless its reason is listed here: a skip hides what is not tested.

A missing program is no reason: continuous integration installs what the tests start. Only the clients of Docker and
Kubernetes, whose commands are parsed, are not in the system's packages. `.ci/run` runs as root; GitHub runs the tests
as another user, on a kernel where only root may make namespaces.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

TWO_MACHINES = "only root may create network namespaces"
OWN_DISK = "only root may mount a disk"
OWN_MOUNTS = "this kernel or this user may not make namespaces"
# Which test may be skipped, and how the reason starts.
ALLOWED = {
    ("test_documents.py::test_a_command_that_cannot_be_run_is_accepted_by_its_parser", "no docker here"),
    ("test_documents.py::test_a_command_that_cannot_be_run_is_accepted_by_its_parser", "no kubectl here"),
    ("test_machines.py::test_a_run_resumes_after_the_link_is_cut", TWO_MACHINES),
    ("test_machines.py::test_a_lossy_link_only_costs_time", TWO_MACHINES),
    ("test_machines.py::test_torchrun_restarts_the_ranks_of_both_machines_when_one_is_killed", TWO_MACHINES),
    ("test_machines.py::test_a_strategy_has_the_same_losses_on_two_machines", TWO_MACHINES),
    ("test_doctor.py::test_two_healthy_machines_pass", TWO_MACHINES),
    ("test_doctor.py::test_a_cut_link_fails_the_ranks_row_on_both_machines", TWO_MACHINES),
    ("test_doctor.py::test_an_unsuitable_file_system_fails_the_row_that_checks_it", OWN_MOUNTS),
    ("test_doctor.py::test_an_unresolvable_host_name_only_warns_on_a_single_machine", OWN_MOUNTS),
    ("test_chaos.py::test_what_does_not_kill_at_once_is_named_and_survived", OWN_DISK),
    ("test_files.py::test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_room", OWN_DISK),
    ("test_symptoms.py::test_too_little_shared_memory_is_reported", "cannot mount a separate /dev/shm"),
}


def fail_if_skipped(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Turn a skip in continuous integration into a failure, unless its reason is listed."""
    if not os.environ.get("CI") or not report.skipped or hasattr(report, "wasxfail"):
        return
    assert isinstance(report.longrepr, tuple)  # The file, the line and the reason.
    reason = report.longrepr[2].removeprefix("Skipped: ")
    test = report.nodeid.rpartition("/")[2].partition("[")[0]
    if not any(test == allowed and reason.startswith(start) for allowed, start in ALLOWED):
        report.outcome = "failed"
        report.longrepr = f"skipped for a reason that tests/skips.py does not list: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    fail_if_skipped(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    fail_if_skipped(report)
    return report
