"""What grows with the number of ranks: python tools/benchmarks/ranks.py 4 8 16 32.

For each number of ranks of the default project on this machine, it prints the file descriptors of a rank, the time that
a check for stop signals takes, and, for three faults of one rank in its third step, the lines of output and the
requests to the store that all ranks sent after it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from cookiecutter.main import cookiecutter

TEMPLATE = Path(__file__).parents[2]
FAULTS = {
    "error": "raise ValueError('a fault')",
    "hang": "time.sleep(10000)",
    "SIGKILL": "os.kill(os.getpid(), 9)",
}
WORDS = "--train.log_every 1 --train.max_steps 30 --distributed.device cpu --distributed.timeout_seconds 20".split()
# Every rank executes this when it starts, as sitecustomize.py.
HOOK = """
import os, sys, time
if "RANK" in os.environ and "torch" not in sys.modules:
    import collections, json, torch, torch.distributed as dist
    requests, figures, steps = collections.Counter(), {}, []

    def counted(name, call):
        def count(self, *arguments):
            requests[name] += len(steps) >= 3
            return call(self, *arguments)
        return count

    for name in ("add", "check", "compare_set", "get", "set", "wait"):
        setattr(dist.PrefixStore, name, counted(name, getattr(dist.PrefixStore, name)))
    end, step = os._exit, torch.optim.AdamW.step

    def write_and_end(code):
        with open(f"FOLDER/{os.environ['RANK']}.json", "w") as file:
            json.dump(figures | {"requests": sum(requests.values())}, file)
        end(code)

    def faulty_step(self, closure=None):
        steps.append(None)
        if len(steps) == 2:
            message, start = torch.zeros(2), time.perf_counter()
            for _ in range(100):
                dist.barrier()
                dist.broadcast(message, 0)
            figures["check"] = (time.perf_counter() - start) / 100
            figures["descriptors"] = len(os.listdir("/proc/self/fd"))
        if len(steps) == 3 and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            FAULT
        return step(self, closure)

    os._exit, torch.optim.AdamW.step = write_and_end, faulty_step
"""


def measure(project: Path, nproc: int, fault: str) -> tuple[int, int, dict[str, float]]:
    """Return the lines of a failure's output, the requests of all ranks, and the largest figures of a rank."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "sitecustomize.py").write_text(HOOK.replace("FOLDER", scratch).replace("FAULT", FAULTS[fault]))
        words = ["train", *WORDS, "--data.global_batch_size", str(2 * nproc), "--run.dir", scratch + "/run"]
        environment = os.environ | {"NPROC": str(nproc), "PYTHONPATH": scratch, "STOP_SECONDS": "5"}
        environment |= {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        command = [project / "scripts" / "launch.sh", *words]
        done = subprocess.run(command, env=environment, cwd=project, capture_output=True, text=True)
        assert done.returncode == 1, done.stderr
        figures = [json.loads(path.read_text()) for path in folder.glob("*.json")]
        most = {name: max(each.get(name, 0) for each in figures) for name in ("check", "descriptors")}
        return done.stderr.count("\n"), sum(each["requests"] for each in figures), most


def main() -> None:
    with TemporaryDirectory() as scratch:
        project = Path(cookiecutter(str(TEMPLATE), no_input=True, output_dir=scratch, accept_hooks=False))
        print(
            "| ranks | descriptors of a rank | a check for stop signals |",
            *(f"{name}: lines, requests |" for name in FAULTS),
        )
        print("|" + " --- |" * (3 + len(FAULTS)))
        for nproc in map(int, sys.argv[1:]):
            cells = []
            for fault in FAULTS:
                lines, requests, most = measure(project, nproc, fault)
                cells.append(f"{lines}, {requests}")
            print(
                f"| {nproc} | {most['descriptors']} | {1e3 * most['check']:.2f} ms |",
                *(f"{cell} |" for cell in cells),
                flush=True,
            )


if __name__ == "__main__":
    main()
