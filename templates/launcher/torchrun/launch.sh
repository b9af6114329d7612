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
# Stop signals are forwarded to the ranks, which get time to save.
exec "$PYTHON" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node="$NPROC" \
    --max-restarts="${MAX_RESTARTS:-0}" --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    --shutdown-timeout="${STOP_SECONDS:-60}" -m "$package" "$@"
#:: endblock ::#
