#!/usr/bin/env bash
# Train a rendered project on two CPU processes, and evaluate it. `make demo` runs this after rendering.
set -euo pipefail
cd "$1"
export PYTHON="$BIN/python" CUDA_VISIBLE_DEVICES=

scripts/launch.sh train --distributed.device cpu --train.max_steps 600 # a third of the task language, and all of digits
scripts/launch.sh evaluate --checkpoint runs/default --distributed.device cpu
cat <<END

Next:
  cd $1
  make setup                                     # its own environment, git repository and pre-commit hook
  make test                                      # proves that splitting the work does not change the result
  NPROC=4 scripts/launch.sh train --run.dir runs/four-ranks
  less README.md
END
