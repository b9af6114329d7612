#!/usr/bin/env bash
# Start NPROC ranks on this machine, by default one per GPU or two on a CPU:
#   scripts/launch.sh train --optim.lr 1e-3
# On several machines, run this on each of them; HEAD is the first one:
#   NODES=2 NODE_RANK=0 HEAD=HOST PORT=29400 scripts/launch.sh train
# STOP_SECONDS is how long ranks may save after a stop signal.
#:: include "launcher/shared/prepare.sh" ::#

NPROC="$nproc" exec "$python" -m {{ cookiecutter.__package }}.spawn "$@"
