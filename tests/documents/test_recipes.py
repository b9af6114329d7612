"""Each recipe in docs/recipes applies, gives the same on 1 and 2 ranks, resumes, and does what it is for."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from conftest import (
    BIN,
    TEMPLATE,
    Bake,
    blocks,
    commit,
    copy_template,
    edit,
    find_processes,
    launch,
    launch_and_kill,
    read_losses,
    read_records,
    render_copy,
    run,
    run_python,
    run_trainer,
    started,
    wait_until,
)

pytestmark = pytest.mark.independent

PAGES = {path.stem: path for path in sorted((TEMPLATE / "docs" / "recipes").glob("*.md"))}
MAX_ADDED = 125  # Lines of at most 100 characters.
STEPS = 30
SMALL = [
    *f"--train.max_steps {STEPS} --train.epochs 9 --train.log_every 1 --train.eval_every 15".split(),
    *"--checkpoint.every_steps 3 --data.global_batch_size 32 --distributed.device cpu".split(),
]


@pytest.fixture
def edited(bake: Bake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that renders a project, applies a recipe, and runs the page's commands before the training."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))  # Of the packages transformers and datasets.

    def apply(name: str, **answers: str) -> Path:
        project = bake(**answers)
        (project / ".venv").symlink_to(BIN.parent)
        run("bash", "-c", f"patch -p1 --fuzz=0 < {PAGES[name]}", cwd=project)
        (commands,) = blocks(PAGES[name], "bash")
        run("bash", "-ec", re.split(r"^scripts/launch.sh", commands, flags=re.MULTILINE)[0], cwd=project)
        return project

    return apply


def words(name: str) -> list[str]:
    """Return the page's command that trains."""
    command = re.findall(r"^scripts/launch.sh (train.*)", *blocks(PAGES[name], "bash"), re.MULTILINE)[0]
    return shlex.split(command, comments=True)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return what a run ended with."""
    newest = folder / "checkpoints" / f"step-{STEPS:08d}.pt"
    return dict(torch.load(newest, weights_only=True)["model"])


@pytest.mark.parametrize("name", PAGES)
def test_a_recipe_is_a_small_edit_that_applies_and_is_clean(edited: Callable[..., Path], name: str) -> None:
    project = edited(name)
    for diff in blocks(PAGES[name], "diff"):
        assert 0 < len(re.findall(r"^\+(?!\+\+ )", diff, re.MULTILINE)) <= MAX_ADDED
    assert not list(project.rglob("*.orig"))  # The line numbers are right.
    run(BIN / "ruff", "check", ".", cwd=project)
    run(BIN / "ruff", "format", "--check", ".", cwd=project)


@pytest.mark.long
def test_make_recipes_moves_the_patches_to_a_changed_source(tmp_path: Path) -> None:
    template = copy_template(tmp_path / "template")
    commit(template)
    source = template / "{{cookiecutter.project_slug}}" / "src" / "{{cookiecutter.__package}}" / "train.py"
    source.write_text(f"# A new line.\n{source.read_text()}")
    run(BIN / "python", "tests/documents/patches.py", cwd=template, PYTHONPATH=".:tests")
    project = render_copy(template, tmp_path / "out")
    for page in (template / "docs" / "recipes").glob("*.md"):
        assert "offset" not in run("patch", "-p1", "--fuzz=0", "--dry-run", f"--input={page}", cwd=project).stdout


@pytest.mark.weekly
@pytest.mark.parametrize("name", PAGES)
def test_a_recipe_ends_as_its_page_shows(edited: Callable[..., Path], name: str) -> None:
    project = edited(name)
    (commands,), (shown,) = blocks(PAGES[name], "bash"), blocks(PAGES[name], "text")
    training = re.findall(r"^scripts/launch.sh.*", commands, re.MULTILINE | re.DOTALL)[0]
    printed = run("bash", "-ec", training, cwd=project).stdout.splitlines()
    for line in re.findall(r"^(?:eval|best).*", shown, re.MULTILINE):
        found = next(each for each in reversed(printed) if each.split()[:2] == line.split()[:2])
        print(found)
        # Which settings a search draws next depends on the last digits of the losses before.
        start = -1 if name == "sweep" else 0
        for ours, theirs in zip(found.split()[start:], line.split()[start:], strict=True):
            if not re.fullmatch(r"[\d.e-]*\d", theirs):
                assert ours == theirs
            else:  # Between machines, kernels round differently, and training amplifies that.
                assert float(ours) == pytest.approx(float(theirs), rel=0.5, abs=0.03)


@pytest.mark.weekly
@pytest.mark.parametrize("name", [name for name in PAGES if name != "sweep"])  # Which edits nothing of the training.
def test_a_recipe_does_not_depend_on_the_ranks_and_resumes(
    edited: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    project = edited(name)
    command = [*words(name), *SMALL]
    for nproc in (1, 2):
        launch(project, *command, "--run.dir", tmp_path / str(nproc), nproc=nproc)
    assert_close(tmp_path / "1", tmp_path / "2")
    killed = tmp_path / "killed"
    launch_and_kill(project, *command, "--run.dir", killed, when=lambda: len(read_losses(killed)) > 6)
    assert 6 < len(read_losses(killed)) < STEPS
    launch(project, *command, "--run.dir", killed)
    assert read_losses(killed) == read_losses(tmp_path / "2")
    ours, theirs = weights(killed), weights(tmp_path / "2")
    assert all(torch.equal(value, theirs[key]) for key, value in ours.items())
    run(BIN / "mypy", cwd=project)
    run(BIN / "pytest", "-q", "tests/test_experiment.py", cwd=project)


def assert_close(one: Path, two: Path) -> None:
    """Assert that two runs agree to rounding: what they logged, and their weights."""
    for ours, theirs in zip(read_records(one), read_records(two), strict=True):
        for key, value in ours.items():
            if isinstance(value, float) and not key.endswith(("_per_second", "_per_step", "_share")):
                tolerance = 1e-4 if key == "grad_norm" else 1e-5
                assert theirs[key] == pytest.approx(value, rel=tolerance), (key, ours, theirs)
    ours, theirs = weights(one), weights(two)
    worst = max(float((ours[key] - value).norm() / (value.norm() + 1e-9)) for key, value in theirs.items())
    losses = max(abs(a / b - 1) for a, b in zip(read_losses(one), read_losses(two), strict=True))
    print(f"largest relative difference between 1 and 2 ranks: {losses:.1e} of a loss, {worst:.1e} of weights")
    assert worst <= 1e-4  # A small tensor that started at zero changes most.


@pytest.mark.weekly
def test_records_have_every_sample_once_and_the_changes_of_the_code(edited: Callable[..., Path]) -> None:
    project = edited("records")
    commit(project)
    edit(project, {("task.py", 'reduction="sum")}'): 'reduction="sum") * 0.5}'})
    launch(project, *words("records"), *SMALL, "--run.dir", "run")
    *_, last = read_records(project / "run", "eval")
    confusion = last["confusion"]
    assert sum(map(sum, confusion)) == last["num_samples"]
    assert sum(row[label] for label, row in enumerate(confusion)) == round(last["accuracy"] * last["num_samples"])
    *_, trained = read_records(project / "run", "train")
    assert trained["lr_of_groups"] == [trained["lr"]] * 2
    assert '+        return {"loss"' in (project / "run" / "changes.diff").read_text()


COMPARE_IMAGES = """
import numpy as np, torch
from my_experiment.config import Config, DatasetConfig
from my_experiment.dataset import build_datasets
train_set, _, test_set = build_datasets(Config(dataset=DatasetConfig(min_crop=0.5)))
with np.load("src/my_experiment/digits.npz") as arrays:
    images, labels = arrays["test_images"], arrays["test_labels"]
assert len(test_set) == len(images)
for (image, label), file in zip((test_set[i] for i in range(len(test_set))), test_set.files):
    pixels = torch.from_numpy(images[int(file.stem)] * 15) / 255
    assert label == labels[int(file.stem)] and torch.equal(image, pixels.expand(3, 8, 8))
assert not torch.equal(train_set[0][0], train_set[0][0])  # Another crop.
"""


@pytest.mark.weekly
def test_images_are_the_pixels_of_their_files_and_other_names_are_refused(
    edited: Callable[..., Path], tmp_path: Path
) -> None:
    project = edited("images")
    run_python(project, COMPARE_IMAGES)
    command = (*words("images"), *SMALL, "--run.dir", tmp_path / "run")
    launch(project, *command, "--train.max_steps", "3")
    (project / "data").rename(project / "moved")
    moved = (*command, "--dataset.path", "moved/images")
    assert "step 3 of 6" in launch(project, *moved, "--train.max_steps", "6").stdout
    image = next(project.glob("moved/images/train/0/*.png"))
    image.rename(image.with_stem("renamed"))
    assert "content of dataset.path is" in launch(project, *moved, code=2).stderr
    (project / "moved" / "images" / "test" / "7").rename(project / "seven")
    error = "error: dataset.path is moved/images; give one with the same 10 classes in train and test\n"
    assert launch(project, *moved, code=2).stderr == error


@pytest.mark.weekly
def test_muon_takes_orthogonal_steps_that_are_equal_under_ddp_and_fsdp(
    edited: Callable[..., Path], tmp_path: Path
) -> None:
    losses = []
    for parallelism in ("ddp", "fsdp"):
        project = edited("muon", folder=parallelism, parallelism=parallelism)
        for nproc in (1, 2, 4):
            folder = tmp_path / f"{parallelism}{nproc}"
            every_step = "--optim.weight_decay 0 --checkpoint.every_steps 1".split()
            launch(project, *words("muon"), *SMALL, *every_step, "--run.dir", folder, nproc=nproc)
            losses.append(torch.tensor(read_losses(folder), dtype=torch.float64))
        before = torch.load(folder / "checkpoints" / f"step-{STEPS - 1:08d}.pt", weights_only=True)["model"]
        lr = read_records(folder, "train")[-1]["lr"]
        for name, after in weights(folder).items():
            if after.dim() > 1:
                update = ((after - before[name]) / lr).flatten(1)
                values = torch.linalg.svdvals(update / (0.2 * max(update.shape) ** 0.5))
                is_orthogonal = bool(values.median() > 0.6 and values.max() < 1.25)  # Those near zero stay small.
                assert is_orthogonal != name.startswith(("stem", "head")), (name, values)
    worst = max(float((each / losses[0] - 1).abs().max()) for each in losses)
    print(f"largest relative difference of a loss under ddp and fsdp on 1, 2 and 4 ranks: {worst:.1e}")
    assert worst <= 1e-5


@pytest.mark.weekly
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_evaluation_uses_the_averages(
    edited: Callable[..., Path], bake: Bake, tmp_path: Path, parallelism: str
) -> None:
    project, newest = edited("ema", parallelism=parallelism), tmp_path / "checkpoints" / f"step-{STEPS:08d}.pt"
    edit(project, {("dataset.py", 'Subset(Digits("train"), order[:VALIDATION])'): 'Digits("test")'})  # As evaluate's.
    launch(project, *words("ema"), *SMALL, "--run.dir", tmp_path)
    losses = [read_records(tmp_path, "eval")[-1]["loss"]]
    for each in (project, bake("plain", parallelism=parallelism)):
        out = launch(each, "evaluate", "--checkpoint", newest, "--distributed.device", "cpu").stdout
        losses.append(json.loads(out.splitlines()[-1])["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and losses[0] > 1.01 * losses[2], losses


DRAWN = """
import sys
from my_experiment.__main__ import parse
from my_experiment.distributed import cleanup, rendezvous, setup
from my_experiment.experiment import build_experiment
_, config, _ = parse(["train", "--distributed.device", "cpu"])
setup(config, process := rendezvous(config))
for loads in (True, False):
    _, parallel, _ = build_experiment(config, process, loads)
    print(sum(p.isnan().all().item() for p in parallel.module.parameters()))
cleanup(process)
"""


@pytest.mark.weekly
@pytest.mark.parametrize("task", ["digits", "language"])
@pytest.mark.parametrize("parallelism", ["ddp", "mesh"])
def test_weights_that_are_loaded_next_are_not_drawn(
    edited: Callable[..., Path], tmp_path: Path, parallelism: str, task: str
) -> None:
    project = edited("large", parallelism=parallelism, task=task)
    skipped, drawn = run_python(project, DRAWN).split()
    assert int(skipped) > 4 and int(drawn) == 0
    command = [*words("large"), *SMALL, "--run.dir", tmp_path]
    for steps in ("15", "30"):
        launch(project, *command, "--train.max_steps", steps)


@pytest.mark.weekly
def test_what_is_computed_from_weights_that_are_not_drawn_ends_the_run(
    edited: Callable[..., Path], tmp_path: Path
) -> None:
    project, command = edited("large"), [*words("large"), *SMALL, "--run.dir", tmp_path]
    weight = ("model.py", "        self.linear = nn.Linear(width, CLASSES)\n")
    initial = "        self.register_buffer('initial', self.linear.weight.detach().clone(), persistent=False)\n"
    forward = ("model.py", "return self.linear(features.mean(dim=(2, 3)))")
    edit(project, {weight: weight[1] + initial, forward: forward[1] + " + 0 * self.initial.sum()"})
    launch(project, *command, "--train.max_steps", "15")
    assert "has {'loss': nan" in launch(project, *command, code=2).stderr


@pytest.mark.weekly
def test_a_student_learns_from_the_frozen_teacher_of_the_file(edited: Callable[..., Path], tmp_path: Path) -> None:
    project = edited("distillation")
    script = """
        calls = []
        task, student = trainer.task, trainer.parallel.module
        task.teacher.register_forward_hook(lambda *_: calls.append(1))
        trainer.run()
        assert len(calls) == 4 * 2 + 1, calls  # Steps, each of two micro-batches, and a batch of evaluation.
        file = torch.load(config.teacher.checkpoint, weights_only=True)["model"]
        assert file["head.linear.weight"].shape == (10, 64) and student.head.linear.weight.shape == (10, 32)
        assert all(torch.equal(value, file[name]) for name, value in task.teacher.state_dict().items())
        assert not any(p.requires_grad or p.grad is not None for p in task.teacher.parameters())
        images, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 10
        inputs, targets = task.prepare(images, labels)
        p, q = (torch.softmax(model(images).double() / 4, 1) for model in (task.teacher, student))
        hard = -student(images).double().log_softmax(1)[range(20), labels].sum()
        expected = 0.1 * hard + 0.9 * 16 * (p * (p / q).log()).sum()
        loss = task.losses(student(inputs), targets)["loss"].double()
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    """
    command = [*words("distillation"), *SMALL, "--train.max_steps", "4", "--data.micro_batch_size", "16"]
    assert "eval   step 4/4" in run_trainer(project, script, *command, "--run.dir", tmp_path)
    assert not [name for name in torch.load(tmp_path / "checkpoints/step-00000004.pt")["model"] if "teacher" in name]


EVALUATE_TABLE = """
import sys
import numpy as np, torch
from my_experiment.config import ModelConfig
from my_experiment.model import build_model
rows = np.loadtxt("data/table.csv", delimiter=",", skiprows=1)
train = np.array([row for number, row in enumerate(rows) if number % 5 < 3])
features, targets = rows[3::5, :-1], rows[3::5, -1]
model = build_model(ModelConfig(width=64, depth=3))
model.load_state_dict(torch.load(sys.argv[1], weights_only=True)["model"])
inputs = torch.tensor((features - train.mean(axis=0)[:-1]) / train.std(axis=0)[:-1], dtype=torch.float32)
predictions = model(inputs).detach().double().numpy()[:, 0] * train.std(axis=0)[-1] + train.mean(axis=0)[-1]
print(1 - np.mean((targets - predictions) ** 2) / targets.var())
"""


@pytest.mark.weekly
def test_a_table_is_standardized_by_its_training_rows_and_r2_is_exact(
    edited: Callable[..., Path], tmp_path: Path
) -> None:
    project = edited("table")
    command = (*words("table"), *SMALL, "--data.eval_batch_size", "17")
    launch(project, *command, "--run.dir", tmp_path / "one", nproc=1)
    newest = tmp_path / "one" / "checkpoints" / f"step-{STEPS:08d}.pt"
    r2 = float(run_python(project, EVALUATE_TABLE, newest))
    assert read_records(tmp_path / "one", "eval")[-1]["r2"] == pytest.approx(r2, rel=1e-5)
    header, *rows = (project / "data" / "table.csv").read_text().splitlines()
    rows[3::5] = [",".join(["100"] * 11)] * len(rows[3::5])
    (project / "data" / "table.csv").write_text("\n".join([header, *rows]))
    launch(project, *command, "--run.dir", tmp_path / "other", nproc=1)
    assert read_losses(tmp_path / "other") == read_losses(tmp_path / "one")
    ours, theirs = read_records(tmp_path / "one", "eval"), read_records(tmp_path / "other", "eval")
    assert ours[-1]["loss"] != theirs[-1]["loss"]


TAKE_A_POISONED_STEP = """
import copy
states = []
trainer.start_period()
(images, labels), *_ = next(trainer.batches())
for factor in (1, torch.nan, 1):
    trainer.train_step([(images * factor, labels)])
    whole = trainer.parallel.full_state_dict(trainer.optimizer)
    states.append(copy.deepcopy([whole["model"], *whole["optimizer"]["state"].values()]))
def equal(ours, theirs):
    return [torch.equal(a[key], b[key]) for a, b in zip(ours, theirs, strict=True) for key in a]
assert all(equal(states[0], states[1])) and not any(equal(states[1], states[2]))
"""


@pytest.mark.weekly
def test_a_step_with_a_poisoned_sample_is_skipped_on_all_ranks_and_changes_nothing(
    edited: Callable[..., Path], tmp_path: Path
) -> None:
    project = edited("skip")
    run_trainer(project, TAKE_A_POISONED_STEP, "train", "--run.dir", "runs/poisoned", "--distributed.device", "cpu")
    dataset, end = project / "src" / "my_experiment" / "dataset.py", "        self.max_shift = max_shift\n"
    poisoned = end + '        if split == "train":\n            self.images[{}] = torch.nan\n'
    clean = dataset.read_text()
    dataset.write_text(clean.replace(end, poisoned.format(1102)))  # Read in step 11.
    command = [*words("skip"), *SMALL, "--train.log_every", "3"]
    for nproc in (1, 2):
        launch(project, *command, "--run.dir", tmp_path / str(nproc), nproc=nproc)
    one, two = ([r for r in read_records(tmp_path / n) if "loss" in r] for n in "12")
    assert [r["loss"] for r in one] == pytest.approx([r["loss"] for r in two], rel=1e-5)
    skipped = [[r.get("skipped_steps", 0) for r in records] for records in (one, two)]
    assert skipped[0] == skipped[1] and sum(skipped[0]) == 1
    for key, value in weights(tmp_path / "2").items():
        assert value.isfinite().all() and (weights(tmp_path / "1")[key] - value).norm() <= 1e-4 * value.norm()
    dataset.write_text(clean.replace(end, poisoned.format(slice(None))))
    error = launch(project, *command, "--run.dir", tmp_path / "all", code=2).stderr
    assert error.startswith("error: no step from 1 to 3 has a finite loss and gradient; ")


PAD_TEXT = """
import torch
from my_experiment.config import Config
from my_experiment.dataset import build_datasets, collate_fn
from my_experiment.model import build_model
*_, test_set = build_datasets(Config())
lines = open("data/lines.tsv").read().splitlines()[4::5]
for (tokens, label), line in zip((test_set[i] for i in range(len(test_set))), lines, strict=True):
    assert f"{label}\\t{bytes(tokens[1:].tolist()).decode()}" == line[:97]
torch.manual_seed(0)
model = build_model(Config().model).double()
short, long = sorted((test_set[i] for i in range(50)), key=lambda sample: len(sample[0]))[:: 49]
alone, (padded, labels) = collate_fn([short])[0], collate_fn([short, long])
assert padded["input_ids"].shape[1] == len(long[0]) > alone["input_ids"].shape[1]
change = (model(padded)[0] - model(alone)[0]).norm() / model(alone)[0].norm()
padded["attention_mask"] = torch.ones_like(padded["attention_mask"])
without_mask = (model(padded)[0] - model(alone)[0]).norm() / model(alone)[0].norm()
assert change < 1e-12 and without_mask > 1e-4, (change, without_mask)
"""


@pytest.mark.weekly
def test_text_is_padded_and_without_the_mask_the_losses_depend_on_the_ranks(
    edited: Callable[..., Path], tmp_path: Path
) -> None:
    project = edited("text")
    run_python(project, PAD_TEXT)
    dataset, mask = project / "src" / "my_experiment" / "dataset.py", "(input_ids != PAD).long()"
    assert mask in dataset.read_text()
    dataset.write_text(dataset.read_text().replace(mask, "torch.ones_like(input_ids)"))
    for nproc in (1, 2):
        launch(project, *words("text"), *SMALL, "--run.dir", tmp_path / str(nproc), nproc=nproc)
    one, two = read_losses(tmp_path / "1"), read_losses(tmp_path / "2")
    assert max(abs(a / b - 1) for a, b in zip(one, two, strict=True)) > 1e-3


WHAT_A_LOSS_TRAINS = """
import torch
from torch.utils.data import default_collate
from my_experiment.config import Config
from my_experiment.dataset import build_datasets
from my_experiment.model import build_model
from my_experiment.task import Task
config = Config()
model, task = build_model(config.model), Task(config, torch.device("cpu"))
inputs, targets = default_collate([build_datasets(config)[0][i] for i in range(8)])
gradients = {}
for name in ("generator_loss", "discriminator_loss", "loss"):
    model.zero_grad()
    outputs = model(inputs)
    assert torch.equal(outputs["fooled"], outputs["fake_logits"])
    task.losses(outputs, targets)[name].backward()
    gradients[name] = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
for network in ("generator", "discriminator"):
    own = gradients[f"{network}_loss"]
    assert own.keys() == {f"{network}.{key}" for key, _ in getattr(model, network).named_parameters()}
    assert all(value.any() and torch.allclose(value, gradients["loss"][key], rtol=1e-5) for key, value in own.items())
"""


@pytest.mark.weekly
def test_each_network_of_a_gan_gets_the_gradient_of_its_own_loss_alone(edited: Callable[..., Path]) -> None:
    run_python(edited("gan"), WHAT_A_LOSS_TRAINS)


@pytest.mark.weekly
def test_a_killed_sweep_resumes_its_trial_and_its_values_do_not_depend_on_the_ranks(
    edited: Callable[..., Path],
) -> None:
    command = (BIN / "python", "scripts/sweep.py", "3", *SMALL)
    projects = [edited("sweep", folder=f"on{nproc}") for nproc in (1, 2)]
    runs = projects[1] / "runs" / "sweep"
    with started(*command, cwd=projects[1], NPROC="2", MARK=str(runs)) as sweep:
        wait_until(lambda: len(read_losses(runs / "1")) > 6 or sweep.poll() is not None, "step 7 of the second trial")
        sweep.kill()
        wait_until(lambda: not find_processes(f"MARK={runs}"), "the ranks have ended")
    assert [trial.state.name for trial in read_trials(projects[1])] == ["COMPLETE", "RUNNING"]
    assert len(read_losses(runs / "1")) < STEPS
    for nproc, project in enumerate(projects, start=1):
        run(*command, cwd=project, NPROC=str(nproc))
    starts = [json.loads((runs / str(number) / "provenance.json").read_text()) for number in range(3)]
    assert [len(start["earlier"]) for start in starts] == [0, 1, 0] and starts[1]["step"] > 0 == starts[2]["step"]
    assert sorted(folder.name for folder in runs.glob("[0-9]*")) == ["0", "1", "2"]
    for one, two in zip(*map(read_trials, projects), strict=True):
        assert one.state.name == two.state.name == "COMPLETE" and one.params == two.params
        assert one.value == pytest.approx(two.value, rel=1e-5)
        assert two.value == read_records(runs / str(two.number))[-1]["loss"]
    assert len({trial.params["optim.lr"] for trial in read_trials(projects[0])}) == 3


def read_trials(project: Path) -> list[optuna.trial.FrozenTrial]:
    """Return the trials of the search in a project."""
    return optuna.load_study(study_name="sweep", storage=f"sqlite:///{project}/runs/sweep/study.db").trials


FIND_DIGITS = """
import sys, torch
from my_experiment.config import Config, ModelConfig
from my_experiment.dataset import build_datasets
from my_experiment.distributed import seed_everything
from my_experiment.model import build_model
model = build_model(ModelConfig(width=32, depth=3))
model.load_state_dict(torch.load(sys.argv[1], weights_only=True)["model"])
seed_everything(0)
_, validation, _ = build_datasets(Config())
def overlap(a, b):
    width, height = (max(0, min(a[i + 2], b[i + 2]) - max(a[i], b[i])) for i in (0, 1))
    return width * height / (sum((c[2] - c[0]) * (c[3] - c[1]) for c in (a, b)) - width * height)
detections, boxes = {label: [] for label in range(10)}, {label: [] for label in range(10)}
for index in range(len(validation)):
    image, objects = validation[index]
    for *box, label in objects.tolist():
        boxes[label].append((index, box))
    for cell in model(image[None])[0].detach():
        scores = cell[4].sigmoid() * cell[5:].softmax(0)
        detections[int(scores.argmax())].append((float(scores.max()), index, (4 * cell[:4]).tolist()))
areas = []
for label, each in boxes.items():
    found, precisions = set(), []
    for number, (_, index, box) in enumerate(sorted(detections[label], reverse=True), start=1):
        overlaps = [(overlap(box, other), i) for i, (image, other) in enumerate(each) if image == index]
        best, i = max(overlaps, default=(0, None))
        if best >= 0.5 and i not in found:
            found.add(i)
            precisions.append(len(found) / number)
    areas.append(sum(max(precisions[i:]) for i in range(len(precisions))) / len(each))
print(sum(areas) / 10)
"""


@pytest.mark.weekly
def test_detection_has_the_average_precision_of_images_that_are_searched_alone(
    edited: Callable[..., Path], tmp_path: Path
) -> None:
    project = edited("detection")
    longer = "--data.eval_batch_size 17 --train.max_steps 150 --train.eval_every 150".split()
    launch(project, *words("detection"), *SMALL, *longer, "--run.dir", tmp_path / "run")
    ap50 = float(run_python(project, FIND_DIGITS, tmp_path / "run" / "checkpoints" / "step-00000150.pt"))
    (record,) = read_records(tmp_path / "run", "eval")
    assert record["ap50"] == pytest.approx(ap50, rel=1e-5)
    assert 0.2 < ap50 < 1


@pytest.mark.weekly
def test_images_ranks_and_steps_without_boxes_count_nothing_and_a_mean_of_each_rank_would_depend_on_the_ranks(
    edited: Callable[..., Path], tmp_path: Path
) -> None:
    project = edited("detection")
    file = project / "src" / "my_experiment" / "task.py"
    clean, measured = file.read_text(), dict[str, float]()
    a_mean = clean.replace("return (labels >= 0).sum()", "return len(labels)")
    losses = "object_loss + class_loss + box_loss"
    a_mean = a_mean.replace(f"{losses},", f"({losses}) / mask.sum().clamp(min=1),")
    small = "--data.global_batch_size 2 --train.max_steps 60 --train.eval_every 60 --checkpoint.every_steps 60".split()
    for name, text in {"sum": clean, "mean": a_mean}.items():
        file.write_text(text)
        for nproc in (1, 2):
            launch(project, *words("detection"), *SMALL, *small, "--run.dir", tmp_path / f"{name}{nproc}", nproc=nproc)
        one, two = (read_losses(tmp_path / f"{name}{nproc}") for nproc in (1, 2))
        assert 0 in one and [a == 0 for a in one] == [b == 0 for b in two]
        measured[name] = max(abs(b / a - 1) for a, b in zip(one, two, strict=True) if a)
        print(f"{name}: losses of 1 and 2 ranks differ by up to {measured[name]:.1e}")
    assert measured["sum"] <= 1e-5 and measured["mean"] > 0.1


READ_LINES = """
import random, sys
from functools import cache
from itertools import groupby
import numpy as np, torch
from torch.nn import functional as F
from my_experiment.config import ModelConfig
from my_experiment.model import build_model
model = build_model(ModelConfig(width=64))
model.load_state_dict(torch.load(sys.argv[1], weights_only=True)["model"])
@cache
def distance(a, b):
    if not a or not b:
        return len(a + b)
    return min(distance(a[1:], b) + 1, distance(a, b[1:]) + 1, distance(a[1:], b[1:]) + (a[0] != b[0]))
with np.load("src/my_experiment/digits.npz") as arrays:
    all_images, all_labels = arrays["train_images"][:237], arrays["train_labels"][:237]
loss = errors = labels = 0
for index in range(237):
    generator = random.Random(index)
    chosen = [generator.randrange(237) for _ in range(generator.randint(1, 5))]
    frames = torch.tensor(np.hstack(all_images[chosen]).T / 16, dtype=torch.float32)
    target = [digit + 1 for digit in all_labels[chosen].tolist()]
    outputs = model.head(model.gru(frames)[0]).detach()
    loss += F.ctc_loss(outputs.log_softmax(1), torch.tensor(target), (len(frames),), (len(target),), reduction="sum")
    path = [label for label, _ in groupby(outputs.argmax(dim=1).tolist()) if label]
    errors, labels = errors + distance(tuple(path), tuple(target)), labels + len(target)
print(float(loss) / labels, errors / labels)
"""


@pytest.mark.weekly
def test_speech_has_the_loss_and_the_error_rate_of_lines_that_are_read_alone(
    edited: Callable[..., Path], tmp_path: Path
) -> None:
    project = edited("speech")
    longer = "--data.eval_batch_size 17 --train.max_steps 200 --train.eval_every 200".split()
    launch(project, *words("speech"), *SMALL, *longer, "--run.dir", tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step-00000200.pt"
    loss, error_rate = map(float, run_python(project, READ_LINES, newest).split())
    (record,) = read_records(tmp_path / "run", "eval")
    assert [record["loss"], record["error_rate"]] == pytest.approx([loss, error_rate], rel=1e-5)
    assert 0 < error_rate < 0.9  # Not of blanks alone.


@pytest.mark.weekly
def test_adapters_alone_are_trained_and_merge_into_the_model_without_them(
    edited: Callable[..., Path], bake: Bake, tmp_path: Path
) -> None:
    project, original = edited("lora"), bake("original")
    script = """
        from my_experiment.dataset import build_datasets
        model = trainer.parallel.module
        before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        trainer.run()
        now, file = model.state_dict(), torch.load(config.model.weights, weights_only=True)["model"]
        assert now.keys() == {*file, *before} and len(before) == 2 * sum(value.dim() > 1 for value in file.values())
        assert all(torch.equal(now[name], value) for name, value in file.items())
        assert not any(torch.equal(now[name], value) for name, value in before.items())
        images = torch.stack([image for image, _ in build_datasets(config)[2]])
        torch.save(model.eval()(images).detach(), f"{config.run.dir}/outputs.pt")
    """
    command = (*words("lora"), *SMALL, "--run.dir", tmp_path)
    run_trainer(project, script, *command)
    newest, (base,) = tmp_path / "checkpoints" / f"step-{STEPS:08d}.pt", project.glob("runs/base/checkpoints/*.pt")
    assert all(".adapter." in name for name in weights(tmp_path))
    assert newest.stat().st_size < base.stat().st_size / 10
    launch(project, "export", "--checkpoint", newest, "--output", tmp_path / "merged.safetensors")
    script = """if True:
        import sys, torch
        from safetensors.torch import load_file
        from my_experiment.config import Config
        from my_experiment.dataset import build_datasets
        from my_experiment.model import build_model
        config, outputs = Config(), torch.load(sys.argv[1] + "/outputs.pt")
        config.model.width, config.model.depth = 32, 3
        model, images = build_model(config.model), torch.stack([image for image, _ in build_datasets(config)[2]])
        model.load_state_dict(load_file(sys.argv[1] + "/merged.safetensors"))
        with torch.no_grad():
            difference = (model(images) - outputs).norm() / outputs.norm()
        print(f"{difference:.1e}")
    """
    difference = run_python(original, script, tmp_path)
    print(f"difference of the outputs after the merge: {difference}")
    assert float(difference) < 1e-5
    base.rename(base.with_stem("moved"))
    error = launch(project, "export", "--checkpoint", newest, "--output", tmp_path / "other.safetensors", code=2).stderr
    assert "is not the file that the adapters were trained on" in error


@pytest.mark.weekly
def test_a_stream_gives_each_rank_its_samples_in_their_order(edited: Callable[..., Path], tmp_path: Path) -> None:
    project = edited("stream")
    command = ["train", *SMALL, "--dataset.max_shift", "1", "--train.max_steps", "50"]  # 37 steps are an epoch.
    for workers in ("0", "2"):
        launch(project, *command, "--data.num_workers", workers, "--run.dir", tmp_path / workers)
    assert read_losses(tmp_path / "0") == read_losses(tmp_path / "2")
    run(BIN / "pytest", "-q", "tests/test_split.py", cwd=project)  # It has 2 loader processes on 2 ranks.


@pytest.mark.weekly
def test_a_contrastive_loss_of_local_batches_would_depend_on_the_ranks(
    edited: Callable[..., Path], tmp_path: Path
) -> None:
    project = edited("contrastive")
    file = project / "src" / "my_experiment" / "task.py"
    variants = {"as it is": ("", ""), "local batches": ("if dist.is_initialized():", "if TEMPERATURE < 0:")}
    variants["gradients of one rank"] = ("        dist.all_reduce(gradient)\n", "")
    text, measured = file.read_text(), dict[str, list[float]]()
    for name, change in variants.items():
        file.write_text(text.replace(*change))
        runs = [tmp_path / f"{name} on {nproc}" for nproc in (1, 2)]
        for nproc, folder in enumerate(runs, start=1):
            launch(project, *words("contrastive"), *SMALL, "--run.dir", folder, nproc=nproc)
        measured[name] = [abs(b / a - 1) for a, b in zip(*map(read_losses, runs), strict=True)]
        print(f"{name}: difference of the loss between 1 and 2 ranks is up to {max(measured[name]):.1e}")
    assert max(measured["as it is"]) <= 1e-5
    assert min(measured["local batches"]) > 0.1
    assert measured["gradients of one rank"][0] < 1e-6 and max(measured["gradients of one rank"]) > 1e-3


READ_ALONE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, split = sys.argv[1:]
model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
loss = count = 0
for line in open(f"data/text/{split}.jsonl"):
    tokens = tokenizer(json.loads(line)["text"], truncation=True, max_length=128, return_tensors="pt").input_ids
    loss += float(model(tokens, labels=tokens).loss) * (tokens.shape[1] - 1)  # It shifts the labels itself.
    count += tokens.shape[1] - 1
print(loss / count)
"""


@pytest.mark.weekly
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_a_run_begins_at_the_loss_of_its_folder_and_exports_one_with_the_loss_of_evaluate(
    edited: Callable[..., Path], tmp_path: Path, parallelism: str
) -> None:
    project = edited("hub", parallelism=parallelism)

    def read_alone(folder: Path | str, split: str) -> Any:
        return pytest.approx(float(run_python(project, READ_ALONE, folder, split)), rel=1e-5)

    command, still = (*words("hub"), *SMALL), ("--optim.lr", "1e-12", "--train.max_steps", "1")
    launch(project, *command, *still, "--run.dir", tmp_path / "first")
    assert read_records(tmp_path / "first", "eval")[-1]["loss"] == read_alone("data/model", "validation")
    launch(project, *command, "--run.dir", tmp_path / "run")
    newest, exported = tmp_path / "run" / "checkpoints" / f"step-{STEPS:08d}.pt", tmp_path / "new" / "exported"
    launch(project, "export", "--checkpoint", newest, "--output", exported)
    out = launch(project, "evaluate", "--checkpoint", newest, "--distributed.device", "cpu").stdout
    assert json.loads(out.splitlines()[-1])["loss"] == read_alone(exported, "test")
    launch(project, *command, *still, "--run.dir", tmp_path / "second", "--model.folder", exported)
    losses = [read_records(tmp_path / name, "eval")[-1]["loss"] for name in ("first", "run", "second")]
    assert losses[2] == pytest.approx(losses[1], rel=1e-6) and losses[1] < 0.95 * losses[0]
    (project / "data" / "model").rename(project / "moved")
    more = (*command, "--train.max_steps", str(STEPS + 3), "--run.dir", tmp_path / "run")
    assert f"step {STEPS} of {STEPS + 3}" in launch(project, *more, "--model.folder", "moved").stdout
    error = launch(project, *more, "--train.max_steps", "40", "--model.folder", exported, code=2).stderr
    assert "error: content of model.folder is" in error
    error = launch(project, "export", "--checkpoint", newest, "--output", tmp_path / "other", code=2).stderr
    assert "was trained from the folder 'data/model', which is not there" in error
