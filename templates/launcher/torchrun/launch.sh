#!/usr/bin/env bash
# Start NPROC ranks on this machine, by default one per GPU or two on a CPU: scripts/launch.sh train --optim.lr 1e-3
# Several machines: on each of them NODES=2 NODE_RANK=0 HEAD=HOST PORT=29400 scripts/launch.sh train; HEAD is the first.
# STOP_SECONDS is how long ranks may save after a stop signal, and MAX_RESTARTS how often failed ranks start again.
#:: include "launcher/shared/prepare.sh" ::#
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${STOP_SECONDS:-60}" # PyTorch 2.11 does not read it, and gives 30 seconds.
where=(--standalone --local-addr=127.0.0.1)
[[ $nodes == 1 ]] || where=(--nnodes="$nodes" --node-rank="$NODE_RANK" --rdzv-endpoint="$HEAD:${PORT:-29400}")
exec "$python" "$root/scripts/torchrun.py" "${where[@]}" --nproc-per-node="$nproc" --max-restarts="${MAX_RESTARTS:-0}" \
    --signals-to-handle=SIGTERM,SIGINT,SIGUSR1 -m {{ cookiecutter.__package }} "$@"
