"""Checks of what ranks need to reach each other: host names, the port of the rendezvous, interfaces."""

import fcntl
import os
import socket
import struct
import sys
import time
from pathlib import Path
from urllib.parse import urlparse

from ..runtime import Process
from .report import Row

SIOCGIFADDR = 0x8915  # From <linux/sockios.h>: the address of an interface.


def check_host_name(process: Process, backend: str) -> Row:
    """Check the address that gloo uses: that of this machine's own host name, unless an interface is named."""
    name = socket.gethostname()
    address = own_address(name)
    found = f"{name}, {address}" if address else f"{name} has no address on this machine"
    remedy = "name an interface in GLOO_SOCKET_IFNAME, or fix the name in /etc/hosts"
    if "gloo" not in backend or os.environ.get("GLOO_SOCKET_IFNAME"):
        return Row("host name", found)
    is_loopback = address is None or address.startswith("127.") or address == "::1"
    if process.world_size > process.local_world_size and is_loopback:
        return Row("host name", found, "fail", f"other machines cannot reach this one there; {remedy}")
    if address is None:
        return Row("host name", found, "warn", f"gloo uses the loopback address instead; {remedy}")
    return Row("host name", found)


def own_address(name: str) -> str | None:
    """Return the first address of ``name`` that this machine has, as gloo does; None if there is none."""
    try:
        candidates = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, _, _, address in candidates:
        try:
            with socket.socket(family, kind) as probe:
                probe.bind(address)
            return str(address[0])
        except OSError:
            continue
    return None


def check_rendezvous(init_method: str | None, process: Process) -> Row:
    """Check that the rendezvous has an address, and that rank 0 can open its port."""
    name = "rendezvous"
    if init_method is None:
        return Row(name, "only one rank, none needed")
    if init_method.startswith("file://"):
        folder = Path(urlparse(init_method).path).parent
        if os.access(folder, os.W_OK):
            return Row(name, init_method)
        return Row(name, init_method, "fail", f"{folder} cannot be written; give a file in a folder that all ranks see")
    try:
        host, port = parse_rendezvous(init_method)
    except (KeyError, ValueError) as error:
        remedy = "give MASTER_ADDR and MASTER_PORT, or --distributed.init_method tcp://host:port"
        return Row(name, f"{init_method}: {error} is missing or wrong", "fail", remedy)
    found = f"{host}, port {port}"
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        return Row(name, f"{found}: {error.strerror}", "fail", f"replace {host} by a name or an address of rank 0")
    if init_method == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return Row(name, f"{found}, held by the launcher")
    if process.is_main and (reason := try_port(port)):
        remedy = f"choose another port; 'ss -ltnp sport = :{port}' shows what uses this one"
        return Row(name, f"{found}: {reason}", "fail", remedy)
    return Row(name, found)


def parse_rendezvous(init_method: str) -> tuple[str, int]:
    """Return host and port of the rendezvous; raises KeyError or ValueError for what is missing or wrong."""
    if init_method == "env://":
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    url = urlparse(init_method)
    if not url.hostname or url.port is None:
        raise ValueError("host:port")
    return url.hostname, url.port


def try_port(port: int) -> str:
    """Return why rank 0 cannot bind ``port``, or "". It does not listen: an early rank must not find a listener yet."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("", port))
        except OSError as error:
            return str(error.strerror)
    return ""


def wait_for_listener(host: str, port: int, patience: float) -> None:
    """Wait until rank 0 listens at the rendezvous; raises OSError after ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host, port), timeout=patience).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise OSError(f"{host}, port {port}: {error.strerror or error}") from None
            time.sleep(0.2)


def check_interfaces(backend: str) -> list[Row]:
    """Check the interfaces that gloo and NCCL use: those that the environment names have to exist."""
    existing = [name for _, name in socket.if_nameindex()]
    advice = f"name one of {', '.join(existing)}"
    rows = []
    if "gloo" in backend:
        named = os.environ.get("GLOO_SOCKET_IFNAME", "")
        missing = ", ".join(name for name in named.split(",") if named and name not in existing)
        if missing:
            rows.append(Row("gloo interface", f"GLOO_SOCKET_IFNAME: {missing} does not exist", "fail", advice))
        else:
            found = named or find_interface(own_address(socket.gethostname()), existing)
            rows.append(Row("gloo interface", found))
    if "nccl" in backend:
        named = os.environ.get("NCCL_SOCKET_IFNAME", "")
        selected = ", ".join(select(existing, named))
        if named and not selected:
            rows.append(Row("NCCL interface", f"NCCL_SOCKET_IFNAME: {named} does not exist", "fail", advice))
        else:
            rows.append(Row("NCCL interface", selected if named else "NCCL chooses"))
    return rows


def select(names: list[str], pattern: str) -> list[str]:
    """Return the names that NCCL selects with ``eth,ib`` (by prefix), ``=eth0`` (exactly) or ``^eth`` (all others).

    Source: NCCL user guide, NCCL_SOCKET_IFNAME and NCCL_IB_HCA.
    """
    exclude, exact = pattern.startswith("^"), pattern.lstrip("^").startswith("=")
    words = [word.split(":")[0] for word in pattern.lstrip("^").lstrip("=").split(",")]
    return [n for n in names if any(n == w if exact else n.startswith(w) for w in words) != exclude]


def find_interface(address: str | None, names: list[str]) -> str:
    """Return the interface that has the IPv4 ``address``; on systems other than Linux, the address itself."""
    if address is None:
        return "loopback"
    if sys.platform == "linux":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
            for name in names:
                try:
                    answer = fcntl.ioctl(query, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                except OSError:
                    continue  # This interface has no address.
                found = socket.inet_ntoa(answer[20:24])
                if found == address or (found.startswith("127.") and address.startswith("127.")):
                    return f"{name} ({address})"
    return address
