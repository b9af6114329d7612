#!/usr/bin/env bash
# Start NPROC ranks on this machine, by default one per GPU or two on a CPU: scripts/launch.sh train --optim.lr 1e-3
# Several machines: on each of them NODES=2 NODE_RANK=0 HEAD=HOST PORT=29400 scripts/launch.sh train; HEAD is the first.
# STOP_SECONDS is how long ranks may save after a stop signal, and MAX_RESTARTS how often failed ranks start again.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
python="${PYTHON:-$root/.venv/bin/python}"
[[ -x "$python" ]] || python="${PYTHON:-python3}"

case " $* " in *" --help "* | *" -h "* | *" --print_config"* | " export "* | " plot "* | " estimate "*) exec "$python" -m {{ cookiecutter.__package }} "$@" ;; esac
gpus="${CUDA_VISIBLE_DEVICES-$(cd /dev && ls -d nvidia[0-9]* 2>/dev/null || true)}"
gpus=$(wc -w <<<"${gpus//,/ }")
nproc="${NPROC:-{{ fact("nproc") or "$((gpus ? gpus : 2))" }}}" nodes="${NODES:-1}"
# Reports a mistake once, in one line, before any rank starts.
WORLD_SIZE=$((nodes * nproc)) "$python" -m {{ cookiecutter.__package }} --preflight "$@"

# The ranks share the processors. glibc keeps freed memory: new pages would take up to a tenth of a step.
cores=$(getconf _NPROCESSORS_ONLN)
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > nproc ? cores / nproc : 1))}"
export MALLOC_MMAP_THRESHOLD_="${MALLOC_MMAP_THRESHOLD_:-33554432}" MALLOC_TRIM_THRESHOLD_="${MALLOC_TRIM_THRESHOLD_:-268435456}"
if [[ $nodes == 1 ]]; then where=(--standalone --local-addr=127.0.0.1)
else where=(--nnodes="$nodes" --rdzv-backend=c10d --rdzv-endpoint="$HEAD:${PORT:-29400}" --rdzv-id="${JOB_ID:-none}"
    --rdzv-conf="is_host=$((NODE_RANK == 0))" ${LOCAL_ADDR:+--local-addr="$LOCAL_ADDR"}); fi
exec "$python" "$root/scripts/torchrun.py" "${where[@]}" --nproc-per-node="$nproc" --max-restarts="${MAX_RESTARTS:-0}" \
    --signals-to-handle=SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout="${STOP_SECONDS:-60}" -m {{ cookiecutter.__package }} "$@"
