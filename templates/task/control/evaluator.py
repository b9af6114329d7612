class Evaluator:
    """Plays all episodes of the test set with the most likely actions, each once, each time it is called.

    ``guard`` returns a context manager for some steps, entered equally often on every rank; it may raise to stop.
    ``experience`` is what was trained on so far. On rank 0, ``first_episode`` has the observation, the action and the
    reward of each step of the first episode.
    """

    def __init__(
        self,
        episodes: dataset.Episodes,
        parallel: Strategy,
        config: DataConfig,
        seed: int,
        guard: Context = nullcontext,
        experience: Any = None,
    ) -> None:
        self.episodes, self.parallel, self.seed, self.guard = episodes, parallel, seed, guard
        self.policy, self.batch_size = Policy(parallel, episodes.model), config.eval_batch_size
        self.experience = experience
        self.first_episode: list[tuple[np.ndarray, np.ndarray, float]] = []
        self.film = Film()

    def __call__(self) -> dict[str, Any]:
        """Return ``num_samples`` and ``dataset.aggregate_metrics``, the same on every rank; a collective."""
        self.parallel.average_buffers()
        self.parallel.module.eval()
        own = self.play_share()
        self.parallel.module.train()
        # One message of a few arrays per rank; ranks with the same share have played the same episodes.
        shares = all_gather_object(own if self.policy.is_first else {name: values[:0] for name, values in own.items()})
        metrics = merge(shares, len(self.episodes))
        if (gif := self.episodes.control.gif) is not None:
            on_main(lambda: self.film.save(Path(gif)))
        progress = {"environment_steps": self.experience.environment_steps} if self.experience else {}
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
        is_first = self.parallel.dp_rank == 0 and numbers[0] == 0 and self.policy.is_first
        is_filmed = is_first and control.gif is not None
        first = partial(make_environment, control, render_mode="rgb_array" if is_filmed else None)
        others = [partial(make_environment, control)] * (len(numbers) - 1)
        vector = SyncVectorEnv([first, *others])  # It resets environments that have ended.
        seeds: list[int | None] = [derive_seed(self.seed, "evaluation", number) for number in numbers]
        observations, _ = vector.reset(seed=seeds, options={})  # As in training.
        playing, returns, lengths = np.full(len(numbers), True), np.zeros(len(numbers)), np.zeros(len(numbers), int)
        self.film.add(vector, is_filmed)
        self.first_episode = [] if is_first else self.first_episode
        while any(all_gather_object(bool(playing.any()))):
            with self.guard():
                for _ in range(STEPS_PER_MESSAGE):
                    policy, _ = self.policy(to_tensor(observations))
                    actions = to_valid(policy.mode, vector.single_action_space)
                    seen = np.array(observations[0])
                    observations, rewards, terminated, truncated, _ = vector.step(actions)
                    self.film.add(vector, is_filmed and playing[0])
                    if playing[0] and is_first:
                        self.first_episode.append((seen, np.array(actions[0]), float(rewards[0])))
                    returns, lengths = returns + rewards * playing, lengths + playing
                    playing &= ~(terminated | truncated)
        vector.close()
        return {"index": np.array(numbers), "return": returns, "length": lengths}
