"""What each setting of a rendered project does, as its ranks observe it; `test_effects.py` starts this program.

Each setting has a function that gives it a value, and asserts its effect where the setting promises it. The function is
called once more while the setting is ignored, and has to fail then.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lab import (
    Lab,
    batches,
    count_collectives,
    distance,
    first_step,
    layers,
    local,
    recorded_steps,
    saved_steps,
    take_steps,
)
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy

Effect = Callable[[Lab], None]
EFFECTS: dict[str, Effect] = {}
# Those of the process group itself, observed after it by each rank alone.
ALONE: dict[str, Effect] = {}
# Settings with which every step moves the weights.
MOVING = "--optim.lr 0.01 --optim.warmup_steps 0 --optim.weight_decay 0".split()


def shows(*settings: str, effects: dict[str, Effect] = EFFECTS) -> Callable[[Effect], Effect]:
    """Register a function as the one that shows what ``settings`` do."""

    def register(effect: Effect) -> Effect:
        effects.update(dict.fromkeys(settings, effect))
        return effect

    return register


def backend_options() -> Any:
    """Return the options of the process group, which have its timeout."""
    return dist.group.WORLD._get_backend(torch.device("cpu")).options


@shows("run.dir")
def run_dir(lab: Lab) -> None:
    folder = lab.new_folder()
    with contextlib.chdir(lab.folder):
        lab.run("--run.dir", str(folder), "--train.max_steps", "1")
    assert folder.exists() and {path.name for path in folder.iterdir()} >= {"metrics.jsonl", "checkpoints"}


@shows("run.seed")
def run_seed(lab: Lab) -> None:
    first, second = lab.trainer("--run.seed", "1"), lab.trainer("--run.seed", "2")
    assert distance(lab.weights_after(0, "--run.seed", "1"), lab.weights_after(0, "--run.seed", "2")) > 0
    assert list(first.sampler) != list(second.sampler)
    if lab.task == "digits":  # Its augmentation is random.
        images = [trainer.loader.dataset.__getitems__([(0, i) for i in range(9)])[0] for trainer in (first, second)]
        assert not torch.equal(*images)


@shows("data.global_batch_size")
def global_batch_size(lab: Lab) -> None:
    trainer = lab.trainer("--data.global_batch_size", "32")
    ((inputs, targets),) = batches(trainer, 1)
    assert len(inputs) == len(targets) == 32 // trainer.parallel.dp_size


@shows("data.eval_batch_size")
def eval_batch_size(lab: Lab) -> None:
    evaluator = lab.trainer("--data.eval_batch_size", "24").evaluator
    sizes = {len(targets) for _, targets in evaluator.loader}
    # On all ranks the same, so that the model is compiled once.
    everywhere = set().union(*lab.module("runtime").all_gather_object(sizes))
    assert len(everywhere) == 1 and 12 < max(everywhere) <= 24


@shows("data.num_workers")
def num_workers(lab: Lab) -> None:
    trainer = lab.trainer("--data.num_workers", "1")
    training, evaluation = iter(trainer.loader), iter(trainer.evaluator.loader)
    # The same process does both.
    assert next(training) and next(evaluation) and next(training)
    assert len(multiprocessing.active_children()) == 1


@shows("dataset.max_shift")
def max_shift(lab: Lab) -> None:
    samples = lab.trainer("--dataset.max_shift", "0").loader.dataset
    images = [samples.__getitems__([(epoch, 0)])[0] for epoch in range(9)]
    assert all(torch.equal(image, images[0]) for image in images)


@shows("dataset.path", "dataset.cache")
def text(lab: Lab) -> None:
    folder, cache = lab.new_folder(), lab.new_folder()
    if lab.process.is_main:
        folder.mkdir()
        (folder / "text.txt").write_text("abc " * 4000)
    dist.barrier()
    with contextlib.chdir(lab.folder):
        trainer = lab.trainer("--dataset.path", str(folder), "--dataset.cache", str(cache))
    ((inputs, _),) = batches(trainer, 1)
    assert set(inputs.unique().tolist()) <= set(b"abc \n")
    assert cache.exists() and any(cache.iterdir())


@shows("dataset.max_bytes", "dataset.test_bytes")
def text_size(lab: Lab) -> None:
    trainer = lab.trainer("--dataset.max_bytes", "9000", "--dataset.test_bytes", "1600")
    trained, tested = (16 * len(samples.dataset) for samples in (trainer.loader.dataset, trainer.evaluator.samples))
    assert abs(trained - 7400) < 32 and abs(tested - 1600) < 32


@shows("model.width")
def width(lab: Lab) -> None:
    assert any(24 in parameter.shape for parameter in lab.whole_model("--model.width", "24").parameters())


@shows("model.depth", "model.layers")
def depth(lab: Lab) -> None:
    name, blocks = ("depth", 8) if lab.task == "digits" else ("layers", 5)
    assert len(list(lab.whole_model(f"--model.{name}", "3").children())) == blocks


@shows("model.norm")
def norm(lab: Lab) -> None:
    kinds = {type(module) for module in lab.whole_model("--model.norm", "batch").modules()}
    assert nn.BatchNorm2d in kinds and nn.GroupNorm not in kinds
    # Each rank has the statistics of its own samples; a checkpoint has their mean.
    trainer = lab.trainer("--model.norm", "batch")
    take_steps(trainer)
    own = {name: buffer.clone() for name, buffer in trainer.parallel.module.named_buffers() if buffer.dim()}
    everyone = lab.module("runtime").all_gather_object(own)
    trainer.progress.step = 1
    trainer.save()
    dist.barrier()
    (path,) = (Path(trainer.config.run.dir) / "checkpoints").iterdir()
    saved = torch.load(path, weights_only=True)["model"]
    for name in own:
        assert torch.allclose(saved[name], sum(each[name] for each in everyone) / len(everyone), atol=1e-6), name
    assert len(everyone) == 1 or not torch.allclose(own[name], saved[name])


@shows("model.heads")
def heads(lab: Lab) -> None:
    # Attention has no effect on the outputs of an untrained model.
    two, four = (lab.weights_after(3, *MOVING, "--model.heads", number) for number in ("2", "4"))
    assert distance(two, four) > 0


@shows("model.context")
def context(lab: Lab) -> None:
    ((inputs, _),) = batches(lab.trainer("--model.context", "8"), 1)
    assert inputs.shape[1] == 8


@shows("model.weights", "model.weights_except")
def start_from_weights(lab: Lab) -> None:
    torch.manual_seed(0)
    start = lab.module("model").build_model(lab.settings().model).state_dict()
    other = {name: value + 1 for name, value in start.items()}
    path = lab.new_folder().with_suffix(".safetensors")
    if lab.process.is_main:
        save_file(other, path)
    dist.barrier()
    resting = "--train.max_steps 1 --optim.lr 1e-12 --optim.warmup_steps 0".split()
    run = lab.run(*resting, "--model.weights", str(path), "--model.weights_except", "[head]")
    saved = torch.load(next((run / "checkpoints").iterdir()), weights_only=True)["model"]
    for name, value in saved.items():
        assert torch.allclose(value, (start if name.startswith("head.") else other)[name], atol=1e-6), name


@shows("optim.lr", "optim.warmup_steps", "optim.decay_steps", "optim.min_lr_ratio")
def schedule(lab: Lab) -> None:
    words = "--optim.lr 0.5 --optim.warmup_steps 4 --optim.decay_steps 12 --optim.min_lr_ratio 0.2"
    trainer, rates = lab.trainer(*words.split()), []
    ((inputs, targets),) = batches(trainer, 1)
    for _ in range(14):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.step(inputs, targets)
    cosine = [0.1 + 0.4 * (1 + math.cos(math.pi * done / 8)) / 2 for done in (0, 1, 2, 3, 4, 5, 6, 7, 8, 8)]
    assert torch.allclose(torch.tensor(rates), torch.tensor([0.125, 0.25, 0.375, 0.5, *cosine]))


@shows("optim.weight_decay")
def weight_decay(lab: Lab) -> None:
    words = "--optim.lr 0.5 --optim.warmup_steps 0 --optim.weight_decay".split()
    start, plain, decayed = lab.weights_after(0), lab.weights_after(1, *words, "0"), lab.weights_after(1, *words, "0.1")
    for name, value in decayed.items():
        decay = 0.5 * 0.1 * start[name] if value.dim() > 1 else 0
        assert torch.allclose(value, plain[name] - decay, atol=1e-5), name


@shows("optim.betas")
def betas(lab: Lab) -> None:
    assert distance(lab.weights_after(2, *MOVING), lab.weights_after(2, *MOVING, "--optim.betas", "[0.5, 0.6]")) > 0


@shows("optim.eps")
def eps(lab: Lab) -> None:
    start, moved = lab.weights_after(0), lab.weights_after(1, *MOVING)
    assert distance(start, lab.weights_after(1, *MOVING, "--optim.eps", "1e6")) < distance(start, moved) / 1000


@shows("train.clip_grad_norm")
def clip_grad_norm(lab: Lab) -> None:
    # With so large an eps, the first step is proportional to the gradient.
    words = (
        "--optim.lr 1e6 --optim.eps 1e6 --optim.warmup_steps 0 --optim.weight_decay 0 --train.clip_grad_norm".split()
    )
    start = lab.weights_after(0)
    once, twice = (distance(start, lab.weights_after(1, *words, value)) for value in ("0.01", "0.02"))
    assert math.isclose(twice, 2 * once, rel_tol=0.01)


@shows("train.epochs")
def epochs(lab: Lab) -> None:
    words = ("--data.global_batch_size", "256", "--train.epochs")
    one, two = (recorded_steps(lab.run(*words, value), "eval") for value in ("1", "2"))
    assert two[-1] == 2 * one[-1]


@shows("train.max_steps")
def max_steps(lab: Lab) -> None:
    assert max(saved_steps(lab.run("--train.max_steps", "3"))) == 3


@shows("train.microbatches")
def microbatches(lab: Lab) -> None:
    trainer, calls = lab.trainer("--train.microbatches", "4"), []
    for layer in layers(trainer):
        layer.register_forward_pre_hook(lambda layer, _: calls.append(layer))
    take_steps(trainer)
    assert calls and all(calls.count(layer) == 4 for layer in layers(trainer))
    if hasattr(trainer.parallel, "ddp"):
        # The ranks' gradients are summed once, however many micro-batches there are.
        one, four = (count_collectives(lab.trainer("--train.microbatches", n), "reduce") for n in ("1", "4"))
        assert 0 < one == four


@shows("train.precision")
def precision(lab: Lab) -> None:
    expected = first_step(lab.trainer("--train.precision", "fp32"))
    for value, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        trainer, seen = lab.trainer("--train.precision", value), set()
        for layer in layers(trainer):
            layer.register_forward_hook(lambda layer, inputs, output, seen=seen: seen.add(output.dtype))
        sent = watch_messages(trainer)
        # AdamW would hide a wrong scale of the gradient; its norm does not.
        loss_and_norm = first_step(trainer)
        assert torch.allclose(loss_and_norm, expected, rtol=0.02), (value, loss_and_norm, expected)
        assert seen == {dtype}
        assert sent <= {torch.bfloat16 if value == "bf16" else torch.float32}
        assert {parameter.dtype for parameter in trainer.parallel.module.parameters()} == {torch.float32}


def watch_messages(trainer: Any) -> set[torch.dtype]:
    """Return a set which steps fill with the types of what a pipeline's stages send on; empty for other strategies."""
    sent, parallel = set[torch.dtype](), trainer.parallel
    for index, stage in getattr(parallel, "stages", {}).items():
        if index + 1 < len(parallel.outline):
            stage.register_forward_hook(lambda stage, inputs, output: sent.add(output.dtype))
    return sent


@shows("train.compile")
def compile_blocks(lab: Lab) -> None:
    if "compile" in lab.refused_layout("--train.compile", "true"):
        return
    from torch._dynamo.utils import counters  # Slow to import.

    counters.clear()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="eager")):
        take_steps(lab.trainer("--train.compile", "true"))
    assert counters["stats"]["unique_graphs"] > 0


@shows("train.activation_checkpointing")
def activation_checkpointing(lab: Lab) -> None:
    if "activation_checkpointing" in lab.refused_layout("--train.activation_checkpointing", "true"):
        return
    plain, checkpointed = (count_saved_bytes(lab, value) for value in ("false", "true"))
    assert checkpointed < 0.8 * plain, (checkpointed, plain)


def count_saved_bytes(lab: Lab, value: str) -> int:
    """Return how many bytes a step's forward keeps for its backward."""
    trainer, sizes = lab.trainer("--train.activation_checkpointing", value), []

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(local(tensor).nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        take_steps(trainer)
    return sum(sizes)


@shows("train.memory_snapshot")
def memory_snapshot(lab: Lab) -> None:
    assert "train.memory_snapshot" in lab.refusal(lambda: lab.trainer("--train.memory_snapshot", "true")), "needs CUDA"


@shows("train.on_nonfinite")
def on_nonfinite(lab: Lab) -> None:
    trainer = lab.trainer("--train.on_nonfinite", "skip", *MOVING)
    with mock.patch.object(
        trainer.parallel, "add_loss", lambda *arguments, add=trainer.parallel.add_loss: add(*arguments) * math.nan
    ):
        take_steps(trainer)
    before = {name: local(p).detach().clone() for name, p in trainer.parallel.module.named_parameters()}
    take_steps(trainer)
    after = {name: local(p).detach() for name, p in trainer.parallel.module.named_parameters()}
    assert 0 < distance(before, after) < math.inf


@shows("train.check_replicas_every")
def check_replicas_every(lab: Lab) -> None:
    with mock.patch.object(lab.module("train"), "check_replicas") as check:
        lab.run("--train.max_steps", "5", "--train.check_replicas_every", "2")
    assert [call.args[1] for call in check.call_args_list] == [2, 4]


@shows("train.log_every")
def log_every(lab: Lab) -> None:
    assert recorded_steps(lab.run("--train.max_steps", "5", "--train.log_every", "2"), "train") == [2, 4, 5]


@shows("train.eval_every")
def eval_every(lab: Lab) -> None:
    assert recorded_steps(lab.run("--train.max_steps", "5", "--train.eval_every", "2"), "eval") == [2, 4, 5]


@shows("checkpoint.every_steps")
def every_steps(lab: Lab) -> None:
    words = "--train.max_steps 5 --train.eval_every null --checkpoint.every_steps 2 --checkpoint.keep 9".split()
    assert saved_steps(lab.run(*words)) == {2, 4, 5}


@shows("checkpoint.keep")
def keep(lab: Lab) -> None:
    words = "--train.max_steps 6 --train.eval_every null --checkpoint.every_steps 1 --checkpoint.keep 3".split()
    assert saved_steps(lab.run(*words)) == {4, 5, 6}


@shows("checkpoint.format")
def checkpoint_format(lab: Lab) -> None:
    run = lab.run("--train.max_steps", "1", "--checkpoint.format", "sharded")
    assert [path.is_dir() for path in (run / "checkpoints").iterdir()] == [True]


@shows("checkpoint.resume")
def resume(lab: Lab) -> None:
    first = lab.run("--train.max_steps", "2")
    path = str(next((first / "checkpoints").iterdir()))
    words = "--train.max_steps 3 --train.log_every 1 --checkpoint.resume".split()
    assert recorded_steps(lab.run(*words, path), "train") == [3]
    assert "never" in lab.refusal(lambda: lab.run(*words, "never", "--run.dir", str(first)))


@shows("checkpoint.timeout_seconds")
def saving_timeout(lab: Lab) -> None:
    trainer, options = lab.trainer("--checkpoint.timeout_seconds", "5432"), backend_options()
    with mock.patch.object(trainer.checkpointer, "save", lambda _: waits.append(options._timeout)):
        waits = [options._timeout]
        trainer.write_checkpoint()
        waits.append(options._timeout)
    assert waits == [waits[0], timedelta(seconds=5432), waits[0]]


@shows("distributed.timeout_seconds", "distributed.startup_timeout_seconds")
def timeouts(lab: Lab) -> None:
    words = "--distributed.startup_timeout_seconds 555 --distributed.timeout_seconds 444".split()
    trainer, options = lab.trainer(*words), backend_options()
    at_start = options._timeout
    trainer.end_startup()
    later = options._timeout
    assert (at_start, later) == (timedelta(seconds=555), timedelta(seconds=444))


@shows("distributed.agree_seconds")
def agree_seconds(lab: Lab) -> None:
    stop = lab.trainer("--distributed.agree_seconds", "0").stop
    for _ in range(4):
        with stop.agree():
            pass
    assert stop.interval == 1


@shows("parallel.bucket_cap_mb")
def bucket_cap_mb(lab: Lab) -> None:
    one, many = (count_collectives(lab.trainer("--parallel.bucket_cap_mb", mb), "reduce") for mb in ("null", "0.001"))
    assert many > one


@shows("parallel.gradient_as_bucket_view")
def gradient_as_bucket_view(lab: Lab) -> None:
    trainer = lab.trainer("--parallel.gradient_as_bucket_view", "false")
    ((inputs, targets),) = batches(trainer, 1)
    trainer.parallel.forward_backward(inputs, targets, trainer.scaler)
    gradients = [parameter.grad for parameter in trainer.parallel.module.parameters()]
    assert len({gradient.untyped_storage().data_ptr() for gradient in gradients}) == len(gradients)


@shows("parallel.static_graph")
def static_graph(lab: Lab) -> None:
    assert lab.trainer("--parallel.static_graph", "true").parallel.ddp._get_ddp_logging_data().get("static_graph")


@shows("parallel.find_unused_parameters")
def find_unused_parameters(lab: Lab) -> None:
    ddp = lab.trainer("--parallel.find_unused_parameters", "true").parallel.ddp
    assert ddp._get_ddp_logging_data()["find_unused_parameters"]


@shows("parallel.sync_batch_norm")
def sync_batch_norm(lab: Lab) -> None:
    # The layers themselves refuse the CPU.
    assert "sync_batch_norm" in lab.refusal(lambda: lab.trainer("--parallel.sync_batch_norm", "true"))
    with mock.patch.object(lab.module("parallel"), "DistributedDataParallel") as ddp:
        build_on_accelerator(lab, "--parallel.sync_batch_norm", "true", "--model.norm", "batch")
    kinds = {type(module) for module in ddp.call_args.args[0].modules()}
    assert nn.SyncBatchNorm in kinds and nn.BatchNorm2d not in kinds


def build_on_accelerator(lab: Lab, *words: str) -> Any:
    """Build the strategy with tensors that have no values, in the place of those of an accelerator."""
    process = replace(lab.process, device=torch.device("meta"))
    loss_fn = lab.module("dataset").loss_fn
    build = partial(lab.whole_model, *words)
    return lab.module("parallel").Parallel(build, loss_fn, lab.settings(*words), process)


@shows("parallel.reshard_after_forward")
def reshard_after_forward(lab: Lab) -> None:
    name = "--parallel.reshard_after_forward"
    freed, kept = (count_collectives(lab.trainer(name, value), "gather") for value in ("true", "false"))
    assert 0 < kept < freed


@shows("parallel.cpu_offload")
def cpu_offload(lab: Lab) -> None:
    # Without accelerators, what FSDP was asked to do is all there is to see.
    block = next(lab.trainer("--parallel.cpu_offload", "true").parallel.module.children())
    assert isinstance(block._get_fsdp_state()._fsdp_param_group.offload_policy, CPUOffloadPolicy)


@shows("parallel.replicas")
def replicas(lab: Lab) -> None:
    trainer, whole = lab.trainer("--parallel.replicas", "2", "--train.microbatches", "2"), lab.whole_model()
    parallel = trainer.parallel
    own = {name: local(parameter).shape for name, parameter in parallel.module.named_parameters()}
    assert parallel.dp_size == 2
    assert own == {name: parameter.shape for name, parameter in whole.named_parameters()}
    if hasattr(parallel, "fsdp"):  # Replicas average the gradients of a block once per step, not per micro-batch.
        once = sum(any(True for _ in part.parameters()) for part in [*lab.module("model").blocks(whole)])
        assert count_collectives(trainer, "all_reduce") <= once + 2


@shows("parallel.sequence_parallel")
def sequence_parallel(lab: Lab) -> None:
    if lab.task == "digits":
        assert "sequence_parallel" in lab.refused_layout("--parallel.sequence_parallel", "true")
        return
    trainer, lengths = lab.trainer("--parallel.sequence_parallel", "true"), set()
    for layer in trainer.parallel.module.modules():
        if isinstance(layer, nn.LayerNorm):
            layer.register_forward_hook(lambda layer, inputs, output: lengths.add(local(output).shape[1]))
    take_steps(trainer)
    assert lengths == {8}


@shows("parallel.schedule", "parallel.stages_per_rank")
def pipeline_schedule(lab: Lab) -> None:
    trainer = lab.trainer("--parallel.schedule", "LoopedBFS", "--train.microbatches", "4")
    take_steps(trainer)
    assert type(trainer.parallel.schedule).__name__ == "ScheduleLoopedBFS"
    interleaved = ("--parallel.schedule", "Interleaved1F1B", "--parallel.stages_per_rank", "1")
    assert len(lab.trainer(*interleaved).parallel.stages) == 1


@shows("parallel.split")
def split(lab: Lab) -> None:
    for sizes in ([1, 3], [3, 1]):
        assert blocks_per_device(lab, "--parallel.split", str(sizes)) == sizes


def blocks_per_device(lab: Lab, *words: str) -> list[int]:
    """Return how many blocks the ranks of a pipeline hold, or the devices of a rank of a model-parallel run."""
    names = mock.patch.object(lab.module("parallel"), "list_devices", list_distinct_devices, create=True)
    with names:
        blocks = list(lab.trainer(*words).parallel.module.children())
    if hasattr(lab.module("parallel"), "move_block"):
        moved_to = [hook.args[0].index for block in blocks for hook in block._forward_pre_hooks.values()]
        return [moved_to.count(index) for index in sorted(set(moved_to))]
    return lab.module("runtime").all_gather_object(len(blocks))


def list_distinct_devices(first: torch.device, count: int) -> list[torch.device]:
    """Return the CPU under several names, so that one sees which of a rank's devices a block is meant for."""
    return [torch.device(first.type, index) for index in range(count)]


@shows("parallel.devices")
def devices(lab: Lab) -> None:
    with accelerators(2):
        config = lab.settings("--parallel.devices", "3", "--distributed.device", "auto")
        find = partial(lab.module("runtime").find_process, config.distributed, config.parallel.devices_per_rank())
        assert "3 device(s) each" in lab.refusal(find)
    parallel = lab.module("parallel")
    if hasattr(parallel, "list_devices"):
        assert len(blocks_per_device(lab, "--parallel.devices", "3")) == 3
        with accelerators(4):
            assert parallel.list_devices(torch.device("cuda:2"), 2) == [torch.device("cuda:2"), torch.device("cuda:3")]
        return
    for words, expected in ((), None), (("--parallel.devices", "3"), [0, 1, 2]):
        with mock.patch.object(nn, "DataParallel") as copies:
            built = build_on_accelerator(lab, *words)
        copies.assert_called_once_with(built.module, expected)
    trainer, calls = lab.trainer(), []
    trainer.parallel.copies.register_forward_pre_hook(lambda *_: calls.append(1))
    take_steps(trainer)
    trainer.parallel.predict(next(batches(trainer, 1))[0])
    assert len(calls) == 2


def accelerators(count: int) -> Any:
    """Pretend that this machine has accelerators; they can only be counted."""
    return mock.patch.multiple(
        torch.accelerator,
        current_accelerator=lambda check_available=False: torch.device("cuda"),
        device_count=lambda: count,
    )


@shows("distributed.device", effects=ALONE)
def device(lab: Lab) -> None:
    with accelerators(2):
        config = lab.settings("--distributed.device", "cpu").distributed
        assert lab.module("runtime").find_process(config, 1).device == torch.device("cpu")
    assert first_devices(lab, 1) == [0, 1] and first_devices(lab, 2) == [0, 2]


def first_devices(lab: Lab, devices_per_rank: int) -> list[int]:
    """Return the first device of each of two ranks on a machine with four."""
    config, indices = lab.settings().distributed, []
    for rank in ("0", "1"):
        variables = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}
        with accelerators(4), mock.patch.dict(os.environ, variables):
            indices.append(lab.module("runtime").find_process(config, devices_per_rank).device.index)
    return indices


@shows("distributed.backend", effects=ALONE)
def backend(lab: Lab) -> None:
    config = lab.settings("--distributed.backend", "mpi").distributed
    assert "without MPI" in lab.refusal(lambda: lab.module("runtime").process_group(config, 1).__enter__())


@shows("distributed.init_method", effects=ALONE)
def init_method(lab: Lab) -> None:
    path = lab.new_folder()
    with lab.module("runtime").process_group(
        lab.settings("--distributed.init_method", f"file://{path}").distributed, 1
    ):
        assert path.exists()


@shows("train.exact", effects=ALONE)
def exact(lab: Lab) -> None:
    # Without a GPU, PyTorch's own settings are all there is to see.
    words, backends = "--train.exact false --train.max_steps 1 --run.dir".split(), torch.backends
    lab.module("__main__").run("train", lab.settings(*words, str(lab.new_folder())), {})
    assert backends.cuda.matmul.allow_tf32 and backends.cudnn.allow_tf32 and not backends.cudnn.deterministic
    assert not torch.are_deterministic_algorithms_enabled()


@shows("generate.prompt", "generate.length")
def prompt(lab: Lab) -> None:
    config, parallel = lab.settings("--generate.prompt", "import ", "--generate.length", "5"), lab.trainer().parallel
    module, context, seed = lab.module("reporting.generate"), config.model.context, config.run.seed
    (text,) = module.continue_prompts(parallel, [b"import "], 5, context, config.generate.temperature, seed)
    assert len(text) == 5 and printed(lab, parallel, config) == "import " + text.decode(errors="replace")


@shows("generate.temperature")
def temperature(lab: Lab) -> None:
    texts, parallel = set(), lab.trainer().parallel
    for seed in ("1", "2", "3"):
        config = lab.settings("--generate.temperature", "0", "--generate.length", "9", "--run.seed", seed)
        texts.add(printed(lab, parallel, config))
    assert len(texts) == 1


def printed(lab: Lab, parallel: Any, config: Any) -> str:
    """Return what ``generate`` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        generate = lab.module("reporting.generate").generate
        generate(parallel, config.generate, config.model.context, config.run.seed, is_main=True)
    return output.getvalue().removesuffix("\n")


def observe(lab: Lab, effects: dict[str, Effect]) -> dict[str, list[str]]:
    """Return what went wrong while each setting was obeyed, and while it was ignored."""
    outcome = {}
    for name in settings_of(lab):
        if name in effects:
            outcome[name] = [attempt(lab, effects[name], ignored) for ignored in ("", name)]
    return outcome


def settings_of(lab: Lab) -> list[str]:
    """Return the names of all settings, from the dataclasses that define them."""
    sections = lab.module("config").sections().items()
    return [f"{section}.{field.name}" for section, kind in sections for field in fields(kind)]


def attempt(lab: Lab, effect: Effect, ignored: str) -> str:
    """Return the traceback of an unexpected outcome, or nothing."""
    lab.ignored = ignored
    try:
        effect(lab)
    except AssertionError as error:
        # An assertion elsewhere, as in PyTorch, does not show that the effect is missed.
        is_ours = traceback.extract_tb(error.__traceback__)[-1].filename.endswith("effects.py")
        return "" if ignored and is_ours else traceback.format_exc()
    except Exception:
        return traceback.format_exc()
    return f"nobody notices that {ignored} is ignored" if ignored else ""


def main(package: str, task: str, folder: Path, *left_out: str) -> None:
    """Observe the effects of all sections but some on this rank, and write the outcome into the folder.

    It has the names of all settings, with None for those of sections that are left out.
    """
    if task == "control":
        from control_effects import CONTROL  # Imported here, because it imports this file.

        EFFECTS.update(CONTROL)
    for effects in (EFFECTS, ALONE):
        for name in [name for name in effects if name.split(".")[0] in left_out]:
            del effects[name]
    lab = Lab(package, task, folder)
    runtime, launch, rank = lab.module("runtime"), lab.module("launch"), os.environ["RANK"]
    launch.end_with_launcher(launch.find_process_info())
    with runtime.process_group(lab.settings().distributed, devices_per_rank=1) as lab.process:
        outcome = observe(lab, EFFECTS)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name)
    lab.folder /= f"rank{rank}"
    lab.folder.mkdir()
    outcome |= observe(lab, ALONE)
    (folder / f"{rank}.json").write_text(json.dumps(dict.fromkeys(settings_of(lab)) | outcome))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
