"""The environment, before anything starts: whether it can be made, and the sizes that it gives the model."""

from typing import Any

import gymnasium
from gymnasium.spaces import Box, Discrete

from ..config import ControlConfig, ModelConfig, UserError
from .environment import exit_with_error


def make_environment(name: str, render_mode: str | None = None) -> Any:
    """Make one environment; reject a wrong name, one whose packages are missing, and one that cannot render."""
    try:
        environment = gymnasium.make(name, render_mode=render_mode, disable_env_checker=True)
        if render_mode is not None:
            environment.reset()
            environment.render()
    except (gymnasium.error.Error, ImportError) as error:
        raise UserError(f"control.environment is {name}: {' '.join(str(error).split())}") from None
    if environment.render_mode != render_mode:
        raise UserError(f"control.environment is {name}, which cannot render to an array; leave control.gif out")
    return environment


def measure_spaces(name: str) -> dict[str, int]:
    """Return the sizes that the model needs for an environment, by setting; reject spaces that it cannot take."""
    environment = make_environment(name)
    observations, actions = environment.observation_space, environment.action_space
    environment.close()
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
        if control.gif is not None:
            make_environment(control.environment, render_mode="rgb_array").close()
        for name, size in measure_spaces(control.environment).items():
            if getattr(model, name) is None:
                setattr(model, name, size)
        check_spaces(control.environment, model)
    except UserError as error:
        exit_with_error(str(error))


def check_spaces(name: str, model: ModelConfig) -> None:
    """Reject the settings of a model for another environment."""
    for size, value in measure_spaces(name).items():
        if getattr(model, size) != value:
            raise UserError(
                f"control.environment is {name}, with {size} {value}, but the model has model.{size} "
                f"{getattr(model, size)}; leave that out, or give the environment that the model was trained in"
            )
