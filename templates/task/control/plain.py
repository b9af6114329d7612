def batches(model: nn.Module, config: Any) -> Iterator[Any]:
    """Yield global batches of experience: the same number of steps of each environment, in an order of its own."""
    control, seed = config.control, config.run.seed
    share = config.data.global_batch_size // control.environments
    worlds = [World(config, number) for number in range(control.environments)]
    samples: list[list[dict[str, Any]]] = []
    for epoch in count():
        if epoch % control.passes == 0:
            samples = [world.collect(model, epoch // control.passes) for world in worlds]
        orders = [torch.randperm(control.steps, generator=generator(seed, "order", epoch, w.number)) for w in worlds]
        for start in range(0, control.steps, share):
            picked = [own[i] for own, order in zip(samples, orders, strict=True) for i in order[start : start + share]]
            batch: dict[str, Any] = {name: torch.stack([sample[name] for sample in picked]) for name in picked[0]}
            advantage = batch["advantage"].double()
            batch["advantage"] = ((advantage - advantage.mean()) / advantage.std(correction=0)).float()
            settings = {name: getattr(control, name) for name in ("clip", "value_weight", "entropy_weight")}
            yield batch.pop("observation"), batch | settings


class World:
    """One environment, which continues from one collection to the next."""

    def __init__(self, config: Any, number: int) -> None:
        self.config, self.number, self.episode = config, number, 0
        self.environment = make(config)
        self.observation = self.reset()

    def reset(self) -> Tensor:
        """Start the next episode."""
        key = (self.config.run.seed, "reset", self.number, self.episode)
        self.episode += 1
        return torch.as_tensor(self.environment.reset(seed=hashed(*key))[0], dtype=torch.float32)

    @torch.no_grad()
    def collect(self, model: nn.Module, rollout: int) -> list[dict[str, Any]]:
        """Return the steps that the policy of now takes, one at a time."""
        control, steps = self.config.control, []
        random = generator(self.config.run.seed, "action", self.number, rollout)
        for noise in torch.rand(control.steps, generator=random).tolist():
            *logits, value = model(self.observation[None])[0]
            log_probs = torch.stack(logits).log_softmax(dim=0)
            ends = log_probs.exp().cumsum(dim=0).tolist()
            action = next((i for i, end in enumerate(ends[:-1]) if noise < end), len(ends) - 1)
            reached, reward, terminated, truncated, _ = self.environment.step(action)
            observation, next_observation = self.observation, torch.as_tensor(reached, dtype=torch.float32)
            next_value = 0.0 if terminated else float(model(next_observation[None])[0, -1])
            td_error = float(reward) + control.discount * next_value - float(value)
            done = terminated or truncated
            steps.append((observation, action, log_probs[action], value, td_error, done))
            self.observation = self.reset() if done else next_observation
        return [sample(steps[i:], control.discount * control.gae_lambda) for i in range(len(steps))]


def sample(steps: Sequence[Any], decay: float) -> dict[str, Any]:
    """Return the first of some steps; its advantage is the decaying sum of the errors up to the episode's end."""
    observation, action, log_prob, value, *_ = steps[0]
    length = next((i for i, step in enumerate(steps, start=1) if step[-1]), len(steps))
    advantage = torch.tensor(sum(decay**i * step[4] for i, step in enumerate(steps[:length])))
    known = {"observation": observation, "action": torch.tensor(action), "log_prob": log_prob}
    return known | {"advantage": advantage, "return": advantage + value}


@torch.no_grad()
def play(model: nn.Module, config: Any) -> dict[str, np.ndarray]:
    """Return the metrics of all evaluation episodes, played one after another."""
    environment, played = make(config), []
    for number in range(config.control.evaluation_episodes):
        observation, _ = environment.reset(seed=hashed(config.run.seed, "evaluation", number))
        rewards, is_over = [], False
        while not is_over:
            logits = model(torch.as_tensor(observation, dtype=torch.float32)[None])[0, :-1]
            observation, reward, terminated, truncated, _ = environment.step(int(logits.argmax()))
            rewards.append(float(reward))
            is_over = terminated or truncated
        played.append((sum(rewards), len(rewards)))
    return dict(zip(("return", "length"), np.array(played).T, strict=True))


def make(config: Any) -> Any:
    """Return the environment of the run."""
    return gymnasium.make(config.control.environment, max_episode_steps=config.control.max_episode_steps)


def generator(*key: int | str) -> torch.Generator:
    """Return a generator for a key."""
    return torch.Generator().manual_seed(hashed(*key))


def hashed(*key: int | str) -> int:
    """Return a seed for a key."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest()) >> 1
