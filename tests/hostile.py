"""Damaged and crafted files, read by a rendered project; `test_hostile.py` starts this program.

Each case is one damage to the newest of two checkpoints. A run that resumes has to reject it in one line and use the
one before, to reject it in one line altogether, or to find what was saved; nothing else may come of it, and no code in
it may run.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import struct
import sys
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lab import Lab, name_error, take_steps
from safetensors.torch import save, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Damage = Callable[[Path], object]
Case = tuple[str, str, Damage]  # Of a kind, where, and how.
# Values of every kind, for what should be something else.
WRONG = [None, -1, 2**70, float("nan"), "x", [1], {"x": 1}, torch.ones(2)]
# What may come of each kind of damage.
ALLOWED = {"cut": {"one before"}, "attack": {"one before"}, "flip": {"one before", "the same"}}
ALLOWED["craft"] = {"one before", "refused", "the same", "accepted"}
# Parts in which a value of the right type may be any: it is used, or what the run itself says counts.
FREE = (
    "config",
    "built_groups",
    "param_groups",
    "rng",
    "scheduler",
    "scaler",
    "counter",
    "optimizer",
    "progress.best_",
    "progress.run_id",
)


# What a run that resumes may print besides: what the settings in a checkpoint and its own have to say.
PRINTED = re.compile("; resuming from the one before$| from now on; it was |: there is no such setting$| starts anew: ")


@dataclass
class Tally:
    """What came of all cases: how many of each kind had which outcome, and what went wrong."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, kind: str, where: str, outcome: str, problem: str = "") -> None:
        """Count a case: its outcome, unless there is a problem."""
        self.outcomes[f"{kind}: {'wrong' if problem else outcome}"] += 1
        if problem:
            self.wrong.append(f"{kind}, {where}: {problem}"[:300])


class Attack:
    """Creates a folder when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.mkdir, (str(self.target),)


class Average:
    """The average of the weights: registered state in tensors of its own."""

    def __init__(self, module: nn.Module) -> None:
        self.averages = {name: p.detach().clone() for name, p in module.named_parameters()}

    def state_dict(self) -> dict[str, Tensor]:
        return self.averages


class Count:
    """Registered state of each rank."""

    count = 3

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = int(state["count"])


def cuts(file: str) -> Iterator[Case]:
    """Yield a file of a checkpoint cut at every 1 % of its length."""

    def cut(path: Path, percent: int) -> None:
        content = (path / file).read_bytes()
        (path / file).write_bytes(content[: len(content) * percent // 100])

    for percent in range(100):
        yield "cut", f"{file} at {percent} %", partial(cut, percent=percent)


def flips(path: Path, file: str) -> Iterator[Case]:
    """Yield a file with a bit flipped, in some bytes of each header and directory entry, and of all data."""

    def flip(path: Path, position: int) -> None:
        content = bytearray((path / file).read_bytes())
        content[position] ^= 1 << position % 8
        (path / file).write_bytes(content)

    for position in find_sections((path / file).read_bytes()):
        yield "flip", f"{file} at byte {position}", partial(flip, position=position)


def find_sections(content: bytes) -> list[int]:
    """Return positions in what a ZIP archive consists of; spread evenly in anything else."""
    steps = range(0, len(content), max(1, len(content) // 100))
    if not zipfile.is_zipfile(io.BytesIO(content)):
        return list(steps)
    positions = set(steps)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for entry in archive.infolist():
            name, extra = struct.unpack_from("<HH", content, entry.header_offset + 26)
            data = entry.header_offset + 30 + name + extra
            positions |= {*range(entry.header_offset, data, 11), data, data + max(entry.compress_size, 1) - 1}
        positions |= set(range(archive.start_dir, len(content), 7))
        # The method of compression, of which a bit makes stored bytes compressed ones.
        positions |= {entry.header_offset + 8 for entry in archive.infolist()[:9]}
    return sorted(position for position in positions if position < len(content))


def find_parts(content: Any, depth: int) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every part of nested dictionaries and lists; of many alike, only the first and the last."""
    keys: list[Any] = list(content) if isinstance(content, dict) else []
    if isinstance(content, list | tuple):
        keys = list(range(len(content)))
    for key in keys if len(keys) < 24 else [keys[0], keys[-1]]:
        yield (key,)
        if depth > 1:
            yield from ((key, *rest) for rest in find_parts(content[key], depth - 1))


def altered(content: Any, path: tuple[Any, ...], *value: Any) -> Any:
    """Return a copy of nested dictionaries and lists with another value at ``path``, or, without one, nothing there."""
    key, *rest = path
    result = dict(content) if isinstance(content, dict) else list(content)
    if rest:
        result[key] = altered(content[key], tuple(rest), *value)
    elif value:
        (result[key],) = value
    else:
        del result[key]
    return type(content)(result)


def crafted(content: dict[str, Any], file: str) -> Iterator[Case]:
    """Yield checkpoints that lack a part, or have something else in its place; their checksums are right."""

    def write(path: Path, place: tuple[Any, ...], *value: Any) -> None:
        torch.save(altered(content, place, *value) if place else value[0], path / file)

    for place in [(), *find_parts(content, depth=4)]:
        name = ".".join(map(str, place))
        if place:
            yield "craft", f"{name} is missing", partial(write, place=place)
        for value in WRONG:
            yield "craft", f"{name} is {str(value)[:20]}", lambda path, p=place, v=value: write(path, p, v)


def attacks(content: dict[str, Any], file: str, target: Path) -> Iterator[Case]:
    """Yield checkpoints with code to run in every part, and pickles in all formats that PyTorch has had."""
    attack, is_folder = Attack(target), file != ""

    def replace_shard(path: Path) -> None:
        """Put code where a tensor is, with the right checksum."""
        header = copy.deepcopy(content)
        info = next(iter(header["metadata"].storage_data.values()))
        torch.save(attack, path / "code.pt")
        code = (path / "code.pt").read_bytes()
        os.replace(path / "code.pt", path / info.relative_path)
        for each in header["metadata"].storage_data.values():
            each.offset, each.length = 0, len(code)
        header["checksums"][info.relative_path, 0] = zlib.crc32(code)
        torch.save(header, path / file)

    def move_shard(path: Path) -> None:
        """Read tensors from a file outside of the checkpoint."""
        header = copy.deepcopy(content)
        for info in header["metadata"].storage_data.values():
            shutil.copyfile(path / info.relative_path, path.parent / "outside")
            header["checksums"]["../outside", info.offset] = header["checksums"][info.relative_path, info.offset]
            info.relative_path = "../outside"
        torch.save(header, path / file)

    for key in content:
        yield "attack", key, lambda path, key=key: torch.save(content | {key: attack}, path / file)
    yield "attack", "a pickle", lambda path: (path / file).write_bytes(pickle.dumps(attack))
    yield "attack", "an old file", lambda path: torch.save(attack, path / file, _use_new_zipfile_serialization=False)
    if is_folder:
        yield "attack", "DCP's index", lambda path: (path / ".metadata").write_bytes(pickle.dumps(attack))
        yield "attack", "a shard", replace_shard
        yield "attack", "a path that leads out", move_shard


class Judge:
    """Applies damages to a run's newest checkpoint, and says what a run that resumes makes of each."""

    def __init__(self, lab: Lab, form: str) -> None:
        self.lab, self.form, self.tally = lab, form, Tally()
        self.trainer = lab.trainer("--checkpoint.format", form, "--checkpoint.keep", "9")
        register = self.trainer.checkpointer.register
        register("average", Average(self.trainer.parallel.module), "tensors")
        register("counter", Count(), "rank")
        self.trainer.restore([])  # A fresh run, with an id.
        self.expected = [self.save(step) for step in (3, 6)]
        self.weights = {name: tensor.clone() for name, tensor in self.trainer.parallel.module.state_dict().items()}
        self.folder = Path(self.trainer.config.run.dir) / "checkpoints"
        self.before, self.newest = sorted(self.folder.iterdir())

    def save(self, step: int) -> list[Any]:
        """Save a step, and return the state that was saved."""
        take_steps(self.trainer, 2)
        self.trainer.progress.step, self.trainer.saved_step = step, 0
        self.trainer.save()
        self.trainer.checkpointer.wait()
        return self.state()

    def state(self) -> list[Any]:
        """Return all of the trainer's state that a checkpoint has."""
        checkpointer = self.trainer.checkpointer
        whole = [sorted(checkpointer.state().items()), sorted(checkpointer.build_header(self.trainer.progress).items())]
        return [each.clone() if isinstance(each, Tensor) else each for each in tree_leaves(whole)]

    def damaged(self, damage: Damage) -> Path:
        """Return a damaged copy of the newest checkpoint."""
        target = self.newest.with_name(f"damaged{self.newest.suffix}")
        discard(target)
        (shutil.copytree if self.newest.is_dir() else shutil.copyfile)(self.newest, target)
        damage(target)
        return target

    def judge(self, kind: str, where: str, damage: Damage) -> None:
        """Damage a copy, resume from it or the one before, and count the outcome."""
        target = self.damaged(damage)
        with torch.no_grad():
            for tensor in self.trainer.checkpointer.state().values():
                tensor.zero_()
        errors = io.StringIO()
        try:
            with contextlib.redirect_stderr(errors):
                self.trainer.restore([target, self.before])
            outcome = self.compare(errors.getvalue())
        except self.lab.module("config").UserError as error:
            outcome = refusal(error)
        except Exception as error:
            outcome = name_error(error)
        expected = ALLOWED[kind] if where.startswith(FREE) else ALLOWED[kind] - {"accepted"}
        self.tally.add(kind, f"{self.form} {where}", outcome, "" if outcome in expected else outcome)

    def judge_reading(self, kind: str, where: str, damage: Damage) -> None:
        """Let what else reads a checkpoint read a damaged copy: ``evaluate``, and ``convert`` to each format."""
        target, module, config = self.damaged(damage), self.lab.module, self.lab.settings()

        def evaluate() -> None:
            _, strategy = module("evaluate").load_strategy(str(target), config, self.lab.process)
            read = strategy.module.state_dict()
            assert all(torch.equal(tensor, self.weights[name]) for name, tensor in read.items()), "other weights"

        readers: dict[str, Callable[[], Any]] = {"evaluate": evaluate}
        for suffix in module("checkpoint.convert").OUTPUTS[self.newest.suffix]:
            readers[suffix] = partial(module("checkpoint.convert").convert, target, self.lab.folder / f"output{suffix}")
        for name, read in readers.items():
            outcome = attempt(self.lab, read)
            is_wrong = outcome not in ("refused", "accepted") or (kind == "attack" and outcome == "accepted")
            self.tally.add(f"{kind} for {name}", f"{self.form} {where}", outcome, outcome if is_wrong else "")
        for output in self.lab.folder.glob("output*"):
            if output.suffix == ".tmp":
                self.tally.wrong.append(f"{self.form} {where}: {output.name} is left")
            discard(output)

    def compare(self, errors: str) -> str:
        """Return what was restored, as far as one can see and go on with it."""
        state, lines = self.state(), [line for line in errors.splitlines() if "resuming from the one before" in line]
        if others := [line for line in errors.splitlines() if not PRINTED.search(line)]:
            return f"several lines: {others[0]}"
        if lines:
            is_before = len(lines) == 1 and are_equal(state, self.expected[0])
            return "one before" if is_before else "the one before, but not as it was saved"
        if are_equal(state, self.expected[1]):
            return "the same"
        take_steps(self.trainer, 1)
        self.trainer.progress.step, self.trainer.saved_step = 5, 0
        self.trainer.save()
        self.trainer.checkpointer.wait()
        return "accepted"


def discard(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    (shutil.rmtree if path.is_dir() else partial(Path.unlink, missing_ok=True))(path)


def attempt(lab: Lab, action: Callable[[], object]) -> str:
    """Return whether an action succeeds or is refused, or what else happens."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            action()
    except lab.module("config").UserError as error:
        return refusal(error)
    except Exception as error:
        return name_error(error)
    return "accepted"


def refusal(error: Exception) -> str:
    """Return that something is refused, if that is said in one line."""
    return "refused" if "\n" not in str(error) else f"several lines: {error}"


def are_equal(ones: list[Any], others: list[Any]) -> bool:
    """Return whether two states are alike, bit for bit."""
    if list(map(type, ones)) != list(map(type, others)):
        return False
    pairs = zip(ones, others, strict=True)
    return all(torch.equal(*pair) if isinstance(pair[0], Tensor) else pair[0] == pair[1] for pair in pairs)


def judge_checkpoints(lab: Lab, form: str) -> Tally:
    """Judge every cut, some of the other damages, and every attack on checkpoints of one form."""
    judge, target = Judge(lab, form), lab.folder / f"hacked-{form}"
    file, others = ("header.pt", [".metadata", "__0_0.distcp"]) if form == "sharded" else ("", [])
    content = lab.module("checkpoint.loading").read(judge.newest)
    chosen = random.Random(0)
    for each in (file, *others):
        for case in [*cuts(each), *choose(chosen, flips(judge.newest, each), 600 // (1 + len(others)))]:
            judge.judge(*case)
    for case in [*choose(chosen, crafted(content, file), 600), *attacks(content, file, target)]:
        judge.judge(*case)
    for case in [*choose(chosen, crafted(content, file), 60), *attacks(content, file, target)]:
        judge.judge_reading(*case)
    if target.exists():
        judge.tally.wrong.append(f"{form}: code in a checkpoint was run")
    return judge.tally


def choose(chosen: random.Random, cases: Iterable[Case], number: int) -> list[Case]:
    """Return some cases, the same in every run."""
    every = list(cases)
    return chosen.sample(every, min(number, len(every)))


def odd_entries(newest: Path) -> Iterator[tuple[str, Damage]]:
    """Yield what may stand in a run's folder under the name of a checkpoint, or of one that is being written."""
    for suffix in (".pt", ".dcp", ".tmp", ".old.tmp"):
        yield f"an empty folder {suffix}", lambda stem, s=suffix: stem.with_suffix(s).mkdir()
        yield f"a folder {suffix}", lambda stem, s=suffix: shutil.copytree(newest.parent, stem.with_suffix(s))
        yield f"an empty file {suffix}", lambda stem, s=suffix: stem.with_suffix(s).touch()
        yield f"a link to nothing {suffix}", lambda stem, s=suffix: stem.with_suffix(s).symlink_to("nothing")
        yield f"a link to itself {suffix}", lambda stem, s=suffix: stem.with_suffix(s).symlink_to(stem.with_suffix(s))
        yield f"a pipe {suffix}", lambda stem, s=suffix: os.mkfifo(stem.with_suffix(s))


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in what takes longer: opening a pipe waits for the other end."""

    def fail(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def judge_folders(lab: Lab, form: str, tally: Tally) -> None:
    """Let a run with an odd entry resume, and save in its place."""
    judge = Judge(lab, form)
    run_dir, keep = judge.folder.parent, {judge.before.name, judge.newest.name}
    for name, make in odd_entries(judge.newest):
        make(judge.folder / "step-00000009")
        problem = ""
        try:
            with contextlib.redirect_stderr(io.StringIO()), time_limit(20):
                judge.trainer.restore(lab.module("launch").find_resume_candidates(run_dir, "auto", False))
                assert judge.trainer.progress.step == 6, judge.trainer.progress
                expected = judge.save(9)
                newest = lab.module("launch").find_resume_candidates(run_dir, "auto", False)
                judge.trainer.restore(newest)
                assert are_equal(judge.state(), expected), "what was saved is not what is restored"
        except Exception as error:
            problem = name_error(error)
        tally.add("folder", f"{form} {name}", "survived", problem)
        for path in judge.folder.iterdir():
            if path.name not in keep:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def weight_files(state: dict[str, Tensor], attack: Attack) -> Iterator[tuple[str, Damage]]:
    """Yield files for ``model.weights`` with code to run, or that are something else."""
    first = next(iter(state))
    contents = {"state": state | {first: attack}, "object": attack, "keys": {1: torch.ones(1)}, "list": [state]}
    contents |= {"nested": {"model": attack}, "checkpoint": {"format": 2, "model": attack}, "sparse": {first: attack}}
    contents["sparse"] = state | {first: state[first].reshape(-1).to_sparse()}
    contents["meta"] = state | {first: state[first].to("meta")}
    for name, content in contents.items():
        for is_new in (True, False):
            save = partial(torch.save, content, _use_new_zipfile_serialization=is_new)
            yield f"{name}.{'pt' if is_new else 'old.pt'}", save
        yield f"{name}.pkl", lambda path, content=content: path.write_bytes(pickle.dumps(content))
        yield f"{name}.safetensors", lambda path, content=content: path.write_bytes(pickle.dumps(content))
    script = torch.jit.script(nn.Linear(2, 2))
    yield "script.pt", lambda path: torch.jit.save(script, path)
    yield "empty.pt", Path.touch
    yield "empty.safetensors", Path.touch
    yield "long.safetensors", lambda path: path.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    yield "pipe.pt", os.mkfifo
    yield "pipe.safetensors", os.mkfifo
    yield "folder.pt", Path.mkdir


def judge_weights(lab: Lab, tally: Tally) -> None:
    """Let ``model.weights`` name files that cannot be used."""
    folder, trainer = lab.new_folder(), lab.trainer()
    folder.mkdir()
    load_weights, module = lab.module("checkpoint").load_weights, trainer.parallel.module
    before = {name: value.clone() for name, value in module.state_dict().items()}
    good = folder / "good.safetensors"
    save_file(before, good)
    cases = list(weight_files(before, Attack(folder / "hacked")))
    for percent in range(100):
        part = good.read_bytes()[: good.stat().st_size * percent // 100]
        cases.append((f"cut{percent}.safetensors", lambda path, part=part: path.write_bytes(part)))
    for name, make in cases:
        make(folder / name)
        outcome = attempt(lab, partial(load_weights, folder / name, [], module, lab.process.device))
        problem = "" if outcome == "refused" else outcome
        if not all(torch.equal(value, before[key]) for key, value in module.state_dict().items()):
            problem = problem or "weights were changed"
        tally.add("weights", name, outcome, problem)
    if (folder / "hacked").exists():
        tally.wrong.append("code in a file of weights was run")


def crafted_metadata(metadata: dict[str, str]) -> Iterator[dict[str, str]]:
    """Yield metadata with something else in the place of a text, and without it."""
    texts = ["", "{", "null", "[]", "[" * 100_000, "NaN", '{"model": 3}', '{"model": {"width": "x"}}']
    texts += ['{"progress": 3}', '{"progress": {"step": 1e999, "epoch": 0, "samples": 0}}', '{"progress": {"step": 1}}']
    for key in ("config", "state"):
        yield {name: text for name, text in metadata.items() if name != key}
        yield from (metadata | {key: text} for text in texts if key == "state" or not text.startswith('{"progress'))


def judge_exported(lab: Lab, tally: Tally) -> None:
    """Cut exported weights short, alter or craft them, and read them as a checkpoint."""
    folder, exported = lab.new_folder(), lab.module("checkpoint.exported")
    folder.mkdir()
    good, state = folder / "good.safetensors", {"a.weight": torch.randn(6, 5), "b.steps": torch.tensor(7)}
    progress = {"step": 6, "epoch": 0, "samples": 384}
    content = {"config": {"model": vars(lab.settings().model)}, "progress": progress, "tensors": []}
    exported.write(good, content, state)
    whole, metadata = good.read_bytes(), exported.read_tensors(good)[1]
    cases = [(f"cut at {at}", whole[:at]) for at in range(0, len(whole), 7)]
    cases += [
        (f"byte {at}", whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :]) for at in range(len(whole))
    ]
    for texts in crafted_metadata(metadata):
        signed = texts | {"crc32": exported.checksum(texts, state)}
        cases.append((f"metadata {texts}", save(state, signed)))
    cases += [("foreign", save(state)), ("unsigned", save(state, {"template": "x"}))]
    expected = lab.module("checkpoint.loading").read(good)
    for number, (name, part) in enumerate(cases):
        (path := folder / f"{number}.safetensors").write_bytes(part)
        read: dict[str, Any] = {}
        outcome = attempt(lab, lambda path=path, read=read: read.update(lab.module("checkpoint.loading").read(path)))
        if outcome == "accepted" and name[0] not in "cmfu":  # A bit may be flipped where it does not matter.
            same = read["config"] == expected["config"] and read["progress"] == expected["progress"]
            same = same and read["model"].keys() == state.keys()
            same = same and all(torch.equal(read["model"][key], state[key]) for key in state)
            outcome = "the same" if same else "accepted"
        tally.add("exported", name, outcome, "" if outcome in ("refused", "the same") else outcome)


def judge_metrics(lab: Lab, tally: Tally) -> None:
    """Tear or alter a file of metrics anywhere, and continue and draw it."""
    metrics, curves = lab.module("reporting.metrics"), lab.module("reporting.curves")
    folder = lab.new_folder()
    folder.mkdir()
    path, image = folder / "metrics.jsonl", folder / "curves.png"
    lines = [b'{"event": "train", "step": %d, "loss": %f}\n' % (step, 1 / step) for step in range(1, 7)]
    whole = b"".join(lines)
    cases = [(f"cut at {at}", whole[:at]) for at in range(len(whole))]
    cases += [(f"torn at {at}", whole[:at] + whole[at + 30 :]) for at in range(0, len(whole), 3)]
    cases += [(f"byte {at}", whole[:at] + b"\xff" + whole[at + 1 :]) for at in range(0, len(whole), 3)]
    odd = [
        "[" * 100_000,
        "9" * 5000,
        '{"step": 1e999, "event": "train"}',
        '{"step": true, "event": "train", "loss": 1}',
    ]
    odd += [
        '{"step": 2, "event": [], "loss": 1}',
        '{"event": "train", "loss": 1, "step": ' + "9" * 400 + "}",
        "\0" * 99,
    ]
    values = ["null", '"x"', "[1]", "{}", "NaN", "-Infinity", "1e999", "true", "9" * 400]
    odd += ['{"step": 3, "event": "train", "loss": ' + value + "}" for value in values]
    odd += ['{"step": 3, "event": "eval", "loss": 1, "accuracy": ' + value + "}" for value in values]
    cases += [(line[:60], whole + line.encode() + b"\n" + whole) for line in odd]
    for name, content in cases:
        path.write_bytes(content)
        kept = [line for line in lines[:4] if content.startswith(line) or b"\n" + line in content]
        problem = ""
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                metrics.truncate_metrics(path, 4, 4)
                if cases.index((name, content)) % 40 == 0 or len(name) > 12:
                    curves.draw_curves(folder, "accuracy", {}).savefig(image)
            left = path.read_bytes().splitlines(keepends=True)
            assert all(json.dumps(json.loads(line)).encode() + b"\n" in left for line in kept), "a record was lost"
        except Exception as error:
            problem = name_error(error)
        tally.add("metrics", name, "survived", problem)


def main(package: str, folder: Path, part: str) -> None:
    """Write what went wrong, and how often each outcome was seen, into the folder."""
    lab = Lab(package, "digits", folder)
    runtime = lab.module("runtime")
    with runtime.process_group(lab.settings().distributed, devices_per_rank=1) as lab.process:
        if part in ("full", "sharded"):
            tally = judge_checkpoints(lab, part)
        else:
            tally = Tally()
            for form in ("full", "sharded"):
                judge_folders(lab, form, tally)
            for judge in (judge_weights, judge_exported, judge_metrics):
                judge(lab, tally)
    (folder / "outcome.json").write_text(json.dumps({"wrong": tally.wrong, "outcomes": tally.outcomes}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
