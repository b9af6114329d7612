#:: extends "launcher/base.sh" ::#
#:: block start ::#
#:: if cookiecutter.parallelism == "data_parallel" ::#
# --standalone lets the system choose a port, so that several jobs fit beside each other.
rendezvous=(--standalone --local-addr=127.0.0.1)
#:: else ::#
if [[ "${NODES:-1}" == 1 ]]; then
    # --standalone lets the system choose a port, so that several jobs fit beside each other.
    rendezvous=(--standalone --local-addr=127.0.0.1)
elif [[ "${MAX_RESTARTS:-0}" == 0 ]]; then
    # Ranks are numbered machine by machine; one that has lost the others ends by itself.
    rendezvous=(--nnodes="$NODES" --node-rank="$NODE_RANK" --master-addr="$HEAD" --master-port="$PORT"
        --rdzv-conf="timeout=${answer#* }")
else
    # After a failure the machines that are left or come back meet anew.
    rendezvous=(--nnodes="$NODES" --rdzv-backend=c10d --rdzv-endpoint="$HEAD:$PORT" --rdzv-id="${JOB_ID:-none}"
        --rdzv-conf="is_host=$((NODE_RANK == 0)),join_timeout=${answer#* }" ${LOCAL_ADDR:+--local-addr="$LOCAL_ADDR"})
fi
#:: endif ::#
# Ranks that are started again need a store of their own: in the first one they find the addresses of those that died, and
# a machine that takes another's place is not told of it.
[[ "${MAX_RESTARTS:-0}" == 0 ]] || export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# A request to stop is handed to the ranks, which are given time to save.
exec "$PYTHON" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node="$NPROC" \
    --max-restarts="${MAX_RESTARTS:-0}" --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    --shutdown-timeout="${STOP_SECONDS:-60}" -m "$package" "$@"
#:: endblock ::#
