@dataclass
class DatasetConfig:
    """Proximal policy optimization (Schulman et al. 2017) in ``data.global_batch_size`` environments."""

    steps: int = 256
    """Steps in each environment, from the start of an episode on, that a training step is based on."""
    passes: int = 10
    """Passes of a training step over this experience."""
    minibatches: int = 4
    """Parts of each pass, with an update of the weights after each; a part has equally many steps of each environment."""
    discount: float = 0.99
    """Factor by which a reward counts less for each step that it lies in the future."""
    gae_lambda: float = 0.95
    """Generalized advantage estimation: near 0, trust the critic after one step; 1, trust only observed rewards."""
    clip: float = 0.2
    """Change of an action's probability, as a ratio, beyond which the loss gives no more gradient."""
    entropy_weight: float = 0.0
    """Weight of the policy's entropy in the loss, which keeps it from settling on one action too early."""

    def check(self) -> None:
        """Reject factors above 1, and more parts of a pass than steps."""
        for name in ("discount", "gae_lambda"):
            if getattr(self, name) > 1:
                raise UserError(f"dataset.{name} is {getattr(self, name)}; give at most 1")
        if self.minibatches > self.steps:
            raise UserError(f"dataset.minibatches is {self.minibatches}; give at most dataset.steps, {self.steps}")


@dataclass
class ModelConfig:
    """An actor and a critic, perceptrons of the same size, for an environment of Gymnasium."""

    environment: str = "CartPole-v1"
    """Id of the environment: observations are vectors, actions discrete, and the length of an episode is limited."""
    width: int = 64
    """Features of each hidden layer, of the actor and of the critic."""
    depth: int = 2
    """Hidden layers of each."""
    weights: str | None = field(default=None, metadata={"file": True})
    """A file of weights that a new run starts from: a checkpoint, a state_dict or a .safetensors file."""

    def check(self) -> None:
        """Reject an environment that does not exist or fit."""
        self.sizes()

    def sizes(self) -> tuple[int, int]:
        """Return how many numbers an observation has, and from how many actions the policy chooses."""
        import gymnasium  # Takes half a second.

        try:
            environment = gymnasium.make(self.environment)
        except gymnasium.error.Error as error:
            raise UserError(f"model.environment is {self.environment}: {error}") from None
        observations, actions = environment.observation_space, environment.action_space
        is_vector = isinstance(observations, gymnasium.spaces.Box) and len(observations.shape) == 1
        is_limited = environment.spec is not None and environment.spec.max_episode_steps is not None
        if not (is_vector and is_limited and isinstance(actions, gymnasium.spaces.Discrete)):
            raise UserError(
                f"model.environment is {self.environment}; give one with vectors as observations, discrete actions and "
                "a limit of the length of an episode"
            )
        return observations.shape[0], int(actions.n)
