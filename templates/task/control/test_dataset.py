"""Environments and experience: the same for any number of ranks, restored exactly, and rejected in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
import torch
from PIL import Image

from support import RANKS, global_batches, launch, module, newest_checkpoint, settings

config, dataset, spaces, splitting = module("config"), module("dataset"), module("launch.spaces"), module("splitting")
CONTINUOUS = ("--control.environment", "Pendulum-v1")


def build(*words: str, dp_rank: int = 0, dp_size: int = 1) -> Any:
    """Return the experience of one rank, with the model's initial weights as its policy."""
    chosen = settings(*words)
    torch.manual_seed(0)
    model = module("model").build_model(chosen.model)
    cpu = torch.device("cpu")
    strategy = SimpleNamespace(dp_rank=dp_rank, dp_size=dp_size, device=cpu, module=model, predict=model)
    experience, _ = dataset.build_datasets(chosen)
    return experience.build_loader(strategy, chosen.data, chosen.run.seed, lambda *_: None)[0]


@pytest.mark.parametrize("words", [(), CONTINUOUS])
def test_an_environment_does_not_depend_on_the_rank_that_steps_it(words: tuple[str, ...]) -> None:
    whole, shares = build(*words), [build(*words, dp_rank=rank, dp_size=2) for rank in range(2)]
    for rollout in range(2):
        for each in (whole, *shares):
            each.collect(rollout)
        for name, values in whole.own.items():
            for rank, share in enumerate(shares):
                assert torch.allclose(share.own[name], values[rank::2], rtol=1e-4, atol=1e-5), name
    assert len(whole.own["observation"].flatten(0, 1).unique(dim=0)) == 64


@pytest.mark.parametrize("words", [(), CONTINUOUS])
def test_what_was_saved_is_restored(words: tuple[str, ...]) -> None:
    saved = build(*words)
    saved.collect(0)
    saved.collect(1)  # Some episodes have ended by now, and others have not.
    restored = build(*words)
    restored.load_state_dict(saved.state_dict())
    for rollout in (1, 2):
        assert all(torch.equal(restored.own[name], values) for name, values in saved.own.items())
        assert torch.equal(restored.moments, saved.moments) and restored.rollout == rollout
        saved.collect(2)
        restored.collect(2)
    with pytest.raises(config.UserError, match="steps is 32, and the run that was saved has 16"):
        build(*words, "--control.steps", "32").load_state_dict(saved.state_dict())


def test_experience_is_collected_anew_after_some_passes() -> None:
    steps, batches = global_batches(settings())
    epochs = [[next(batches) for _ in range(steps or 0)] for _ in range(4)]
    seen = [{tuple(row) for inputs, _ in epoch for row in inputs.tolist()} for epoch in epochs]
    assert seen[0] == seen[1] == seen[2] != seen[3] and len(seen[0]) == 64
    assert not torch.equal(epochs[0][0][0], epochs[1][0][0])
    for _, targets in epochs[0]:
        assert abs(targets["advantage"].mean()) < 1e-5 and abs(targets["advantage"].std(correction=0) - 1) < 1e-5


def test_an_advantage_is_what_was_gained_over_the_value() -> None:
    control = settings("--control.discount", "0.5", "--control.gae_lambda", "1").control
    rewards, values = torch.tensor([[1.0, 2.0, 4.0, 8.0]]), torch.tensor([[10.0, 20.0, 30.0, 40.0]])
    following = torch.tensor([[20.0, 60.0, 40.0, 80.0]])
    terminated, ended = torch.tensor([[False, False, True, False]]), torch.tensor([[False, True, True, False]])
    found = dataset.estimate_advantages(rewards, values, following, terminated, ended, control)
    # The first episode is cut off after two steps, the second ends with its reward, the third goes on.
    assert found.tolist() == [[1 + 0.5 * (2 + 0.5 * 60) - 10, 2 + 0.5 * 60 - 20, 4 - 30, 8 + 0.5 * 80 - 40]]


def test_an_episode_that_is_cut_off_goes_on_in_its_value() -> None:
    experience, seen = build(*CONTINUOUS, "--control.steps", "256"), []
    estimate = experience.estimate_advantages
    experience.estimate_advantages = lambda *arguments: (seen.append(arguments), estimate(*arguments))[1]
    experience.collect(0)
    _, values, following, terminated, ended, _ = seen[0]
    assert not terminated.any() and ended.nonzero().tolist() == [[number, 199] for number in range(4)]
    assert torch.allclose(following[:, :199], values[:, 1:200], atol=1e-5)
    assert (following[:, 199] != values[:, 200]).all()  # What follows is another episode.


def test_the_loss_stops_where_the_policy_has_changed_enough() -> None:
    for log_prob, is_clipped in ((0.0, False), (-0.5, True)):
        outputs = torch.zeros(1, 3, requires_grad=True)
        known = {"action": torch.tensor([1]), "log_prob": torch.tensor([0.5]).log() + log_prob}
        known |= {"advantage": torch.ones(1), "return": torch.ones(1)}
        losses, weight = dataset.loss_fn(outputs, known | {"clip": 0.2, "value_weight": 0.5, "entropy_weight": 0.0})
        losses["loss"].backward()
        assert outputs.grad is not None and (outputs.grad[0, 1] == 0) == is_clipped
        assert weight == 1 and losses["value_loss"].item() == 1 and outputs.grad[0, 2] == -1
        assert (losses["clip_fraction"].item() == 1) == is_clipped == (losses["kl"].item() > 0)


def test_the_first_episode_is_filmed(trained: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint, film = newest_checkpoint(trained(RANKS)), tmp_path / "films" / "episode.gif"
    words = ("--control.evaluation_episodes", "3", "--control.gif", str(film))
    done = launch("evaluate", "--checkpoint", str(checkpoint), *words, nproc=RANKS)
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["num_samples"] == 3 and record["min_return"] <= record["mean_return"] <= record["max_return"]
    with Image.open(film) as frames:
        assert 1 < frames.n_frames <= record["max_return"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--control.environment CartPol-v1", "control.environment is CartPol-v1"),
        ("--control.environment FrozenLake-v1", "observations are a Discrete"),
        ("--model.observations 3", "model.observations 3"),
        ("--control.environment absent:Absent-v0", "No module named 'absent'"),
    ],
)
def test_an_environment_that_does_not_fit_is_rejected(
    capsys: pytest.CaptureFixture[str], words: str, named: str
) -> None:
    with pytest.raises(SystemExit):
        settings(*words.split())
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and named in error


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise gymnasium.error.DependencyNotInstalled("pygame is not installed,\nrun `pip install ...`")

    monkeypatch.setattr(gymnasium, "make", fail)
    with pytest.raises(config.UserError, match="CartPole-v1: pygame is not installed, run"):
        spaces.make_environment("CartPole-v1")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--data.global_batch_size 18", "data.global_batch_size is 18, .* 4, 8, 16, 32, 64 would"),
        ("--data.num_workers 1", "data.num_workers is 1"),
        ("--control.environments 5", r"control.environments is 5, .* 2 share\(s\); 6 would"),
    ],
)
def test_settings_that_cannot_be_trained_with_are_rejected(words: str, named: str) -> None:
    chosen = settings(*words.split())
    with pytest.raises(config.UserError, match=named):
        chosen.control.check_batch(chosen.data, shares=2)


def test_a_factor_above_1_is_rejected() -> None:
    with pytest.raises(config.UserError, match=r"control.discount is 1\.5"):
        settings("--control.discount", "1.5").check()
