"""What the other tests prove on a CPU, on CUDA GPUs; `make test-gpu` runs these tests, and `make test` does not.

With NCCL, each rank needs a GPU of its own.
"""

import math
#:: if not cookiecutter.__one_process ::#
import signal
#:: endif ::#
from collections.abc import Callable, Iterator
#:: if not cookiecutter.__one_process ::#
from functools import partial
#:: endif ::#
from pathlib import Path
from typing import Any

import pytest
import torch

import plain
import support
#:: if not cookiecutter.__one_process ::#
from conftest import signal_last_rank
#:: endif ::#
from support import LENGTH, assert_close, launch, load_model, module, read_records, settings
from test_training import build_trainer, record_dtypes, step

runtime = module("runtime")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
# How much a loss, or a tensor of weights relative to its norm, may differ from the plain loop's on a GPU. This is more
# than on a CPU, because cuDNN and cuBLAS choose other algorithms for other batch sizes; TF32 would change more.
TOLERANCE = 1e-4
GPU = ("--distributed.device", "auto")
#:: if not cookiecutter.__one_process ::#
SHARED_GPU = (*GPU, "--distributed.backend", "gloo")
#:: endif ::#
#:: if cookiecutter.parallelism == "model_parallel" ::#
ONE_GPU, NEEDED = SHARED_GPU, 2 * support.RANKS  # With gloo, the two devices of a rank may be the same GPU.
#:: elif cookiecutter.__one_process ::#
ONE_GPU = GPU
#:: else ::#
ONE_GPU, NEEDED = GPU, support.RANKS
#:: endif ::#
#:: if not cookiecutter.__one_process ::#
with_nccl = pytest.mark.skipif(torch.cuda.device_count() < NEEDED, reason=f"needs {NEEDED} CUDA devices")
#:: endif ::#
LAYOUTS = [
    pytest.param(1, ONE_GPU, id="one rank"),
    #:: if not (cookiecutter.__one_process or cookiecutter.__has_stages) ::#
    pytest.param(support.RANKS, SHARED_GPU, id="ranks that share a GPU"),
    #:: endif ::#
    #:: if not cookiecutter.__one_process ::#
    pytest.param(support.RANKS, (*GPU, *support.SHARDED), marks=with_nccl, id="a GPU for each rank"),
    #:: endif ::#
]


@pytest.fixture(scope="module", autouse=True)
def exact() -> Iterator[None]:
    """Arithmetic in this process is that of runs, from before CUDA is initialized."""
    runtime.set_exact_arithmetic(True)
    yield
    torch.set_deterministic_debug_mode("default")


@pytest.fixture(scope="module")
def expected() -> plain.Plain:
    """What a loop gives that splits nothing, on the first GPU."""
    return plain.train(settings(*LENGTH), support.STEPS, "cuda")


@pytest.fixture(scope="module")
def process() -> Iterator[Any]:
    """A process group of this process alone."""
    config = settings(*ONE_GPU)
    with runtime.process_group(config.distributed, config.parallel.devices_per_rank()) as alone:
        yield alone


@pytest.fixture
def build(process: Any, tmp_path: Path) -> Callable[..., Any]:
    """A function that builds a trainer from settings; it writes to ``tmp_path``."""
    return lambda *words: build_trainer(process, tmp_path, *ONE_GPU, *words)


@pytest.mark.parametrize(("nproc", "words"), LAYOUTS)
def test_a_split_gives_the_result_of_a_plain_loop(
    expected: plain.Plain, trained: Callable[..., Path], nproc: int, words: tuple[str, ...]
) -> None:
    run = trained(nproc, *words)
    for record, theirs in zip(read_records(run, "train"), expected.records, strict=True):
        assert record["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE), f"step {record['step']}"
    assert_close(load_model(run), expected.weights, TOLERANCE)


def test_a_run_repeats_bit_for_bit(trained: Callable[..., Path], tmp_path: Path) -> None:
    first = trained(1, *ONE_GPU)
    launch("train", *LENGTH, *ONE_GPU, "--run.dir", str(tmp_path), nproc=1)
    weights, again = load_model(first), load_model(tmp_path)
    assert all(torch.equal(again[name], weights[name]) for name in weights)
    ours, theirs = ([record["loss"] for record in read_records(run, "train")] for run in (tmp_path, first))
    assert ours == theirs


@pytest.mark.parametrize("exact", [True, False])
def test_products_are_in_tf32_unless_they_are_exact(exact: bool) -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no TF32 before compute capability 8.0")
    matrix = torch.randn(1024, 1024, device="cuda")
    runtime.set_exact_arithmetic(exact)
    product = (matrix @ matrix).double()
    runtime.set_exact_arithmetic(True)
    error = (product - matrix.double() @ matrix.double()).norm() / product.norm()
    assert (error < 1e-5) == exact  # A TF32 number has 11 bits, which gives about 3e-4.


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_layers_compute_in_a_lower_precision(build: Callable[..., Any], precision: str, dtype: torch.dtype) -> None:
    expected = float(step(build())["loss"])
    trainer = build("--train.precision", precision)
    seen = record_dtypes(trainer)
    losses = [float(step(trainer)["loss"]) for _ in range(3)]  # The scaler of fp16 may skip a step.
    assert dtype in seen or not seen
    assert losses[0] == pytest.approx(expected, rel=2e-2) and all(math.isfinite(loss) for loss in losses)
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in trainer.parallel.module.parameters())


#:: if not cookiecutter.__one_process ::#
def test_compiled_blocks_give_the_same_loss(build: Callable[..., Any]) -> None:
    from torch._dynamo.utils import counters  # Slow to import.

    expected = float(step(build())["loss"])
    counters.clear()
    assert float(step(build("--train.compile", "true"))["loss"]) == pytest.approx(expected, rel=TOLERANCE)
    assert counters["stats"]["unique_graphs"] > 0


#:: endif ::#
#:: if cookiecutter.parallelism == "fsdp" ::#
def test_offloaded_shards_stay_on_the_cpu(build: Callable[..., Any]) -> None:
    losses = []
    for offload, device in (("false", "cuda"), ("true", "cpu")):
        trainer = build("--parallel.cpu_offload", offload)
        losses.append([float(step(trainer)["loss"]) for _ in range(2)])
        moments = [state["exp_avg"] for state in trainer.optimizer.state.values()]
        held = [*trainer.parallel.module.parameters(), *moments]
        assert moments and {tensor.to_local().device.type for tensor in held} == {device}
    assert losses[1] == pytest.approx(losses[0], rel=TOLERANCE)


#:: endif ::#
def test_random_numbers_of_the_gpu_continue_where_they_were_saved(build: Callable[..., Any], tmp_path: Path) -> None:
    trainer = build()
    torch.rand(1, device="cuda")
    trainer.checkpointer.save(trainer.progress)
    expected = torch.rand(4, device="cuda")
    build().restore([support.newest_checkpoint(tmp_path)])  # Building seeds the generator.
    assert torch.equal(torch.rand(4, device="cuda"), expected)


#:: if not cookiecutter.__plays ::#
def test_batches_are_copied_without_waiting(build: Callable[..., Any]) -> None:
    splitting = module("splitting")
    batch = splitting.unpack(next(iter(build().loader)))
    assert all(tensor.is_pinned() for tensor in batch)
    torch.cuda.set_sync_debug_mode("error")  # A copy that waits is an error.
    try:
        copies = splitting.to_device(batch, torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(copy.cpu(), tensor) for copy, tensor in zip(copies, batch, strict=True))


#:: endif ::#
def test_doctor_names_the_gpu(tmp_path: Path) -> None:
    output = launch("doctor", *ONE_GPU, "--run.dir", str(tmp_path), nproc=1).stdout
    rows = {line[:20].strip(): line[20:].split(maxsplit=1) for line in output.splitlines() if "---->" not in line}
    assert f"cuda:0 {torch.cuda.get_device_name(0)}" in rows["device"][1]
    assert all(rows[name][0] == "pass" for name in ("backend", "driver", "matrix products"))
    assert "NCCL" in rows["versions"][1]
#:: if cookiecutter.__has_stages ::#


def test_ranks_cannot_share_a_gpu(tmp_path: Path) -> None:
    words = ("train", *LENGTH, *SHARED_GPU, "--run.dir", str(tmp_path))
    assert "gloo, which sends no stage's output" in launch(*words, nproc=support.RANKS, exit_code=2).stderr
#:: endif ::#
#:: if not cookiecutter.__one_process ::#


@with_nccl
def test_a_timeout_leaves_the_last_collectives_in_the_run_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOP_SECONDS", "5")  # The stopped rank has to be killed.
    words = (*GPU, "--distributed.timeout_seconds", "10")
    support.end_at(6, tmp_path, partial(signal_last_rank, signal.SIGSTOP), *words)
    assert (tmp_path / "collectives_0").stat().st_size > 0
#:: endif ::#
