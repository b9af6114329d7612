"""Faults to plant in the template's source, each with the test that has to catch it, and how one is planted."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fault:
    """In one function of a file of the template, one expression is replaced by another, and a test has to fail.

    Attributes:
        file: its path in the template.
        where: the function or class (``Trainer.log``), or "" for the whole file.
        old: what ``where`` has exactly once, the shorter the better: names of settings, of PyTorch and of functions
            change less often than those of variables. White space in it does not matter, nor a comma before a bracket
            that closes; ``...`` is any text, as short as possible.
        new: what takes its place, where the first ``...`` is the text of the first one in ``old``, and so on.
        test: pytest's name of the test: ``tests/...`` in the template, ``project/tests/...`` in a rendered project.
        answers: what that project is rendered with.
    """

    file: str
    where: str
    old: str
    new: str
    test: str
    answers: dict[str, str] = field(default_factory=dict)


def plant(fault: Fault, text: str) -> str:
    """Return the text of the fault's file with the fault in it."""
    start, end = find_definition(text, fault.where)
    found = [*re.finditer(build_pattern(fault.old), text[start:end])]
    assert len(found) == 1, f"{fault.where or fault.file} has {len(found)} times: {fault.old}"
    parts = iter(found[0].groups())
    new = re.sub(r"\.\.\.", lambda _: next(parts), fault.new)
    return text[: start + found[0].start()] + new + text[start + found[0].end() :]


def build_pattern(old: str) -> str:
    """Return the regular expression of the texts that ``old`` stands for."""
    patterns = []
    for token in re.findall(r"\.\.\.|\w+|[^\w\s]", old):
        if token == "...":
            patterns.append(r"([\s\S]*?)")
        elif re.match(r"\w", token):
            patterns.append(rf"\b{token}\b")
        else:  # A formatter that breaks a line adds a comma before the bracket that closes.
            patterns.append((r"(?:,\s*)?" if token in ")]}" else "") + re.escape(token))
    return r"\s*".join(patterns)


def find_definition(text: str, where: str) -> tuple[int, int]:
    """Return the positions in a text at which a function or class begins and ends, with its decorators."""
    if not where:
        return 0, len(text)
    node: ast.AST = ast.parse(text)
    for name in where.split("."):
        inside = [child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == name]
        assert len(inside) == 1, f"{len(inside)} definitions of {where}"
        node = inside[0]
    assert isinstance(node, ast.FunctionDef | ast.ClassDef)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = text.splitlines(keepends=True)
    return len("".join(lines[: first - 1])), len("".join(lines[: node.end_lineno]))


DEVICES = "tests/runs/accelerators/test_accelerators.py::"
DDP_ON_DEVICES = DEVICES + "test_a_run_on_devices_is_sound[ddp-digits-4---train.precision fp16]"
RUN_DIR = "tests/runs/failures/test_run_dir.py::"
SRC = "{{cookiecutter.project_slug}}/src/{{cookiecutter.__package}}/"
PARALLEL, TASK = "templates/parallelism/", "templates/task/"
CHECKS = "check_answers.py"

# Tests of a rendered project.
SPLIT = "project/tests/test_split.py::test_a_split_gives_the_result_of_a_plain_loop"
ALONE, MICROBATCHES = f"{SPLIT}[1-[]-[]]", f"{SPLIT}[4-[]-[]]"
PIPELINES = f"{SPLIT}[4-['--parallel.pipeline', '2', '--parallel.schedule', '1F1B']-[]]"
SHARDS = f"{SPLIT}[2-[]-[]]"
REPLICAS = f"{SPLIT}[4-['--parallel.replicas', '2', '--train.exact', 'false']-[]]"  # Of FSDP.
GROUPS = f"{SPLIT}[4-['--parallel.replicas', '2']-[]]"  # Of tensor parallelism.
KILLED = "project/tests/test_resume.py::test_a_killed_run_that_lost_a_checkpoint_resumes_bitwise"
STOPPED = "project/tests/test_resume.py::test_a_stopped_run_loses_no_step"
OTHER = "project/tests/test_resume.py::test_another_experiment_is_refused_by_name"
EXIT = "project/tests/test_exit.py::"
MISTAKE = "project/tests/test_settings.py::test_a_mistake_is_reported_in_one_line"
# Tests of the template.
HOSTILE = "tests/runs/numbers/test_hostile_model.py::"
PARITY = "tests/runs/numbers/test_parity.py::test_a_killed_and_resumed_run_matches_a_plain_loop"
REPORTS = "tests/runs/failures/test_reports.py::"
BITS = "tests/runs/numbers/test_bits.py::"
ANSWERS = "tests/template/test_answers.py::"
TOKENS = "tests/documents/test_tokens.py::"
DRAWN = RUN_DIR + "test_each_rank_and_step_draws_other_numbers_and_the_same_ones_after_a_resume"
CHANGES = "tests/runs/numbers/test_parity.py::test_a_run_that_changes_its_strategy_matches_a_plain_loop[digits]"
NUMBERS = "tests/template/test_source.py::test_pages_state_the_numbers_of_the_code"
WAITS = "tests/template/test_source.py::test_ranks_save_in_less_time_than_a_cluster_waits"

DDP, FSDP, MODEL_PARALLEL, PIPELINE, TENSOR = (
    PARALLEL + f"{name}/parallel.py" for name in ("ddp", "fsdp", "model_parallel", "pipeline", "tensor")
)
UNDER_FSDP, UNDER_PIPELINE, UNDER_TENSOR = ({"parallelism": name} for name in ("fsdp", "pipeline", "tensor"))
LANGUAGE = {"task": "language"}

FAULTS = {
    # What no number shows
    "blocks are not compiled": Fault(
        DDP,
        "prepare_block",
        "config.train.compile",
        "False",
        "tests/runs/numbers/test_parity.py::test_a_compiled_or_recomputed_run_matches_a_plain_loop[train.compile-digits-ddp]",
    ),
    "blocks are not recomputed": Fault(
        DDP,
        "prepare_block",
        "config.train.activation_checkpointing",
        "False",
        "tests/runs/numbers/test_parity.py::"
        "test_a_compiled_or_recomputed_run_matches_a_plain_loop[train.activation_checkpointing-digits-ddp]",
    ),
    "the backend is always that of the device": Fault(
        SRC + "distributed.py",
        "",
        'backend == "auto"',
        'backend != ""',
        REPORTS + "test_what_this_machine_cannot_do_is_refused",
    ),
    # Numerics: gradients
    "ddp adds up no gradients of other ranks": Fault(
        DDP,
        "Parallel.forward_backward",
        "require_backward_grad_sync = is_last",
        "require_backward_grad_sync = False",
        MICROBATCHES,
    ),
    "a micro-batch counts as much as all together": Fault(
        SRC + "losses.py", "MeanLosses", "/ self.num_microbatches", "/ 1", MICROBATCHES
    ),
    "a rank divides by the weight of its own samples": Fault(
        SRC + "losses.py",
        "MeanLosses.mean_loss",
        "self.weights.mean()",
        "self.weights[[*self.parallel.microbatches]].mean()",
        "tests/runs/projects/test_own_tests.py::test_a_loss_of_ragged_weight_does_not_depend_on_the_split[ddp]",
    ),
    "the replicas of fsdp drift apart": Fault(
        FSDP,
        "Parallel.forward_backward",
        "set_requires_all_reduce(is_last)",
        "set_requires_all_reduce(False)",
        REPLICAS,
        UNDER_FSDP,
    ),
    "fsdp averages gradients in bf16": Fault(
        FSDP, "", "reduce_dtype=torch.float32", "reduce_dtype=torch.bfloat16", REPLICAS, UNDER_FSDP
    ),
    "model parallelism averages over the ranks twice": Fault(
        MODEL_PARALLEL,
        "Parallel.forward_backward",
        "scaler.scale(loss)",
        "scaler.scale(loss / self.dp_size)",
        MICROBATCHES,
        {"parallelism": "model_parallel"},
    ),
    "the schedule of a pipeline scales the gradients again": Fault(
        PIPELINE,
        "",
        "scale_grads=False",
        "scale_grads=True",
        f"{SPLIT}[1-['--parallel.schedule', 'GPipe']-[]]",
        UNDER_PIPELINE,
    ),
    "each stage clips by its own norm": Fault(
        PIPELINE,
        "Parallel.clip_grad_norm",
        "dist.all_gather(norms, ...)",
        "norms = [...]",
        PIPELINES,
        UNDER_PIPELINE,
    ),
    "the norm counts each replica of a group": Fault(
        TENSOR, "Parallel.clip_grad_norm", "self.layout.replicas", "1", GROUPS, UNDER_TENSOR
    ),
    "the norm lacks the parameters that plan.py leaves whole": Fault(
        TENSOR, "Parallel.clip_grad_norm", "self.tensor_rank == 0 or", "", SHARDS, UNDER_TENSOR
    ),
    "a shard of the attention mixes heads": Fault(
        TASK + "language/model.py",
        "",
        "(-1, 3, self.head_width)...permute(3, 0, 2, 1, 4)",
        "(3, -1, self.head_width)...permute(2, 0, 3, 1, 4)",
        SHARDS,
        UNDER_TENSOR | LANGUAGE,
    ),
    "gradients are not clipped": Fault(SRC + "train.py", "Trainer", "self.config.train.clip_grad_norm", "None", ALONE),
    # Numerics: the optimizer and its schedule
    "AdamW ignores eps": Fault(SRC + "optim.py", "build_optimizer", "eps=config.eps", "eps=1e-8", ALONE),
    "biases decay": Fault(SRC + "optim.py", "build_optimizer", ".dim() > 1", ".dim() > 0", ALONE),
    "the warm-up starts at zero": Fault(SRC + "optim.py", "learning_rate", "(step + 1)", "step", ALONE),
    "the schedule ends at max_steps": Fault(
        SRC + "train.py",
        "Trainer",
        "self.scheduled_steps, self.config.optim",
        "self.total_steps, self.config.optim",
        ALONE,
    ),
    # Numerics: samples and random numbers
    "the first samples of an epoch are left out": Fault(
        SRC + "loader.py", "TrainSampler.__iter__", "order[:end]", "order[-end:]", ALONE
    ),
    "ranks read consecutive parts of an epoch": Fault(
        SRC + "loader.py",
        "TrainSampler.__iter__",
        ".view(self.steps_per_epoch, self.num_microbatches, -1)",
        ".view(self.num_microbatches, self.steps_per_epoch, -1).transpose(0, 1)",
        MICROBATCHES,
    ),
    # Numerics: the order of summation
    "ranks add up in another order": Fault(
        DDP,
        "reduce_scatter_as_tree",
        "parts[::2], parts[1::2]",
        "parts[: len(parts) // 2], parts[len(parts) // 2 :]",
        MICROBATCHES,
    ),
    "three ranks average and multiply": Fault(
        DDP,
        "Parallel.all_reduce",
        "padded[: len(gradients)]",
        "padded[: len(gradients)] / self.dp_size * self.dp_size",
        BITS + "test_six_micro_batches_have_the_same_bits_on_1_3_and_6_ranks",
    ),
    "weights add up in an order of the ranks": Fault(
        SRC + "losses.py",
        "MeanLosses.mean_loss",
        "self.weights.mean()",
        "sum(self.weights.roll(self.parallel.dp_size)).div(self.num_microbatches)",
        BITS + "test_layouts_of_one_micro_batch_size_have_the_same_bits[weights-fsdp]",
        UNDER_FSDP,
    ),
    "random numbers depend on the rank": Fault(
        SRC + "train.py",
        "Trainer.seeded",
        "purpose, self.step, number)",
        "purpose, self.step, self.parallel.dp_rank)",
        BITS + "test_layouts_of_one_micro_batch_size_have_the_same_bits[dropout-ddp]",
    ),
    "the norm of shards is in float32": Fault(
        FSDP,
        "norm",
        "else torch.float64",
        "else torch.float32",
        f"{SPLIT}[2-['--data.num_workers', '2']-[]]",
        UNDER_FSDP,
    ),
    "every epoch has the same augmentation": Fault(
        SRC + "loader.py", "", "derive_seed(self.seed, epoch, index)", "derive_seed(self.seed, 0, index)", ALONE
    ),
    "loader processes draw without a seed": Fault(
        SRC + "loader.py",
        "",
        "seed_everything(derive_seed(",
        "parent_process() or seed_everything(derive_seed(",
        f"{SPLIT}[2-['--data.num_workers', '2']-[]]",
    ),
    "every epoch has the same order": Fault(
        SRC + "loader.py",
        "TrainSampler.__iter__",
        'derive_seed(self.seed, "order", self.epoch)',
        "self.seed + (self.epoch << 32)",  # Of which PyTorch takes the lower half.
        f"{SPLIT}[2-['--data.num_workers', '2']-[]]",
    ),
    "all steps and ranks have the same dropout": Fault(
        SRC + "train.py",
        "Trainer.seeded",
        "derive_seed(self.config.run.seed, purpose, self.step, number)",
        "self.config.run.seed",
        DRAWN,
    ),
    "shards of one activation have different dropout": Fault(
        SRC + "train.py",
        "Trainer.seeded",
        "self.step, number)",
        "self.step, number, self.process.rank)",
        HOSTILE + "test_an_unused_parameter_is_refused_by_name_unless_it_may_be[tensor]",
    ),
    "a rank normalizes advantages by itself": Fault(
        TASK + "control/task.py",
        "normalize",
        "process.all_gather",
        "(lambda own: [own])",
        MICROBATCHES,
        {"task": "control"},
    ),
    # Numerics: shared weights and statistics
    "fsdp trains two copies of a shared weight": Fault(
        FSDP,
        "refuse_shared",
        "parameter.is_in_a_block = True",
        "pass",
        HOSTILE + "test_shared_weights_stay_shared_or_are_refused_by_name[fsdp]",
    ),
    "two stages train copies of a shared weight": Fault(
        PARALLEL + "shared/stages.py",
        "refuse_shared",
        "if parameter not in first_names:",
        "if True:",
        HOSTILE + "test_shared_weights_stay_shared_or_are_refused_by_name[pipeline]",
    ),
    "a weight that is no number is lost": Fault(
        SRC + "losses.py",
        "MeanLosses.set_weight",
        ".view(torch.int32)",
        "",
        REPORTS + "test_a_weight_that_is_no_number_on_one_rank_ends_the_run",
    ),
    "a checkpoint has the BatchNorm statistics of rank 0": Fault(
        SRC + "checkpoint.py",
        "Checkpointer",
        "self.parallel.average_buffers()",
        "pass",
        RUN_DIR + "test_saved_statistics_of_batch_norm_are_averages_over_the_ranks",
    ),
    "statistics of BatchNorm are summed over the ranks": Fault(
        DDP,
        "Parallel.average_buffers",
        "ReduceOp.AVG",
        "ReduceOp.SUM",
        RUN_DIR + "test_saved_statistics_of_batch_norm_are_averages_over_the_ranks",
    ),
    "variances of BatchNorm are those of rank 0": Fault(
        DDP,
        "Parallel.average_buffers",
        '("running_mean", "running_var")',
        '("running_mean", "running_mean")',
        RUN_DIR + "test_saved_statistics_of_batch_norm_are_averages_over_the_ranks",
    ),
    # Resume
    "a resumed run starts its epoch again": Fault(
        SRC + "loader.py", "TrainSampler.position", "return epoch,", "return epoch, 0 *", f"{KILLED}[2]"
    ),
    "a resumed run starts with an empty optimizer": Fault(
        DDP, "Parallel.load_full_state_dict", "state.get(name, {})", "{}", f"{KILLED}[2]"
    ),
    "settings of the checkpoint replace changed ones": Fault(
        SRC + "checkpoint.py",
        "Checkpointer.restore",
        "self.load(parallel, ..., optimizer)",
        'self.load(parallel, ..., optimizer); vars(self.config.optim).update(self.start["config"]["optim"])',
        "project/tests/test_resume.py::test_changed_settings_act_from_the_first_step",
    ),
    "a run resumes with another seed": Fault(
        SRC + "checkpoint.py", "", '"run.seed"', '"run.others"', f"{OTHER}[('--run.seed', '8')]"
    ),
    "a run resumes with another batch size": Fault(
        SRC + "checkpoint.py",
        "",
        '"data.global_batch_size"',
        '"data.others"',
        RUN_DIR + "test_another_batch_size_is_refused_in_the_middle_of_a_run",
    ),
    "resume=never resumes": Fault(
        SRC + "checkpoint.py",
        "",
        'resume == "never"',
        'resume == "others"',
        f"{OTHER}[('--checkpoint.resume', 'never')]",
    ),
    "the oldest checkpoint comes first": Fault(SRC + "checkpoint.py", "", "in reversed(", "in (", f"{KILLED}[2]"),
    "a damaged checkpoint ends the run": Fault(
        SRC + "files.py", "set_aside", "os.replace(path, ...)", "raise", f"{KILLED}[2]"
    ),
    "records of steps that are repeated remain": Fault(
        SRC + "logger.py", "", '["step"] <=', '["step"] >= 0 *', f"{KILLED}[2]"
    ),
    "records that cannot be read are lost": Fault(
        SRC + "logger.py",
        "",
        "if is_damaged:",
        "if not lines:",
        RUN_DIR + "test_what_a_crash_of_the_machine_damaged_is_set_aside",
    ),
    "a folder that is not mounted is a fresh start": Fault(
        SRC + "checkpoint.py",
        "Checkpointer",
        "self.folder.mkdir(",
        "self.folder.parent.mkdir(",
        REPORTS + "test_a_link_to_a_folder_that_is_not_mounted_is_no_fresh_start",
    ),
    "numbers of an optimizer start again": Fault(
        SRC + "checkpoint.py",
        "Checkpointer.restore",
        'group.update(content.get("numbers", {}))',
        "group",
        REPORTS + "test_numbers_that_an_optimizer_keeps_resume_or_are_refused[ddp-1.5-]",
    ),
    "a checkpoint's index runs code": Fault(
        PARALLEL + "shared/sharded.py",
        "IndexUnpickler",
        "if not is_dtype and",
        "if not module and",
        REPORTS + "test_a_planted_index_of_a_sharded_checkpoint_runs_no_code",
    ),
    "weights are drawn by each shard": Fault(
        PARALLEL + "shared/sharded.py",
        "Checkpointer.restore",
        '"progress" not in',
        '"progress" in',
        REPORTS + "test_weights_that_are_drawn_after_wrap_are_those_of_one_rank[fsdp]",
    ),
    "a pipeline loses a hook of the whole model": Fault(
        PARALLEL + "shared/stages.py",
        "Outline.__init__",
        "not is_bare",
        "not wrap",
        REPORTS
        + "test_what_hangs_on_a_whole_model_that_has_stages_is_refused[register_forward_hook(lambda model, inputs, "
        "outputs: outputs * 2)-pipeline]",
    ),
    "forward changes a buffer": Fault(
        SRC + "train.py",
        "Trainer.sum_bits",
        ", *modules.named_buffers()",
        "",
        REPORTS + "test_what_micro_batches_change_is_named_at_the_first_record[a buffer]",
    ),
    "forward changes what fsdp has gathered": Fault(
        PARALLEL + "fsdp/parallel.py",
        "Parallel.check_unchanged",
        "parameter._version > 0",
        "parameter._version < 0",
        REPORTS + "test_what_micro_batches_change_is_named_at_the_first_record[what fsdp gathers]",
    ),
    "forward changes what a stage has gathered": Fault(
        PARALLEL + "shared/stages.py",
        "Stage.forward",
        "parameter._version > 0",
        "parameter._version < 0",
        REPORTS + "test_what_micro_batches_change_is_named_at_the_first_record[what a pipeline gathers]",
    ),
    "gradients of two layers are added": Fault(
        PARALLEL + "fsdp/parallel.py",
        "Parallel.check_used",
        "not in self.reached",
        "is None",
        REPORTS + "test_a_layer_that_some_micro_batches_lack_is_right_or_refused[fsdp-2-words6-1-the loss does not "
        "depend on ['head.]",
    ),
    "a bucket of gradients that DDP keeps is no error": Fault(
        DDP,
        "Parallel.clip_grad_norm",
        "not self.is_reduced",
        "not self.ddp",
        REPORTS + "test_a_layer_that_some_micro_batches_lack_is_right_or_refused[ddp-1-words4-0-unused in the last "
        "micro-batch]",
    ),
    "shards lose the hook of a parameter": Fault(
        PARALLEL + "shared/sharded.py",
        "refuse_hooks",
        "if parameter.requires_grad",
        "if parameter.is_meta",
        REPORTS + "test_what_hangs_on_a_parameter_is_refused_under_shards[hook-fsdp]",
    ),
    "a resumed run loses what a task keeps": Fault(
        SRC + "train.py",
        "Trainer.sum_bits",
        "repr(vars(self.task))",
        "repr(self.task)",
        REPORTS + "test_what_a_task_keeps_from_step_to_step_is_refused_at_the_first_record[changes0]",
    ),
    "a module of the task changes": Fault(
        SRC + "experiment.py",
        "build_task",
        "isinstance(member, nn.Module)",
        "isinstance(member, nn.Sequential)",
        REPORTS + "test_what_a_task_keeps_from_step_to_step_is_refused_at_the_first_record[changes2]",
    ),
    "the best checkpoint is removed with its record": Fault(
        SRC + "checkpoint.py",
        "Checkpointer.prune",
        "not in names",
        "in names",
        "tests/runs/failures/test_run_dir.py::test_the_best_checkpoint_stays_if_its_record_is_lost",
    ),
    # Evaluation
    "an evaluation draws as its loaders have": Fault(
        SRC + "evaluate.py",
        "Evaluator.measure",
        "seed_everything(...)\n            inputs",
        "inputs",
        REPORTS + "test_what_an_evaluation_draws_depends_on_no_loader_process",
    ),
    "the last samples are lost on uneven ranks": Fault(
        SRC + "evaluate.py",
        "Evaluator.__init__",
        "range(parallel.dp_rank, ..., parallel.dp_size)",
        "range(parallel.dp_rank, len(batches) - len(batches) % parallel.dp_size, parallel.dp_size)",
        "project/tests/test_evaluate.py::test_every_sample_counts_once[3]",
        LANGUAGE,
    ),
    "a sample that only fills up counts": Fault(
        SRC + "evaluate.py",
        "Evaluator.aggregate",
        'np.unique(merged["index"], return_index=True)[1]',
        'np.argsort(merged["index"])',
        f"{PARITY}[ddp-language-4]",
    ),
    "images for validation are shifted too": Fault(
        TASK + "digits/dataset.py",
        "build_datasets",
        'Digits("train")',
        'Digits("train", config.dataset.max_shift)',
        f"{PARITY}[ddp-digits-1]",
    ),
    "validation is on the test set": Fault(
        SRC + "train.py",
        "Trainer.__init__",
        "Evaluator(..., validation_set",
        "Evaluator(..., datasets[2]",
        f"{PARITY}[ddp-digits-1]",
    ),
    "an evaluation trains BatchNorm": Fault(
        SRC + "evaluate.py",
        "Evaluator.__call__",
        "module.eval()",
        "module.train()",
        HOSTILE + "test_a_killed_run_resumes_bitwise[data_parallel]",
    ),
    "training goes on in eval mode": Fault(
        SRC + "evaluate.py",
        "Evaluator.__call__",
        "module.training = True",
        "module.training = False",
        HOSTILE + "test_a_killed_run_resumes_bitwise[data_parallel]",
    ),
    "an evaluation reads another dataset than the run": Fault(
        SRC + "experiment.py",
        "",
        '("model", "dataset")',
        '("model",)',
        REPORTS + "test_what_evaluates_is_what_trained",
    ),
    # Saving
    "a flipped bit is not noticed": Fault(SRC + "files.py", "", "archive.testzip()", "None", f"{KILLED}[2]"),
    "a loss that is not finite is logged as any other": Fault(
        SRC + "train.py",
        "Trainer.check_finite",
        "math.isfinite(number)",
        "True",
        "project/tests/test_resume.py::test_a_loss_that_is_not_finite_ends_the_run_by_its_step",
    ),
    "weights that are not finite are saved": Fault(
        SRC + "checkpoint.py",
        "Checkpointer",
        "if not nn.utils",
        "if None is nn.utils",
        RUN_DIR + "test_weights_that_are_not_finite_are_not_saved[ddp]",
    ),
    "a checkpoint counts the samples of one rank": Fault(
        SRC + "train.py",
        "Trainer",
        '"samples": ...}',
        '"samples": (...) // self.parallel.dp_size}',
        REPORTS + "test_metrics_become_plain_numbers_and_the_checkpoint_can_be_read",
    ),
    "a checkpoint has the first stage alone": Fault(
        PARALLEL + "shared/stages.py",
        "gather_state_dict",
        'content["model"].update(received[0]["model"])',
        "pass",
        PIPELINES,
        UNDER_PIPELINE,
    ),
    "the last step is not saved": Fault(
        SRC + "train.py",
        "Trainer.run",
        "save_is_due = evaluation_is_due or self.is_due(self.config.checkpoint.every_steps)",
        "every = self.config.checkpoint.every_steps\n"
        "                save_is_due = every is not None and self.step % every == 0",
        REPORTS + "test_what_evaluates_is_what_trained",
    ),
    "only the best checkpoint is kept": Fault(
        SRC + "checkpoint.py",
        "Checkpointer.prune",
        "checkpoints[-self.config.checkpoint.keep :]",
        "()",
        "tests/runs/clusters/test_machines.py::test_torchrun_restarts_the_ranks_when_one_is_killed",
    ),
    "the worst checkpoint is kept": Fault(
        SRC + "logger.py",
        "Logger.best_steps",
        "reverse=task.higher_is_better",
        "reverse=not task.higher_is_better",
        RUN_DIR + "test_the_newest_checkpoints_and_the_best_one_are_kept",
    ),
    "a checkpoint runs code": Fault(
        SRC + "files.py",
        "",
        "weights_only=True, mmap=True",
        "weights_only=False, mmap=True",
        REPORTS + "test_weights_of_other_programs_load_or_are_named",
    ),
    "a full disk leaves what was half written": Fault(
        SRC + "files.py",
        "write_atomically",
        "temporary.unlink(missing_ok=True)",
        "pass",
        RUN_DIR + "test_a_full_disk_costs_no_checkpoint_that_was_complete[ddp-words0]",
    ),
    "two runs share a folder": Fault(
        SRC + "checkpoint.py",
        "Checkpointer",
        "self.lock = files.lock_run_dir(self.folder.parent)",
        "pass",
        RUN_DIR + "test_a_folder_belongs_to_one_run",
    ),
    "a run writes into the folder of another": Fault(
        SRC + "checkpoint.py",
        "Checkpointer.wait_for_writers",
        'not os.path.samefile(self.lock, self.folder.parent / ".lock")',
        "False",
        RUN_DIR + "test_a_run_whose_folder_was_moved_does_not_write_into_another_run",
    ),
    "a checkpoint is written while training changes it": Fault(
        DDP,
        "Parallel.full_state_dict",
        'tensor.to("cpu", copy=True)',
        'tensor.to("cpu")',
        RUN_DIR + "test_a_run_that_is_killed_while_it_saves_resumes_bitwise[ddp-words1]",
    ),
    "a sharded checkpoint lacks the optimizer's state": Fault(
        PARALLEL + "shared/sharded.py",
        "Checkpointer.load",
        "parameters[name], states.pop(name))",
        "parameters[name], {})",
        RUN_DIR + "test_a_sharded_run_that_is_killed_resumes_bitwise[fsdp]",
    ),
    # Stopping and failing
    "a signal to one rank is ignored": Fault(
        SRC + "distributed.py",
        "StopSignal",
        'self.process.store.set("stop"',
        'self.process.rank or self.process.store.set("stop"',
        f"{STOPPED}[SIGUSR1 to one rank]",
    ),
    "spawn kills ranks that would save": Fault(
        "templates/launcher/spawn/spawn.py",
        "wait",
        ".terminate()",
        ".kill()",
        f"{STOPPED}[SIGTERM to the launcher]",
        {"launcher": "spawn"},
    ),
    "ranks outlive a killed launcher": Fault(
        SRC + "distributed.py",
        "",
        "prctl(..., signal.SIGKILL)",
        "prctl(..., 0)",
        EXIT + "test_a_killed_launcher_leaves_no_rank",
    ),
    "a hang names the ranks that wait": Fault(
        SRC + "failures.py",
        "",
        'not store.check([f"waited{rank}"])',
        'store.check([f"waited{rank}"])',
        EXIT + "test_a_rank_that_hangs_is_named",
    ),
    "a failed run ends with 0": Fault(
        SRC + "failures.py", "fail", "exit_now(...)", "exit_now(0)", EXIT + "test_an_error_is_named_with_one_traceback"
    ),
    "a rank that was stopped ends with 0": Fault(
        SRC + "distributed.py",
        "cleanup",
        "exit_now(...)",
        "exit_now(0)",
        "tests/runs/clusters/test_kubernetes.py::test_pods_that_stop_are_replaced_and_a_mistake_ends_the_job[spawn]",
    ),
    "parameters without a gradient pass": Fault(
        SRC + "train.py",
        "Trainer.check_gradients",
        "self.config.train.allow_unused",
        "True",
        HOSTILE + "test_an_unused_parameter_is_refused_by_name_unless_it_may_be[data_parallel]",
    ),
    "the last of two equal keys counts": Fault(
        SRC + "__main__.py",
        "",
        "if key.value in seen_keys",
        "if seen_keys.count(key.value) > 1",
        f"{MISTAKE}[train --config {{}}/twice.yaml-]",
    ),
    "every rank reports a mistake": Fault(
        "templates/launcher/shared/prepare.sh",
        "",
        '--preflight "$@"',
        '--preflight "$@" || true',  # At least one rank reports it again.
        f"{MISTAKE}[train --train.epochs 0-]",
    ),
    # What a setting, an argument or a page says
    "bf16 computes in fp32": Fault(DDP, "", '"bf16": torch.bfloat16', '"bf16": torch.float32', DRAWN),
    "fp16 does not scale the loss": Fault(
        DDP, "Parallel.__init__", "GradScaler(..., enabled=...)", "GradScaler(..., enabled=False)", DRAWN
    ),
    "every run is exact": Fault(SRC + "distributed.py", "setup", "config.train.exact", "True", DRAWN),
    "ranks meet at the launcher's address alone": Fault(
        SRC + "distributed.py",
        "rendezvous",
        "config.distributed.init_method",
        '"env://"',
        REPORTS + "test_ranks_meet_where_init_method_says",
    ),
    "LoopedBFS is another schedule": Fault(
        PIPELINE,
        "Parallel.build_schedule",
        "self.layout.schedule",
        'self.layout.schedule.replace("LoopedBFS", "GPipe")',
        CHANGES,
    ),
    "blocks free their weights although they are to be kept": Fault(
        FSDP,
        "",
        "reshard_after_forward=... .reshard_after_forward",
        "reshard_after_forward=True",
        CHANGES,
    ),
    "a notebook cannot be interrupted after a run": Fault(
        "templates/launcher/spawn/spawn.py",
        "launch",
        "signal.signal(number, handler)",
        "pass",
        REPORTS + "test_a_notebook_starts_ranks_and_keeps_its_signals",
    ),
    "a temperature has no effect": Fault(
        TASK + "language/generate.py",
        "",
        "/ max(..., 1e-9)",
        "",
        REPORTS + "test_what_evaluates_is_what_trained",
    ),
    "there is one rank for any number of GPUs": Fault(
        "templates/launcher/shared/prepare.sh",
        "",
        "$((gpus ? gpus : 2))",
        "$((gpus ? 1 : 2))",
        REPORTS + "test_ranks_are_as_many_as_visible_devices_or_two[0,1,-1,2-2]",
    ),
    "a stop signal is looked for twice a minute": Fault(
        SRC + "distributed.py",
        "",
        "CHECK_SECONDS = 2.5",
        "CHECK_SECONDS = 25",
        RUN_DIR + "test_a_stop_waits_for_no_record",
    ),
    "a machine may have the number of machines as its number": Fault(
        "templates/launcher/shared/prepare.sh",
        "",
        "last=$((nodes - 1))",
        "last=$((nodes))",
        "tests/template/test_claims.py::test_numbers_that_start_no_machines_are_refused[torchrun]",
    ),
    "a stopped launcher ends with the number of the signal": Fault(
        "templates/launcher/torchrun/torchrun.py",
        "",
        "128 + stopped.sigval",
        "stopped.sigval",
        f"{STOPPED}[SIGTERM to the launcher]",
    ),
    "the README has other exit codes": Fault(
        "{{cookiecutter.project_slug}}/README.md", "", "130, 143 or 138", "130, 137 or 138", NUMBERS
    ),
    "a slug may be longer than the page states": Fault(
        CHECKS, "", 'SLUG_LIMIT = "my-experiment", 60', 'SLUG_LIMIT = "my-experiment", 64', NUMBERS
    ),
    "make setup installs another group of packages": Fault(
        "{{cookiecutter.project_slug}}/Makefile", "", "--group dev", "--group test", NUMBERS
    ),
    "a pod is killed before its ranks have saved": Fault(
        "templates/cluster/kubernetes/job.yaml",
        "",
        "terminationGracePeriodSeconds: 300",
        "terminationGracePeriodSeconds: 200",
        WAITS,
    ),
    "a Slurm job ends before its ranks have saved": Fault(
        "templates/cluster/slurm/train.sbatch", "", "--signal=USR1@300", "--signal=USR1@120", WAITS
    ),
    "a container runs as root": Fault(
        "{{cookiecutter.project_slug}}/{{ 'Dockerfile' if cookiecutter.docker else '' }}",
        "",
        "USER 1000",
        "",
        "tests/template/test_source.py::test_a_container_runs_as_the_user_that_may_write",
    ),
    # Tokens
    "what follows the end of a document is predicted": Fault(
        TASK + "language/dataset.py",
        "Windows.__getitem__",
        "== self.end",
        "== -2",
        TOKENS + "test_windows_are_those_of_a_mixture_of_documents",
    ),
    "masked targets count": Fault(
        TASK + "language/task.py",
        "Task.weight",
        '["end"] < 0',
        '["end"] < 300',
        TOKENS + "test_windows_are_those_of_a_mixture_of_documents",
    ),
    # What is loaded, split or averaged
    "losses are averaged by position": Fault(
        SRC + "losses.py",
        "MeanLosses.average",
        "part[name] for part in parts",
        "[*part.values()][[*names].index(name)] for part in parts",
        REPORTS + "test_losses_are_averaged_by_name",
    ),
    "all groups have one learning rate": Fault(
        SRC + "optim.py",
        "set_learning_rate",
        "share_of_peak * peak",
        "share_of_peak * config.lr",
        REPORTS + "test_a_group_keeps_its_share_of_the_learning_rate",
    ),
    "copies of a parameter that works on shards drift apart": Fault(
        TENSOR,
        "",
        "> 1.0001 *",
        "> 1e9 *",
        REPORTS + "test_a_parameter_that_works_on_shards_is_in_the_plan_or_refused[tensor]",
    ),
    # Rendering
    "a slug leads out of the output folder": Fault(
        CHECKS,
        "find_slug_fault",
        "re.fullmatch(",
        "re.match(",
        ANSWERS + "test_without_hooks_no_slug_leads_out_of_the_output_folder",
    ),
    "a reserved name with a dash is free": Fault(
        CHECKS,
        "find_owner",
        "if slug in names",
        "if name in names",
        ANSWERS + "test_no_slug_is_the_name_of_a_module_and_the_better_one_works",
    ),
    "a backslash is not escaped": Fault(
        CHECKS,
        "quoted",
        r""".replace("\\", "\\\\")""",
        "",
        ANSWERS + "test_names_may_contain_any_other_character",
    ),
    "an old cookiecutter writes half a project": Fault(
        CHECKS,
        "CheckAnswers.__init__",
        "< [2, 6]",
        "< [2, 1]",
        ANSWERS + "test_a_cookiecutter_that_is_too_old_is_refused[2.1.1]",
    ),
    "projects link to a repository of their own": Fault(
        "{{cookiecutter.project_slug}}/README.md",
        "",
        "({{ cookiecutter._repository }}/blob/main/docs/recipes.md)",
        "(https://example.org/blob/main/docs/recipes.md)",
        "tests/template/test_source.py::test_one_line_names_the_repository",
    ),
    "choices that do not fit are rendered": Fault(
        CHECKS,
        "find_refusal",
        "if answers[question] in reasons",
        "if question in reasons",
        ANSWERS + "test_choices_that_do_not_fit_are_rejected_with_a_command_that_works"
        "[{'task': 'control', 'parallelism': 'fsdp'}]",
    ),
    "a replay is not checked": Fault(
        CHECKS,
        "CheckAnswers.preprocess",
        "source == FOLDER",
        "source == name",
        ANSWERS + "test_it_is_rejected_in_one_line_with_a_command_that_works[replay-project_slug-../evil]",
    ),
    "a replay says itself what follows from its answers": Fault(
        CHECKS,
        "CheckAnswers.check_answers",
        "derive(answers)",
        'derive(answers) | {"__year": answers.get("__year", 1)}',
        ANSWERS + "test_what_follows_from_the_answers_is_derived_again_by_a_replay[edited]",
    ),
    "an update checks answers with the old version": Fault(
        CHECKS,
        "CheckAnswers.__init__",
        "sys.modules.pop",
        "sys.modules.get",
        "tests/template/test_cruft.py::test_an_update_loads_the_checks_of_each_version_that_it_renders",
    ),
    "a fact that no choice states is empty": Fault(
        PARALLEL + "model_parallel/facts.json",
        "",
        '"accelerators": "two accelerators"',
        '"devices": "two accelerators"',
        "tests/template/test_source.py::test_every_fact_is_stated_by_one_question_and_used",
    ),
    "the answer to a question is not recorded": Fault(
        "{{cookiecutter.project_slug}}/pyproject.toml",
        "",
        'launcher = "{{ cookiecutter.launcher }}"',
        'launcher = "torchrun"',
        "tests/template/test_prompts.py::test_choices_can_be_selected_by_number_and_the_slug_follows_the_name",
    ),
    "a project has a chapter on a file that it lacks": Fault(
        "{{cookiecutter.project_slug}}/README.md",
        "",
        "#:: if cookiecutter.docker ::#",
        '#:: if cookiecutter.docker or cookiecutter.cluster == "kubernetes" ::#',
        "tests/template/test_render.py::test_a_project_has_no_traces_of_the_template_or_of_other_choices[pairs]",
    ),
    "a project uses one private interface more": Fault(
        SRC + "distributed.py",
        "choose_device",
        "torch.accelerator.device_count()",
        "torch._C._accelerator_hooks_device_count()",
        "tests/template/test_caps.py::test_no_project_is_beyond_a_cap[default-private interfaces]",
    ),
    # Accelerators
    "DDP is given a device": Fault(
        DDP,
        "Parallel.__init__",
        "gradient_as_bucket_view=True,",
        "gradient_as_bucket_view=True, device_ids=[0],",
        DDP_ON_DEVICES,
    ),
    "all ranks take the first device": Fault(
        SRC + "distributed.py",
        "choose_device",
        'int(os.environ.get("LOCAL_RANK", "0"))',
        "0",
        DDP_ON_DEVICES,
    ),
    "each step waits for the device": Fault(
        SRC + "train.py",
        "Trainer.train_step",
        "scaler.step(self.optimizer)",
        "scaler.step(self.optimizer), grad_norm.item()",
        DDP_ON_DEVICES,
    ),
    "each micro-batch waits to get its weight": Fault(
        SRC + "losses.py",
        "MeanLosses.set_weight",
        "self.weights[number].fill_(self.task.weight(targets))",
        "self.weights[number] = self.task.weight(targets)",
        DDP_ON_DEVICES,
    ),
    "a batch stays on the CPU": Fault(
        SRC + "loader.py",
        "to_device",
        "tensor.to(device, non_blocking=True)",
        "tensor",
        DDP_ON_DEVICES,
    ),
    "rank 0 calls a collective alone": Fault(
        SRC + "train.py",
        "Trainer.train_step",
        "self.check_gradients()",
        "self.check_gradients(), self.process.rank == 0 and torch.distributed.barrier()",
        DDP_ON_DEVICES,
    ),
    "the first random operation on a shard waits for other stages": Fault(
        "templates/parallelism/mesh/parallel.py",
        "Parallel.build_mesh",
        "rand(1, device_mesh=self.tensor_mesh)",
        "pass",
        DEVICES + "test_stages_may_draw_random_numbers_on_shards",
    ),
    "gloo is chosen for an accelerator": Fault(
        SRC + "distributed.py",
        "setup",
        "dist.get_default_backend_for_device(process.device)",
        '"gloo"',
        DDP_ON_DEVICES,
    ),
    "some ranks make a group": Fault(
        SRC + "distributed.py",
        "setup",
        'dist.new_group(backend="gloo", timeout=timeout)',
        'dist.new_group(backend="gloo", timeout=timeout)\n        process.rank and dist.new_group()',
        DDP_ON_DEVICES,
    ),
    "losses are divided on another device": Fault(
        MODEL_PARALLEL,
        "Parallel.place_blocks",
        "place(block, self.device)",
        "place(block, self.device)\n            self.device = self.process.device",
        DEVICES + "test_a_run_resumes_on_devices[model_parallel]",
    ),
    "a stage keeps the outputs of an evaluation": Fault(
        "templates/parallelism/shared/stages.py",
        "Stage.take_outputs",
        "self.outputs = None",
        "pass",
        DEVICES + "test_a_run_on_devices_is_sound[pipeline-language-4---train.activation_checkpointing true]",
    ),
}
# Planted in `make test-long` too.
SAMPLE = [
    "the norm counts each replica of a group",
    "the first samples of an epoch are left out",
    "two stages train copies of a shared weight",
    "a run resumes with another seed",
    "a folder that is not mounted is a fresh start",
    "the last samples are lost on uneven ranks",
    "a loss that is not finite is logged as any other",
    "a failed run ends with 0",
    "every rank reports a mistake",
    "choices that do not fit are rendered",
]
