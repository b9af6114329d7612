"""What people reported of other tools: it is right here, or refused in one line before it costs a run."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path, PurePosixPath
from shutil import copytree
from signal import SIGINT, SIGKILL, SIGTERM

import pytest
import torch
from conftest import (
    BIN,
    TEMPLATE,
    Bake,
    commit,
    edit,
    find_processes,
    free_ports,
    launch,
    read_losses,
    read_records,
    run,
    run_alone,
    run_python,
    run_trainer,
    started,
    wait_until,
    weekly,
)
from lines import (
    ACCURACY,
    AUGMENTED,
    BUILD,
    FORWARD,
    HEAD,
    IMPORTS,
    LOADED,
    LOSSES,
    MEASURED,
    METHODS,
    ROW,
    SAMPLE,
    STEM,
    TASK,
    UPDATED,
    WEIGHT,
    WRITE,
    Line,
    after,
    before,
    instead,
)
from ranks import FAULTS, measure
from safetensors.torch import load_file
from small import SHARDED, SMALL, WORKERS, load, refuse

pytestmark = [pytest.mark.long, pytest.mark.independent]


@pytest.mark.parametrize("fault", ["SIGKILL", *weekly(*(each for each in FAULTS if each != "SIGKILL"))])
def test_a_failure_of_many_ranks_is_short(bake: Bake, fault: str) -> None:
    lines, requests, most = measure(bake(), 8, fault)
    assert 0 < lines <= 10 + (fault == "error") * 25  # A traceback.
    assert 0 < requests <= 40 * 8 and most["descriptors"] < 64 + 8


@pytest.mark.weekly
def test_a_rank_that_hangs_is_named_by_all_groups_of_a_mesh(bake: Bake) -> None:
    project = bake(parallelism="fsdp")
    edit(project, after(UPDATED, "if self.step == 2 and self.process.rank == 3:", "    time.sleep(1e6)"))
    words = ("--parallel.replicas", "2", "--train.exact", "false", "--distributed.timeout_seconds", "8")
    err = launch(project, *SMALL, *words, nproc=4, code=1, STOP_SECONDS="3").stderr
    assert "no report from rank(s) 3" in err, err


BELOW_A_FILE = "--run.dir=README.md/run"
MISTAKES: list[tuple[bytes, list[str], str]] = [  # A file of settings, words of the command line, what is named.
    (b"optim: 3", [], "optim in "),
    (b"optim: [{lr: 1}]", [], "optim in "),
    (b"optim.lr: 1", [], "optim.lr in "),
    (b"- optim", [], "mine.yaml"),
    (b"optim:\n\tlr: 1", [], 'mine.yaml", line 2'),
    (b"optim:\n  lr: \0", [], "mine.yaml"),
    (b"optim:\n  lr: \xff", [], "mine.yaml"),
    (b"optim: &a\n  lr: *a", [], "optim.lr"),
    (b"optim:\n", [], "optim in"),
    (b"optim:\n  betas: null", [], "optim.betas"),
    ("optim:\n  lr: 1\n".encode("utf-16"), [], "mine.yaml"),
    (b"optim:\n  lr: .nan", [], "optim.lr"),
    (b"optim:\n  lr: 1\n  lr: 1", [], "lr is given twice in optim"),
    (b"optim: " + b"{a: " * 3000 + b"}" * 3000, [], "recursion"),
    (b"", ["--config=mine.yaml"], "--config is given twice"),
    (b"", ["--optim.l", "1"], "--optim.l"),
    (b"", ["--model.weights", "nowhere.pt"], "model.weights"),
    (b"", ["--optim.betas", "[0.9]"], "optim.betas"),
    (b"", ["--optim.betas", '[0.9, "x"]'], "optim.betas"),
    (b"", ["--run.seed", str(2**63)], "run.seed"),
    (b"", ["--train.microbatches", "4"], "data.micro_batch_size"),
    (b"", ["--data.eval_batch_size", "1" + "0" * 30], "data.eval_batch_size"),
    (b"", ["--data.num_workers", "1000000000"], "data.num_workers"),
    (b"", ["--distributed.timeout_seconds", "1e15"], "distributed.timeout_seconds"),
    (b"", ["--run.dir="], "run.dir"),
    (b"", ["--run.dir=README.md"], "run.dir"),
    (b"", [BELOW_A_FILE], "run.dir"),
]


def test_mistakes_in_settings_are_named_before_pytorch_is_imported(bake: Bake) -> None:
    project = bake()
    (project / "torch.py").write_text("raise SystemExit('PyTorch was imported')")  # The current folder comes first.
    words_of_file = ("train", "--config", "mine.yaml")
    (project / "mine.yaml").write_text("optim:\n  lr: 1e-3\n")
    assert "PyTorch was imported" in run_alone(project, *words_of_file, code=1).stderr
    for content, words, named in MISTAKES:
        (project / "mine.yaml").write_bytes(content)
        err = run_alone(project, *words_of_file, *words, code=2).stderr
        assert err.startswith("error: ") and err.count("\n") == 1 and named in err, (content, words, err)


def test_what_this_machine_cannot_do_is_refused(bake: Bake) -> None:
    project = bake()
    assert "run.dir is README.md/run, but " in refuse(project, BELOW_A_FILE, nproc=2)
    err = launch(project, "train", "--distributed.backend=nccl", "--distributed.device=cpu", nproc=1, code=2).stderr
    assert re.match("error: .*(have NCCL|no GPUs)", err) and "Traceback" not in err, err
    run_alone(project, "--preflight", "train", BELOW_A_FILE, NODE_RANK="1")
    run_alone(project, "--preflight", "evaluate", BELOW_A_FILE, "--checkpoint", "README.md")


@pytest.mark.parametrize("content", ["", "# Nothing yet.\n", "---\n", "{}\n"])
def test_a_file_without_settings_means_the_defaults(bake: Bake, content: str) -> None:
    project = bake("[a] folder*")  # Which is no pattern.
    words = ["train", "--print_config"]
    assert "lr: 0.004" in run_alone(project, *words).stdout
    (project / "mine.yaml").write_text(content)
    assert "lr: 0.001" in run_alone(project, *words, "--config", "mine.yaml").stdout


def test_a_mistake_that_a_loader_process_finds_is_one_line(bake: Bake) -> None:
    """The error that PyTorch passes on has the traceback of the process as its message."""
    project = bake()
    imported = {("dataset.py", "from .config import Config\n"): "from .config import Config, UserError\n"}
    edit(project, imported | instead(SAMPLE, "raise UserError(f'image {index} has no label')"))
    err = launch(project, *SMALL, *WORKERS, "--run.dir", "run", code=1).stderr
    assert re.search(r"^error: image \d+ has no label$", err, re.MULTILINE), err


DROPPED = ("model.py", "        self.up = linear(width, 4 * width)\n")


@pytest.mark.weekly
def test_dropout_that_all_shards_would_share_is_refused(bake: Bake) -> None:
    project = bake(parallelism="tensor", task="language")
    edit(project, after(DROPPED, "self.dropout = nn.Dropout(0.0)"))
    launch(project, *SMALL, "--run.dir", "run")
    edit(project, {("model.py", "nn.Dropout(0.0)"): "nn.Dropout(0.1)"})
    assert "nn.Dropout drops the same places of all shards" in refuse(project, nproc=2)


GROUPS = ("optim.py", "    return torch.optim.AdamW(\n")
RATES = 'trainer.run(); print(*(group["lr"] for group in trainer.optimizer.param_groups))'


def test_a_group_keeps_its_share_of_the_learning_rate(bake: Bake) -> None:
    project = bake()
    edit(project, before(GROUPS, 'groups[0]["lr"] = config.lr / 2'))
    last = {}
    for steps in ("2", "4"):  # The second start resumes.
        printed = run_trainer(project, RATES, *SMALL, "--run.dir", "run", "--train.max_steps", steps)
        last[steps] = [float(word) for word in printed.splitlines()[-1].split()]
        assert last[steps][0] == pytest.approx(last[steps][1] / 2)
    assert last["2"][0] < last["4"][0] < load(project / "run")["config"]["optim"]["lr"] / 2  # They warm up.


QKV = ("model.py", "        self.qkv = linear(width, 3 * width)\n")
ATTENDED = ("model.py", "        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)\n")
NORMS = after(QKV, "self.norms = nn.ModuleList(nn.RMSNorm(width // heads) for _ in range(2))") | before(
    ATTENDED, "queries, keys = self.norms[0](queries), self.norms[1](keys)"
)
PLANNED = {
    ("plan.py", "    RowwiseParallel,\n"): "    RowwiseParallel,\n    SequenceParallel,\n",
    ("plan.py", '"qkv": columns,'): '"norms.*": SequenceParallel(use_local_output=True), "qkv": columns,',
}


@pytest.mark.weekly
@pytest.mark.parametrize("parallelism", ["tensor", "mesh"])
def test_a_parameter_that_works_on_shards_is_in_the_plan_or_refused(bake: Bake, parallelism: str) -> None:
    project = bake(parallelism=parallelism, task="language")
    edit(project, NORMS)
    words = ["--parallel.tensor", "2", "--optim.warmup_steps", "0"]
    assert "copies of block0.norms.0.weight drift apart" in refuse(project, *words, nproc=2)
    edit(project, PLANNED)
    for nproc in (1, 2):
        launch(project, *SMALL, *(words if nproc > 1 else words[2:]), "--run.dir", f"run{nproc}", nproc=nproc)
    for one, two in zip(*(read_records(project / f"run{nproc}", "train") for nproc in (1, 2)), strict=True):
        # Not the weights: AdamW makes a whole step of a gradient that is rounding alone.
        assert [one["loss"], one["grad_norm"]] == pytest.approx([two["loss"], two["grad_norm"]], rel=1e-5)


@pytest.mark.weekly
def test_weights_that_a_run_started_from_may_be_gone(bake: Bake) -> None:
    project = bake()
    run_alone(project, *SMALL, "--run.dir", "first")
    (project / "first" / "checkpoints" / "step-00000004.pt").rename(project / "weights.pt")
    run_alone(project, *SMALL, "--run.dir", "run", "--train.max_steps", "2", "--model.weights", "weights.pt")
    (project / "weights.pt").unlink()
    assert "step 2 of 4" in run_alone(project, *SMALL, "--run.dir", "run").stdout


@pytest.mark.parametrize("form", ["sharded", *weekly("full")])
def test_a_run_that_fails_ends_a_save_of_its_own_and_waits_for_no_other(bake: Bake, form: str) -> None:
    project = bake(parallelism="fsdp")
    sharded = ("sharded.py", "            dcp.save(shards, storage_writer=writer, process_group=self.group)\n")
    write, seconds = (WRITE, "12") if form == "full" else (sharded, "1e4 * self.process.rank")
    fails = ("if self.step == 2 and self.process.rank == 0:", "    raise ValueError('a bad sample')")
    edit(project, before(write, f"__import__('time').sleep({seconds})") | after(UPDATED, *fails))
    words = ["--checkpoint.format", form, "--checkpoint.every_steps", "2", "--run.dir", "run"]
    words += ["--distributed.timeout_seconds", "8"]  # Shorter than the write.
    err = launch(project, *SMALL, *words, code=1).stderr
    assert "ValueError: a bad sample" in err and "no report" not in err, err
    assert (project / "run/checkpoints/step-00000002.pt").exists() == (form == "full")


@pytest.mark.weekly
def test_a_sharded_run_is_evaluated_without_a_full_checkpoint(bake: Bake) -> None:
    project = bake(parallelism="fsdp")
    launch(project, *SMALL, *SHARDED, "--run.dir", "run")
    words = ["evaluate", "--distributed.device", "cpu", "--checkpoint"]
    outputs = {run_alone(project, *words, path).stdout for path in ("run", "run/checkpoints/step-00000004.dcp")}
    assert len(outputs) == 1


@pytest.mark.weekly
def test_a_frozen_parameter_may_be_infinite(bake: Bake) -> None:
    project = bake()
    mask = "self.mask = nn.Parameter(torch.full((CLASSES,), -torch.inf), requires_grad=False)"
    edit(project, IMPORTS | after(HEAD, mask))
    run_alone(project, *SMALL, "--run.dir", "run")
    assert load(project / "run")["model"]["head.mask"].isinf().all()


@pytest.mark.weekly
def test_a_negative_weight_counts_as_on_one_rank(bake: Bake) -> None:
    project = bake()
    edit(project, instead(WEIGHT, "return len(targets) - 24 * (targets[0] % 2)"))
    for nproc in (1, 2):
        launch(project, *SMALL, "--data.micro_batch_size", "8", "--run.dir", f"run{nproc}", nproc=nproc)
    assert read_losses(project / "run1") == read_losses(project / "run2")


EXTRA = "self.extra = nn.Parameter(torch.ones(4, 1, 1), requires_grad={})"
USED = '"USED" in __import__("os").environ'


@pytest.mark.parametrize(
    ("was", "parallelism", "words"),
    [
        ("frozen", "ddp", []),
        *weekly(
            ("unused", "ddp", []),
            ("unused", "fsdp", SHARDED),
            ("frozen", "fsdp", SHARDED),
            ("frozen", "fsdp", []),
            ("unused", "fsdp", []),
        ),
    ],
)
def test_a_parameter_that_had_no_gradient_trains_after_a_resume(
    bake: Bake, was: str, parallelism: str, words: list[str]
) -> None:
    project = bake(parallelism=parallelism)
    edit(project, IMPORTS | after(STEM, EXTRA.format(USED if was == "frozen" else "True")))
    edit(project, before(FORWARD, f"images = images * (self.extra.mean() if {USED} else 1)"))
    often = [*SMALL, *words, "--train.allow_unused", "true", "--run.dir", "run", "--train.max_steps"]
    train = run_alone if parallelism == "ddp" else launch
    train(project, *often, "2")
    train(project, *often, "4", USED="1")
    if words:
        train(project, *often, "5", "--checkpoint.format", "full", USED="1")
    assert len(read_losses(project / "run")) == (5 if words else 4)
    saved = load(project / "run")["optimizer"]["state"]
    taken = {name: int(state["step"]) for name, state in saved.items()}
    assert taken.pop("stem.extra") == (3 if words else 2) and {*taken.values()} == {5 if words else 4}


def test_names_may_have_an_umlaut_in_an_ascii_locale(bake: Bake) -> None:
    project, ascii_locale = bake(), {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0"}
    edit(project, after(ACCURACY, '"größe": 1.0,'))
    for steps in ("2", "4"):
        launch(project, *SMALL, "--run.dir", "läufe", "--train.max_steps", steps, nproc=1, **ascii_locale)
    assert len(read_losses(project / "läufe")) == 4 and not list(project.rglob("*.damaged"))
    assert read_records(project / "läufe", "eval")[-1]["größe"] == 1


def test_metrics_become_plain_numbers_and_the_checkpoint_can_be_read(bake: Bake) -> None:
    project = bake()
    edit(
        project, {("task.py", 'return {"loss": losses,'): 'return {"top": outputs.amax(1).bfloat16(), "loss": losses,'}
    )
    odd = '"list": torch.arange(2), "each": {"a": np.int64(4), 3: correct[:2]},'
    edit(project, after(ACCURACY, '"top": metrics["top"].max(), "nan": np.float32("nan"),', odd))
    run_alone(project, *SMALL, "--run.dir", "run", "--train.eval_every", "2")
    (first, last), saved = read_records(project / "run", "eval"), load(project / "run")
    assert isinstance(last["top"], float) and last["nan"] is None and last["list"] == [0, 1]
    assert last["each"] == {"a": 4, "3": last["each"]["3"]} and len(first["each"]["3"]) == 2
    assert saved["progress"] == {"step": 4, "epoch": 0, "samples": 128}


@pytest.mark.weekly
def test_what_evaluates_is_what_trained(bake: Bake) -> None:
    project = bake(task="language")
    (project / "mine.txt").write_text("a text of one's own, " * 4000)  # So both sets hold the same.
    words = ["--dataset.path", "mine.txt", "--dataset.test_bytes", "21000", "--run.seed", "5"]
    run_alone(project, *SMALL, *words, "--train.precision", "bf16", "--run.dir", "run")
    recorded = read_records(project / "run", "eval")[-1]
    evaluate = ["evaluate", "--distributed.device", "cpu", "--checkpoint", "run/checkpoints/step-00000004.pt"]
    assert json.loads(run_alone(project, *evaluate).stdout) == recorded | {"split": "test"}
    for given in (["--dataset.test_bytes", "10000"], ["--dataset", '{"test_bytes": 10000, "path": "mine.txt"}']):
        result = run_alone(project, *evaluate, *given)
        assert json.loads(result.stdout)["num_samples"] < recorded["num_samples"]
    # At temperature 0, nothing is drawn, but between equals, which bf16 has.
    words = ["generate", *evaluate[1:], "--train.precision=fp32", "--temperature=0", "--length=20", "--run.seed"]
    assert len({run_alone(project, *words, seed).stdout for seed in "12"}) == 1


@pytest.mark.weekly
def test_an_evaluation_of_many_batches_opens_few_files(bake: Bake) -> None:
    project = bake()
    command = ["bash", "-c", 'ulimit -n 120; exec scripts/launch.sh "$@"', "_", *SMALL, *WORKERS, "--run.dir", "run"]
    run(*command, "--data.eval_batch_size", "1", cwd=project)


def test_weights_of_other_programs_load_or_are_named(bake: Bake, tmp_path: Path) -> None:
    project = bake()
    run_alone(project, *SMALL, "--run.dir", "first")
    model = load(project / "first")["model"]
    contents = {
        "own": {"model": model},
        "wrapped": {"state_dict": model, "epoch": 3},
        "compiled": {f"_orig_mod.{name}": value for name, value in model.items()},
        "parallel": {f"module.{name}": value for name, value in model.items()},
        "other": {f"net.{name}": value for name, value in model.items()},
        "code": {"model": model, "path": PurePosixPath("x")},
        "old": {"model": model},  # As PyTorch before 1.6 wrote it.
    }
    losses = {}
    for name, content in contents.items():
        torch.save(content, tmp_path / f"{name}.pt", _use_new_zipfile_serialization=name != "old")
        words = ["--model.weights", str(tmp_path / f"{name}.pt")]
        if name == "other":
            assert "net.stem.conv.weight" in refuse(project, *words)
        elif name == "code":
            assert "PurePosixPath" in refuse(project, *words)
        elif name == "old":
            assert "old.pt is not a readable checkpoint: File is not a zip file" in refuse(project, *words)
        else:
            run_alone(project, *SMALL, *words, "--train.max_steps", "1", "--run.dir", name)
            (losses[name],) = read_losses(project / name)
    assert len(set(losses.values())) == 1 and losses["own"] != read_losses(project / "first")[0]
    assert "model.weights" in refuse(project, "--checkpoint.resume", str(tmp_path / "own.pt"))


def test_a_link_to_a_folder_that_is_not_mounted_is_no_fresh_start(bake: Bake) -> None:
    project = bake()
    (project / "run").mkdir()
    (project / "run" / "checkpoints").symlink_to("/nowhere/checkpoints")
    assert "File exists: 'run/checkpoints'" in refuse(project)
    assert not (project / "run" / "metrics.jsonl").exists()


def test_a_folder_with_a_colon_is_refused(bake: Bake, tmp_path: Path) -> None:
    assert "colon" in refuse(Path(copytree(bake(), tmp_path / "a:b")), nproc=2)


def test_state_of_ones_own_is_saved_and_restored_on_every_rank(bake: Bake) -> None:
    project = bake()
    state = "    def get_extra_state(self):\n        return self.calls\n\n    def set_extra_state(self, state):\n"
    edit(project, {METHODS: f"{state}        self.calls = state\n\n{METHODS[1]}"} | after(STEM, "self.calls = 0"))
    edit(project, before(FORWARD, "self.calls += 1", "print(f'call {self.calls}\\n', end='')"))
    launch(project, *SMALL, "--run.dir", "run")  # Four steps; the evaluation comes after the checkpoint.
    output = launch(project, *SMALL, "--run.dir", "run", "--train.max_steps", "5").stdout
    assert output.count("call 5") == 2 and "call 4" not in output
    # What a module keeps beside its weights is not exported with them.
    run_alone(project, "export", "--checkpoint", "run", "--output", "weights.safetensors")
    weights = load_file(project / "weights.safetensors")
    assert weights.keys() == load(project / "run")["model"].keys() - {"stem._extra_state"}


@pytest.mark.parametrize("launcher", ["torchrun", "spawn"])
def test_no_rank_outlives_a_launcher_that_is_killed_while_they_start(bake: Bake, launcher: str) -> None:
    project = bake(launcher=launcher)
    command = [project / "scripts" / "launch.sh", *SMALL, "--train.max_steps", "40", "--run.dir", "run"]
    with started(*command, cwd=project, NPROC="2", MARK=str(project)) as process:
        wait_until(lambda: len(ranks_of(process.pid)) == 2, "two ranks")
        os.kill(process.pid, SIGKILL)
        process.wait()
        wait_until(lambda: not find_processes(f"MARK={project}"), "no process is left", seconds=60)


def ranks_of(launcher: int) -> list[str]:
    """Return the child processes of a launcher that are ranks."""
    command = ["pgrep", "-P", str(launcher), "-f", "--", "-m my_experiment|spawn_main"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


CONNECTION = "RuntimeError: the connection to the database: timeout of gloo"


@pytest.mark.parametrize(
    ("parallelism", "line", "words"),
    [("ddp", ROW, WORKERS), *weekly(("pipeline", FORWARD, []), ("fsdp", LOSSES, []))],
)
def test_what_an_error_says_does_not_hide_it(bake: Bake, parallelism: str, line: Line, words: list[str]) -> None:
    project, rank = bake(parallelism=parallelism), int(line != FORWARD)  # An error of the first stage is wrapped.
    name, text = CONNECTION.split(": ", 1)
    edit(project, before(line, f'if __import__("os").environ["RANK"] == "{rank}":', f'    raise {name}("{text}")'))
    err = launch(project, *SMALL, *words, "--run.dir", "run", code=1).stderr
    assert f"\n{CONNECTION}\n" in err, err
    assert rank == 0 or err.endswith(f"\nerror: rank 0 waited in vain: rank 1 failed with {CONNECTION}\n"), err


@pytest.mark.parametrize("parallelism", ["fsdp", *weekly("tensor")])
def test_a_rank_that_waits_for_a_killed_one_prints_one_line(bake: Bake, parallelism: str) -> None:
    project = bake(parallelism=parallelism)
    edit(project, before(LOSSES, "import os", 'if os.environ["RANK"] == "1":', "    os.kill(os.getpid(), 9)"))
    waited, killed = launch(project, *SMALL, "--run.dir", "run", code=1).stderr.splitlines()
    assert waited.startswith("error: rank 0 waited in vain: a rank died or left (RuntimeError: "), waited
    assert "gloo" not in waited and killed == "error: rank 1 was ended by SIGKILL"


@pytest.mark.parametrize(
    ("rank", "workers", "killed"), [(1, "1", 1), pytest.param(0, "3", 6, marks=pytest.mark.weekly)]
)
def test_a_loader_process_that_dies_is_named(bake: Bake, rank: int, workers: str, killed: int) -> None:
    project = bake()
    words = [*SMALL, "--train.epochs", "1000", "--train.max_steps", "20000", "--train.eval_every", "4"]
    words += ["--data.num_workers", workers, "--distributed.timeout_seconds", "60", "--run.dir", "run"]
    with started(project / "scripts" / "launch.sh", *words, cwd=project, NPROC="2") as launcher:
        wait_until(lambda: len(read_losses(project / "run")) > 8, "both loaders have processes")
        (parent,) = {*map(int, ranks_of(launcher.pid))} & {*find_processes(f"LOCAL_RANK={rank}")}
        command = ["pgrep", "-P", str(parent), "-f", "--", "spawn_main"]
        loaders = [*map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())]
        assert len(loaders) == 2 * int(workers)
        for loader in loaders[:killed]:
            os.kill(loader, SIGKILL)
        assert launcher.wait(timeout=40) == 1  # Long before ranks would have waited in vain.
        err = launcher.communicate(timeout=60)[1]
    assert any(f"(pid {loader}) is killed by signal" in err for loader in loaders[:killed]), err
    assert rank == 0 or "rank 0 waited in vain: rank 1 failed with RuntimeError: DataLoader worker" in err, err


def test_an_unexpected_error_of_rank_0_while_all_wait_ends_them_at_once(bake: Bake) -> None:
    project = bake()
    edit(project, {("config.py", "    weights: str | None"): "    others: str | None"})
    err = launch(project, *SMALL, "--run.dir", "run", code=2).stderr
    assert "no attribute 'weights'" in err.splitlines()[-1], err
    assert err.count("Traceback") == 1 and "\nerror: " in err, err


def test_a_run_that_fails_ends_although_nobody_reads_why(bake: Bake) -> None:
    project, words = bake(), [*SMALL, *WORKERS, "--optim.lr", "1e30", "--optim.warmup_steps", "0", "--run.dir", "run"]
    script = 'exec timeout -s KILL 60 "$PYTHON" -m my_experiment "$@" 2>&1 | true; exit "${PIPESTATUS[0]}"'
    run("bash", "-c", script, "_", *words, cwd=project, code=2, PYTHONPATH="src")


@pytest.mark.parametrize("redirection", ["2>&1 | true", *weekly("<&- >&- 2>&-")])
def test_a_run_whose_output_nobody_reads_ends_well(bake: Bake, redirection: str) -> None:
    project = bake()
    script = f'scripts/launch.sh "$@" {redirection}; exit "${{PIPESTATUS[0]}}"'
    (project / "run").mkdir()
    (project / "run/metrics.jsonl").write_text("damaged")
    run("bash", "-c", script, "_", *SMALL, *WORKERS, "--run.dir", "run", cwd=project, NPROC="2")
    assert len(read_losses(project / "run")) == 4 and (project / "run/checkpoints/step-00000004.pt").exists()


def test_what_a_launcher_did_not_set_is_named(bake: Bake) -> None:
    project, known = bake(), {"RANK": "0"}
    for variable, value in {"WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        err = run_alone(project, *SMALL, "--run.dir", "run", code=2, **known).stderr
        assert err.startswith("error: ") and err.count("\n") == 1 and variable in err, err
        known[variable] = value
    err = run_alone(project, *SMALL, "--run.dir", "run", code=2, **known | {"WORLD_SIZE": "two"}).stderr
    assert err.startswith("error: ") and "'two'" in err and not (project / "run").exists(), err


@pytest.mark.weekly
def test_a_second_run_on_the_same_port_is_named_and_the_first_continues(bake: Bake) -> None:
    project = bake()
    words = [*SMALL, "--train.epochs", "100", "--distributed.init_method", f"tcp://127.0.0.1:{free_ports(1)[0]}"]
    words += ["--train.log_every", "100", "--train.max_steps"]
    first = (project / "scripts" / "launch.sh", *words, "1000", "--run.dir", "first")
    with started(*first, cwd=project, NPROC="2") as process:
        wait_until((project / "first" / "metrics.jsonl").exists, "the first run trains")
        err = launch(project, *words, "4", "--run.dir", "second", code=1).stderr
        assert "address already in use" in err and "Traceback" not in err, err
        assert process.wait(timeout=300) == 0


def test_ranks_meet_where_init_method_says(bake: Bake, tmp_path: Path) -> None:
    """Without the launcher's address."""
    words = ("--distributed.init_method", f"file://{tmp_path}/store", "--distributed.backend", "gloo")
    out = run_alone(bake(), *SMALL, "--run.dir", "run", *words, RANK="0", WORLD_SIZE="1").stdout
    assert "step 4/4" in out


def test_a_notebook_starts_ranks_and_keeps_its_signals(bake: Bake) -> None:
    words = [*SMALL, "--run.dir", "run"]
    script = "import signal\nfrom my_experiment.spawn import launch\nbefore = signal.getsignal(signal.SIGINT)\n"
    script += f"print(launch({words}, nproc=2))\nprint(signal.getsignal(signal.SIGINT) is before)"
    out = run_python(bake(launcher="spawn"), script)
    assert "on 2 rank(s)" in out and out.endswith("\n0\nTrue\n"), out


ALONE = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0", "HEAD": "127.0.0.1", "NPROC": "1"}


@pytest.mark.parametrize("script", ["launch.sh", "rank.sh"])
def test_a_script_is_called_through_a_link_from_anywhere(bake: Bake, tmp_path: Path, script: str) -> None:
    project = Path(copytree(bake(cluster="slurm"), tmp_path / "a project"))
    python = tmp_path / "a python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "train").symlink_to(project / "scripts" / script)
    (tmp_path / "link").symlink_to("train")
    run(tmp_path / "link", *SMALL, "--run.dir", "run", cwd=tmp_path, PYTHON=str(python), **ALONE)
    assert len(read_losses(tmp_path / "run")) == 4


@pytest.mark.parametrize("script", ["launch.sh", "rank.sh"])
@pytest.mark.parametrize("interpreter", ["absent", "no program", "of the environment", "of another project"])
def test_an_interpreter_that_cannot_run_is_named(bake: Bake, tmp_path: Path, script: str, interpreter: str) -> None:
    project, python, environment = bake(cluster="slurm"), tmp_path / "python", dict(ALONE)
    if interpreter == "of the environment":
        environment |= {"PYTHON": "", "PATH": "/usr/bin:/bin"}
        python = project / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
    environment |= {"PYTHON": "" if python.parent.name == "bin" else str(python)}
    if interpreter == "of another project":
        environment["PYTHON"] = "/usr/bin/python3"
    elif interpreter != "absent":
        python.write_text("import this\n")
    err = run(project / "scripts" / script, *SMALL, "--run.dir", "run", cwd=project, code=2, **environment).stderr
    assert err.count("\n") == 1 and "run 'make setup' first" in err, err


@pytest.mark.parametrize(
    ("visible", "ranks"), [("0,1,-1,2", 2), *weekly(("", 2), ("-1", 2), ("NoDevFiles", 2), ("0", 1))]
)
def test_ranks_are_as_many_as_visible_devices_or_two(bake: Bake, visible: str, ranks: int) -> None:
    project = bake()
    launcher = (project / "scripts" / "launch.sh", *SMALL, "--train.max_steps", "1", "--run.dir", "run")
    assert f" on {ranks} rank(s)" in run(*launcher, cwd=project, CUDA_VISIBLE_DEVICES=visible).stdout


def test_a_project_that_git_converts_for_windows_runs(bake: Bake, tmp_path: Path) -> None:
    project = bake(cluster="slurm")
    commit(project)
    run("git", "-c", "core.autocrlf=true", "clone", "--quiet", project, tmp_path / "clone", cwd=tmp_path)
    files = [
        tmp_path / "clone" / name for name in ("README.md", "Makefile", "scripts/train.sbatch", "scripts/launch.sh")
    ]
    assert [b"\r\n" in file.read_bytes() for file in files] == [True, False, False, False]
    launch(tmp_path / "clone", *SMALL, "--run.dir", "run", nproc=1)


def test_the_template_is_the_same_where_git_converts_for_windows(tmp_path: Path) -> None:
    run("git", "-c", "core.autocrlf=true", "clone", "--quiet", TEMPLATE, tmp_path / "clone", cwd=tmp_path)
    for script in tmp_path.glob("clone/**/*.sh"):
        assert b"\r\n" not in script.read_bytes(), script
    run(BIN / "cookiecutter", tmp_path / "clone", "--no-input", "--output-dir", tmp_path, cwd=tmp_path)
    launch(tmp_path / "my-experiment", *SMALL, "--run.dir", "run", nproc=1)


def test_a_part_in_eval_mode_stays_so_after_an_evaluation(bake: Bake) -> None:
    project = bake()
    edit(project, instead(STEM, "self.norm = nn.BatchNorm2d(width)") | before(BUILD, "blocks['stem'].eval()"))
    run_alone(project, *SMALL, "--run.dir", "run", "--train.eval_every", "1")
    assert not load(project / "run")["model"]["stem.norm.running_mean"].any()


def test_records_are_as_exact_as_their_numbers(bake: Bake) -> None:
    project = bake()
    edit(project, after(TASK, "torch.set_default_dtype(torch.bfloat16)"))
    edit(project, before(FORWARD, "images = images.bfloat16()"))
    run_alone(project, *SMALL, "--run.dir", "run")
    assert any(float(torch.tensor(loss).bfloat16()) != loss for loss in read_losses(project / "run"))


def test_a_record_has_the_mean_of_its_interval(bake: Bake) -> None:
    project = bake()
    run_alone(project, *SMALL, "--run.dir", "each")
    run_alone(project, *SMALL, "--run.dir", "all", "--train.log_every", "4")
    (record,) = read_records(project / "all", "train")
    assert record["loss"] == pytest.approx(sum(read_losses(project / "each")) / 4)
    assert 0 < record["seconds_per_step"] < 10


def test_training_batches_alone_are_augmented(bake: Bake) -> None:
    project = bake()
    run_alone(project, *SMALL, "--run.dir", "run", "--train.max_steps", "2")
    edit(project, before(AUGMENTED, "raise RuntimeError('augmented')"))
    run_alone(project, "evaluate", "--checkpoint", "run", "--distributed.device", "cpu")
    assert "augmented" in run_alone(project, *SMALL, "--run.dir", "run", code=1).stderr


def test_changed_code_is_named_on_a_resume(bake: Bake) -> None:
    project = bake()
    words = ("--run.dir", "run", "--train.max_steps")
    run_alone(project, *SMALL, *words, "2")
    edit(project, {("task.py", '"sum")'): '"sum") * 0.5'})
    out = run_alone(project, *SMALL, *words, "3").stdout
    assert re.findall("^changed: [a-z_]+.py", out, re.MULTILINE) == ["changed: task.py"]
    assert "task.py" not in run_alone(project, *SMALL, *words, "4").stdout


def test_sets_have_one_order_without_a_launcher(bake: Bake) -> None:
    project = bake()
    names = "{f'name{number}' for number in range(100)}"
    edit(project, after(LOADED, f"print(*{names})"))
    orders = set()
    for number in range(2):
        out = run_alone(project, *SMALL, "--run.dir", f"run{number}", PYTHONHASHSEED="random").stdout
        orders.add(out.splitlines()[0])
    assert len(orders) == 1


def test_bounds_stand_beside_their_setting(bake: Bake) -> None:
    project = bake()
    eps = ("config.py", "    eps: float = 1e-8\n")
    edit(project, after(eps, "ema_decay: float = 0.9", "share: Annotated[float, 0, 1] = 0.5"))
    words = (*SMALL, "--preflight")
    run_alone(project, *words, "--optim.ema_decay", "0", "--optim.share", "1")
    for word, named in (
        ("--optim.share=1.5", "from 0 to 1"),
        ("--optim.lr=0", "optim.lr is 0"),
        ("--run.dir=~/x", "HOME"),
    ):
        assert named in run_alone(project, *words, word, code=2).stderr


def test_ctrl_c_without_a_launcher_exits_with_its_own_code(bake: Bake) -> None:
    project = bake()
    command = [BIN / "python", "-m", "my_experiment", *SMALL, "--train.max_steps", "400", "--run.dir", "run"]
    with started(*command, cwd=project, PYTHONPATH="src") as process:
        wait_until(lambda: read_records(project / "run"), "the first step")
        process.send_signal(SIGINT)
        assert process.wait(60) == 130
    assert list(project.glob("run/checkpoints/*.pt"))


PLANTED = """
import os, pickle
import torch.distributed as dist
from my_experiment.distributed import Process

class Planted:
    def __reduce__(self):
        return os.mkdir, ("planted",)

store = dist.HashStore()
store.set("main1/0", pickle.dumps(Planted()))
try:
    Process(store, rank=1, world_size=2).on_main(None)
except ValueError:
    print("refused", os.path.exists("planted"))
"""


def test_a_value_that_others_put_into_the_store_runs_no_code(bake: Bake) -> None:
    assert run_python(bake(), PLANTED) == "refused False\n"


def test_a_record_whose_metric_is_a_text_does_not_end_a_run(bake: Bake) -> None:
    project = bake()
    words = ("--run.dir", "run", "--train.max_steps")
    run_alone(project, *SMALL, *words, "2")
    records = project / "run" / "metrics.jsonl"
    records.write_text(re.sub('"accuracy": [0-9.]+', '"accuracy": "high"', records.read_text()))
    run_alone(project, *SMALL, *words, "4")


def test_more_stop_signals_do_not_end_ranks_before_they_have_saved(bake: Bake) -> None:
    project, run_dir = bake(), "run"
    edit(project, before(WRITE, "__import__('time').sleep(2)"))
    words = [*SMALL, "--train.max_steps", "400", "--run.dir", run_dir]
    with started(project / "scripts" / "launch.sh", *words, cwd=project, NPROC="2") as launcher:
        wait_until(lambda: read_records(project / run_dir), "the first step")
        for _ in range(4):
            launcher.send_signal(SIGTERM)
            time.sleep(0.1)
        out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 143 and "stopped after step" in out, (out, err)
    assert list(project.glob("run/checkpoints/*.pt"))


def test_a_run_needs_no_proc(bake: Bake) -> None:
    script = 'mount -t tmpfs none /proc && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", script, "sh", "scripts/launch.sh", *SMALL, "--run.dir", "run"]
    project = bake()
    assert "step 4/4" in run(*words, cwd=project, NPROC="2").stdout


def test_evaluate_takes_the_split_that_it_is_told(bake: Bake) -> None:
    project = bake()
    run_alone(project, *SMALL, "--run.dir", "run")
    words = ("evaluate", "--checkpoint", "run", "--distributed.device", "cpu", "--split")
    *_, recorded = read_records(project / "run", "eval")
    assert json.loads(run_alone(project, *words, "validation").stdout) == recorded
    assert json.loads(run_alone(project, *words, "test").stdout)["num_samples"] == 360
    assert "train" in run_alone(project, *words, "train", code=2).stderr


PLANT = """
import os, pickle, sys

class Planted:
    def __reduce__(self):
        return os.mkdir, ("planted",)

with open(sys.argv[1], "wb") as index:
    pickle.dump(Planted(), index)
"""


def test_a_planted_index_of_a_sharded_checkpoint_runs_no_code(bake: Bake, tmp_path: Path) -> None:
    project, other = bake("sharding", parallelism="fsdp"), bake("ddp")
    words = [*SMALL, *SHARDED, "--run.dir", "run", "--train.max_steps"]
    launch(project, *words, "4")
    checkpoint = project / "run" / "checkpoints" / "step-00000004.dcp"
    copytree(checkpoint, tmp_path / "good.dcp")
    run_python(project, PLANT, str(checkpoint / ".metadata"))
    named = "posix.mkdir in a checkpoint's index might run code"
    resume = [*SMALL, "--run.dir", "new", "--checkpoint.resume", checkpoint]
    assert named in run_alone(project, *resume, code=2).stderr
    evaluate = ("evaluate", "--checkpoint", checkpoint, "--distributed.device", "cpu")
    assert named in run_alone(project, *evaluate, code=2).stderr
    # What does not read shards does not read the index.
    weights = [*SMALL, "--run.dir", "new", "--model.weights", checkpoint]
    export = ["export", "--checkpoint", checkpoint, "--output", "w.safetensors"]
    for reader, words_of_reader in ((project, weights), (project, export), (other, weights), (other, resume)):
        assert f"{checkpoint} is sharded" in run_alone(reader, *words_of_reader, code=2).stderr
    assert named in run_alone(project, *words, "5", code=2).stderr and checkpoint.exists()  # It is not set aside.
    # PyTorch would take another file for the index if this one is none.
    checkpoint.joinpath("__0.metadata").write_bytes(checkpoint.joinpath(".metadata").read_bytes())
    for content in (pickle.dumps(None), (tmp_path / "good.dcp" / ".metadata").read_bytes()):
        checkpoint.joinpath(".metadata").write_bytes(content)
        run_alone(project, *resume, code=2)
    assert not list(project.rglob("planted")) and not list(other.rglob("planted"))


@pytest.mark.weekly
def test_a_sharded_checkpoint_becomes_a_file_by_the_command_that_is_printed(bake: Bake) -> None:
    project, other = bake("sharding", parallelism="fsdp"), bake("ddp")
    launch(project, *SMALL, *SHARDED, "--run.dir", "run")
    checkpoint = project / "run" / "checkpoints" / "step-00000004.dcp"
    words = [*SMALL, "--run.dir", "new", "--train.max_steps", "1", "--model.weights"]
    command = run_alone(other, *words, checkpoint, code=2).stderr.partition("file of weights: python ")[2]
    run(BIN / "python", *command.split()[:-1], "weights.pt", cwd=other)
    run_alone(other, *words, "weights.pt")
    run_alone(project, *words, other / "weights.pt")
    first, sharded = (load(folder / "new") for folder in (other, project))
    assert first["config"]["model"]["weights"] == "weights.pt"
    assert all(torch.equal(first["model"][name], sharded["model"][name]) for name in first["model"])


@pytest.mark.weekly
def test_what_an_evaluation_draws_depends_on_no_loader_process(bake: Bake) -> None:
    project = bake()
    edit(project, before(MEASURED, "outputs = outputs + torch.randn_like(outputs)"))
    for workers in "012":
        run_alone(project, *SMALL, "--data.num_workers", workers, "--run.dir", f"run{workers}")
    assert len({read_records(project / f"run{workers}", "eval")[-1]["loss"] for workers in "012"}) == 1
