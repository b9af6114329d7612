"""What the settings of the control task do, for `effects.py`; some of the others show it in another way there."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from effects import MOVING, Effect, shows
from lab import Lab, batches, distance, layers, recorded_steps

CONTROL: dict[str, Effect] = {}
shows = partial(shows, effects=CONTROL)


def collected(lab: Lab, *words: str) -> Any:
    """Return the experience of this rank, by name."""
    trainer = lab.trainer(*words)
    next(batches(trainer, 1))
    return trainer.sampler.own


@shows("run.seed")
def run_seed(lab: Lab) -> None:
    first, second = (lab.trainer("--run.seed", seed) for seed in ("1", "2"))
    assert distance(lab.weights_after(0, "--run.seed", "1"), lab.weights_after(0, "--run.seed", "2")) > 0
    observations = [trainer.sampler.environments.observations for trainer in (first, second)]
    assert not torch.equal(*observations) and not torch.equal(*(each.sampler.order(0) for each in (first, second)))
    assert not torch.equal(*(each.sampler.draw_noise(0) for each in (first, second)))


@shows("data.global_batch_size")
def global_batch_size(lab: Lab) -> None:
    trainer = lab.trainer("--data.global_batch_size", "32")
    ((inputs, targets),) = batches(trainer, 1)
    assert len(inputs) == len(targets["action"]) == 32 // trainer.parallel.dp_size


@shows("data.eval_batch_size")
def eval_batch_size(lab: Lab) -> None:
    evaluator, sizes = lab.trainer("--data.eval_batch_size", "1").evaluator, []
    policy = evaluator.policy.strategy.predict
    evaluator.policy.strategy.predict = lambda inputs: (sizes.append(len(inputs)), policy(inputs))[1]
    evaluator()
    assert max(sizes) == 1


@shows("data.num_workers")
def num_workers(lab: Lab) -> None:
    config = lab.settings("--data.num_workers", "1")
    assert "num_workers" in lab.refusal(lambda: config.control.check_batch(config.data, 1))


@shows("model.depth")
def depth(lab: Lab) -> None:
    assert len(list(lab.whole_model("--model.depth", "3").children())) == 4


@shows("model.observations", "model.actions", "model.action_dims")
def sizes_of_the_environment(lab: Lab) -> None:
    sizes = []
    for name in ("Acrobot-v1", "Pendulum-v1"):
        model = lab.settings("--control.environment", name).model
        sizes.append((model.observations, model.actions, model.action_dims))
    assert sizes == [(6, 3, 0), (3, 0, 1)]
    model = lab.whole_model("--control.environment", "Acrobot-v1")
    linear = [layer for layer in model.modules() if hasattr(layer, "weight")]
    assert {layer.in_features for layer in linear} == {6, 16} and {layer.out_features for layer in linear} == {16, 3, 1}


@shows("train.epochs")
def epochs(lab: Lab) -> None:
    one, two = (recorded_steps(lab.run("--train.epochs", value), "eval") for value in ("1", "2"))
    assert two[-1] == 2 * one[-1]


@shows("train.microbatches")
def microbatches(lab: Lab) -> None:
    trainer, calls = lab.trainer("--train.microbatches", "4"), []
    ((inputs, targets),) = batches(trainer, 1)  # For these, the model has been run too.
    for layer in layers(trainer):
        layer.register_forward_pre_hook(lambda layer, _: calls.append(layer))
    trainer.step(inputs, targets)
    assert calls and all(calls.count(layer) == 4 for layer in layers(trainer))


@shows("train.precision")
def precision(lab: Lab) -> None:
    # Under fp16, the first steps are skipped until the scale of the loss is low enough for the critic's gradient.
    for value, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        trainer, seen = lab.trainer("--train.precision", value), set()
        for layer in layers(trainer):
            layer.register_forward_hook(lambda layer, inputs, output, seen=seen: seen.add(output.dtype))
        next(batches(trainer, 1))  # The environments are stepped in it too.
        assert seen == {dtype}


@shows("control.environment")
def environment(lab: Lab) -> None:
    seen: list[Any] = []
    refused = lab.refusal(lambda: seen.append(collected(lab, "--control.environment", "Acrobot-v1")))
    assert not refused and seen[0]["observation"].shape[2] == 6


@shows("control.max_episode_steps")
def max_episode_steps(lab: Lab) -> None:
    trainer = lab.trainer("--control.max_episode_steps", "5")
    next(batches(trainer, 1))
    assert trainer.sampler.metrics["max_return"] == 5
    assert trainer.evaluator()["max_return"] == 5


@shows("control.environments")
def environments(lab: Lab) -> None:
    trainer = lab.trainer("--control.environments", "8")
    numbers = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, list(trainer.sampler.numbers))
    assert sorted({number for own in numbers for number in own or []}) == list(range(8))


@shows("control.steps")
def steps(lab: Lab) -> None:
    assert collected(lab, "--control.steps", "16")["observation"].shape[1] == 16


@shows("control.passes")
def passes(lab: Lab) -> None:
    trainer = lab.trainer("--control.passes", "3")
    for epoch, rollout in ((2, 0), (3, 1)):
        trainer.sampler.set_epoch(epoch)
        next(batches(trainer, 1))
        assert trainer.sampler.rollout == rollout


@shows("control.discount", "control.gae_lambda")
def returns(lab: Lab) -> None:
    one, other = collected(lab), collected(lab, "--control.discount", "0.5")
    assert torch.equal(one["action"], other["action"]) and not torch.allclose(one["return"], other["return"])
    other = collected(lab, "--control.gae_lambda", "0")
    assert not torch.allclose(one["return"], other["return"])


@shows("control.clip", "control.value_weight", "control.entropy_weight")
def losses(lab: Lab) -> None:
    words = ("--control.clip", "1e-5"), ("--control.value_weight", "2"), ("--control.entropy_weight", "1")
    start = lab.weights_after(2, *MOVING)
    assert all(distance(start, lab.weights_after(2, *MOVING, *each)) > 0 for each in words)


@shows("control.evaluation_episodes")
def evaluation_episodes(lab: Lab) -> None:
    assert lab.trainer("--control.evaluation_episodes", "3").evaluator()["num_samples"] == 3


@shows("control.gif")
def gif(lab: Lab) -> None:
    path = lab.new_folder().with_suffix(".gif")
    lab.trainer("--control.gif", str(path), "--control.evaluation_episodes", "2").evaluator()
    dist.barrier()
    assert path.exists()


@shows("parallel.sync_batch_norm")
def sync_batch_norm(lab: Lab) -> None:
    # The model has none that could be replaced.
    assert "sync_batch_norm" in lab.refusal(lambda: lab.trainer("--parallel.sync_batch_norm", "true"))
