"""Every setting of a rendered project with values of every kind, and launchers' variables that contradict each other.

`test_hostile.py` starts this program. Each value has to be refused in one line, or to be one with which a run comes to
its end, or is refused in one line when it meets the data.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import multiprocessing
import resource
import sys
from collections import Counter
from dataclasses import fields
from pathlib import Path

from lab import BASE, Lab, name_error

VALUES = [
    *("null", "true", "x", "''", "[]", "{}", "[1, 2]", "{a: 1}", "-1", "0", "2", "0.5", "-0.5", "-0.0", "1e-320"),
    *("1e12", "1e15", "1e308", ".inf", "-.inf", ".nan", "[.nan, 0.9]", str(2**53), str(2**63), "9" * 30, "9" * 400),
    *("9" * 5000, "é" * 5000),
]
# Of what is a text, any other value is one too.
TEXTS = ("run.dir", "model.weights", "checkpoint.resume", "dataset.path", "dataset.cache", "generate.prompt")
# Which process this is, to each launcher: the last of four, on the second of two machines, or of two on one.
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
OPEN_MPI = {f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")}
OPEN_MPI |= {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
HYDRA = {"PMI_RANK": "1", "MPI_LOCALRANKID": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_NODEID": "1", "SLURM_PROCID": "3"}
SRUN |= {"SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
ODD = ["", "x", "-1", "0", "1", "2", "3", "5", "1.5", "1e9", " 1 ", "²", "9" * 30, "9" * 5000, "1_0"]
ODD += ["2(x3),1", "0(x3)", f"2(x{10**12})", "(x2)", "2(x2),y", "n[", "[1-2]", ","]


def refusal(lab: Lab, *words: str) -> str | None:
    """Return how a command line is refused, None if it is not, or what else happens."""
    errors, user_error = io.StringIO(), lab.module("config").UserError
    try:
        with contextlib.redirect_stderr(errors):
            config = lab.settings(*words)
            lab.module("__main__").check(config, 1, True)
    except SystemExit:
        return errors.getvalue().rstrip("\n")
    except user_error as error:
        return str(error)
    except Exception as error:
        return f"\n{name_error(error)}"
    return None


def judge_settings(lab: Lab, left_out: list[str], wrong: list[str], outcomes: Counter[str]) -> list[tuple[str, str]]:
    """Give every setting of all sections but some every value; returns what is accepted."""
    arguments = lab.module("launch.arguments")
    arguments.build_parser = functools.lru_cache(arguments.build_parser)
    accepted = []
    for section, kind in lab.module("config").sections().items():
        for field, value in itertools.product(() if section in left_out else fields(kind), VALUES):
            name = f"{section}.{field.name}"
            line = refusal(lab, f"--{name}={value}")
            outcomes["setting: accepted" if line is None else "setting: refused"] += 1
            if line is None:
                accepted.append((name, value))
            # It names the setting, or says in other words what it is.
            elif "\n" in line or not any(
                word[:5] in line.replace("-", "") for word in [section, *field.name.split("_")]
            ):
                wrong.append(f"{name} = {value[:20]}: {line[:300]}")
    return accepted


def judge_variables(lab: Lab, wrong: list[str], outcomes: Counter[str]) -> None:
    """Give every variable of every launcher every value, and take it away."""
    environment, user_error = lab.module("launch.environment"), lab.module("config").UserError
    for variables in (TORCHRUN, OPEN_MPI, HYDRA, SRUN):
        for name, value in itertools.product(variables, [None, *ODD]):
            given = variables | ({} if value is None else {name: value})
            if value is None:
                del given[name]
            try:
                info = environment.find_process_info(given)
            except user_error as error:
                outcomes["variable: refused"] += 1
                if "\n" in str(error):
                    wrong.append(f"{name} = {value}: {error}")
            except Exception as error:
                wrong.append(f"{name} = {str(value)[:20]}: {name_error(error)}")
            else:
                outcomes["variable: accepted"] += 1
                on_one_machine = info.local_world_size == info.world_size
                is_possible = 0 <= info.local_rank <= info.rank < info.world_size >= info.local_world_size
                if not is_possible or (on_one_machine and info.rank != info.local_rank):
                    wrong.append(f"{name} = {value}: {info}")


def train(lab: Lab, folder: Path, words: tuple[str, ...]) -> None:
    """Train for two steps, in a process of its own; exit with 0, with 2 and one line, or otherwise."""
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    sys.stderr = (folder / "stderr").open("w")
    sys.stdout = (folder / "stdout").open("w")
    lab.module("__main__").main(["train", *BASE[lab.task].split(), *words])


def judge_runs(lab: Lab, accepted: list[tuple[str, str]], wrong: list[str], outcomes: Counter[str]) -> None:
    """Train with what is accepted: each run comes to its end, or is refused when the value meets the data."""
    for number, (name, value) in enumerate(accepted):
        if name in TEXTS or name.split(".")[0] in ("model", "dataset", "control", "generate"):
            continue
        if name == "data.num_workers" and value.isdecimal() and len(value) > 1:
            wrong.append(f"{name} = {value[:20]} is accepted, and a run would start as many processes")
            continue
        folder = lab.folder / str(number)
        folder.mkdir()
        words = ("--run.dir", str(folder / "run"), "--train.max_steps=2", f"--{name}={value}")
        child = multiprocessing.get_context("fork").Process(target=train, args=(lab, folder, words))
        child.start()
        child.join(120)
        child.kill()
        child.join()
        errors = (folder / "stderr").read_text().splitlines()
        lines = [line for line in errors if line.startswith("error: ")]
        outcomes["run: finished" if child.exitcode == 0 else "run: refused"] += 1
        if not (child.exitcode == 0 or (child.exitcode == 2 and len(lines) == 1 and "Traceback" not in str(errors))):
            wrong.append(f"{name} = {value[:20]}: exit code {child.exitcode}: {errors[-1:]}")


def main(package: str, task: str, folder: Path, left_out: list[str], trains: bool) -> None:
    """Write what went wrong, and how much was refused and accepted, into the folder."""
    lab, wrong, outcomes = Lab(package, task, folder), list[str](), Counter[str]()
    accepted = judge_settings(lab, left_out, wrong, outcomes)
    judge_variables(lab, wrong, outcomes)
    if trains:
        lab.module("train")  # Imported before the children are forked.
        judge_runs(lab, accepted, wrong, outcomes)
    (folder / "outcome.json").write_text(json.dumps({"wrong": wrong, "outcomes": outcomes, "accepted": accepted}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4].split(), sys.argv[5:] == ["train"])
