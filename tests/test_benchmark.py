"""``benchmark``: each figure is compared with something that was planted, or that is known otherwise."""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Bake, run
from PIL import Image
from runs import alone, edit, launch, plant

pytestmark = pytest.mark.slow

CPU = ("--distributed.device", "cpu")
WIDTH, BATCH = 8, 64
SMALL = (*CPU, "--model.width", str(WIDTH), "--model.depth", "1", "--train.max_steps", "6", "--train.log_every", "3")
# Seconds that are slept in each part of a step; rank 1 loads more slowly, so rank 0 waits for its gradients.
SLEEPS = {"data": 0.1, "forward": 0.15, "backward": 0.15, "optimizer": 0.1, "logging": 0.1}
SLOWER, LOG, SAVE, WRITE = 0.6, 3 * SLEEPS["logging"], 0.3, 0.5
# A run that lives in the directory; benchmark must not touch it.
RUN = {
    "metrics.jsonl": "{}\n",
    "config.yaml": "a: 1\n",
    "checkpoints/step-00000006.pt": "saved",
    "memory-rank0.pickle": "m",
}
FORWARD = f"""\
time.sleep({SLEEPS["forward"]})
if features.requires_grad:
    features.register_hook(lambda _: time.sleep({SLEEPS["backward"]}))
"""


def slow_down(project: Path) -> None:
    """Sleep in each part of a step, and in saves."""
    data = f'import os\nimport time\ntime.sleep({SLEEPS["data"]} + {SLOWER} * (os.environ["RANK"] == "1"))'
    plant(project, "splitting/loaders.py", "                under_way.popleft()\n                yield batch\n", data)
    edit(project, "model.py", "from torch import Tensor, nn\n", "import time\n\nfrom torch import Tensor, nn\n")
    plant(project, "model.py", "        return self.linear(features.mean(dim=(2, 3)))\n", FORWARD)
    plant(project, "train.py", "        self.scaler.step(self.optimizer)\n", f"time.sleep({SLEEPS['optimizer']})")
    plant(project, "train.py", "        skipped = check_finite(self, guards)\n", f"time.sleep({LOG})")
    plant(project, "train.py", "        self.parallel.average_buffers()\n", f"time.sleep({SAVE})")
    plant(
        project,
        "checkpoint/sharded.py",
        "        publish(self.temporary, self.target)\n",
        f"import time; time.sleep({WRITE})",
    )


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory, baked: Bake) -> Iterator[tuple[dict[str, Any], Path, str]]:
    """The record of a slowed-down project on two ranks, its directory, and its table; with traces."""
    project, folder = baked(project_slug="slowed-down"), tmp_path_factory.mktemp("measured")
    slow_down(project)
    for name, text in RUN.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    done = launch(project, "benchmark", "--profile", *SMALL, "--run.dir", folder)
    (line,) = done.stdout.splitlines()[-1:]
    yield json.loads(line), folder, done.stderr


def test_a_planted_sleep_is_in_the_part_where_it_was_planted(measured: tuple[dict[str, Any], Path, str]) -> None:
    first, second = (rank["parts_ms"] for rank in measured[0]["ranks"])
    for rank in (first, second):
        for part, seconds in SLEEPS.items():
            assert rank[part] >= 1000 * seconds * 0.85, part
    assert second["data"] >= 1000 * (SLEEPS["data"] + SLOWER)
    # Rank 0 waits for the gradients of rank 1, and neither for anything else.
    assert first["exposed_communication"] >= 1000 * SLOWER * 0.7
    assert second["exposed_communication"] <= 1000 * SLOWER * 0.5
    assert first["backward"] <= 1000 * (SLEEPS["backward"] + SLOWER * 0.5)


def test_the_parts_sum_up_to_the_step(measured: tuple[dict[str, Any], Path, str]) -> None:
    for rank in measured[0]["ranks"]:
        assert sum(rank["parts_ms"].values()) == pytest.approx(rank["ms_per_step"]["whole_step"], rel=0.02)
        # Both ranks take as long, because they wait for each other; throughput was measured in other steps.
        assert BATCH / rank["ms_per_step"]["whole_step"] * 1000 == pytest.approx(
            measured[0]["samples_per_second"], rel=0.3
        )


def test_the_record_keeps_its_keys(measured: tuple[dict[str, Any], Path, str]) -> None:
    record = measured[0]
    assert (record["event"], record["world_size"], record["device"]) == ("benchmark", 2, "cpu")
    for rank in record["ranks"]:
        times = rank["ms_per_step"]
        assert 0 < times["optimizer"] and 0 < times["clip_grad_norm"] < times["forward_backward"] < times["whole_step"]
        assert rank["peak_memory_mib"] > 0
    assert 1 < record["first_step_seconds"] < 600


def test_training_stands_still_only_while_it_is_copied(measured: tuple[dict[str, Any], Path, str]) -> None:
    full, sharded = measured[0]["saves"]["full"], measured[0]["saves"]["sharded"]
    assert full["seconds"] == pytest.approx(full["stall_seconds"], rel=0.1) and full["stall_seconds"] >= SAVE
    assert sharded["stall_seconds"] >= SAVE
    assert sharded["seconds"] - sharded["stall_seconds"] >= 0.9 * WRITE
    # In fp32: the weights and AdamW's two moments.
    tensors = 3 * 4 * parameters() / 2**20
    assert 0.9 * tensors <= full["mib"] <= tensors + 0.1


def parameters() -> int:
    """The parameters of the network of digits with one block in each half: convolutions, norms, the head."""
    w, wide = WIDTH, 2 * WIDTH
    convolutions = 9 * w + 2 * 9 * w * w + 9 * w * wide + 9 * wide * wide + 4 * w * wide
    return convolutions + 2 * (3 * w + 2 * wide) + 10 * wide + 10


def test_the_flops_are_those_of_a_formula(measured: tuple[dict[str, Any], Path, str]) -> None:
    """A convolution of k x k: 2 k k inputs outputs positions, three times; the images need no gradient."""
    w, wide = WIDTH, 2 * WIDTH
    stem = 2 * 9 * w * 64
    others = 2 * (2 * 9 * w * w * 64 + 9 * w * wide * 16 + 9 * wide * wide * 16 + 4 * w * wide * 16 + wide * 10)
    record = measured[0]
    assert record["flops_per_step"] == BATCH * (2 * stem + 3 * others)
    rate = record["flops_per_step"] * record["samples_per_second"] / BATCH
    assert record["flops_per_second"] == pytest.approx(rate, rel=1e-3)
    assert record["mfu"] is None, "the peak of a CPU is not known"


def test_messages_have_bounds(measured: tuple[dict[str, Any], Path, str]) -> None:
    record = measured[0]
    link = 1e6 * record["link_gb_per_second"]  # Bytes per millisecond.
    sizes = [each["bytes"] for each in record["collectives"]]
    assert len(sizes) == 4 and sizes == sorted(sizes)
    for each in record["collectives"]:
        assert each["ring_bound_ms"] == pytest.approx(each["bytes"] / link, rel=0.02, abs=0.001)
        assert each["server_bound_ms"] == pytest.approx(2 * each["bytes"] / link, rel=0.02, abs=0.001)
        assert min(each["all_reduce_ms"], each["server_ms"]) > 0
    assert record["collectives"][-1]["server_ms"] > record["collectives"][0]["server_ms"]


def test_it_leaves_a_run_in_the_directory_as_it_is(measured: tuple[dict[str, Any], Path, str]) -> None:
    folder = measured[1]
    assert {name: (folder / name).read_text() for name in RUN} == RUN
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {*RUN, ".lock", "benchmark.json", "benchmark.png", "trace-rank0.json", "trace-rank1.json"}


def test_the_table_and_the_picture_show_the_record(measured: tuple[dict[str, Any], Path, str]) -> None:
    record, folder, table = measured
    for part in ("data", "forward", "backward", "optimizer", "logging", "exposed communication"):
        (shown,) = [line for line in table.splitlines() if line.startswith(f"  {part} ")]
        mean = sum(rank["parts_ms"][part.replace(" ", "_")] for rank in record["ranks"]) / 2
        assert f"{mean:.2f} ms" in shown
    assert "only CUDA has memory snapshots" in table
    with Image.open(folder / "benchmark.png") as image:
        assert min(image.size) > 100 and len(image.convert("L").getcolors() or []) > 5


def test_a_trace_has_what_its_rank_did(measured: tuple[dict[str, Any], Path, str]) -> None:
    for rank in range(2):
        trace = json.loads((measured[1] / f"trace-rank{rank}.json").read_text())
        assert (trace["distributedInfo"]["rank"], trace["distributedInfo"]["world_size"]) == (rank, 2)
        names = [event.get("name") for event in trace["traceEvents"]]
        assert names.count("forward_backward") == names.count("backward") == names.count("step") == 3
        assert {"gloo:all_reduce", "data", "logging", "[memory]", "aten::convolution"} <= set(names)


def test_a_directory_in_use_is_refused(baked: Bake, tmp_path: Path) -> None:
    with open(tmp_path / ".lock", "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        refused = alone(baked(), "benchmark", *SMALL, "--run.dir", tmp_path, expect=2).stderr
    assert f"error: {tmp_path} is in use by another run" in refused.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


LANGUAGE = """
import json
import torch
from my_experiment.benchmark.flops import count_flops
from my_experiment.config import ModelConfig
from my_experiment.model import build_model


class Reads(torch.nn.Module):
    def forward(self, x):
        return x * x.sum().item()


config, inputs = ModelConfig(width=32, layers=3, heads=4, context=16), torch.zeros(2, 16, dtype=torch.int64)
flops = count_flops(lambda: build_model(config), inputs)
print(json.dumps([flops, count_flops(lambda: torch.nn.Sequential(build_model(config), Reads()), inputs)]))
"""


def test_the_flops_of_a_transformer_are_those_of_a_formula(baked: Bake) -> None:
    """Per position: 2 for each weight of a matrix, and 4 times context and width per block for attention; three times.

    A model that reads values has none.
    """
    project = baked(task="language")
    printed = run(sys.executable, "-c", LANGUAGE, cwd=project, PYTHONPATH="src").stdout
    width, layers, context, batch = 32, 3, 16, 2
    matrices = layers * 12 * width**2 + width * 256
    assert json.loads(printed) == [3 * batch * context * (2 * matrices + 4 * layers * context * width), None]


TRACE = """
import json
from types import SimpleNamespace
import torch
from torch.autograd import DeviceType
from my_experiment.benchmark.trace import exposed_shares


def event(name, start, end, is_user_annotation=False, device_type=DeviceType.CPU):
    span = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(
        name=name, time_range=span, is_user_annotation=is_user_annotation, device_type=device_type
    )


def on_gpu(name, start, end, **options):
    return event(name, start, end, device_type=DeviceType.CUDA, **options)


# Two steps of 100: data, forward and backward, in which a message begins, and the rest of the step.
parts = []
for start in (0, 100):
    names = {"data": (0, 10), "step": (10, 90), "forward_backward": (10, 80), "backward": (40, 80)}
    names["logging"] = 90, 100
    parts += [event(name, start + a, start + b, is_user_annotation=True) for name, (a, b) in names.items()]
cpu = [
    # 50 to 60 overlap, 60 to 80 are exposed, and in the second step 10 of the forward, where the loops overlap.
    event("gloo:all_reduce", 50, 80), event("aten::convolution", 40, 60), event("aten::conv", 45, 55),
    event("c10d::allreduce_", 50, 79),
    event("gloo:recv", 110, 130), event("gloo:send", 115, 125), event("aten::mm", 120, 140),
    # In a compiled region, waiting is not computing.
    event("gloo:all_gather", 150, 160), event("Torch-Compiled Region: 0/0", 140, 170),
    event("_c10d_functional::wait_tensor", 150, 155),
]
gpu = [
    on_gpu("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 50, 80), on_gpu("sgemm", 40, 60),
    on_gpu("backward", 40, 80, is_user_annotation=True), event("aten::mm", 0, 200),
    event("nccl:all_reduce", 0, 90, is_user_annotation=True),
]
print(json.dumps([exposed_shares(parts + cpu, torch.device("cpu")), exposed_shares(parts + gpu, torch.device("cuda"))]))
"""


def test_exposed_is_what_no_computation_covers(plain: Path) -> None:
    cpu, gpu = json.loads(run(sys.executable, "-c", TRACE, cwd=plain, PYTHONPATH="src").stdout)
    assert cpu == pytest.approx(
        {"data": 0, "forward": 10 / 60, "backward": (20 + 5) / 80, "optimizer": 0, "logging": 0}
    )
    assert gpu == pytest.approx({"data": 0, "forward": 0, "backward": 20 / 80, "optimizer": 0, "logging": 0})


RECORDS = """
import json
import sys
from pathlib import Path
from my_experiment.benchmark.collectives import ring_bytes, server_bytes
from my_experiment.benchmark.picture import draw_benchmark
from my_experiment.benchmark.records import add_record

path, record = Path(sys.argv[1]) / "benchmark.json", json.loads(sys.argv[2])


def add(world_size, rate, **settings):
    changed = record | {"world_size": world_size, "samples_per_second": rate}
    sections = {"run": {"dir": f"of {world_size}"}, "train": {"betas": (0, 1), **settings}}
    return add_record(path, changed, sections, {"time": "now"}), changed


add(4, 250.0)
add(1, 100.0)
records, changed = add(2, 180.0)
figure = draw_benchmark(records)
labels = [[axes.get_title(), axes.get_xlabel(), axes.get_ylabel()] for axes in figure.axes]
lines = [line.get_label() for axes in figure.axes for line in axes.lines]
bars = sorted({label for axes in figure.axes for label in axes.get_legend_handles_labels()[1]})
again, _ = add(2, 160.0)
other, _ = add(8, 400.0, precision="bf16")
path.write_text("[1, 2")
damaged, _ = add(1, 100.0)
print(json.dumps({
    "efficiency": {each["world_size"]: each["scaling_efficiency"] for each in records},
    "own": changed["scaling_efficiency"], "labels": labels, "lines": lines, "bars": bars,
    "again": {each["world_size"]: each["samples_per_second"] for each in again},
    "other": [each["world_size"] for each in other], "damaged": [each["world_size"] for each in damaged],
    "bytes": [ring_bytes(8, 4), server_bytes(8, 4)],
}))
"""


def test_world_sizes_are_compared_with_the_smallest(
    plain: Path, tmp_path: Path, measured: tuple[dict[str, Any], Path, str]
) -> None:
    command = (sys.executable, "-c", RECORDS, tmp_path, json.dumps(measured[0]))
    found = json.loads(run(*command, cwd=plain, PYTHONPATH="src").stdout)
    assert found["efficiency"] == {"1": 1.0, "2": 0.9, "4": 0.625}
    assert found["own"] == 0.9
    assert found["again"] == {"1": 100.0, "2": 160.0, "4": 250.0}, "a world size has one record"
    assert found["other"] == [8], "records of other settings are no comparison"
    assert found["damaged"] == [1] and (tmp_path / "benchmark.json.damaged").exists()
    assert found["bytes"] == [12, 48]
    assert len(found["labels"]) == 4 and all(text for axes in found["labels"] for text in axes)
    assert {
        f"{way}, {n} ranks" for way in ("all-reduce", "bound of a ring", "parameter server") for n in (1, 2, 4)
    } <= {*found["lines"]}
    assert {"exposed communication", "logging", "training stands still"} <= {*found["bars"]}


SERVER = """
import sys
import torch
import torch.distributed as dist
from my_experiment.benchmark.collectives import average_at_server


def main(rank):
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=3)
    tensor = torch.full((5,), (1.0, 2.0, 6.0)[rank])
    average_at_server(tensor, torch.empty(5))
    assert tensor.tolist() == [3.0] * 5, tensor
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=3)
"""


def test_a_parameter_server_sends_the_mean_to_each_rank(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    run(sys.executable, tmp_path / "server.py", tmp_path, cwd=plain, PYTHONPATH="src")
