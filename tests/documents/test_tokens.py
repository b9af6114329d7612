"""docs/tokens.md: a run reads what prepare.py writes, and the figures are those of `rehearse`."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import BIN, TEMPLATE, Bake, blocks, launch, run, run_python
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

PAGE = TEMPLATE / "docs" / "tokens.md"
SMALL = "--distributed.device cpu --train.max_steps 2 --model.context 8 --dataset.test_bytes 500".split()
READ_WINDOWS = """
import math, torch
from my_experiment.__main__ import parse
from my_experiment.dataset import build_datasets
from my_experiment.task import Task
config = parse(["train", "--dataset.path", "data/all.bin", "--dataset.test_bytes", "999"])[1]
for part in build_datasets(config):
    samples = [part[i] for i in range(len(part))]
    print([[tensor.tolist() for tensor in sample] for sample in samples])
    task, targets = Task(config, torch.device("cpu")), torch.stack([sample[1] for sample in samples])
    outputs = torch.zeros(*targets.shape, 256)  # All bytes are equally likely.
    metrics = task.aggregate({name: values.numpy() for name, values in task.metrics(outputs, targets).items()})
    for loss in (task.losses(outputs, targets)["loss"] / task.weight(targets), metrics["loss"]):
        assert math.isclose(loss, math.log(256), rel_tol=1e-5), loss
"""


def prepare(project: Path, *words: str, code: int = 0) -> str:
    """Run a project's prepare.py; returns its last line."""
    result = run(BIN / "python", "scripts/prepare.py", *words, cwd=project, code=code)
    return (result.stdout + result.stderr).splitlines()[-1]


def test_windows_are_those_of_a_mixture_of_documents(bake: Bake) -> None:
    project = bake(task="language")
    for name in ("once", "half", "twice"):
        (project / name).write_text("".join(f"{name} é {number}\n" for number in range(200)))
    out = prepare(project, "data/all.bin", "once", "--mix", "0.5", "half", "--mix", "2", "twice", "--lines")
    tokens = np.fromfile(project / "data/all.bin", np.uint16)
    assert out == f"data/all.bin: {len(tokens):,} tokens of a vocabulary of 256"
    documents = bytes(tokens.tolist()).decode().split("\0")[:-1]
    counts = Counter(Counter(documents).values())
    assert counts == {1: 200 + 100, 2: 200} and Counter(text.split()[0] for text in documents)["half"] == 100
    assert {text.split()[0] for text in documents[-10:]} == {"once", "half", "twice"}
    splits = run_python(project, READ_WINDOWS).splitlines()
    for part, text in zip((tokens[:-1998], tokens[-1998:-999], tokens[-999:]), splits, strict=True):
        windows = json.loads(text)
        assert len(windows) == (len(part) - 1) // 64
        for number, (inputs, targets) in enumerate(windows):
            window = part[64 * number : 64 * number + 65].tolist()
            assert inputs == window[:-1]
            pairs = pairwise(window)
            assert targets == [-100 if before == 0 else after for before, after in pairs]


def test_a_mistake_is_one_line(bake: Bake) -> None:
    project = bake(task="language")
    assert prepare(project, "a.bin", "README.md", "none.txt", code=2).endswith("error: none.txt is no file")
    assert prepare(project, "a.txt", "README.md", code=2).endswith("give a name that ends in .bin")
    for words in (["README.md", "README.md"], ["0", "README.md"], ["inf", "README.md"]):
        assert "--mix takes a weight" in prepare(project, "a.bin", "README.md", "--mix", *words, code=2)
    assert not list(project.glob("a.*"))
    (project / "b.bin").write_bytes(bytes(10))
    err = launch(project, "train", *SMALL, "--dataset.path", "b.bin", code=2).stderr
    assert err == "error: b.bin has no b.json with it; scripts/prepare.py writes both\n"


@pytest.mark.weekly
def test_the_commands_of_the_page_train(bake: Bake) -> None:
    project = bake(task="language")
    (project / ".venv").symlink_to(BIN.parent)
    commands, _ = blocks(PAGE, "bash")
    assert commands.count("--train.max_steps 100 ") == 1
    commands = commands.replace("--train.max_steps 100 ", "--train.max_steps 2 ")
    assert "eval   step 2/2" in run("bash", "-ec", commands, cwd=project).stdout


def test_a_mixture_has_the_documents_of_the_page(bake: Bake) -> None:
    project = bake(task="language")
    (project / ".venv").symlink_to(BIN.parent)
    _, commands = blocks(PAGE, "bash")
    assert run("bash", "-ec", commands, cwd=project).stdout == blocks(PAGE, "text")[0]


@pytest.mark.weekly
def test_a_tokenizer_writes_and_reads_tokens(bake: Bake) -> None:
    project = bake(task="language")
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(), ByteLevelDecoder()
    text = (project / "README.md").read_text()
    alphabet = ByteLevel.alphabet()
    tokenizer.train_from_iterator([text], BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False))
    tokenizer.enable_truncation(10)  # As that of a model may.
    tokenizer.save(str(project / "tokenizer.json"))
    tokenizer.no_truncation()
    out = prepare(project, "data/readme.bin", "README.md", "--tokenizer", "tokenizer.json")
    (project / "tokenizer.json").unlink()
    assert out.endswith("tokens of a vocabulary of 512")
    tokens = np.fromfile(project / "data/readme.bin", np.uint16)
    assert tokenizer.decode(tokens[:-1].tolist()).strip() == text.strip() and tokens[-1] == 500
    evaluated = launch(project, "train", *SMALL, "--dataset.path", "data/readme.bin", "--run.dir", "run").stdout
    loss, bits = (float(re.findall(rf"eval .* {name} (\S+)", evaluated)[0]) for name in ("loss", "bits_per_byte"))
    assert bits == pytest.approx(loss / np.log(2) * len(tokens) / len(text.encode()), rel=1e-4)
    newest = project / "run" / "checkpoints" / "step-00000002.pt"
    assert torch.load(newest, weights_only=True)["model"]["head.linear.weight"].shape[0] == 512
    words = ("--checkpoint", newest, "--prompt", "training", "--length", "5", "--distributed.device", "cpu")
    assert launch(project, "generate", *words).stdout.strip().startswith("training")


@pytest.mark.weekly
def test_the_rehearsal_is_what_the_page_shows(bake: Bake) -> None:
    project = bake(parallelism="fsdp", task="language")
    (project / ".venv").symlink_to(BIN.parent)
    (project / "data").mkdir()
    about = {"dtype": "uint16", "vocabulary": 25088, "end": 0, "bytes_per_token": 4, "tokenizer": None}
    (project / "data/wiki.json").write_text(json.dumps(about))
    (project / "data/wiki.bin").write_bytes(bytes(10**7))
    (command,), (_, printed) = blocks(PAGE, "sh"), blocks(PAGE, "text")
    out = run("bash", "-c", command, cwd=project, PYTHONPATH=str(project / "src")).stdout
    assert re.sub(r"in \d+ s\n", "in 60 s\n", out) == printed
    alone = command.replace("--ranks 8", "--ranks 1")
    (gib,) = re.findall(r"On a single device, .* take ([\d.]+) GiB", PAGE.read_text())
    assert f"\n{gib} GiB fit" in run("bash", "-c", alone, cwd=project, PYTHONPATH=str(project / "src")).stdout


def test_models_have_the_parameters_of_the_pages(bake: Bake) -> None:
    script = """if True:
        import sys, torch
        from my_experiment.config import ModelConfig
        from my_experiment.model import build_model
        ModelConfig.vocabulary, *shape = map(int, sys.argv[1:])
        names = ("width", "layers", "heads", "context")
        with torch.device("meta"):
            model = build_model(ModelConfig(**dict(zip(names, shape, strict=True))))
        print(sum(p.numel() for p in model.parameters()))
    """
    project, gpus = bake(task="language"), (TEMPLATE / "docs" / "gpus.md").read_text()
    count = int(run_python(project, script, "25088", "768", "12", "12", "1024"))
    assert f"({count:,} parameters;" in PAGE.read_text()
    for shape in (("2048", "24", "16", "2048"), ("4096", "32", "32", "4096")):
        assert f"| {int(run_python(project, script, '50304', *shape)) / 1e9:.1f} billion parameters, 8 ranks |" in gpus
