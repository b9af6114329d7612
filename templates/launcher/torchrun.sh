#:: extends "launcher/base.sh" ::#
#:: block start ::#
# --standalone lets the system choose a port, so that several jobs fit beside each other.
exec "$PYTHON" -m torch.distributed.run --standalone --local-addr=127.0.0.1 --nproc-per-node="$NPROC" \
    -m "$package" "$@"
#:: endblock ::#
