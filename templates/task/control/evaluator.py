STEPS_PER_MESSAGE = 32  # The ranks ask each other only so often whether any still plays.


class Evaluator:
    """Plays all episodes of the test set with the most likely actions, each once, each time it is called.

    ``guard`` returns a context manager for some steps, entered equally often on every rank; it may raise to stop.
    """

    def __init__(
        self,
        episodes: dataset.Episodes,
        parallel: Strategy,
        config: DataConfig,
        seed: int,
        guard: Context = nullcontext,
        _: Any = None,
    ) -> None:
        self.episodes, self.parallel, self.seed, self.guard = episodes, parallel, seed, guard
        self.policy, self.batch_size = Policy(parallel, episodes.model), config.eval_batch_size

    def __call__(self) -> dict[str, Any]:
        """Return ``num_samples`` and ``dataset.aggregate_metrics``, the same on every rank; a collective."""
        self.parallel.average_buffers()
        self.parallel.module.eval()
        own = self.play_share()
        self.parallel.module.train()
        # One message of a few arrays per rank; ranks with the same share have played the same episodes.
        shares = all_gather_object(own if self.policy.is_first else {name: values[:0] for name, values in own.items()})
        metrics = merge(shares, len(self.episodes))
        progress = {"environment_steps": self.episodes.experience.environment_steps}
        return {"num_samples": len(self.episodes), **dataset.aggregate_metrics(metrics), **progress}

    def play_share(self) -> Metrics:
        """Return the metrics of every ``dp_size``-th episode from ``dp_rank`` on, and their ``index``."""
        own, size = range(self.parallel.dp_rank, len(self.episodes), self.parallel.dp_size), self.batch_size
        most = -(-len(self.episodes) // self.parallel.dp_size)  # Share 0 has at least as many as any other.
        played = []
        for first in range(0, most, size):
            numbers = own[first : first + size]
            # A rank without episodes still plays one, so that the model's collectives match.
            metrics = self.play(numbers or range(1))
            played.append(metrics if numbers else {name: values[:0] for name, values in metrics.items()})
        return {name: np.concatenate([metrics[name] for metrics in played]) for name in played[0]}

    def play(self, numbers: range) -> Metrics:
        """Play episodes at the same time, until no rank plays any more."""
        control = self.episodes.control
        is_filmed = control.gif is not None and self.parallel.dp_rank == 0 and numbers[0] == 0 and self.policy.is_first
        make = partial(make_environment, control.environment)
        first = partial(make, render_mode="rgb_array" if is_filmed else None)
        vector = SyncVectorEnv([first, *[make] * (len(numbers) - 1)])  # It resets environments that have ended.
        observations, _ = vector.reset(seed=[derive_seed(self.seed, "evaluation", number) for number in numbers])
        playing, returns, lengths = np.full(len(numbers), True), np.zeros(len(numbers)), np.zeros(len(numbers), int)
        frames: list[Any] = []
        while any(all_gather_object(bool(playing.any()))):
            with self.guard():
                for _ in range(STEPS_PER_MESSAGE):
                    if is_filmed and playing[0]:
                        frames.append(vector.envs[0].render())
                    policy, _ = self.policy(to_tensor(observations))
                    actions = to_valid(policy.mode, vector.single_action_space)
                    observations, rewards, terminated, truncated, _ = vector.step(actions)
                    returns, lengths = returns + rewards * playing, lengths + playing
                    playing &= ~(terminated | truncated)
        if is_filmed:
            save_gif(Path(str(control.gif)), frames, vector.metadata.get("render_fps", 30))
        vector.close()
        return {"index": np.array(numbers), "return": returns, "length": lengths}


def save_gif(path: Path, frames: list[Any], frames_per_second: float) -> None:
    """Save the frames of an episode as an animation."""
    path.parent.mkdir(parents=True, exist_ok=True)
    first, *others = map(Image.fromarray, frames)
    first.save(path, save_all=True, append_images=others, duration=round(1000 / frames_per_second), loop=0)
