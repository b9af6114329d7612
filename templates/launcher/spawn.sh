#:: extends "launcher/base.sh" ::#
#:: block start ::#
export NPROC
exec "$PYTHON" -m "$package.launch" "$@"
#:: endblock ::#
