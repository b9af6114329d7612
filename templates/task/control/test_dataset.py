"""Experience: the same for any number of ranks, and restored exactly."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from PIL import Image

from support import (
    RANKS,
    SEED,
    assert_close,
    global_batches,
    launch,
    load_model,
    module,
    newest_checkpoint,
    read_checkpoint,
    read_records,
    settings,
)
from walk_environment import WALK, Walk, advance, build, same

config, dataset, splitting = module("config"), module("dataset"), module("splitting")
draw_actions = module("splitting.policy").draw_actions
CONTINUOUS = ("--control.environment", "Pendulum-v1")


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
    for epoch in (0, 3):  # Some episodes of CartPole have ended by then, and others have not.
        advance(saved, epoch)
    restored = build(*words)
    restored.load_state_dict(saved.state_dict())
    for epoch in (4, 6, 9):
        assert same(advance(restored, epoch), advance(saved, epoch)), f"the batches of epoch {epoch} differ"
        assert restored.metrics == saved.metrics and same(restored.state_dict(), saved.state_dict())
    for words_of_other, named in (("--control.steps 32", "steps is 32"), ("--run.seed 9", "run.seed is 9")):
        with pytest.raises(config.UserError, match=f"{named}, and the run that was saved has"):
            build(*words, *words_of_other.split()).load_state_dict(saved.state_dict())


@pytest.mark.parametrize(("savers", "restorers"), [(1, 2), (RANKS, 1)])
def test_what_some_ranks_saved_others_restore(trained: Callable[..., Path], savers: int, restorers: int) -> None:
    saved = read_checkpoint(newest_checkpoint(trained(savers)))["experience"]
    assert sorted(saved) == ["environment_steps", "environments", "layout", "rollout"] and saved["rollout"] == 1
    for rank in range(restorers):
        share = build(*SEED, dp_rank=rank, dp_size=restorers)
        share.load_state_dict(saved)
        assert same(share.state_dict()["environments"], saved["environments"][rank::restorers])


def test_a_collection_that_is_stopped_is_repeated() -> None:
    class Stopped(Exception):
        pass

    def stop() -> AbstractContextManager[None]:
        if next(steps) == 3:
            raise Stopped
        return nullcontext()

    words, steps = ("--control.steps", "64"), iter(range(100))
    whole, stopped, resumed = build(*words), build(*words, guard=stop), build(*words)
    for each in (whole, stopped):
        advance(each, 0)
    before = whole.state_dict()
    with pytest.raises(Stopped):
        advance(stopped, 3)
    assert same(stopped.state_dict(), before)
    resumed.load_state_dict(stopped.state_dict())
    assert same(advance(resumed, 3), advance(whole, 3))


def test_the_actions_that_were_taken_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Walk, "fault", "in place")
    saved, restored = build(*WALK), build(*WALK)
    advance(saved, 0)
    state = saved.state_dict()
    actions = state["environments"][0]["actions"].flatten().tolist()
    assert actions == saved.environments.vector.envs[0].unwrapped.received
    for _ in range(2):  # Whatever the environment does to an action while it repeats it.
        restored.load_state_dict(state)
    received = [[each.unwrapped.received for each in run.environments.vector.envs] for run in (saved, restored)]
    assert received[0] == received[1] and len(received[0][0]) == 16
    assert same(restored.state_dict(), state)


def test_an_environment_that_does_not_repeat_its_episode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = build(*WALK)
    advance(saved, 0)
    for name in ("observation", "return"):
        state = saved.state_dict()
        state["environments"][2][name] += 1
        with pytest.raises(ValueError, match="environment 2 does not repeat"):
            build(*WALK).load_state_dict(state)
    restored, state = build(*WALK), build(*WALK).state_dict()
    monkeypatch.setattr(Walk, "fault", "global")
    with pytest.raises(ValueError, match="environment 0 does not repeat"):
        restored.load_state_dict(state)


@pytest.mark.parametrize("fault", ["reward", "observation"])
def test_what_is_not_finite_is_named_before_it_is_trained_on(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    monkeypatch.setattr(Walk, "fault", fault)
    with pytest.raises(config.UserError, match=f"the {fault} of environment 1 in step 3 of episode 0 is not finite;"):
        advance(build(*WALK, dp_rank=1, dp_size=2), 0)


def test_earlier_experience_is_gone() -> None:
    experience = build()
    advance(experience, 3)
    state = experience.state_dict()
    assert advance(experience, 2) == [] and len(advance(experience, 4)) == 4
    assert same(experience.state_dict(), state)


def test_records_have_the_episodes_that_ended() -> None:
    experience = build("--control.steps", "64")
    advance(experience, 0)
    ended = experience.ended_episodes()
    assert sorted(ended) == [0, 1, 2, 3] and (ended[0][:, 0] == ended[0][:, 1]).all()  # A step's reward is 1.
    lengths = [length for number in range(4) for length in ended[number][:, 1]]
    running = [len(actions) for actions in experience.environments.actions]
    assert sum(lengths) + sum(running) == 4 * 64
    expected = {"min_return": min(lengths), "max_return": max(lengths), "mean_length": np.mean(lengths)}
    assert experience.metrics == {"environment_steps": 256, "mean_return": np.mean(lengths), **expected}
    experience = build(*CONTINUOUS)
    advance(experience, 0)
    assert experience.metrics == {"environment_steps": 64}, "no episode has ended"


@pytest.mark.parametrize(("low", "high"), [(0.0, 4.0), (-np.inf, 4.0)])
def test_actions_are_mapped_to_finite_bounds(low: float, high: float) -> None:
    space = gymnasium.spaces.Box(low, high, (1,), np.float32)
    valid = splitting.to_valid(torch.tensor([[-3.0], [-1.0], [0.5], [1.0], [9.0]]), space)
    expected = [0, 0, 3, 4, 4] if low == 0 else [-3, -1, 0.5, 1, 4]
    assert valid.dtype == np.float32 and valid.flatten().tolist() == expected


def test_continuous_actions_are_trained_the_same_on_any_number_of_ranks(trained: Callable[..., Path]) -> None:
    one, other = (trained(nproc, *CONTINUOUS, "--control.discount", "0.9") for nproc in (1, RANKS))
    assert_close(load_model(one), load_model(other))
    names = ("loss", "entropy", "grad_norm")
    records = [[[each[name] for name in names] for each in read_records(run, "train")] for run in (one, other)]
    assert np.allclose(*records, rtol=1e-5, atol=1e-6)


def test_records_have_the_episodes_of_all_ranks(trained: Callable[..., Path]) -> None:
    one, other = (read_records(trained(nproc), "train") for nproc in (1, RANKS))
    assert len({record["environment_steps"] for record in one}) == 2, "the run has two collections"
    names = ("environment_steps", "min_return", "max_return", "mean_length", "mean_return", "entropy", "clip_fraction")
    for name in names:
        values = [[record[name] for record in records] for records in (one, other)]
        assert np.allclose(*values, rtol=1e-5, atol=1e-6), name


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
    next_values = torch.tensor([[20.0, 60.0, 40.0, 80.0]])
    terminated, done = torch.tensor([[False, False, True, False]]), torch.tensor([[False, True, True, False]])
    found = dataset.estimate_advantages(rewards, values, next_values, terminated, done, control)
    # The first episode is cut off after two steps, the second ends with its reward, the third goes on.
    assert found.tolist() == [[1 + 0.5 * (2 + 0.5 * 60) - 10, 2 + 0.5 * 60 - 20, 4 - 30, 8 + 0.5 * 80 - 40]]


def test_an_episode_that_is_cut_off_goes_on_in_its_value() -> None:
    experience, seen = build(*CONTINUOUS, "--control.steps", "256"), []
    estimate = experience.estimate_advantages
    experience.estimate_advantages = lambda *arguments: (seen.append(arguments), estimate(*arguments))[1]
    experience.collect(0)
    _, values, next_values, terminated, done, _ = seen[0]
    assert not terminated.any() and done.nonzero().tolist() == [[number, 199] for number in range(4)]
    for goes_on in (slice(0, 199), slice(200, 255)):
        assert torch.equal(next_values[:, goes_on], values[:, 1:][:, goes_on])
    assert (next_values[:, 199] != values[:, 200]).all()  # What follows is another episode.
    assert (next_values[:, 255] != values[:, 0]).all()


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "is_clipped", "is_counted"),
    [
        (0.0, 1.0, False, False),
        (0.5, 1.0, True, True),
        (0.5, -1.0, False, True),  # The loss may be too low, but never too high.
        (-0.5, 1.0, False, True),
        (-0.5, -1.0, True, True),
    ],
)
def test_the_loss_stops_where_the_policy_has_changed_enough(
    log_ratio: float, advantage: float, is_clipped: bool, is_counted: bool
) -> None:
    outputs = torch.zeros(1, 3, requires_grad=True)
    known = {"action": torch.tensor([1]), "log_prob": torch.tensor([0.5]).log() - log_ratio}
    known |= {"advantage": torch.tensor([advantage]), "return": torch.ones(1)}
    losses, weight = dataset.loss_fn(outputs, known | {"clip": 0.2, "value_weight": 0.5, "entropy_weight": 0.0})
    losses["loss"].backward()
    assert outputs.grad is not None and (outputs.grad[0, 1] == 0) == is_clipped
    assert weight == 1 and losses["value_loss"].item() == 1 and outputs.grad[0, 2] == -1
    assert (losses["clip_fraction"].item() == 1) == is_counted == (losses["kl"].item() > 0)


def test_each_number_stands_for_an_action() -> None:
    highest = torch.tensor([1.0]).nextafter(torch.tensor([0.0]))
    for actions in range(2, 100):  # The probabilities of some of them add up to less than this number.
        policy, _ = splitting.read_outputs(torch.zeros(1, actions + 1), is_discrete=True)
        numbers = torch.zeros(1), highest
        assert [int(draw_actions(policy, number)) for number in numbers] == [0, actions - 1]


def test_the_first_episode_is_filmed(trained: Callable[..., Path], tmp_path: Path) -> None:
    checkpoint, film = newest_checkpoint(trained(RANKS)), tmp_path / "films" / "episode.gif"
    words = ("--control.evaluation_episodes", "3", "--control.gif", str(film))
    done = launch("evaluate", "--checkpoint", str(checkpoint), *words, nproc=RANKS)
    assert "error" not in done.stdout + done.stderr  # As pygame prints where there is no display.
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["num_samples"] == 3 and record["min_return"] <= record["mean_return"] <= record["max_return"]
    with Image.open(film) as frames:
        frames.seek(frames.n_frames - 1)
        assert 1 < frames.n_frames <= record["max_return"] + 1
    assert not [path for path in film.parent.iterdir() if path != film]


def test_the_whole_first_episode_is_filmed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = ("--control.gif", str(tmp_path / "episode.gif"), "--control.max_episode_steps", "5")
    chosen = settings(*words, "--control.evaluation_episodes", "2")
    model = module("model").build_model(chosen.model)
    cpu = torch.device("cpu")
    strategy = SimpleNamespace(dp_rank=0, dp_size=1, device=cpu, module=model, predict=model)
    _, episodes = dataset.build_datasets(chosen)
    evaluator = module("evaluate").Evaluator(episodes, strategy, chosen.data, 0)
    monkeypatch.setattr(module("evaluate"), "all_gather_object", lambda own: [own])
    evaluator.play_share()
    frames = evaluator.film.frames
    assert len(frames) == 5 + 1 and {frame.mode for frame in frames} == {"P"}
    panels = dataset.examples(evaluator)["episode.png"]().axes
    assert [axes.get_ylabel() for axes in panels] == ["observation", "action", "sum of rewards"]
    assert [line.get_ydata().tolist() for line in panels[2].lines] == [[1, 2, 3, 4, 5]]
    assert panels[2].get_xlabel() == "step of the episode" and len(panels[0].lines) == 4
