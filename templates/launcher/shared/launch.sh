#!/usr/bin/env bash
# Start NPROC ranks on this machine: scripts/launch.sh train --optim.lr 1e-3
#
# NPROC       number of ranks; the default depends on the accelerators of this machine
# DEBUG_RANK  the rank that waits for a debugger; see the README
# STOP_CODE   exit code of a rank that saved after a stop signal (0); another code means that the run is not complete
# PYTHON      interpreter; default: the project's .venv, or the first python on the PATH
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
package={{ cookiecutter.__package }}
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"

if [[ -z "${PYTHON:-}" ]]; then
    PYTHON="$root/.venv/bin/python"
    [[ -x "$PYTHON" ]] || PYTHON="$(command -v python || command -v python3)"
fi
if ! "$PYTHON" -c 'import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, ["torch", "jsonargparse"])))'; then
    echo "error: $PYTHON lacks this project's packages; run 'make setup' first, or set PYTHON" >&2
    exit 2
fi

for word in "$@"; do
    case "$word" in
        -h | --help | --print_config*) exec "$PYTHON" -m "$package" "$@" ;;
    esac
done

# Reports a mistake once, before any rank starts; prints the number of ranks, and the seconds in which all must arrive.
# Ctrl-C ends this script after the check, instead of ending the check with a traceback.
trap 'exit 130' INT
answer="$(trap '' INT && exec "$PYTHON" -m "$package" --preflight "$@")"
trap '' INT # Until the launcher answers it: Python prints a traceback while it starts.
NPROC="${answer% *}"

# The ranks share the processors of this machine; on a cluster, those that are allocated to the job.
cores="$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores > NPROC ? cores / NPROC : 1))}"

#:: block start ::#
#:: endblock ::#
