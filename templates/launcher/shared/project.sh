set -euo pipefail
# A file or a socket would get the number of a closed input or output.
[[ -e /dev/fd/0 ]] || exec </dev/null
[[ -e /dev/fd/1 ]] || exec >/dev/null
[[ -e /dev/fd/2 && ! /dev/fd/2 -ef "$0" ]] || exec 2>/dev/null # Bash may have this file there.
root="$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.." && pwd)" # Also if this file is called through a link.
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
python="${PYTHON:-$root/.venv/bin/python}"
[[ -x "$python" ]] || python="${PYTHON:-python3}"
mistake() { echo "error: $1" >&2 && exit 2; }
"$python" -c 'from importlib.metadata import version as v; v("torch"), v("jsonargparse")' &>/dev/null ||
    mistake "$python lacks this project's packages; run 'make setup' first, or set PYTHON"
[[ "$root" != *:* ]] || mistake "$root has a colon, which PYTHONPATH cannot hold; rename that folder"
# Gloo gives other machines the address of this one's host name; for an address of its own, they wait for minutes.
check_host_name() {
    [[ -n "${GLOO_SOCKET_IFNAME:-}" ]] || "$python" -c 'import socket, sys
is_loopback = lambda name: socket.getaddrinfo(name, None)[0][4][0].startswith(("127.", "::1"))
sys.exit(is_loopback(socket.gethostname()) and not is_loopback(sys.argv[1]))' "$HEAD" 2>/dev/null ||
        mistake "other machines cannot reach this one by its host name, $HOSTNAME; set GLOO_SOCKET_IFNAME (eth0)"
}
