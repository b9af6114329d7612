@dataclass
class DatasetConfig:
    """Proximal policy optimization (Schulman et al. 2017); a sample is an environment."""

    steps: PositiveInt = 256
    """Number of steps in each environment that one step of training learns from."""
    passes: PositiveInt = 10
    """Number of passes over these steps."""
    minibatches: PositiveInt = 4
    """Number of updates of the weights per pass, each with another part of the steps."""
    discount: PositiveFloat = 0.99
    """Factor by which a reward counts less for each step that it lies in the future."""
    gae_lambda: float = 0.95
    """Generalized advantage estimation: 0 trusts the critic at once; 1, only observed rewards."""
    clip: PositiveFloat = 0.2
    """Change of an action's probability, as a ratio, beyond which the loss has no gradient."""
    entropy_weight: float = 0.0
    """Weight of the policy's entropy in the loss, against settling on one action too early."""

    def check(self, config: "Config", world_size: int) -> None:
        """Reject factors that are too large, and more parts than steps."""
        if self.discount >= 1:
            raise UserError(f"dataset.discount is {self.discount}; give a number below 1")
        if self.gae_lambda > 1:
            raise UserError(f"dataset.gae_lambda is {self.gae_lambda}; give at most 1")
        if self.minibatches > self.steps:
            advice = f"give at most dataset.steps, {self.steps}"
            raise UserError(f"dataset.minibatches is {self.minibatches}; {advice}")


@dataclass
class ModelConfig:
    """An actor and a critic, perceptrons of the same size, for an environment of Gymnasium."""

    environment: str = "CartPole-v1"
    """Id of an environment with vectors as observations, discrete actions and limited episodes."""
    width: PositiveInt = 64
    """Number of features in each hidden layer of the actor and of the critic."""
    depth: PositiveInt = 2
    """Number of hidden layers in each of them."""
    weights: str | None = field(default=None, metadata={"file": True})
    """File that a new run starts from: a checkpoint, a state_dict or a .safetensors file."""

    def check(self, config: "Config", world_size: int) -> None:
        """Reject an environment that does not exist or fit."""
        self.sizes()

    def sizes(self) -> tuple[int, int]:
        """Return the number of features of an observation, and the number of actions."""
        # Gymnasium takes half a second to import, so other commands do without it.
        import gymnasium

        try:
            environment = gymnasium.make(self.environment)
        except (gymnasium.error.Error, ImportError) as error:
            raise UserError(f"model.environment is {self.environment}: {error}") from None
        # The policy is a perceptron with one output per action, and episodes have to end.
        observations = environment.observation_space
        actions = environment.action_space
        spec = environment.spec
        if (
            not isinstance(observations, gymnasium.spaces.Box)
            or len(observations.shape) != 1
            or not isinstance(actions, gymnasium.spaces.Discrete)
            or spec is None
            or spec.max_episode_steps is None
        ):
            raise UserError(
                f"model.environment is {self.environment}; give one whose observations are "
                "vectors, whose actions are discrete, and whose episodes have a limited length"
            )
        return observations.shape[0], int(actions.n)
