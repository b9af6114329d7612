"""Environments and settings that experience cannot be collected with are rejected in one line."""

from typing import Any

import gymnasium
import pytest

from support import module, settings
from walk_environment import WALK, Walk, advance, build

config, spaces = module("config"), module("launch.spaces")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--control.environment CartPol-v1", "control.environment is CartPol-v1"),
        ("--control.environment a:b:c", "control.environment is a:b:c, which cannot be made or played: "),
        ("--control.environment Endless-v0", "give --control.max_episode_steps"),
        ("--control.environment Random-v0", "registered as nondeterministic"),
        ("--control.environment Walk-v0 --control.gif episode.gif", "cannot render to an array"),
        ("--control.environment FrozenLake-v1", "observations are a Discrete; the model takes vectors"),
        ("--control.environment Image-v0", "observations are a Box of shape (1, 1, 1); the model takes vectors"),
        ("--model.observations 3", "model.observations 3"),
        ("--control.environment absent:Absent-v0", "No module named 'absent'"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*render_mode")  # Gymnasium warns of what is rejected.
def test_an_environment_that_does_not_fit_is_rejected(
    capsys: pytest.CaptureFixture[str], words: str, named: str
) -> None:
    with pytest.raises(SystemExit):
        settings(*words.split())
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and named in error


@pytest.mark.parametrize(("saved", "given"), [("antigravity:Reach-v0", "CartPole-v1"), ("Pendulum-v1", "CartPole-v1")])
def test_a_checkpoint_names_the_environment_but_no_other_package(saved: str, given: str) -> None:
    chosen, other = config.ControlConfig(environment=given), config.ControlConfig(environment=saved)
    if ":" in saved:
        with pytest.raises(config.UserError, match=f"add --control.environment {saved}"):
            spaces.take_environment("step.pt", other, chosen)
    else:
        spaces.take_environment("step.pt", other, chosen)
        assert chosen.environment == saved


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise gymnasium.error.DependencyNotInstalled("pygame is not installed,\nrun `pip install ...`")

    monkeypatch.setattr(gymnasium, "make", fail)
    with pytest.raises(config.UserError, match="made or played: DependencyNotInstalled: pygame is not installed, run"):
        spaces.measure_spaces(config.ControlConfig())


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        ("init", "RuntimeError: no license; gymnasium.pprint_registry()"),
        ("global", "something else for the same seed and actions"),
        ("shape", "should be a Box of shape (1,), but reset returned one of shape (2,)"),
    ],
)
def test_an_environment_with_a_fault_is_rejected_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str, named: str
) -> None:
    monkeypatch.setattr(Walk, "fault", fault)
    with pytest.raises(SystemExit):
        settings(*WALK)
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1


def test_a_limit_of_the_steps_of_an_episode_is_obeyed() -> None:
    experience = build("--control.environment", "Endless-v0", "--control.max_episode_steps", "6")
    advance(experience, 0)
    assert experience.metrics["max_return"] == experience.metrics["mean_length"] == 6


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--data.global_batch_size 18", "data.global_batch_size is 18, .*; 16 or 32 would"),
        ("--data.num_workers 1", "data.num_workers is 1"),
        ("--control.environments 5", r"control.environments is 5, .* 2 share\(s\); 6 would"),
    ],
)
def test_settings_that_cannot_be_trained_with_are_rejected(words: str, named: str) -> None:
    chosen = settings(*words.split())
    with pytest.raises(config.UserError, match=named):
        chosen.control.check_batch(chosen.data, shares=2)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--control.discount 1.5", r"control.discount is 1\.5"),
        ("--control.gif episode.mp4", "control.gif is episode.mp4; .* ends with .gif"),
        (f"--control.gif {__file__}/episode.gif", "which cannot be written"),
    ],
)
def test_a_setting_that_makes_no_sense_is_rejected(words: str, named: str) -> None:
    with pytest.raises(config.UserError, match=named):
        settings(*words.split()).check()


@pytest.mark.parametrize("name", ["environments", "steps", "passes"])
def test_a_number_that_would_fill_the_memory_is_rejected(name: str) -> None:
    with pytest.raises(config.UserError, match=f"control.{name} is .*; give at most"):
        module("launch").check_values(vars(settings(f"--control.{name}", "9007199254740991")))
