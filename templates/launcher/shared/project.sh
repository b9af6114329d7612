set -euo pipefail

mistake() {
    echo "error: $1" >&2
    exit 2
}

# If an input or output is closed, the next file or socket gets its number, and what is printed
# would be written there.
open_closed_streams() {
    # Without /proc, nothing tells which ones are closed.
    if [[ ! -d /dev/fd/ ]]; then
        return
    fi
    if [[ ! -e /dev/fd/0 ]]; then
        exec </dev/null
    fi
    if [[ ! -e /dev/fd/1 ]]; then
        exec >/dev/null
    fi
    # Bash may have opened this script as number 2.
    if [[ ! -e /dev/fd/2 || /dev/fd/2 -ef "$0" ]]; then
        exec 2>/dev/null
    fi
}

# PYTHON names the interpreter; otherwise it is that of `make setup`, or else the shell's.
find_python() {
    if [[ -n "${PYTHON:-}" ]]; then
        echo "$PYTHON"
    elif [[ -x "$root/.venv/bin/python" ]]; then
        echo "$root/.venv/bin/python"
    else
        echo python3
    fi
}

# Gloo gives other machines the address of this one's host name. They wait for minutes if it is a
# loopback address, which each of them takes for itself.
check_host_name() {
    if [[ -n "${GLOO_SOCKET_IFNAME:-}" ]]; then
        return
    fi
    local other_machines_reach_it='
import socket
import sys

def is_loopback(name):
    address = socket.getaddrinfo(name, None)[0][4][0]
    return address.startswith(("127.", "::1"))

# HEAD is a loopback address if all ranks run on this machine.
head_is_here = is_loopback(sys.argv[1])
sys.exit(is_loopback(socket.gethostname()) and not head_is_here)
'
    if ! "$python" -c "$other_machines_reach_it" "$HEAD" 2>/dev/null; then
        local problem="other machines cannot reach this one by its host name, $HOSTNAME"
        mistake "$problem; set GLOO_SOCKET_IFNAME (eth0)"
    fi
}

open_closed_streams
# The script may be called through a link, from any folder.
script="$(readlink -f "${BASH_SOURCE[0]}")"
root="$(cd "$(dirname "$script")/.." && pwd)"
python="$(find_python)"
# Looking up the versions takes no time; importing the packages would take seconds.
versions='from importlib.metadata import version; version("torch"); version("jsonargparse")'
if ! "$python" -c "$versions" &>/dev/null; then
    mistake "$python lacks this project's packages; run 'make setup' first, or set PYTHON"
fi
if [[ "$root" == *:* ]]; then
    mistake "$root has a colon, which PYTHONPATH cannot hold; rename that folder"
fi
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
# Paths and files are in UTF-8, also where the locale is ASCII, as in many containers.
export PYTHONUTF8=1
