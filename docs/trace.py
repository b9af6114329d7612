"""Where the time of a step goes, from a trace that a run with train.profile has left: milliseconds per step.

.venv/bin/python docs/trace.py runs/trace/rank0.*.pt.trace.json
"""

import json
import sys
from typing import Any

PARTS = {
    "data": "enumerate(DataLoader)",
    "forward": "DistributedDataParallel.forward",
    "backward": "autograd::engine::evaluate_function",
    "all-reduce": "gloo:all_reduce",
    "optimizer": "Optimizer.step",
}

with open(sys.argv[1]) as file:
    events: list[dict[str, Any]] = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
steps = [event for event in events if event["name"].startswith("ProfilerStep")]
spans = {
    part: [(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"].startswith(name)]
    for part, name in PARTS.items()
}
for part, each in spans.items():
    print(f"{part:12}{sum(end - start for start, end in each) / len(steps) / 1000:8.1f}")
hidden = sum(
    max(0, min(end, last) - max(start, first))
    for start, end in spans["all-reduce"]
    for first, last in spans["backward"]
)
print(f"{'step':12}{sum(step['dur'] for step in steps) / len(steps) / 1000:8.1f}")
print(f"{hidden / sum(end - start for start, end in spans['all-reduce']):.0%} of all-reduce is while backward computes")
