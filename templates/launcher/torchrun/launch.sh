#:: extends "launcher/shared/launch.sh" ::#
#:: block start ::#
#:: if cookiecutter.__one_process ::#
# --standalone: the system chooses a free port, so that several jobs can run on one machine.
rendezvous=(--standalone --local-addr=127.0.0.1)
#:: else ::#
if [[ "${NODES:-1}" == 1 ]]; then
    # --standalone: the system chooses a free port, so that several jobs can run on one machine.
    rendezvous=(--standalone --local-addr=127.0.0.1)
elif [[ "${MAX_RESTARTS:-0}" == 0 ]]; then
    # Ranks are numbered machine by machine; a machine that loses contact with the others ends by itself.
    rendezvous=(--nnodes="$NODES" --node-rank="$NODE_RANK" --master-addr="$HEAD" --master-port="$PORT"
        --rdzv-conf="timeout=${answer#* }")
else
    # After a failure, the machines that remain or return form a new rendezvous.
    rendezvous=(--nnodes="$NODES" --rdzv-backend=c10d --rdzv-endpoint="$HEAD:$PORT" --rdzv-id="${JOB_ID:-none}"
        --rdzv-conf="is_host=$((NODE_RANK == 0)),join_timeout=${answer#* }" ${LOCAL_ADDR:+--local-addr="$LOCAL_ADDR"})
fi
#:: endif ::#
# Restarted ranks need a new store: the old one holds the addresses of dead ranks, and a replacement machine does not
# know of it.
[[ "${MAX_RESTARTS:-0}" == 0 ]] || export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# This is torchrun; launch/torchrun.py says what it adds. Without PET_LOG_DIR, it would leave an empty folder in the
# temporary directory.
exec "$PYTHON" -m "$package.launch.torchrun" "${rendezvous[@]}" --nproc-per-node="$NPROC" \
    --max-restarts="${MAX_RESTARTS:-0}" --shutdown-timeout="${STOP_SECONDS:-60}" \
    --log-dir="${PET_LOG_DIR:-/dev/null}" -m "$package" "$@"
#:: endblock ::#
