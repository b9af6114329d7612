"""`make benchmark` is paired and fair: rounds, ratios and arms; its figures need an idle machine, and half an hour."""

from __future__ import annotations

import sys
from pathlib import Path

import benchmark
import benchmark_page
import pytest
from benchmark import Comparison, Lab, missing, ratios
from conftest import run
from runs import plant

# Prints the page faults of a step that allocates 32 MiB, or 8192 pages, as the one before did.
FAULTS = """
import resource, torch
from my_experiment.runtime.memory import keep_freed_memory
keep_freed_memory()
def step():
    return [torch.ones(2**18) for _ in range(32)] and None
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
TWO = Comparison("two", "digits", 20, 10, ("a", "b"))


def test_each_round_begins_with_another_arm_and_a_later_call_resumes() -> None:
    done = [{"comparison": "two", "round": number, "arm": arm} for _, number, arm in missing([TWO], 2, [])]
    assert [(row["round"], row["arm"]) for row in done] == [(0, "a"), (0, "b"), (1, "b"), (1, "a")]
    assert [(number, arm) for _, number, arm in missing([TWO], 2, done[:3])] == [(1, "a")]
    assert [number for _, number, _ in missing([TWO], 3, done)] == [2, 2]


def test_ratios_are_taken_within_rounds() -> None:
    fast_and_slow_round = {0: 60.0, 1: 6.0}, {0: 50.0, 1: 8.0, 2: 1.0}
    assert ratios(*fast_and_slow_round) == [1.2, 0.75]
    assert benchmark_page.spread(ratios(*fast_and_slow_round)) == "0.97 (0.75 to 1.20)"


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["project", "hand-written loop", "no communication"])
def test_an_arm_takes_steps(arm: str, tmp_path: Path) -> None:
    comparison = Comparison("short", "digits", 40, 20)
    measured = Lab(tmp_path, sys.executable).measure(arm, comparison)
    assert measured["steps_per_second"] > 0 and measured["first_step"] > 0


@pytest.mark.slow
def test_a_step_is_compared_with_one_that_lacks_what_surrounds_it(tmp_path: Path) -> None:
    lab = Lab(tmp_path, sys.executable)
    plant(
        lab.project("digits"), "reporting/tracker.py", "            self.bar.update()\n", "import time; time.sleep(0.2)"
    )
    measured = lab.measure("bare", Comparison("short", "digits", 100, 20, ("bare",)))
    assert measured["pairs"] == 2 and measured["share"] > 2


def test_the_page_has_the_newest_series_of_each_comparison() -> None:
    rows = [{"comparison": name, "commit": commit} for name, commit in (("one", "a"), ("two", "a"), ("two", "b"))]
    assert benchmark_page.newest(rows) == [rows[0], rows[2]]


def test_all_arms_train_with_the_same_settings(tmp_path: Path) -> None:
    lab = Lab(tmp_path, sys.executable)
    words = {arm: lab.command(arm, benchmark.COMPARISONS[0], "run") for arm in benchmark.COMPARED}
    assert len({tuple(command[command.index("--config") :]) for command in words.values()}) == 1
    assert words["project"][0].endswith("/scripts/launch.sh")


def test_what_renders_all_projects_starts_outside_of_pytest() -> None:
    run(sys.executable, "-c", "import branches; branches.Recorder()", cwd=Path(__file__).parent)


@pytest.mark.slow
def test_a_step_reuses_the_memory_of_the_one_before(plain: Path) -> None:
    faults = int(run(sys.executable, "-c", FAULTS, cwd=plain, PYTHONPATH="src").stdout)
    assert faults < 1000, "a step takes new pages from the system"
