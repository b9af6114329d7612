#!/usr/bin/env bash
# Start NPROC ranks on this machine, by default one per GPU or two on a CPU:
#   scripts/launch.sh train --optim.lr 1e-3
# On several machines, run this on each of them; HEAD is the first one:
#   NODES=2 NODE_RANK=0 HEAD=HOST PORT=29400 scripts/launch.sh train
# STOP_SECONDS is how long ranks may save after a stop signal, and MAX_RESTARTS how often failed
# ranks start again.
#:: include "launcher/shared/prepare.sh" ::#

# PyTorch 2.11 does not read this variable, and gives ranks 30 seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${STOP_SECONDS:-60}"
options=(
    --nproc-per-node="$nproc"
    --max-restarts="${MAX_RESTARTS:-0}"
    # torchrun passes these on to the ranks, which save and end.
    --signals-to-handle="SIGTERM,SIGINT,SIGUSR1"
)
if [[ "$nodes" == 1 ]]; then
    # The rendezvous takes any free port of this machine.
    options+=(--standalone --local-addr=127.0.0.1)
else
    options+=(--nnodes="$nodes" --node-rank="$NODE_RANK" --rdzv-endpoint="$HEAD:${PORT:-29400}")
fi
exec "$python" "$root/scripts/torchrun.py" "${options[@]}" -m {{ cookiecutter.__package }} "$@"
