#!/usr/bin/env bash
# Kill a run at random moments until it is done, and compare it with one that was left alone: every record of its
# metrics and every weight has to be the same, bit for bit.
#
#   scripts/chaos.sh --train.max_steps 200      the arguments are those of `train`
#
# KILLS       how often to kill the run (5)
# CHAOS_DIR   where both runs go (runs/chaos)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder="${CHAOS_DIR:-runs/chaos}"
if [[ -e "$folder" ]]; then
    echo "error: $folder exists; remove it, or set CHAOS_DIR to another folder" >&2
    exit 2
fi
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=.venv/bin/python
    [[ -x "$PYTHON" ]] || PYTHON="$(command -v python || command -v python3)"
fi
train=(scripts/launch.sh train --train.log_every 1 --checkpoint.every_steps 5 "$@" --checkpoint.format full)

count_records() {
    if [[ -f "$folder/$1/metrics.jsonl" ]]; then wc -l <"$folder/$1/metrics.jsonl"; else echo 0; fi
}

"${train[@]}" --run.dir "$folder/whole"
length="$(count_records whole)"

set -m # Each job gets a process group of its own, which Ctrl-C does not reach.
trap 'kill "${launcher:-}" 2>/dev/null || true' EXIT
kills=0 status=1
while ((status != 0)); do
    "${train[@]}" --run.dir "$folder/killed" &
    launcher=$!
    if ((kills < ${KILLS:-5})); then
        # During the start, or after some step: early enough to leave steps for the kills that follow.
        records="$(count_records killed)"
        moment=$((RANDOM % (records + (length - records) / (${KILLS:-5} - kills) + 1)))
        while kill -0 "$launcher" 2>/dev/null && (($(count_records killed) < moment)); do sleep 0.05; done
        sleep "0.0$((RANDOM % 10))"
        # The launcher and its ranks: one of them, and the others have to notice; or all of them.
        read -ra targets <<<"$launcher $(pgrep -P "$launcher" | tr '\n' ' ')"
        choice=$((RANDOM % (${#targets[@]} + 1)))
        ((choice == ${#targets[@]})) || targets=("${targets[choice]}")
        if kill -KILL "${targets[@]}" 2>/dev/null; then
            kills=$((kills + 1))
            echo "killed ${targets[*]}"
            wait "$launcher" || true
            continue
        fi
    fi
    wait "$launcher" && status=0 || status=$?
    ((status == 0)) || { echo "error: the run failed by itself, with exit code $status" >&2; exit 1; }
done

"$PYTHON" - "$folder" "$kills" <<'END'
import json
import sys
from pathlib import Path

import torch

folder, kills = Path(sys.argv[1]), sys.argv[2]
measured = {"samples_per_second", "tokens_per_second", "memory_mib", "peak_memory_mib", "slowest_rank", "behind_ms"}

def read(run):
    """Return the records of a run without what was measured, and the weights in its last checkpoint."""
    lines = (folder / run / "metrics.jsonl").read_text().splitlines()
    records = [{key: value for key, value in json.loads(line).items() if key not in measured} for line in lines]
    newest = sorted((folder / run / "checkpoints").iterdir())[-1]
    return records, torch.load(newest, map_location="cpu", weights_only=True)["model"]

(whole, expected), (killed, weights) = read("whole"), read("killed")
different = [name for name in expected if not torch.equal(weights[name], expected[name])]
if whole != killed or different:
    sys.exit(f"error: after {kills} kills, {len(different)} tensor(s) or the metrics differ: {', '.join(different[:5])}")
print(f"killed {kills} times: {len(whole)} records and {len(expected)} tensors are the same, bit for bit")
END
