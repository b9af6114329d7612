"""Faults to plant in the template's source, each with the test that has to catch it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fault:
    """A text that a file of the template has once is replaced by another one, and a test has to fail.

    Attributes:
        file: its path in the template.
        test: pytest's name of the test: ``tests/...`` in the template, ``project/tests/...`` in a rendered project.
        answers: what that project is rendered with.
    """

    file: str
    old: str
    new: str
    test: str
    answers: dict[str, str] = field(default_factory=dict)


RUN_DIR = "tests/failures/test_run_dir.py::"
SRC = "{{cookiecutter.project_slug}}/src/{{cookiecutter.__package}}/"
PARALLEL, TASK = "templates/parallelism/", "templates/task/"
CHECKS = "check_answers.py"

# Tests of a rendered project.
SPLIT = "project/tests/test_split.py::test_a_split_gives_the_result_of_a_plain_loop"
ALONE, MICROBATCHES = f"{SPLIT}[1-[]-[]]", f"{SPLIT}[4-['--train.microbatches', '2']-[]]"
PIPELINES = f"{SPLIT}[4-['--parallel.pipeline', '2', '--parallel.schedule', '1F1B']-[]]"
SHARDS = f"{SPLIT}[2-[]-[]]"
REPLICAS = f"{SPLIT}[4-['--train.microbatches', '2', '--parallel.replicas', '2']-[]]"  # Of FSDP.
GROUPS = f"{SPLIT}[4-['--parallel.replicas', '2', '--train.microbatches', '2']-[]]"  # Of tensor parallelism.
KILLED = "project/tests/test_resume.py::test_a_killed_run_that_lost_a_checkpoint_resumes_bitwise"
STOPPED = "project/tests/test_resume.py::test_a_stopped_run_loses_no_step"
OTHER = "project/tests/test_resume.py::test_another_experiment_is_refused_by_name"
EXIT = "project/tests/test_exit.py::"
MISTAKE = "project/tests/test_settings.py::test_a_mistake_is_reported_in_one_line"
# Tests of the template.
HOSTILE = "tests/numerics/test_hostile_model.py::"
PARITY = "tests/numerics/test_parity.py::test_a_killed_and_resumed_run_matches_a_plain_loop"
REPORTS = "tests/failures/test_reports.py::"
ANSWERS = "tests/rendering/test_answers.py::"
TOKENS = "tests/documents/test_tokens.py::"
DRAWN = RUN_DIR + "test_each_rank_and_step_draws_other_numbers_and_the_same_ones_after_a_resume"
CHANGES = "tests/numerics/test_parity.py::test_a_run_that_changes_its_strategy_matches_a_plain_loop[digits]"
NUMBERS = "tests/rendering/test_source.py::test_pages_state_the_numbers_of_the_code"
WAITS = "tests/rendering/test_source.py::test_ranks_save_in_less_time_than_a_cluster_waits"

DDP, FSDP, PIPELINE, TENSOR = (PARALLEL + f"{name}/parallel.py" for name in ("ddp", "fsdp", "pipeline", "tensor"))
UNDER_FSDP, UNDER_PIPELINE, UNDER_TENSOR = ({"parallelism": name} for name in ("fsdp", "pipeline", "tensor"))
LANGUAGE = {"task": "language"}

FAULTS = {
    # What no number shows
    "blocks are not compiled": Fault(
        PARALLEL + "shared/block_steps.py",
        "    block.compile()",
        "    pass",
        "tests/numerics/test_parity.py::test_a_compiled_or_recomputed_run_matches_a_plain_loop[train.compile-digits-ddp]",
    ),
    "blocks are not recomputed": Fault(
        PARALLEL + "shared/block_steps.py",
        "    block.forward = partial(checkpoint, block.forward, use_reentrant=False)",
        "    pass",
        "tests/numerics/test_parity.py::"
        "test_a_compiled_or_recomputed_run_matches_a_plain_loop[train.activation_checkpointing-digits-ddp]",
    ),
    "the backend is always that of the device": Fault(
        SRC + "distributed.py",
        '(device) if settings.backend == "auto" else settings.backend',
        "(device)",
        REPORTS + "test_what_this_machine_cannot_do_is_refused",
    ),
    # Numerics: gradients
    "ddp never averages the gradients": Fault(
        DDP,
        "if number < self.microbatches",
        "if number <= self.microbatches",
        MICROBATCHES,
    ),
    "a micro-batch counts as much as a local batch": Fault(
        SRC + "loader.py",
        "device=self.process.device) / self.weight",
        "device=self.process.device) / len(targets)",
        MICROBATCHES,
    ),
    "a rank divides by the weight of its own samples": Fault(
        SRC + "loader.py",
        "weight = total.clamp(min=1e-30) / self.process.world_size",
        "weight = weight + 0",
        "tests/projects/test_own_tests.py::test_a_loss_of_ragged_weight_does_not_depend_on_the_split[ddp]",
    ),
    "the replicas of fsdp drift apart": Fault(
        PARALLEL + "shared/micro_batches.py",
        "set_requires_all_reduce(number == self.microbatches)",
        "set_requires_all_reduce(number > self.microbatches)",
        REPLICAS,
        UNDER_FSDP,
    ),
    "fsdp averages gradients in bf16": Fault(
        FSDP,
        "reduce_dtype=torch.float32",
        "reduce_dtype=torch.bfloat16",
        REPLICAS,
        UNDER_FSDP,
    ),
    "model parallelism averages over the ranks twice": Fault(
        PARALLEL + "model_parallel/parallel.py",
        "self.scaler.scale(loss).backward()",
        "self.scaler.scale(loss / self.dp_size).backward()",
        MICROBATCHES,
        {"parallelism": "model_parallel"},
    ),
    "the schedule of a pipeline scales the gradients again": Fault(
        PIPELINE,
        "scale_grads=False",
        "scale_grads=True",
        f"{SPLIT}[1-['--parallel.schedule', 'GPipe']-[]]",
        UNDER_PIPELINE,
    ),
    "each stage clips by its own norm": Fault(
        PIPELINE,
        "dist.all_gather(norms, own)",
        "norms = [own]",
        PIPELINES,
        UNDER_PIPELINE,
    ),
    "the norm counts each replica of a group": Fault(
        TENSOR,
        " / self.replicas**0.5",
        "",
        GROUPS,
        UNDER_TENSOR,
    ),
    "the norm lacks the parameters that plan.py leaves whole": Fault(
        TENSOR,
        "if self.is_first or is_split(g)",
        "if is_split(g)",
        SHARDS,
        UNDER_TENSOR,
    ),
    "a shard of the attention mixes heads": Fault(
        TASK + "language/model.py",
        "qkv.unflatten(2, (-1, 3, self.head_width)).permute(3, 0, 2, 1, 4)",
        "qkv.unflatten(2, (3, -1, self.head_width)).permute(2, 0, 3, 1, 4)",
        SHARDS,
        UNDER_TENSOR | LANGUAGE,
    ),
    "gradients are not clipped": Fault(
        SRC + "train.py",
        "config.train.clip_grad_norm or math.inf",
        "math.inf",
        ALONE,
    ),
    # Numerics: the optimizer and its schedule
    "AdamW ignores eps": Fault(SRC + "optim.py", "eps=config.eps", "eps=1e-8", ALONE),
    "biases decay": Fault(
        SRC + "optim.py",
        "config.weight_decay * decays",
        "config.weight_decay",
        ALONE,
    ),
    "the warm-up starts at zero": Fault(
        SRC + "optim.py",
        "config.lr * (step + 1) / config.warmup_steps",
        "config.lr * step / config.warmup_steps",
        ALONE,
    ),
    "the schedule ends at max_steps": Fault(
        SRC + "train.py",
        "learning_rate(self.steps, self.scheduled_steps,",
        "learning_rate(self.steps, self.total_steps,",
        ALONE,
    ),
    # Numerics: samples and random numbers
    "the incomplete global batch is read": Fault(
        SRC + "loader.py",
        "[self.start : self.steps_per_epoch * self.batch]",
        "[self.start :]",
        ALONE,
    ),
    "ranks read consecutive parts of an epoch": Fault(
        SRC + "loader.py",
        "order[self.dp_rank :: self.dp_size]",
        "order.chunk(self.dp_size)[self.dp_rank]",
        MICROBATCHES,
    ),
    "every epoch has the same augmentation": Fault(
        SRC + "loader.py",
        "derive_seed(self.seed, *key)",
        "derive_seed(self.seed, 0, key[1])",
        ALONE,
    ),
    "loader processes draw without a seed": Fault(
        SRC + "loader.py",
        "        seed_everything(derive_seed(self.seed, *key))",
        "        if parent_process() is None:\n            seed_everything(derive_seed(self.seed, *key))",
        f"{SPLIT}[2-['--data.num_workers', '2']-[]]",
    ),
    "shards of one activation have different dropout": Fault(
        SRC + "train.py",
        '"step", self.steps, self.parallel.dp_rank)',
        '"step", self.steps, self.process.rank)',
        HOSTILE + "test_an_unused_parameter_is_refused_by_name_unless_it_may_be[tensor]",
    ),
    "a rank normalizes advantages by itself": Fault(
        TASK + "control/task.py",
        "sums = process.all_gather((values.numel(), values.sum().item(), values.square().sum().item()))",
        "sums = [(values.numel(), values.sum().item(), values.square().sum().item())]",
        MICROBATCHES,
        {"task": "control"},
    ),
    # Numerics: shared weights and statistics
    "fsdp trains two copies of a shared weight": Fault(
        PARALLEL + "shared/ties.py",
        "seen[id(parameter)] = parameter",
        "seen.pop(id(parameter), None)",
        HOSTILE + "test_shared_weights_stay_shared_or_are_refused_by_name[fsdp]",
    ),
    "two stages train copies of a shared weight": Fault(
        PARALLEL + "shared/outline.py",
        "users.setdefault(parameter, name)",
        "name",
        HOSTILE + "test_shared_weights_stay_shared_or_are_refused_by_name[pipeline]",
    ),
    "a checkpoint has the BatchNorm statistics of rank 0": Fault(
        SRC + "checkpoint.py",
        "self.parallel.average_buffers()",
        "self.parallel.module.train()",
        HOSTILE + "test_a_killed_run_resumes_bitwise[ddp]",
    ),
    # Resume
    "a resumed run starts its epoch again": Fault(
        SRC + "loader.py",
        "return epoch, steps * self.batch",
        "return epoch, 0",
        f"{KILLED}[2]",
    ),
    "a resumed run starts with an empty optimizer": Fault(
        PARALLEL + "shared/load.py",
        '{**own, "state": state or {}}',
        '{**own, "state": {}}',
        f"{KILLED}[2]",
    ),
    "the first step after a resume sums in another order": Fault(
        PARALLEL + "shared/ddp.py",
        "    ddp().backward()  # Otherwise, the order would change after the first step of every start.\n",
        "",
        f"{KILLED}[4]",
    ),
    "settings of the checkpoint replace changed ones": Fault(
        SRC + "checkpoint.py",
        "self.load(parallel, self.start, optimizer)",
        "self.load(parallel, self.start, optimizer)\n"
        '        vars(self.config.optim).update(self.start["config"]["optim"])',
        "project/tests/test_resume.py::test_changed_settings_act_from_the_first_step",
    ),
    "a run resumes with another seed": Fault(
        SRC + "checkpoint.py",
        'name in ("run.seed", "data.global_batch_size")',
        'name == "data.global_batch_size"',
        f"{OTHER}[('--run.seed', '8')]",
    ),
    "resume=never resumes": Fault(
        SRC + "checkpoint.py",
        'if found and resume == "never":',
        'if not found and resume == "never":',
        f"{OTHER}[('--checkpoint.resume', 'never')]",
    ),
    "the oldest checkpoint comes first": Fault(
        SRC + "checkpoint.py",
        "for path in reversed(found):",
        "for path in found:",
        f"{KILLED}[2]",
    ),
    "a damaged checkpoint ends the run": Fault(
        SRC + "checkpoint.py",
        "move(path, new)",
        "raise",
        f"{KILLED}[2]",
    ),
    "records of steps that are repeated remain": Fault(
        SRC + "logger.py",
        '["step"] <= step',
        '["step"] >= 0',
        f"{KILLED}[2]",
    ),
    "records that cannot be read are lost": Fault(
        SRC + "logger.py",
        "if len(found) < len(lines):",
        "if not lines:",
        RUN_DIR + "test_what_a_crash_of_the_machine_damaged_is_set_aside",
    ),
    "a folder that is not mounted is a fresh start": Fault(
        SRC + "checkpoint.py",
        "self.folder.mkdir(parents=True, exist_ok=True)",
        "self.folder.parent.mkdir(parents=True, exist_ok=True)",
        REPORTS + "test_a_link_to_a_folder_that_is_not_mounted_is_no_fresh_start",
    ),
    # Evaluation
    "the last samples are lost on uneven ranks": Fault(
        SRC + "evaluate.py",
        "self.indices = range(parallel.dp_rank, self.length, parallel.dp_size)",
        "self.indices = range(parallel.dp_rank, self.length - self.length % parallel.dp_size, parallel.dp_size)",
        "project/tests/test_evaluate.py::test_every_sample_counts_once[3]",
        LANGUAGE,
    ),
    "a sample that only fills up counts": Fault(
        SRC + "evaluate.py",
        "metrics[name] = whole[:count].cpu().numpy()",
        "metrics[name] = whole.cpu().numpy()",
        f"{PARITY}[ddp-language-4]",
    ),
    "images for validation are shifted too": Fault(
        TASK + "digits/dataset.py",
        'Subset(Digits("train"), order',
        "Subset(whole, order",
        f"{PARITY}[ddp-digits-1]",
    ),
    "an evaluation trains BatchNorm": Fault(
        SRC + "evaluate.py",
        "self.parallel.module.eval()",
        "self.parallel.module.train()",
        HOSTILE + "test_a_killed_run_resumes_bitwise[data_parallel]",
    ),
    "training goes on in eval mode": Fault(
        SRC + "evaluate.py",
        "self.parallel.module.train()",
        "self.parallel.module.eval()",
        HOSTILE + "test_a_killed_run_resumes_bitwise[data_parallel]",
    ),
    "an evaluation reads another dataset than the run": Fault(
        SRC + "evaluate.py",
        'if (section in ("model", "dataset") or name',
        'if (section == "model" or name',
        REPORTS + "test_what_evaluates_is_what_trained",
    ),
    # Saving
    "a flipped bit is not noticed": Fault(
        SRC + "checkpoint.py",
        "if damaged := archive.testzip():",
        "if damaged := archive.comment:",
        f"{KILLED}[2]",
    ),
    "a loss that is not finite is logged as any other": Fault(
        SRC + "train.py",
        "if not all(math.isfinite(x) for",
        "if not all(True for",
        "project/tests/test_resume.py::test_a_loss_that_is_not_finite_ends_the_run_by_its_step",
    ),
    "a checkpoint counts the samples of one rank": Fault(
        SRC + "train.py",
        '"samples": samples}',
        '"samples": samples // self.parallel.dp_size}',
        REPORTS + "test_metrics_become_plain_numbers_and_the_checkpoint_can_be_read",
    ),
    "a checkpoint has the first stage alone": Fault(
        PARALLEL + "shared/stage_state.py",
        "whole = [mine | theirs for mine, theirs in zip(whole, part, strict=True)]",
        "whole = [mine for mine, theirs in zip(whole, part, strict=True)]",
        PIPELINES,
        UNDER_PIPELINE,
    ),
    "the last step is not saved": Fault(
        SRC + "train.py",
        "saves = evaluates or step %",
        "saves = step %",
        REPORTS + "test_what_evaluates_is_what_trained",
    ),
    "only the best checkpoint is kept": Fault(
        SRC + "checkpoint.py",
        "found[: -self.config.checkpoint.keep]",
        "found",
        "tests/clusters/test_machines.py::test_torchrun_restarts_the_ranks_when_one_is_killed",
    ),
    "a checkpoint runs code": Fault(
        SRC + "checkpoint.py",
        'return torch.load(path, map_location="cpu", weights_only=True, mmap=True)',
        'return torch.load(path, map_location="cpu", weights_only=False, mmap=True)',
        REPORTS + "test_weights_of_other_programs_load_or_are_named",
    ),
    # Stopping and failing
    "a signal to one rank is ignored": Fault(
        SRC + "distributed.py",
        'process.store.set("stop", "")',
        'process.rank or process.store.set("stop", "")',
        f"{STOPPED}[SIGUSR1 to one rank]",
    ),
    "spawn kills ranks that would save": Fault(
        "templates/launcher/spawn/spawn.py",
        "rank.kill() if is_over else rank.terminate()",
        "rank.kill()",
        f"{STOPPED}[SIGTERM to the launcher]",
        {"launcher": "spawn"},
    ),
    "ranks outlive a killed launcher": Fault(
        SRC + "distributed.py",
        "ctypes.CDLL(None).prctl(1, signal.SIGKILL)",
        "ctypes.CDLL(None).prctl(1, 0)",
        EXIT + "test_a_killed_launcher_leaves_no_rank",
    ),
    "a hang names the ranks that wait": Fault(
        SRC + "distributed.py",
        'if not store.check([f"waited{rank}"])',
        'if store.check([f"waited{rank}"])',
        EXIT + "test_a_rank_that_hangs_is_named",
    ),
    "a failed run ends with 0": Fault(
        SRC + "distributed.py",
        'exit_now(2 if "failed with UserError" in reason else 1)',
        'exit_now(2 if "failed with UserError" in reason else 0)',
        EXIT + "test_an_error_is_named_with_one_traceback",
    ),
    "a rank that was stopped ends with 0": Fault(
        SRC + "distributed.py",
        "exit_now(128 + signal.SIGTERM if stopped else 0)",
        "exit_now(0)",
        "tests/clusters/test_kubernetes.py::test_pods_that_stop_are_replaced_and_a_mistake_ends_the_job[spawn]",
    ),
    "parameters without a gradient pass": Fault(
        SRC + "train.py",
        "if missing and not self.config.train.allow_unused:",
        "if missing and self.config.train.allow_unused:",
        HOSTILE + "test_an_unused_parameter_is_refused_by_name_unless_it_may_be[data_parallel]",
    ),
    "the last of two equal keys counts": Fault(
        SRC + "__main__.py",
        "names.count(name) > 1",
        "names.count(name) > 2",
        f"{MISTAKE}[train --config {{}}/twice.yaml-]",
    ),
    "every rank reports a mistake": Fault(
        "templates/launcher/shared/prepare.sh",
        '-m {{ cookiecutter.__package }} --preflight "$@"',
        '-m {{ cookiecutter.__package }} --preflight "$@" || true',  # At least one rank reports it again.
        f"{MISTAKE}[train --train.epochs 0-]",
    ),
    # What a setting, an argument or a page says
    "bf16 computes in fp32": Fault(DDP, 'enabled=precision != "fp32"', 'enabled=precision == "fp16"', DRAWN),
    "fp16 does not scale the loss": Fault(
        DDP, 'GradScaler(kind, enabled=precision == "fp16")', "GradScaler(kind, enabled=False)", DRAWN
    ),
    "every run is exact": Fault(SRC + "distributed.py", "(exact := config.train.exact)", "(exact := True)", DRAWN),
    "ranks meet at the launcher's address alone": Fault(
        SRC + "distributed.py",
        "dist.rendezvous(method, rank,",
        'dist.rendezvous("env://", rank,',
        REPORTS + "test_ranks_meet_where_init_method_says",
    ),
    "LoopedBFS is another schedule": Fault(
        PIPELINE,
        "get_schedule_class(self.config.schedule)",
        'get_schedule_class(self.config.schedule.replace("LoopedBFS", "GPipe"))',
        CHANGES,
    ),
    "blocks free their weights although they are to be kept": Fault(
        FSDP,
        "reshard_after_forward=layout.reshard_after_forward",
        "reshard_after_forward=True",
        CHANGES,
    ),
    "a notebook cannot be interrupted after a run": Fault(
        "templates/launcher/spawn/spawn.py",
        "        signal.signal(number, handler)\n",
        "        del handler\n",
        REPORTS + "test_a_notebook_starts_ranks_and_keeps_its_signals",
    ),
    "a temperature has no effect": Fault(
        TASK + "language/generate.py",
        " / max(options.temperature, 1e-9)",
        "",
        REPORTS + "test_what_evaluates_is_what_trained",
    ),
    "there is one rank for any number of GPUs": Fault(
        "templates/launcher/shared/prepare.sh",
        "$((gpus ? gpus : 2))",
        "$((gpus ? 1 : 2))",
        REPORTS + "test_ranks_are_as_many_as_visible_devices_or_two[0,1,-1,2-2]",
    ),
    "a stopped launcher ends with the number of the signal": Fault(
        "templates/launcher/torchrun/torchrun.py",
        "sys.exit(128 + stopped.sigval)",
        "sys.exit(stopped.sigval)",
        f"{STOPPED}[SIGTERM to the launcher]",
    ),
    "the README has other exit codes": Fault(
        "{{cookiecutter.project_slug}}/README.md", "130, 143 or 138", "130, 137 or 138", NUMBERS
    ),
    "a slug may be longer than the page states": Fault(
        CHECKS, 'SLUG_LIMIT = "my-experiment", 60', 'SLUG_LIMIT = "my-experiment", 64', NUMBERS
    ),
    "make setup installs another group of packages": Fault(
        "{{cookiecutter.project_slug}}/Makefile", "--group dev", "--group test", NUMBERS
    ),
    "a pod is killed before its ranks have saved": Fault(
        "templates/cluster/kubernetes/job.yaml",
        "terminationGracePeriodSeconds: 300",
        "terminationGracePeriodSeconds: 200",
        WAITS,
    ),
    "a Slurm job ends before its ranks have saved": Fault(
        "templates/cluster/slurm/train.sbatch", "--signal=USR1@300", "--signal=USR1@120", WAITS
    ),
    "a container runs as root": Fault(
        "{{cookiecutter.project_slug}}/{{ 'Dockerfile' if cookiecutter.docker else '' }}",
        "USER 1000\n",
        "",
        "tests/rendering/test_source.py::test_a_container_runs_as_the_user_that_may_write",
    ),
    # Tokens
    "what follows the end of a document is predicted": Fault(
        TASK + "language/dataset.py",
        ".masked_fill(window[:-1] == self.end, -100)",
        "",
        TOKENS + "test_windows_are_those_of_a_mixture_of_documents",
    ),
    "masked targets count": Fault(
        TASK + "language/task.py",
        'return targets.numel() if self.about["end"] < 0 else',
        'return targets.numel() if self.about["end"] < 300 else',
        TOKENS + "test_windows_are_those_of_a_mixture_of_documents",
    ),
    # Rendering
    "a slug leads out of the output folder": Fault(
        CHECKS,
        "if not re.fullmatch(",
        "if not re.match(",
        ANSWERS + "test_without_hooks_no_slug_leads_out_of_the_output_folder",
    ),
    "a reserved name with a dash is free": Fault(
        CHECKS,
        "if slug in names)",
        "if name in names)",
        ANSWERS + "test_no_slug_is_the_name_of_a_module_and_the_better_one_works",
    ),
    "a backslash is not escaped": Fault(
        CHECKS,
        r'.replace("\\", "\\\\")',
        "",
        ANSWERS + r"test_a_name_may_contain_any_other_character[back\\slash \\n \\x41]",
    ),
    "an old cookiecutter writes half a project": Fault(
        CHECKS,
        "< [2, 6]:",
        "< [2, 1]:",
        ANSWERS + "test_a_cookiecutter_that_is_too_old_is_refused[2.1.1]",
    ),
    "projects link to a repository of their own": Fault(
        "{{cookiecutter.project_slug}}/README.md",
        "({{ cookiecutter._repository }}/blob/main/docs/recipes.md)",
        "(https://example.org/blob/main/docs/recipes.md)",
        "tests/rendering/test_source.py::test_one_line_names_the_repository",
    ),
    "choices that do not fit are rendered": Fault(
        CHECKS,
        "if answers[question] in reasons:",
        "if question in reasons:",
        ANSWERS + "test_choices_that_do_not_fit_are_rejected_with_a_command_that_works"
        "[{'task': 'control', 'parallelism': 'fsdp'}]",
    ),
    "a replay is not checked": Fault(
        CHECKS,
        "if source == FOLDER else source",
        "if source == name else source",
        ANSWERS
        + "test_an_answer_in_a_file_is_rejected_in_the_same_way[replay-project_slug-../evil-letters and digits]",
    ),
    "a replay says itself what follows from its answers": Fault(
        CHECKS,
        "answers.update(derive(answers))",
        'answers.update(derive(answers) | {"__year": answers.get("__year", 1)})',
        ANSWERS + "test_what_follows_from_the_answers_is_derived_again_by_a_replay[edited]",
    ),
    "an update checks answers with the old version": Fault(
        CHECKS,
        "sys.modules.pop(__name__, None)",
        "sys.modules.get(__name__, None)",
        "tests/rendering/test_cruft.py::test_an_update_loads_the_checks_of_each_version_that_it_renders",
    ),
    "a fact that no choice states is empty": Fault(
        PARALLEL + "model_parallel/facts.json",
        '"accelerators": "two accelerators"',
        '"devices": "two accelerators"',
        "tests/rendering/test_source.py::test_every_fact_is_stated_by_one_question_and_used",
    ),
    "the answer to a question is not recorded": Fault(
        "{{cookiecutter.project_slug}}/pyproject.toml",
        'launcher = "{{ cookiecutter.launcher }}"',
        'launcher = "torchrun"',
        "tests/rendering/test_prompts.py::test_choices_can_be_selected_by_number_and_the_slug_follows_the_name",
    ),
    "a project has a chapter on a file that it lacks": Fault(
        "{{cookiecutter.project_slug}}/README.md",
        "#:: if cookiecutter.docker ::#",
        '#:: if cookiecutter.docker or cookiecutter.cluster == "kubernetes" ::#',
        "tests/rendering/test_render.py::test_a_project_has_no_traces_of_the_template_or_of_other_choices[pairs]",
    ),
    "a project uses one private interface more": Fault(
        SRC + "distributed.py",
        "torch.accelerator.device_count()",
        "torch._C._accelerator_hooks_device_count()",
        "tests/rendering/test_caps.py::test_no_project_is_larger_than_its_cap[default-private interfaces]",
    ),
    "every epoch has the same order": Fault(
        SRC + "loader.py",
        'derive_seed(self.seed, "order", self.epoch)',
        "self.seed + (self.epoch << 32)",
        "project/tests/test_split.py::test_every_epoch_has_every_sample_in_an_order_of_its_own",
    ),
    "all steps and ranks have the same dropout": Fault(
        SRC + "train.py",
        'derive_seed(self.config.run.seed, "step", self.steps, self.parallel.dp_rank)',
        "self.config.run.seed",
        DRAWN,
    ),
    "statistics of BatchNorm are summed over the ranks": Fault(
        PARALLEL + "shared/buffers.py",
        "ReduceOp.AVG",
        "ReduceOp.SUM",
        RUN_DIR + "test_statistics_of_batch_norm_are_averages_over_the_ranks",
    ),
    "the worst checkpoint is kept": Fault(
        SRC + "logger.py",
        "reverse=task.higher_is_better",
        "reverse=not task.higher_is_better",
        RUN_DIR + "test_the_newest_checkpoints_and_the_best_one_are_kept",
    ),
    "weights that are not finite are saved": Fault(
        SRC + "checkpoint.py",
        "(p in self.trained and p.sum().isfinite())",
        "(p in self.trained)",
        RUN_DIR + "test_weights_that_are_not_finite_are_not_saved[ddp]",
    ),
    "a full disk leaves what was half written": Fault(
        SRC + "checkpoint.py",
        "        temporary.unlink(missing_ok=True)\n",
        "",
        RUN_DIR + "test_a_full_disk_costs_no_checkpoint_that_was_complete[ddp-words0]",
    ),
    "two runs share a folder": Fault(
        SRC + "checkpoint.py",
        "        lock(self.folder.parent)\n",
        "",
        RUN_DIR + "test_a_folder_belongs_to_one_run",
    ),
    "a run resumes with another batch size": Fault(
        SRC + "checkpoint.py",
        'name in ("run.seed", "data.global_batch_size")',
        'name == "run.seed"',
        RUN_DIR + "test_another_batch_size_is_refused_in_the_middle_of_a_run",
    ),
    "a checkpoint is written while training changes it": Fault(
        SRC + "checkpoint.py",
        "content if is_copy else deepcopy(content)",
        "content",
        RUN_DIR + "test_a_run_that_is_killed_while_it_saves_resumes_bitwise[ddp-words0]",
    ),
    "a sharded checkpoint lacks the optimizer's state": Fault(
        PARALLEL + "shared/sharded.py",
        '{"state": optimizer.get("state", {})}',
        '{"state": {}}',
        RUN_DIR + "test_a_sharded_run_that_is_killed_resumes_bitwise[fsdp]",
    ),
    # What is loaded, split or averaged
    "losses are averaged by position": Fault(
        SRC + "loader.py",
        "*(float(each.get(name, 0)) for name in names)",
        "*map(float, each.values())",
        REPORTS + "test_losses_are_averaged_by_name",
    ),
    "micro-batches are fewer than asked for": Fault(
        SRC + "loader.py",
        "leaf.tensor_split(parts)",
        "leaf.chunk(parts)",
        REPORTS + "test_batches_that_lost_samples_are_split_into_micro_batches",
    ),
    "all groups have one learning rate": Fault(
        SRC + "train.py",
        'rate * group.setdefault("initial_lr", group["lr"])',
        "rate * self.config.optim.lr",
        REPORTS + "test_a_group_keeps_its_share_of_the_learning_rate",
    ),
    "copies of a parameter that works on shards drift apart": Fault(
        PARALLEL + "shared/sharded.py",
        "own.get(n, v) > 1.0001 * v",
        "own.get(n, v) > 1e9 * v",
        REPORTS + "test_a_parameter_that_works_on_shards_is_in_the_plan_or_refused[tensor]",
    ),
    "validation is on the test set": Fault(
        SRC + "train.py",
        "Evaluator(self.task, self.parallel, sets[1], config)",
        "Evaluator(self.task, self.parallel, sets[2], config)",
        f"{PARITY}[ddp-digits-1]",
    ),
    "tensors are sent as they lie in memory": Fault(
        SRC + "checkpoint.py",
        'parts = tree_map_only(Tensor, Tensor.contiguous, (content.pop("model", {}), content.pop("optimizer", {})))',
        'parts = content.pop("model", {}), content.pop("optimizer", {})',
        REPORTS + "test_tensors_of_any_layout_resume_and_evaluate[channels_last]",
    ),
    "a parameter without a gradient has taken a step": Fault(
        SRC + "checkpoint.py",
        'if name in self.start["stateful"]:',
        "if name:",
        REPORTS + "test_a_parameter_that_had_no_gradient_trains_after_a_resume[unused-ddp-full]",
    ),
}
# Planted in `make test-long` too.
SAMPLE = [
    "the norm counts each replica of a group",
    "the incomplete global batch is read",
    "two stages train copies of a shared weight",
    "a run resumes with another seed",
    "a folder that is not mounted is a fresh start",
    "the last samples are lost on uneven ranks",
    "a loss that is not finite is logged as any other",
    "a failed run ends with 0",
    "every rank reports a mistake",
    "choices that do not fit are rendered",
]
