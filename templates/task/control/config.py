@dataclass
class DatasetConfig:
    """Proximal policy optimization (Schulman et al. 2017) in ``data.global_batch_size`` environments."""

    steps: int = 256
    """Steps in each environment, from the start of an episode on, that a step of training learns from."""
    passes: int = 10
    """Passes over them."""
    minibatches: int = 4
    """Updates of the weights per pass, each with another part of the steps of every environment."""
    discount: float = 0.99
    """Factor by which a reward counts less for each step that it lies in the future."""
    gae_lambda: float = 0.95
    """Generalized advantage estimation: near 0, trust the critic after one step; 1, trust only observed rewards."""
    clip: float = 0.2
    """Change of an action's probability, as a ratio, beyond which the loss gives no more gradient."""
    entropy_weight: float = 0.0
    """Weight of the policy's entropy in the loss, which keeps it from settling on one action too early."""

    def check(self, *_: object) -> None:
        """Reject factors that are too large, and more parts than steps."""
        if self.discount >= 1:
            raise UserError(f"dataset.discount is {self.discount}; give a number below 1")
        if self.gae_lambda > 1:
            raise UserError(f"dataset.gae_lambda is {self.gae_lambda}; give at most 1")
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

    def check(self, *_: object) -> None:
        """Reject an environment that does not exist or fit."""
        self.sizes()

    def sizes(self) -> tuple[int, int]:
        """Return how many numbers an observation has, and how many actions there are to choose from."""
        import gymnasium  # Takes half a second.

        try:
            environment = gymnasium.make(self.environment)
        except (gymnasium.error.Error, ImportError) as error:
            raise UserError(f"model.environment is {self.environment}: {error}") from None
        seen, actions, spec = environment.observation_space, environment.action_space, environment.spec
        if isinstance(seen, gymnasium.spaces.Box) and isinstance(actions, gymnasium.spaces.Discrete):
            if len(seen.shape) == 1 and spec is not None and spec.max_episode_steps is not None:
                return seen.shape[0], int(actions.n)
        raise UserError(
            f"model.environment is {self.environment}; give one whose observations are vectors, whose actions are "
            "discrete, and whose episodes have a limited length"
        )
