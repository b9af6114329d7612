"""Faults, each with the test that has to catch it.

A fault replaces a piece of one file, which has to occur there once. A fault of a project is planted in a rendered
project, whose own test has to fail; a fault of the template is planted in a copy of the template.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """A fault: ``old`` becomes ``new`` in a file, and the tests of a file that ``-k`` selects have to fail.

    Attributes:
        test: The file and the selection, as ``file::selection``; it begins with a part of the test's name.
    """

    file: str
    old: str
    new: str
    test: str
    answers: dict[str, Any] = field(default_factory=dict)


SRC = "src/my_experiment/"
FSDP, TENSOR, PIPELINE, MODEL = ({"parallelism": name} for name in ("fsdp", "tensor", "pipeline", "model_parallel"))
LANGUAGE, CONTROL = {"task": "language"}, {"task": "control"}
SPLIT, RESUME = "test_split.py::plain_loop", "test_resume.py::killed_and_stopped"

# Caught by the tests of a rendered project.
PROJECT = {
    # The step
    "the gradient is not clipped": Mutant(
        SRC + "strategy.py",
        "nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)",
        "nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])",
        SPLIT,
    ),
    "the gradient is not reset": Mutant(SRC + "train.py", "        self.optimizer.zero_grad()\n", "", SPLIT),
    "the schedule does not move": Mutant(SRC + "train.py", "        self.scheduler.step()\n", "", SPLIT),
    "the rate is logged after the step": Mutant(
        SRC + "train.py",
        "self.log(losses, norm, lr)",
        "self.log(losses, norm, self.scheduler.get_last_lr()[0])",
        SPLIT,
    ),
    "the loss is logged for one rank": Mutant(SRC + "train.py", "zip(*parts, strict=True)", "zip(parts[0])", SPLIT),
    "micro-batches are not averaged": Mutant(
        SRC + "splitting/losses.py", "total = weight * self.microbatches", "total = weight", SPLIT
    ),
    "gradients are averaged over ranks": Mutant(SRC + "parallel.py", "loss * self.dp_size", "loss", SPLIT),
    "a gradient that is not finite moves the weights": Mutant(
        SRC + "train.py",
        '        self.guard.protect(losses["loss"], norm, self.optimizer)\n',
        "",
        "test_training.py::never_reaches_the_weights",
    ),
    # The optimizer
    "biases decay": Mutant(SRC + "optim.py", '{"weight_decay": 0.0}]', "decay]", SPLIT),
    "nothing decays": Mutant(SRC + "optim.py", '{"weight_decay": config.weight_decay}', '{"weight_decay": 0.0}', SPLIT),
    "no warm-up": Mutant(SRC + "optim.py", "if step < warmup:", "if False:", SPLIT),
    "the rate decays to zero": Mutant(
        SRC + "optim.py",
        "return least + (1 - least) *",
        "return",
        SPLIT,
    ),
    "optim.decay_steps is ignored": Mutant(
        SRC + "optim.py",
        "self.end = self.config.decay_steps or planned_steps",
        "self.end = planned_steps",
        SPLIT,
    ),
    "optim.betas is ignored": Mutant(SRC + "optim.py", "betas=config.betas, ", "", SPLIT),
    "optim.eps is ignored": Mutant(SRC + "optim.py", "eps=config.eps, ", "eps=1e-3, ", SPLIT),
    # The data
    "every epoch has the first one's order": Mutant(
        SRC + "train.py", "set_epoch(epoch, start", "set_epoch(0, start", SPLIT
    ),
    "run.seed does not order the data": Mutant(
        SRC + "data.py", "permuted(own, length, self.seed, epoch)", "permuted(own, length, epoch)", SPLIT
    ),
    "a round of the order is left out": Mutant(
        SRC + "splitting/order.py", "for i, key in enumerate(keys):", "for i, key in enumerate(keys[2:]):", SPLIT
    ),
    "an order is not uniform": Mutant(
        SRC + "splitting/order.py",
        "for i, key in enumerate(keys):",
        "for i, key in enumerate(keys[:2]):",
        "test_data.py::as_often_in_every_position",
    ),
    "an order is held in memory": Mutant(
        SRC + "splitting/order.py", "CHUNK = 4096", "CHUNK = 10**6", "test_data.py::takes_no_memory"
    ),
    "ranks read the same samples": Mutant(
        SRC + "data.py", "[self.rank :: self.num_replicas]", "[:: self.num_replicas]", "test_data.py::a_step_sees"
    ),
    "the incomplete batch is read": Mutant(
        SRC + "data.py",
        "length - (length - start) % self.global_batch_size",
        "length",
        "test_data.py::drops_the_incomplete_batch",
    ),
    "random transforms repeat in every epoch": Mutant(
        SRC + "splitting/seeding.py",
        "seed_generators(self.seed, epoch, index)",
        "seed_generators(self.seed, index)",
        SPLIT,
    ),
    "loading draws from the rank's generators": Mutant(
        SRC + "splitting/seeding.py", "        random.setstate(python)\n", "", "test_data.py::unless_it_draws"
    ),
    "random collation is not seeded": Mutant(
        SRC + "splitting/seeding.py",
        "            seed_generators(self.seed, *keys[0], COLLATE)\n",
        "",
        "test_data.py::what_a_batch_draws",
    ),
    "random collation repeats what its first sample drew": Mutant(
        SRC + "splitting/seeding.py", "*keys[0], COLLATE)", "*keys[0])", "test_data.py::what_a_batch_draws"
    ),
    "a stream repeats after a resume": Mutant(
        SRC + "splitting/streams.py", "done + number, None", "number, None", "test_data.py::a_stream_is_the_same"
    ),
    "shards repeat after a resume": Mutant(
        SRC + "splitting/streams.py", "len(range(turn, done, count))", "0", "test_data.py::splits_itself"
    ),
    # Evaluation
    "dropout acts in evaluation": Mutant(
        SRC + "evaluate.py", "        self.parallel.module.eval()\n", "", "test_training.py::evaluation_mode"
    ),
    "training goes on in evaluation mode": Mutant(
        SRC + "evaluate.py", "        self.parallel.module.train()\n", "", "test_training.py::evaluation_mode"
    ),
    "each rank counts every sample": Mutant(
        SRC + "data.py", "range(dp_rank, length, dp_size)", "range(0, length)", "test_data.py::reads_every_sample_once"
    ),
    "evaluation's last batch is a small one": Mutant(
        SRC + "data.py",
        "batches * self.batch_size * dp_size, dp_size)",
        "share * dp_size, dp_size)",
        "test_data.py::all_of_one_size",
    ),
    "what completes a batch of evaluation counts": Mutant(
        SRC + "evaluate.py",
        "append(values[:left])",
        "append(values)",
        "test_evaluate.py::counts_every_sample_once",
    ),
    "what was under way is lost when evaluation takes its turn": Mutant(
        SRC + "splitting/loaders.py",
        "itertools.chain(again, upcoming)",
        "upcoming",
        "test_data.py::are_loaded_by_the_same_processes",
    ),
    "evaluation has loader processes of its own": Mutant(
        SRC + "splitting/loaders.py",
        "loader_options(config, device), beside)",
        "loader_options(config, device), None)",
        "test_data.py::are_loaded_by_the_same_processes",
    ),
    "the worst checkpoint is the best": Mutant(
        SRC + "checkpoint/content.py",
        "sign * value <= sign * self.best_value",
        "sign * value >= sign * self.best_value",
        "test_training.py::and_the_best",
    ),
    # Experience
    "environments are seeded by their place on the rank": Mutant(
        SRC + "splitting/environments.py",
        "keys = zip(self.numbers, self.episodes, strict=True)",
        "keys = enumerate(self.episodes)",
        "test_dataset.py::does_not_depend_on_the_rank",
        CONTROL,
    ),
    "actions are drawn alike in every collection": Mutant(
        SRC + "splitting/experience.py", '"action", number, rollout)', '"action", number, 0)', SPLIT, CONTROL
    ),
    "every episode starts alike": Mutant(
        SRC + "splitting/environments.py",
        'derive_seed(self.seed, "reset", number, episode)',
        'derive_seed(self.seed, "reset", number)',
        SPLIT,
        CONTROL,
    ),
    "a random number stands for no action": Mutant(
        SRC + "splitting/policy.py",
        "policy.probs.cumsum(dim=1)[:, :-1]",
        "policy.probs.cumsum(dim=1)",
        "test_dataset.py::each_number_stands",
        CONTROL,
    ),
    "advantages are normalized by each rank": Mutant(
        SRC + "splitting/experience.py",
        "(sum(sums) / self.batch_size)",
        "(self.sum_advantages() * self.policy.strategy.dp_size / self.batch_size)",
        SPLIT,
        CONTROL,
    ),
    "an advantage has rewards of the next episode": Mutant(
        SRC + "dataset.py",
        "config.gae_lambda * ~done[:, step] * advantage",
        "config.gae_lambda * advantage",
        "test_dataset.py::gained_over_the_value",
        CONTROL,
    ),
    "the last step is followed by the first": Mutant(
        SRC + "splitting/experience.py",
        "        is_asked[:, -1] = True\n",
        "",
        "test_dataset.py::cut_off_goes_on",
        CONTROL,
    ),
    "the loss may be too high": Mutant(
        SRC + "dataset.py", "-torch.minimum(ratio", "-torch.maximum(ratio", "test_dataset.py::the_loss_stops", CONTROL
    ),
    "the fraction that is clipped has one side": Mutant(
        SRC + "dataset.py",
        '"clip_fraction": ((ratio - 1).abs() > clip)',
        '"clip_fraction": (ratio - 1 > clip)',
        "test_dataset.py::the_loss_stops",
        CONTROL,
    ),
    "records have the episodes of one rank": Mutant(
        SRC + "splitting/experience.py",
        "for share in episodes for number, ends in share.items()",
        "for number, ends in episodes[0].items()",
        "test_dataset.py::episodes_of_all_ranks",
        CONTROL,
    ),
    "an episode that is cut off ends": Mutant(
        SRC + "splitting/experience.py",
        '("reward", "value", "next_value", "terminated", "done")',
        '("reward", "value", "next_value", "done", "done")',
        "test_dataset.py::cut_off",
        CONTROL,
    ),
    "a resumed environment starts its episode anew": Mutant(
        SRC + "splitting/environments.py",
        """\
            for action in self.actions[index]:
                observation, reward, *_ = self.vector.envs[index].step(action.copy())
                self.observations[index] = torch.from_numpy(np.asarray(observation, dtype=np.float32))
                self.returns[index] += reward
            is_same = torch.equal(self.observations[index], state["observation"])
            if not is_same or self.returns[index] != state["return"]:""",
        "            if False:",
        "test_dataset.py::saved_is_restored",
        CONTROL,
    ),
    "an environment changes the action that is recorded": Mutant(
        SRC + "splitting/environments.py",
        "enumerate(valid.copy())",
        "enumerate(valid)",
        "test_dataset.py::were_taken_are_repeated",
        CONTROL,
    ),
    "a resumed run collects its experience anew": Mutant(
        SRC + "splitting/experience.py",
        'self.rollout, self.environment_steps = state["rollout"], state["environment_steps"]',
        'self.environment_steps = state["environment_steps"]',
        "test_dataset.py::saved_is_restored",
        CONTROL,
    ),
    "a resumed environment may be another": Mutant(
        SRC + "splitting/environments.py",
        'if not is_same or self.returns[index] != state["return"]:',
        "if False:",
        "test_dataset.py::does_not_repeat",
        CONTROL,
    ),
    "an earlier epoch collects anew": Mutant(
        SRC + "splitting/experience.py",
        "        if rollout < self.rollout:\n            return\n        if rollout > self.rollout:",
        "        if rollout != self.rollout:",
        "test_dataset.py::earlier_experience",
        CONTROL,
    ),
    "a stopped collection saves the environments as they are": Mutant(
        SRC + "splitting/experience.py",
        "own = self.snapshot or self.environments.state()",
        "own = self.environments.state()",
        "test_dataset.py::stopped_is_repeated",
        CONTROL,
    ),
    "a reward that is not finite is trained on": Mutant(
        SRC + "splitting/experience.py",
        "if problem := next(filter(None, problems), None):",
        "if problem := None:",
        "test_dataset.py::not_finite",
        CONTROL,
    ),
    "an action is not mapped to its bounds": Mutant(
        SRC + "splitting/environments.py",
        "np.where(is_bounded, rescaled, given)",
        "given",
        "test_dataset.py::finite_bounds",
        CONTROL,
    ),
    "the last frame is missing": Mutant(
        SRC + "evaluate.py",
        "self.film.add(vector, is_filmed and playing[0])",
        "self.film.add(vector, is_filmed and playing[0] and not (terminated | truncated)[0])",
        "test_dataset.py::whole_first_episode",
        CONTROL,
    ),
    "an episode that has ended counts on": Mutant(
        SRC + "evaluate.py",
        "returns + rewards * playing",
        "returns + rewards",
        "test_evaluate.py::counts_every_sample_once",
        CONTROL,
    ),
    "each rank writes the animation": Mutant(
        SRC + "evaluate.py",
        "on_main(lambda: self.film.save(Path(gif)))",
        "self.film.save(Path(gif))",
        "test_dataset.py::first_episode_is_filmed",
        CONTROL,
    ),
    "each rank plays every episode": Mutant(
        SRC + "evaluate.py",
        "own, size = range(self.parallel.dp_rank, ",
        "own, size = range(0, ",
        "test_evaluate.py::counts_every_sample_once",
        CONTROL,
    ),
    # Settings
    "train.precision is ignored": Mutant(
        SRC + "strategy.py", "[config.train.precision]", '["fp32"]', "test_training.py::in_the_precision"
    ),
    "train.compile is ignored": Mutant(
        SRC + "splitting/blocks.py", "if config.compile:", "if False:", "test_training.py::are_compiled"
    ),
    "train.activation_checkpointing is ignored": Mutant(
        SRC + "splitting/blocks.py",
        "if config.activation_checkpointing:",
        "if False:",
        "test_training.py::computed_again",
    ),
    "train.log_every is ignored": Mutant(
        SRC + "train.py",
        "if is_last or is_due(progress.step, config.train.log_every):",
        "if True:",
        "test_training.py::logs_every_few_steps",
    ),
    "train.eval_every is ignored": Mutant(
        SRC + "train.py",
        " or is_due(progress.step, self.config.train.eval_every)",
        "",
        "test_training.py::and_the_best",
    ),
    "distributed.timeout_seconds is ignored": Mutant(
        SRC + "train.py",
        "        runtime.set_timeout(self.config.distributed.timeout_seconds)\n",
        "",
        "test_training.py::wait_for_each_other",
    ),
    # Checkpoints
    "random state is not restored": Mutant(
        SRC + "checkpoint/checkpointer.py",
        "set_rng_state(state, self.process.device)",
        "pass",
        "test_training.py::random_numbers_continue",
    ),
    "all ranks have the same random numbers": Mutant(
        SRC + "train.py",
        "seed_rank(config.run.seed, process.rank)",
        "seed_rank(config.run.seed, 0)",
        "test_training.py::different_random_numbers",
    ),
    "one checkpoint too many is kept": Mutant(
        SRC + "checkpoint/checkpointer.py",
        "own[:-keep]",
        "own[: -keep - 1]",
        "test_training.py::and_the_best",
    ),
    "the best checkpoint is removed": Mutant(
        SRC + "checkpoint/checkpointer.py", "if path.stem != ", 'if "" != ', "test_training.py::and_the_best"
    ),
    "checkpoints are written in place": Mutant(
        SRC + "runtime/files.py",
        'temporary = path.with_suffix(".tmp")',
        "temporary = path",
        "test_training.py::a_save_that_fails",
    ),
    "the position in the epoch is not restored": Mutant(
        SRC + "train.py", "start=progress.samples)", "start=0)", RESUME
    ),
    "the schedule is not saved": Mutant(
        SRC + "train.py", '        register("scheduler", self.scheduler)\n', "", RESUME
    ),
    "the optimizer is not saved": Mutant(
        SRC + "checkpoint/state_dict.py",
        "    for optimizer in optimizers:\n        # This",
        "    for optimizer in ():\n        # This",
        RESUME,
    ),
    "a resumed step has no mark": Mutant(
        SRC + "reporting/provenance.py", "min([last, *steps])", "0", "test_training.py::where_the_run_was_resumed"
    ),
    "a picture that is missing is not reported": Mutant(
        SRC + "reporting/examples.py",
        'print(f"warning: no {name} in {run_dir}: {reason}", file=sys.stderr)',
        "del reason",
        "test_training.py::only_missed",
    ),
    "the confusion matrix is transposed": Mutant(
        SRC + "reporting/pictures.py",
        "np.add.at(counts, (target, prediction), 1)",
        "np.add.at(counts, (prediction, target), 1)",
        "test_dataset.py::confusion",
    ),
    "records of lost steps stay": Mutant(
        SRC + "reporting/metrics.py", ' if record["step"] <= last.get(record["event"], step)]', "]", RESUME
    ),
    "a stop needs a signal on every rank": Mutant(
        SRC + "runtime/stop_signal.py", "dist.ReduceOp.MAX", "dist.ReduceOp.MIN", RESUME
    ),
    "checksums are not verified": Mutant(
        SRC + "checkpoint/sharded.py",
        "if self.checksums.get(key) != checksum:",
        "if False:",
        "test_checkpoint.py::altered_folder",
    ),
    "the checksum of exported weights is not verified": Mutant(
        SRC + "checkpoint/exported.py",
        'if "template" in metadata and',
        "if False and",
        "test_checkpoint.py::exported_weights",
    ),
    "loading runs code": Mutant(
        SRC + "checkpoint/loading.py",
        "weights_only=True, mmap=True)",
        "weights_only=False, mmap=True)",
        "test_checkpoint.py::crafted_folder",
    ),
    # Other strategies and tasks
    "fsdp: gradients are averaged": Mutant(SRC + "parallel.py", "loss * self.dp_size", "loss", SPLIT, FSDP),
    "tensor: replicas have their own gradients": Mutant(
        SRC + "parallel.py", "        self.buckets.wait()\n", "", SPLIT, TENSOR
    ),
    "pipeline: pipelines have their own gradients": Mutant(
        SRC + "parallel.py",
        "stage.buckets.wait()",
        "pass",
        SPLIT,
        PIPELINE,
    ),
    "pipeline: gradients are sent before they are complete": Mutant(
        SRC + "splitting/stages.py", "is_last_backward = last_backward", "is_last_backward = True", SPLIT, PIPELINE
    ),
    "pipeline: sharded replicas average their gradients": Mutant(
        SRC + "splitting/replication.py",
        "    sharded.set_gradient_divide_factor(1.0)\n",
        "",
        SPLIT,
        PIPELINE,
    ),
    "tensor: the norm is that of a shard": Mutant(
        SRC + "parallel.py",
        "nn.utils.get_total_norm(self.gradients())  # type: ignore[assignment]\n        return norm.full_tensor()",
        "nn.utils.get_total_norm([each.to_local() for each in self.gradients()])\n        return norm",
        SPLIT,
        TENSOR,
    ),
    "pipeline: each stage clips for itself": Mutant(
        SRC + "parallel.py",
        "        dist.all_reduce(squared, group=dist.group.WORLD if self.config.shard_replicas else self.pipeline)\n",
        "",
        SPLIT,
        PIPELINE,
    ),
    "model_parallel: gradients are averaged": Mutant(SRC + "parallel.py", "loss * self.dp_size", "loss", SPLIT, MODEL),
    "language: a byte predicts itself": Mutant(
        SRC + "dataset.py",
        "window[:-1], window[1:]",
        "window[:-1], window[:-1]",
        "test_dataset.py::windows_are_consecutive",
        LANGUAGE,
    ),
    "language: the temperature is ignored": Mutant(
        SRC + "reporting/generate.py", ".cpu() / temperature)", ".cpu())", "test_generate.py::low_temperature", LANGUAGE
    ),
    # Launchers
    "the local rank is the rank": Mutant(
        SRC + "launch/environment.py",
        'int(env["SLURM_LOCALID"])',
        'int(env["SLURM_PROCID"])',
        "test_environment.py::finds_its_rank",
    ),
    "the shipped experiment is not the default": Mutant(
        "configs/default.yaml", "max_shift: 1", "max_shift: 2", "test_settings.py::shipped_file"
    ),
    "the launcher hides a failure": Mutant(
        "scripts/launch.sh",
        'exec "$PYTHON" -m "$package.launch',
        '! "$PYTHON" -m "$package.launch',
        "test_exit.py::killed_rank_ends",
    ),
}

PACKAGE = "{{cookiecutter.project_slug}}/src/{{cookiecutter.__package}}/"
STRATEGIES = "templates/parallelism/"
EFFECTS = "test_effects.py::each_setting_acts and "
START = "test_start.py::part_and_one_block and "


def unscaled(strategy: str, loss: str) -> Mutant:
    """The fault that gradients are a scaler's factor too small; AdamW's steps are nearly the same."""
    scaled = f"scaler.scale({loss})"
    return Mutant(f"{STRATEGIES}{strategy}/parallel.py", scaled, f"({scaled} / scaler.get_scale())", EFFECTS + strategy)


# Caught by the template's own tests.
TEMPLATE = {
    "a message behind computation counts as exposed": Mutant(
        PACKAGE + "benchmark/trace.py",
        "exposed = subtract(union(messages), subtract(union(computing), union(waiting)))",
        "exposed = union(messages)",
        "test_benchmark.py::test_exposed_is_what",
    ),
    "backward is in forward as well": Mutant(
        PACKAGE + "benchmark/steps.py",
        'get("forward_backward", 0.0) - get("backward", 0.0)',
        'get("forward_backward", 0.0)',
        "test_benchmark.py::test_the_parts_sum_up",
    ),
    "the stall of a save has the time until it is written": Mutant(
        PACKAGE + "benchmark/saving.py",
        "    stall = time.perf_counter() - start\n    trainer.checkpointer.wait()\n",
        "    trainer.checkpointer.wait()\n    stall = time.perf_counter() - start\n",
        "test_benchmark.py::test_training_stands_still",
    ),
    "throughput of other settings is compared": Mutant(
        PACKAGE + "benchmark/records.py",
        '(old["settings"], old["device"]) == (new["settings"], new["device"])',
        "True",
        "test_benchmark.py::test_world_sizes_are_compared",
    ),
    "a slug may be a module's name": Mutant(
        "cookiecutter.json", '"torch", ', "", "test_answers.py::test_no_slug_is_the_name"
    ),
    "a slug may lead out of the folder": Mutant(
        "check_answers.py", "([-_][", "([-_./][", "test_answers.py::an_answer_that_cannot_work and letters"
    ),
    "an answer is evaluated": Mutant(
        "check_answers.py", "source not in self.templates", "False", "test_answers.py::a_name_may_contain and update"
    ),
    "cruft keeps the checks of the old version": Mutant(
        "check_answers.py", "sys.modules.pop(__name__, None)", "pass", "test_cruft.py::cruft_loads_the_checks"
    ),
    "an action is not pinned": Mutant(
        "{{cookiecutter.project_slug}}/.github/workflows/test.yml",
        "checkout@3d3c42e5aac5ba805825da76410c181273ba90b1",
        "checkout@v7",
        "test_habits.py::zizmor_finds_nothing",
    ),
    "a project without a license names one": Mutant(
        "{{cookiecutter.project_slug}}/CITATION.cff",
        '("Proprietary", "none")',
        '("Proprietary",)',
        "test_habits.py::a_project_without_a_license",
    ),
    "make setup installs the same build of PyTorch": Mutant(
        "{{cookiecutter.project_slug}}/Makefile",
        "whl/$(TORCH) torch",
        "whl/cpu torch",
        "test_install.py::build_of_pytorch_is_chosen",
    ),
    "a package is not among the constraints": Mutant(
        "{{cookiecutter.project_slug}}/constraints.txt",
        "cfgv==3.5.0\n",
        "",
        "test_install.py::constraints_are_complete",
    ),
    "tied weights are exported from the same memory": Mutant(
        "{{cookiecutter.project_slug}}/src/{{cookiecutter.__package}}/checkpoint/exported.py",
        "tensor.is_contiguous() and address not in memory",
        "tensor.is_contiguous()",
        "test_export.py::share_memory",
    ),
    "make demo expands a dollar sign": Mutant(
        "Makefile", "$(value $(q))", "$($(q))", "test_answers.py::make_demo_passes"
    ),
    "each round of the benchmark begins with the same arm": Mutant(
        "tests/benchmark.py", "number % len(comparison.arms)", "0", "test_peers.py::each_round_begins"
    ),
    "freed memory returns to the system": Mutant(
        PACKAGE + "runtime/memory.py",
        "            libc.mallopt(*M_TRIM_THRESHOLD)\n",
        "",
        "test_peers.py::reuses_the_memory",
    ),
    "a choice leaves a trace": Mutant(
        "templates/parallelism/tensor/README.md",
        "## What one step does",
        "## What one step of the pipeline does",
        "test_render.py::has_no_traces",
    ),
    "a branch is never taken": Mutant(
        "{{cookiecutter.project_slug}}/.gitignore", '== "slurm"', '== "slrum"', "test_render.py::every_branch"
    ),
    "a workflow keeps credentials": Mutant(
        "{{cookiecutter.project_slug}}/.github/workflows/test.yml",
        "persist-credentials: false",
        "fetch-depth: 1",
        "test_habits.py::zizmor_finds",
    ),
    "a link leads nowhere": Mutant(
        "{{cookiecutter.project_slug}}/README.md", "(docs/ema.md)", "(docs/emas.md)", "test_render.py::markdown_is"
    ),
    "a command is misspelt": Mutant(
        "{{cookiecutter.project_slug}}/README.md",
        "launch.sh convert --checkpoint runs/large",
        "launch.sh convert --checkpont runs/large",
        "test_documents.py::a_command_runs and launch",
    ),
    "data.eval_batch_size is ignored": Mutant(
        "templates/task/shared/evaluator.py",
        "parallel.dp_size, config.eval_batch_size)",
        "parallel.dp_size, 256)",
        EFFECTS + "ddp",
    ),
    "nothing shows what a setting does": Mutant(
        PACKAGE + "config.py",
        "    seed: NonNegativeInt = 0\n",
        "    new: int = 0\n    seed: NonNegativeInt = 0\n",
        "test_effects.py::effect_to_show",
    ),
    "a room imports upwards": Mutant(
        PACKAGE + "runtime/files.py",
        "import os\n",
        "import os\n\nfrom ..train import train\n",
        "test_architecture.py::imports_go_one_way",
    ),
    # Hostile input
    "a crafted checkpoint is not looked at": Mutant(
        PACKAGE + "checkpoint/loading.py",
        "        check_content(content, is_folder)\n",
        "",
        "test_hostile.py::damaged_and_crafted and full",
    ),
    "state that cannot be restored is a crash": Mutant(
        PACKAGE + "checkpoint/loading.py",
        "    except Exception as error:  # Whatever",
        "    except AssertionError as error:  # Whatever",
        "test_hostile.py::damaged_and_crafted and full",
    ),
    "a shard may be anywhere": Mutant(
        PACKAGE + "checkpoint/content.py",
        "Path(info.relative_path).name != info.relative_path",
        "False",
        "test_hostile.py::damaged_and_crafted and sharded",
    ),
    "a damaged name is in the way of a save": Mutant(
        PACKAGE + "runtime/files.py", "    remove(temporary)", "    pass", "test_hostile.py::odd_files"
    ),
    "any number of loader processes is started": Mutant(
        PACKAGE + "launch/values.py", ', "data.num_workers": 2**10', "", "test_hostile.py::nonsense_is_refused and ddp"
    ),
    # The end of a process and of a run
    "a rank is taken apart while gloo runs": Mutant(
        PACKAGE + "__main__.py",
        "launch.run_and_exit(main, sys.argv[1:])",
        "main(sys.argv[1:])",
        "test_ending.py::does_not_abort and torchrun",
    ),
    "a spawned rank is taken apart while gloo runs": Mutant(
        "templates/launcher/spawn/spawn.py",
        "    run_and_exit(main, argv)",
        "    main(argv)",
        "test_ending.py::does_not_abort and spawn",
    ),
    "a process does not wait for its threads": Mutant(
        PACKAGE + "launch/ending.py",
        "    threading._shutdown()  # type: ignore[attr-defined]\n",
        "",
        "test_ending.py::ends_as_with_python",
    ),
    "what is printed last is lost": Mutant(
        PACKAGE + "launch/ending.py", "call(sys.stdout.flush)", "0", "test_ending.py::ends_as_with_python"
    ),
    "MPI is not finalized": Mutant(
        PACKAGE + "launch/ending.py",
        "if distributed and distributed.is_mpi_available()",
        "if False",
        "test_ending.py::mpi",
    ),
    "torchrun reports what its ranks have reported": Mutant(
        "templates/launcher/torchrun/agent.py",
        "except ChildFailedError:",
        "except DistError:",
        "test_stop.py::that_ranks_find and torchrun",
    ),
    "a loader process ends for anyone": Mutant(
        PACKAGE + "launch/loader.py", ".si_pid != rank:", ".si_pid == 0:", "test_stop.py::ends_only_for_its_rank"
    ),
    "a rank that waited prints its traceback last": Mutant(
        PACKAGE + "runtime/failures.py",
        "    if is_first or not is_first_on_machine():",
        "    if False:",
        "test_stop.py::last_line_names and spawn",
    ),
    "a rank that hangs is waited for": Mutant(
        PACKAGE + "launch/ranks.py",
        "self.wait(deadline - time.monotonic())",
        "self.wait(60)",
        "test_stop.py::stop_seconds_bounds and spawn",
    ),
    "a repeated signal interrupts the wait for ranks": Mutant(
        "templates/launcher/torchrun/agent.py",
        "    if is_first:",
        "    if True:",
        "test_stop.py::stop_signal_is and torchrun",
    ),
    # Devices
    "every rank computes on the first device": Mutant(
        PACKAGE + "runtime/process_group.py", "info.local_rank * devices_per_rank % count", "0", EFFECTS + "ddp"
    ),
    "ranks share devices": Mutant(
        PACKAGE + "runtime/process_group.py",
        "info.local_rank * devices_per_rank % count",
        "info.local_rank % count",
        EFFECTS + "ddp",
    ),
    "pipeline: gloo sends from an accelerator": Mutant(
        PACKAGE + "runtime/process_group.py",
        'if backend == "gloo" and device.type',
        'if backend == "x" and device.type',
        "test_accelerators.py::stages_do_not_share",
    ),
    "model_parallel: all blocks are on the first device": Mutant(
        STRATEGIES + "model_parallel/parallel.py",
        "(first.index + i) %",
        "first.index %",
        EFFECTS + "model_parallel",
    ),
    "data_parallel: one device computes": Mutant(
        STRATEGIES + "data_parallel/parallel.py",
        "loss = self.add_loss(self.copies(some_inputs)",
        "loss = self.add_loss(self.module(some_inputs)",
        EFFECTS + "data_parallel",
    ),
    "data_parallel: parallel.devices is ignored": Mutant(
        STRATEGIES + "data_parallel/parallel.py",
        "list(range(config.parallel.devices))",
        "None",
        EFFECTS + "data_parallel",
    ),
    # BatchNorm
    "buffers are not averaged": Mutant(
        PACKAGE + "splitting/sums.py", "if not buffer.is_floating_point() or size == 1:", "if True:", EFFECTS + "ddp"
    ),
    "a checkpoint has one rank's buffers": Mutant(
        PACKAGE + "train.py", "        self.parallel.average_buffers()\n", "", EFFECTS + "model_parallel"
    ),
    "ddp: BatchNorm is not synchronized": Mutant(
        STRATEGIES + "ddp/parallel.py",
        "            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)\n",
        "",
        EFFECTS + "ddp",
    ),
    # Precision
    "data_parallel: the loss is not scaled": unscaled("data_parallel", "loss"),
    "ddp: the loss is not scaled": unscaled("ddp", "loss * self.dp_size"),
    "fsdp: the loss is not scaled": unscaled("fsdp", "loss * self.dp_size"),
    "model_parallel: the loss is not scaled": unscaled("model_parallel", "loss * self.dp_size"),
    "pipeline: the loss is not scaled": unscaled("pipeline", "torch.ones((), device=self.device)"),
    "tensor: the loss is not scaled": unscaled("tensor", "loss"),
    # Micro-batches
    "ddp: gradients are summed after each micro-batch": Mutant(
        STRATEGIES + "ddp/parallel.py", "if number < len(pieces) else", "if False else", EFFECTS + "ddp"
    ),
    "model_parallel: gradients are summed after each micro-batch": Mutant(
        STRATEGIES + "model_parallel/parallel.py",
        "if number < len(pieces) else",
        "if False else",
        EFFECTS + "model_parallel",
    ),
    # Memory
    "blocks are sharded when all are built": Mutant(
        PACKAGE + "splitting/blocks.py", "        _place_fn(block)\n", "        pass\n", START + "fsdp-4"
    ),
    "pipeline: blocks of other ranks are kept": Mutant(
        STRATEGIES + "pipeline/stages.py",
        "        if holds(next(numbers)):\n",
        "        if holds(next(numbers)) or True:\n",
        START + "pipeline-4",
    ),
    "an outline draws the weights of the model": Mutant(
        STRATEGIES + "shared/sequence.py",
        'with restored_generators(), torch.device("meta"), placing',
        "with placing",
        START + "pipeline-4",
    ),
    "what is loaded stays in memory": Mutant(
        PACKAGE + "checkpoint/state_dict.py",
        "        whole = buffer[: sizes[name]].view(dtype).view(shape)\n",
        "        whole = torch.empty(shape, dtype=dtype, device=device)\n        outline.append(whole)\n",
        START + "fsdp-4",
    ),
    # What `plan` says
    "plan: memory is not returned": Mutant(
        PACKAGE + "plan/ledger.py",
        "        self.memory -= self.alive.pop(key).size\n",
        "        self.alive.pop(key)\n",
        "test_plan.py::real_ranks_take and ddp and language",
    ),
    "plan: gathered weights are not freed": Mutant(
        PACKAGE + "plan/ledger.py",
        "                allocation = self.note(storage)\n",
        "                allocation = self.alive[storage._cdata]\n",
        "test_plan.py::real_ranks_take and fsdp and language",
    ),
    "plan: the messages of all steps are counted": Mutant(
        PACKAGE + "plan/simulate.py",
        "            ledger.begin_step()\n",
        "",
        "test_plan.py::real_ranks_take and ddp and language",
    ),
    "plan: all stages are alike": Mutant(
        STRATEGIES + "pipeline/plan.py",
        "        return rank // replicas, *",
        "        return 0, *",
        "test_plan.py::real_ranks_take and pipeline and language",
    ),
    "plan: sharded replicas are alike": Mutant(
        STRATEGIES + "tensor/plan.py",
        "if self.layout.shard_replicas else []",
        "if False else []",
        "test_plan.py::with_unequal_shards_are",
    ),
    "plan: what does not fit is no failure": Mutant(
        PACKAGE + "plan/report.py",
        'return 0 if record["fits"] is not False else 1',
        "return 0",
        "test_plan.py::does_not_fit",
    ),
    # Trackers
    "a branch of a run has its identity": Mutant(
        "{{cookiecutter.project_slug}}/src/{{cookiecutter.__package}}/checkpoint/checkpointer.py",
        'progress.run_id = ""',
        "pass",
        "test_trackers.py::identity_of_a_run",
    ),
    "a resumed run gets another identity": Mutant(
        "{{cookiecutter.project_slug}}/src/{{cookiecutter.__package}}/train.py",
        "progress.run_id or on_main(",
        "on_main(",
        "test_trackers.py::identity_of_a_run",
    ),
    "a tracked record is sent again": Mutant(
        "templates/tracker/mlflow/follow.py",
        'if row[1] > self.known.get(f"{row[0]}/step", -1)',
        "if row",
        "test_trackers.py::has_each_record and mlflow",
    ),
    "a tracker's password is printed": Mutant(
        "templates/tracker/shared/follow.py",
        r're.sub(r"//\S*@", "//", text)',
        "text",
        "test_trackers.py::a_library_that_fails and raising",
    ),
    "a tracker takes a complete run for a stopped one": Mutant(
        "templates/tracker/shared/followed.py",
        'self.outcome = "finished"',
        "pass",
        "test_trackers.py::outcome_is_how",
    ),
    "a record that W&B gets takes the place of another": Mutant(
        "templates/tracker/wandb/follow.py",
        "if row > self.row or split in self.splits:",
        "if row > self.row:",
        "test_trackers.py::a_resumed_run_online",
    ),
    "pictures that did not reach W&B are never sent": Mutant(
        "templates/tracker/wandb/follow.py",
        'if self.splits or "curves" not in self.known:',
        "if self.splits:",
        "test_trackers.py::a_resumed_run_online",
    ),
    "a stop signal to make ends only a shell": Mutant(
        "{{cookiecutter.project_slug}}/Makefile",
        "exec env PYTHON=",
        "PYTHON=",
        "test_install.py::a_stop_signal_to_make",
    ),
    "an exercise shows a line that is no longer there": Mutant(
        "{{cookiecutter.project_slug}}/docs/exercises.md",
        "-        self.sampler.set_epoch(epoch, start=progress.samples)",
        "-        self.sampler.set_epoch(epoch)",
        "test_teaching.py::each_diff_fits",
    ),
    "a diagram has an arrow to nowhere": Mutant(
        "templates/parallelism/ddp/diagram.md",
        "its share --> f1",
        "its share --> f2",
        "test_teaching.py::the_readme_has",
    ),
    "all jobs of an array take the first line": Mutant(
        "templates/cluster/slurm/train.sbatch", '"${SLURM_ARRAY_TASK_ID}p"', "1p", "test_sweep.py::each_job_of_an_array"
    ),
    # Nothing lost, nothing silent
    "a file gets its name before it is on the disk": Mutant(
        PACKAGE + "runtime/files.py", "            os.fsync(file.fileno())\n", "", "test_files.py::is_on_the_disk"
    ),
    "ranks wait for a save as long as for a step": Mutant(
        PACKAGE + "train.py",
        "runtime.timeout(self.config.checkpoint.timeout_seconds)",
        "runtime.timeout(0)",
        "test_train.py::ranks_wait_for_a_save",
    ),
    "all buffers are averaged": Mutant(
        PACKAGE + "splitting/sums.py",
        "isinstance(part, nn.modules.batchnorm._NormBase)",
        "buffer.is_floating_point()",
        "test_replicas.py::only_batch_norm",
    ),
    "every rank copies what it saves a share of": Mutant(
        PACKAGE + "checkpoint/sharded.py",
        "alike = [rank for rank, each in enumerate(all_gather_object(own)) if each == own]",
        "alike = [dist.get_rank()]",
        "test_strategies.py::copies_only_its_share",
    ),
    "a crafted shard is refused at length": Mutant(
        PACKAGE + "checkpoint/sharded.py",
        'f"{message}: {first_line(first)}"',
        'f"{message}: {first}"',
        "test_hostile.py::damaged_and_crafted and sharded",
    ),
    # Models of one's own
    "a replica without a gradient counts as one with it": Mutant(
        STRATEGIES + "shared/replication.py",
        "            present[self.missing] = 0\n",
        "            pass\n",
        "test_own_models.py::take_another_way",
    ),
    "tensor: what is whole in a sharded module is trained on": Mutant(
        STRATEGIES + "tensor/parallel.py",
        "            check_replicated(self.module, self.group)\n",
        "            pass\n",
        "test_own_models.py::whole_in_a_sharded_module",
    ),
    "tensor: parts of gradients are summed one by one": Mutant(
        STRATEGIES + "tensor/parallel.py",
        "        sum_parts(self.module.parameters(), self.group)\n",
        "",
        "test_own_models.py::are_one_message",
    ),
    "attention counts as nothing": Mutant(
        PACKAGE + "plan/ledger.py", "FORMULAS.get(", "flop_registry.get(", "test_plan.py::those_of_a_transformer"
    ),
    "tensor: activations are sent while ranks compute": Mutant(
        STRATEGIES + "tensor/plan.py",
        "len({rank // size for rank in message.ranks}) == 1",
        "False",
        "test_plan.py::not_sent_while_ranks_compute",
    ),
    "the optimizer of a slow rank is not counted": Mutant(
        PACKAGE + "reporting/pace.py",
        "time.perf_counter() - self.mark if self.is_alone else 0.0",
        "0.0",
        "test_train.py::which_rank_is_slow",
    ),
}
