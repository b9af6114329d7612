@dataclass
class ControlConfig:
    """Proximal policy optimization in an environment of Gymnasium. Its defaults solve CartPole-v1."""

    environment: str = "CartPole-v1"
    """Id of the environment. Its observations are vectors, its actions discrete or continuous. evaluate takes this and
    the next setting from the checkpoint."""
    max_episode_steps: PositiveInt | None = None
    """Steps after which an episode is cut off; null takes the limit that the environment was registered with."""
    environments: PositiveInt = 8
    """Copies of the environment, over all ranks together; a multiple of the number of ranks that share them."""
    steps: PositiveInt = 32
    """Steps in each of them that make up the experience of an epoch."""
    passes: PositiveInt = 20
    """Epochs that train on the same experience, before it is collected anew with the policy of that moment."""
    discount: PositiveFloat = 0.98
    """Factor by which a reward counts less for each step that it is in the future."""
    gae_lambda: NonNegativeFloat = 0.8
    """Generalized advantage estimation: 0 trusts the critic's values after one step, 1 only the observed rewards."""
    clip: PositiveFloat = 0.2
    """Change of an action's probability, as a ratio, beyond which the loss gives no more gradient."""
    value_weight: NonNegativeFloat = 0.5
    """Weight of the critic's squared error in the loss."""
    entropy_weight: NonNegativeFloat = 0.0
    """Weight in the loss of the policy's entropy, which keeps it from settling on one action too early."""
    evaluation_episodes: PositiveInt = 100
    """Episodes per evaluation, over all ranks together, each with the most likely actions."""
    gif: str | None = None
    """File, *.gif, for an animation of the first episode of each evaluation; null writes none."""

    def check(self) -> None:
        """Reject factors above 1, and a file that cannot be written."""
        for name in ("discount", "gae_lambda"):
            if getattr(self, name) > 1:
                raise UserError(f"control.{name} is {getattr(self, name)}; give at most 1")
        if self.gif is not None:
            self.check_gif(self.gif)

    def check_gif(self, path: str) -> None:
        """Reject a name with another suffix, and a folder that can be neither written to nor created."""
        if not path.endswith(".gif"):
            raise UserError(f"control.gif is {path}; give a file whose name ends with .gif")
        folder = os.path.dirname(os.path.abspath(path))
        while not os.path.exists(folder):
            folder = os.path.dirname(folder)
        if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
            raise UserError(f"control.gif is {path}, which cannot be written; give a file in another folder")

    def check_batch(self, data: DataConfig, shares: int) -> None:
        """Reject environments that do not divide into equal shares, and unequal parts of them in a global batch."""
        count, size = self.environments, data.global_batch_size
        if count % shares:
            fits = -(-count // shares) * shares
            raise UserError(
                f"control.environments is {count}, which does not divide into {shares} share(s); {fits} would"
            )
        if size % count or self.steps % (size // count):
            divisors = [n for n in range(1, self.steps + 1) if self.steps % n == 0]
            below = max((n for n in divisors if n * count < size), default=divisors[0])
            above = min((n for n in divisors if n * count > size), default=divisors[-1])
            fits = " or ".join(str(count * n) for n in sorted({below, above}))
            raise UserError(
                f"data.global_batch_size is {size}, but a batch has equally many of the {self.steps} steps of each of "
                f"{count} environments; {fits} would do"
            )
        if data.num_workers:
            raise UserError(f"data.num_workers is {data.num_workers}; give 0: each rank steps its own environments")


@dataclass
class ModelConfig:
    """An actor and a critic side by side, perceptrons of the same size."""

    width: PositiveInt = 64
    """Features of each hidden layer, of the actor and of the critic."""
    depth: PositiveInt = 2
    """Hidden layers of each."""
    observations: PositiveInt | None = None
    """Numbers in an observation; null takes it from the environment, and so do the next two."""
    actions: NonNegativeInt | None = None
    """Discrete actions to choose from; 0 if actions are continuous."""
    action_dims: NonNegativeInt | None = None
    """Numbers in a continuous action; 0 if actions are discrete."""
    weights: str | None = None
    """Weights to start a new run from: a checkpoint, a state_dict file or a .safetensors file."""
    weights_except: list[str] = field(default_factory=list)
    """Modules that keep their initial weights nevertheless, for example [head]."""

    def check(self) -> None:
        """Reject sizes that no environment has; before it is known, both are null."""
        if bool(self.actions) == bool(self.action_dims) and self.actions is not None:
            raise UserError("model.actions and model.action_dims do not say which actions there are; leave both out")
#:: if cookiecutter.__cuts_blocks ::#

    def count_blocks(self) -> int:
        """Return the number of blocks; the model can be split between any two of them."""
        return 1 + self.depth
#:: endif ::#
#:: if cookiecutter.__shards_layers ::#

    def check_shards(self, size: int, sequence_parallel: bool) -> None:
        """Reject settings that cannot be sharded over ``size`` ranks."""
        if self.width % size:
            fits = -(-self.width // size) * size
            raise UserError(f"model.width is {self.width}, which does not divide into {size} shards; {fits} would")
        if sequence_parallel:
            raise UserError("parallel.sequence_parallel is on, but observations have no sequence; leave it off")
#:: endif ::#
