#!/usr/bin/env bash
# Start NPROC ranks on this machine, by default one per GPU or two on a CPU: scripts/launch.sh train --optim.lr 1e-3
# Several machines: on each of them NODES=2 NODE_RANK=0 HEAD=HOST PORT=29400 scripts/launch.sh train; HEAD is the first.
# STOP_SECONDS is how long ranks may save after a stop signal.
#:: include "launcher/shared/prepare.sh" ::#
NPROC="$nproc" exec "$python" -m {{ cookiecutter.__package }}.spawn "$@"
