"""Looks at what ranks need to find each other: host names, the port where they meet, network interfaces."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import time
from pathlib import Path
from urllib.parse import urlparse

from .distributed import World
from .findings import Row

SIOCGIFADDR = 0x8915  # From <linux/sockios.h>: the address of an interface.


def own_host_name(world: World, backend: str) -> Row:
    """The address that gloo takes: that of the own host name, unless an interface is named."""
    name = socket.gethostname()
    address = own_address(name)
    found = f"{name}, {address}" if address else f"{name} has no address on this machine"
    remedy = "name an interface in GLOO_SOCKET_IFNAME, or mend the name in /etc/hosts"
    if "gloo" not in backend or os.environ.get("GLOO_SOCKET_IFNAME"):
        return Row("host name", found)
    if world.size > world.local_size and (address is None or address.startswith("127.") or address == "::1"):
        return Row("host name", found, "fail", f"other machines cannot reach this one there; {remedy}")
    if address is None:
        return Row("host name", found, "warn", f"gloo takes the loopback address in its place; {remedy}")
    return Row("host name", found)


def own_address(name: str) -> str | None:
    """The first address of ``name`` that this machine has, which is how gloo chooses; None if there is none."""
    try:
        candidates = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    for family, kind, _, _, place in candidates:
        try:
            with socket.socket(family, kind) as probe:
                probe.bind(place)
            return str(place[0])
        except OSError:
            continue
    return None


def meeting_point(init_method: str | None, world: World) -> Row:
    """Where the ranks meet: whether the place has an address, and rank 0 can open the port."""
    name = "meeting point"
    if init_method is None:
        return Row(name, "alone, none needed")
    if init_method.startswith("file://"):
        folder = Path(urlparse(init_method).path).parent
        if os.access(folder, os.W_OK):
            return Row(name, init_method)
        return Row(name, init_method, "fail", f"{folder} cannot be written; give a file in a folder that all ranks see")
    try:
        host, port = read_place(init_method)
    except (KeyError, ValueError) as error:
        remedy = "give MASTER_ADDR and MASTER_PORT, or --distributed.init_method tcp://host:port"
        return Row(name, f"{init_method}: {error} is missing or wrong", "fail", remedy)
    found = f"{host}, port {port}"
    try:
        socket.getaddrinfo(host, port)
    except OSError as error:
        return Row(name, f"{found}: {error.strerror}", "fail", f"replace {host} by a name or an address of rank 0")
    if init_method == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return Row(name, f"{found}, which the launcher holds")
    if world.is_main and (reason := port_taken(port)):
        remedy = f"take another port; 'ss -ltnp sport = :{port}' shows who has this one"
        return Row(name, f"{found}: {reason}", "fail", remedy)
    return Row(name, found)


def read_place(init_method: str) -> tuple[str, int]:
    """Host and port of the meeting point.

    Raises:
        KeyError: with the name of the environment variable that is missing.
        ValueError: if the place cannot be read.
    """
    if init_method == "env://":
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    place = urlparse(init_method)
    if not place.hostname or place.port is None:
        raise ValueError("host:port")
    return place.hostname, place.port


def port_taken(port: int) -> str:
    """Why rank 0 cannot open ``port``; empty if it can.

    It is not listened to here: a rank that is early must not find a listener that soon goes away.
    """
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


def await_listener(host: str, port: int, patience: float) -> None:
    """Wait until somebody listens at the meeting point.

    Raises:
        OSError: if nobody did for ``patience`` seconds.
    """
    give_up = time.monotonic() + patience
    while True:
        try:
            socket.create_connection((host, port), timeout=patience).close()
            return
        except OSError as error:
            if time.monotonic() > give_up:
                raise OSError(f"{host}, port {port}: {error.strerror or error}") from None
            time.sleep(0.2)


def interfaces(backend: str) -> list[Row]:
    """The network interfaces that gloo and NCCL take, and whether those that are named exist."""
    there = [name for _, name in socket.if_nameindex()]
    rows = []
    if "gloo" in backend:
        wanted = os.environ.get("GLOO_SOCKET_IFNAME", "")
        chosen = wanted or interface_of(own_address(socket.gethostname()), there)
        lost = ", ".join(name for name in wanted.split(",") if wanted and name not in there)
        rows.append(judge_interface("gloo interface", chosen, f"GLOO_SOCKET_IFNAME: {lost}" if lost else "", there))
    if "nccl" in backend:
        wanted = os.environ.get("NCCL_SOCKET_IFNAME", "")
        chosen = ", ".join(select(there, wanted)) if wanted else "NCCL chooses"
        rows.append(judge_interface("NCCL interface", chosen, "" if chosen else f"NCCL_SOCKET_IFNAME: {wanted}", there))
    return rows


def judge_interface(name: str, chosen: str, lost: str, there: list[str]) -> Row:
    """A row for the interfaces of one library; ``lost`` is what was named and is not there."""
    if lost:
        return Row(name, f"{lost} is not here", "fail", f"name one of {', '.join(there)}")
    return Row(name, chosen)


def select(names: list[str], pattern: str) -> list[str]:
    """The names that NCCL takes by a list such as ``eth,ib``: by prefix, exactly after ``=``, all others after ``^``.

    Source: NCCL user guide, NCCL_SOCKET_IFNAME and NCCL_IB_HCA.
    """
    exclude, exact = pattern.startswith("^"), pattern.lstrip("^").startswith("=")
    words = [word.split(":")[0] for word in pattern.lstrip("^").lstrip("=").split(",")]
    return [n for n in names if any(n == w if exact else n.startswith(w) for w in words) != exclude]


def interface_of(address: str | None, names: list[str]) -> str:
    """The interface that has an IPv4 address; the address itself where Linux cannot be asked."""
    if address is None:
        return "loopback"
    if sys.platform == "linux":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            for name in names:
                try:
                    answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                except OSError:
                    continue  # It has none.
                same_network = address.startswith("127.") and socket.inet_ntoa(answer[20:24]).startswith("127.")
                if socket.inet_ntoa(answer[20:24]) == address or same_network:
                    return f"{name} ({address})"
    return address
