#:: extends "launcher/shared/launch.sh" ::#
#:: block start ::#
export NPROC
exec "$PYTHON" -m "$package.launch.spawn" "$@"
#:: endblock ::#
