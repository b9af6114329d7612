#!/usr/bin/env bash
# Train and evaluate the only project in demo/ on two CPU processes. `make demo` runs this after rendering.
set -euo pipefail
cd demo/*/
export PYTHON="$BIN/python" NPROC=2

settings=(--config configs/default.yaml --distributed.device cpu)
if grep -q 'task = "language"' pyproject.toml; then
    settings+=(--train.max_steps 600 --optim.decay_steps 600) # a third of the full run
fi
scripts/launch.sh train "${settings[@]}"
newest="$(find runs/default/checkpoints -name "step-*.pt" | sort | tail -n 1)"
scripts/launch.sh evaluate --checkpoint "$newest" --distributed.device cpu |
    "$PYTHON" -c '
import json, sys
record = json.loads(sys.stdin.read().splitlines()[-1])
messages = {
    "accuracy": "accuracy {accuracy:.4f} on all {num_samples} samples",
    "bits_per_byte": "bits per byte {bits_per_byte:.3f} on all {num_samples} samples",
    "mean_return": "mean return {mean_return:.1f} over {num_samples} episodes",
}
message = next(text for name, text in messages.items() if name in record)
print(("test " + message + ", after {step} steps").format(**record))
'
cat <<END

Next:
  cd demo/${PWD##*/}
  make setup                                     # its own environment, git repository and pre-commit hook
  make test                                      # proves that splitting the work does not change the result
  NPROC=4 scripts/launch.sh train --run.dir runs/four-ranks
  less README.md
END
