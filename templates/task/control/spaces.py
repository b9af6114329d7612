"""The environment, before anything starts: whether it can be made, and the sizes that it gives the model."""

import os
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

from ..config import ControlConfig, ModelConfig, UserError
from .environment import exit_with_error

TRIED = 32  # Steps in an environment, before it is taken.


def make_environment(control: ControlConfig, render_mode: str | None = None) -> Any:
    """Make one environment; wrappers belong here."""
    options = {} if render_mode is None else {"render_mode": render_mode}
    if options:
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # Otherwise pygame looks for a display, and prints an error.
    limit = control.max_episode_steps
    return gymnasium.make(control.environment, max_episode_steps=limit, disable_env_checker=True, **options)


def try_environment(control: ControlConfig) -> Any:
    """Make, play and close an environment; reject one that fails in it, or that no run could repeat or end."""
    name = control.environment
    try:
        environment = make_environment(control)
        first, again = play(environment), play(environment)
        environment.close()
    except Exception as error:  # It may be anybody's code.
        raise UserError(
            f"control.environment is {name}, which cannot be made or played: {describe_error(error)}; "
            "gymnasium.pprint_registry() lists those that are installed"
        ) from None
    if isinstance(environment.observation_space, Box):
        check_observations(name, environment.observation_space, first, again)
    spec = environment.spec
    if spec.nondeterministic:
        raise UserError(
            f"control.environment is {name}, which is registered as nondeterministic: a resumed run could not repeat "
            "its episodes; choose another, or make it depend on its seed and the actions alone"
        )
    if spec.max_episode_steps is None:
        raise UserError(
            f"control.environment is {name}, whose episodes have no time limit: an evaluation might never end; give "
            "--control.max_episode_steps"
        )
    return environment


def play(environment: Any) -> list[Any]:
    """Return the observations and rewards of the first steps, with random actions that are the same each time."""
    environment.action_space.seed(0)
    seen = [environment.reset(seed=0)[0]]
    for _ in range(TRIED):
        observation, reward, terminated, truncated, _ = environment.step(environment.action_space.sample())
        seen += [observation, reward]
        if terminated or truncated:
            seen.append(environment.reset()[0])
    return seen


def check_observations(name: str, space: Box, first: list[Any], again: list[Any]) -> None:
    """Reject observations of another shape than the environment says, and what is not the same the second time."""
    if np.shape(first[0]) != space.shape:
        raise UserError(
            f"control.environment is {name}, whose observations should be {describe(space)}, but reset returned one of "
            f"shape {np.shape(first[0])}; fix the environment"
        )
    if not all(np.array_equal(one, other, equal_nan=True) for one, other in zip(first, again, strict=False)):
        raise UserError(
            f"control.environment is {name}, which returned something else for the same seed and actions: a resumed "
            "run could not repeat its episodes; let it draw random numbers from self.np_random alone"
        )


def check_render(control: ControlConfig) -> None:
    """Reject an environment that cannot be filmed, if it is to be."""
    if control.gif is None:
        return
    try:
        environment = make_environment(control, render_mode="rgb_array")
        environment.reset(seed=0)
        problem = None if environment.render() is not None else "it returns no array"
        environment.close()
    except Exception as error:
        problem = describe_error(error)
    if problem:
        raise UserError(
            f"control.environment is {control.environment}, which cannot render to an array: {problem}; leave "
            "control.gif out"
        )


def describe_error(error: Exception) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def measure_spaces(control: ControlConfig) -> dict[str, int]:
    """Return the sizes that the model needs for the environment, by setting; reject spaces that it cannot take."""
    name, environment = control.environment, try_environment(control)
    observations, actions = environment.observation_space, environment.action_space
    if not isinstance(observations, Box) or len(observations.shape) != 1:
        raise UserError(
            f"control.environment is {name}, whose observations are {describe(observations)}; the model takes vectors: "
            "choose another, or wrap it in make_environment (gymnasium.wrappers.FlattenObservation)"
        )
    sizes = {"observations": observations.shape[0], "actions": 0, "action_dims": 0}
    if isinstance(actions, Discrete):
        return sizes | {"actions": int(actions.n)}
    if isinstance(actions, Box) and len(actions.shape) == 1:
        return sizes | {"action_dims": actions.shape[0]}
    raise UserError(
        f"control.environment is {name}, whose actions are {describe(actions)}; the policy chooses one of several "
        "actions, or a vector: choose another environment, or wrap it in make_environment"
    )


def describe(space: Any) -> str:
    """Return a space in a few words."""
    return f"a {type(space).__name__} of shape {space.shape}" if space.shape else f"a {type(space).__name__}"


def complete_settings(control: ControlConfig, model: ModelConfig) -> None:
    """Set the sizes of the model that are null to those of the environment; exit if that cannot be trained on."""
    try:
        sizes = measure_spaces(control)
        for name, size in sizes.items():
            if getattr(model, name) is None:
                setattr(model, name, size)
        check_sizes(sizes, control, model)
        check_render(control)
    except UserError as error:
        exit_with_error(str(error))


def check_spaces(control: ControlConfig, model: ModelConfig) -> None:
    """Reject the settings of a model for another environment."""
    check_sizes(measure_spaces(control), control, model)


def check_sizes(sizes: dict[str, int], control: ControlConfig, model: ModelConfig) -> None:
    """Reject a model that has not the sizes of its environment."""
    for size, value in sizes.items():
        if getattr(model, size) != value:
            raise UserError(
                f"control.environment is {control.environment}, with {size} {value}, but the model has model.{size} "
                f"{getattr(model, size)}; leave that out, or give the environment that the model was trained in"
            )


def take_environment(path: str, saved: ControlConfig, control: ControlConfig) -> None:
    """Set the environment to that of the checkpoint at ``path``, whose settings are ``saved``.

    Rejects one of another package that only the checkpoint names: Gymnasium would import its module, and a checkpoint
    must not choose what code is run.
    """
    is_own = ":" not in saved.environment or saved.environment.startswith(f"{__package__.partition('.')[0]}.")
    if not is_own and saved.environment != control.environment:
        raise UserError(
            f"{path} was trained in {saved.environment}, whose module would be imported; if you trust it, add "
            f"--control.environment {saved.environment}"
        )
    control.environment, control.max_episode_steps = saved.environment, saved.max_episode_steps
    check_render(control)
