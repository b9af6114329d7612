"""NCCL's variables in force: what each that matters does, and which have a value or a name that NCCL does not know.

Names, meanings and values are those of NVIDIA's NCCL user guide, chapter "Environment Variables" (version 2.30).
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import NamedTuple

from .findings import Row, State
from .network import select


class Values(NamedTuple):
    """Values that a variable takes: a regular expression, and the same in words."""

    pattern: str
    words: str


class Variable(NamedTuple):
    """What a variable does, the values that it takes, and what to do about it if it is set at all."""

    meaning: str
    values: Values = Values(".*", "")
    advice: str = ""


SWITCH, NUMBER, THREE = Values("[01]", "0 or 1"), Values(r"-?\d+", "a number"), Values("[012]", "0, 1 or 2")
BYTES = Values(r"0x[\da-fA-F]+|[1-9]\d*", "a number of bytes; NCCL takes 4M for 4")
BLOCKS = Values("[1-9]|[1-5][0-9]|6[0-4]", "1 to 64")
PATHS = "LOC|PIX|PXB|PHB|SYS"
# Lists that may be given for one function alone: "ring;allreduce:^tree". Case does not matter.
LIST = r"(?i:(\w+:)?\^?({0})(,({0}))*(;\w+:\^?({0})(,({0}))*)*)"
ALGORITHMS = "ring|tree|collnet|collnetchain|collnetdirect|nvls|nvlstree|pat"
UNUSUAL = "leave it out unless you measured that it helps"

MATTERS = {
    "NCCL_DEBUG": Variable(
        "what NCCL prints: WARN explains errors, INFO tells what it chooses",
        Values("VERSION|WARN|INFO|TRACE", "VERSION, WARN, INFO or TRACE"),
    ),
    "NCCL_DEBUG_SUBSYS": Variable("which parts of NCCL write to an INFO log"),
    "NCCL_DEBUG_FILE": Variable("where that log goes; %h is the host, %p the process"),
    "NCCL_SOCKET_IFNAME": Variable("IP interfaces by prefix; = before the list: by name, ^: all others"),
    "NCCL_SOCKET_FAMILY": Variable("IPv4 or IPv6 alone", Values("AF_INET6?", "AF_INET or AF_INET6")),
    "NCCL_IB_HCA": Variable("InfiniBand and RoCE adapters by prefix; = before the list: by name, ^: all others"),
    "NCCL_IB_DISABLE": Variable("1: IP sockets in place of InfiniBand and RoCE", SWITCH, UNUSUAL),
    "NCCL_IB_GID_INDEX": Variable("global ID index of RoCE; -1 lets NCCL choose", NUMBER),
    "NCCL_IB_TIMEOUT": Variable("InfiniBand waits 4.096 us * 2^value before it sends again; default 20", NUMBER),
    "NCCL_NET": Variable("the network by its name: IB, Socket, or a plugin's"),
    "NCCL_NET_GDR_LEVEL": Variable(
        "farthest a network adapter may be from a GPU whose memory it reads itself",
        Values(rf"{PATHS}|\d+", "LOC, PIX, PXB, PHB or SYS"),
    ),
    "NCCL_CROSS_NIC": Variable("whether a ring may use different adapters on different machines; default 2", THREE),
    "NCCL_P2P_DISABLE": Variable("1: GPUs do not exchange directly over NVLink or PCI", SWITCH, UNUSUAL),
    "NCCL_P2P_LEVEL": Variable(
        "farthest two GPUs may be apart that exchange directly",
        Values(rf"NVL|{PATHS}|\d+", "LOC, NVL, PIX, PXB, PHB or SYS"),
    ),
    "NCCL_SHM_DISABLE": Variable("1: the network in place of shared memory within a machine", SWITCH, UNUSUAL),
    "NCCL_BUFFSIZE": Variable("bytes of a buffer between two GPUs; default 4194304", BYTES),
    "NCCL_NTHREADS": Variable("CUDA threads in a block of NCCL's", Values("64|128|256|512", "64, 128, 256 or 512")),
    "NCCL_MIN_CTAS": Variable("fewest CUDA blocks that NCCL uses", BLOCKS),
    "NCCL_MAX_CTAS": Variable("most CUDA blocks that NCCL uses", BLOCKS),
    "NCCL_MIN_NCHANNELS": Variable("the old name of NCCL_MIN_CTAS", NUMBER, "set NCCL_MIN_CTAS in its place"),
    "NCCL_MAX_NCHANNELS": Variable("the old name of NCCL_MAX_CTAS", NUMBER, "set NCCL_MAX_CTAS in its place"),
    "NCCL_ALGO": Variable(
        "algorithms that NCCL may use",
        Values(LIST.format(ALGORITHMS), "some of Ring, Tree, CollnetChain, CollnetDirect, NVLS, NVLSTree and PAT"),
        UNUSUAL,
    ),
    "NCCL_PROTO": Variable(
        "protocols that NCCL may use", Values(LIST.format("ll|ll128|simple"), "some of LL, LL128 and Simple"), UNUSUAL
    ),
    "NCCL_NVLS_ENABLE": Variable("whether NVLink switches add up; default 2", THREE),
    "NCCL_CUMEM_ENABLE": Variable("whether NCCL allocates by CUDA's cuMem functions", SWITCH),
    "NCCL_TOPO_FILE": Variable("a description of the machine that is read before NCCL looks itself"),
    "NCCL_CONF_FILE": Variable("a file of such variables, in place of ~/.nccl.conf"),
    "NCCL_IB_CUDA_SUPPORT": Variable("removed in version 2.4", advice="set NCCL_NET_GDR_LEVEL in its place"),
    "NCCL_SINGLE_RING_THRESHOLD": Variable("removed in version 2.3", advice="leave it out"),
    "NCCL_LL_THRESHOLD": Variable("removed in version 2.5", advice="leave it out"),
    "NCCL_TREE_THRESHOLD": Variable("removed in version 2.5", advice="leave it out"),
}
# The others that the guide has, without NCCL_.
DOCUMENTED = """
ALLOC_P2P_NET_LL_BUFFERS CGA_CLUSTER_SIZE CHECKS_DISABLE CHECK_MODE CHECK_POINTERS COLLNET_ENABLE
COLLNET_NODE_THRESHOLD COMM_BLOCKING CTA_POLICY CUMEM_HOST_ENABLE DEBUG_TIMESTAMP_FORMAT DEBUG_TIMESTAMP_LEVELS
DMABUF_ENABLE ENV_PLUGIN GRAPH_MIXING_SUPPORT GRAPH_REGISTER GRAPH_STREAM_ORDERING IB_ADAPTIVE_ROUTING IB_ADDR_FAMILY
IB_ADDR_RANGE IB_AR_THRESHOLD IB_ECE_ENABLE IB_FIFO_TC IB_MERGE_NICS IB_OOO_RQ IB_PCI_RELAXED_ORDERING
IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_RETURN_ASYNC_EVENTS IB_ROCE_VERSION_NUM IB_SL IB_SPLIT_DATA_ON_QPS IB_TC
IGNORE_COLLNET_MISMATCH IGNORE_CPU_AFFINITY IGNORE_NET_MISMATCH IPC_USE_ABSTRACT_SOCKET LAUNCH_MODE
LAUNCH_ORDER_IMPLICIT LAUNCH_RACE_FATAL LEGACY_CUDA_REGISTER LOCAL_REGISTER MAX_NRINGS MEM_SYNC_DOMAIN MIN_NRINGS
MNNVL_CLIQUE_ID MNNVL_ENABLE MNNVL_UUID MULTI_RANK_GPU_ENABLE NETDEVS_POLICY NET_GDR_C2C NET_GDR_READ NET_MERGE_LEVEL
NET_MERGE_POLICY NET_PLUGIN NET_SHARED_BUFFERS NET_SHARED_COMMS NSOCKS_PERTHREAD NVB_DISABLE OOB_NET_ENABLE
OOB_NET_IFNAME P2P_DIRECT_DISABLE P2P_LL_THRESHOLD P2P_NET_CHUNKSIZE P2P_PXN_LEVEL PROFILER_PLUGIN PXN_C2C PXN_DISABLE
RAS_ADDR RAS_ENABLE RAS_TIMEOUT_FACTOR RUNTIME_CONNECT SET_STACK_SIZE SET_THREAD_NAME SOCKET_MAGIC SOCKET_NTHREADS
SOCKET_POLL_TIMEOUT_MSEC SOCKET_RETRY_CNT SOCKET_RETRY_SLEEP_MSEC SYM_GIN_KERNELS_ENABLE TOPO_DUMP_FILE TUNER_PLUGIN
UID_STAGGER_RATE UID_STAGGER_THRESHOLD WIN_ENABLE
"""
KNOWN = {*MATTERS, *(f"NCCL_{name}" for name in DOCUMENTED.split())}


def variables(backend: str) -> list[Row]:
    """A row for each variable that is set; what is wrong with one would break a run only where NCCL carries it."""
    wrong: State = "fail" if "nccl" in backend else "warn"
    rows = [judge(name, value, place, wrong) for name, (value, place) in sorted(in_force().items())]
    return rows or [Row("NCCL variables", "none set")]


def in_force() -> dict[str, tuple[str, str]]:
    """The value of each variable that is set, and the file that sets it; the environment goes before files."""
    chosen = os.environ.get("NCCL_CONF_FILE")
    found = {name: (value, "") for name, value in os.environ.items() if name.startswith("NCCL_")}
    for path in (Path(chosen) if chosen else Path.home() / ".nccl.conf", Path("/etc/nccl.conf")):
        for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
            name, equals, value = line.partition("=")
            if equals and name.startswith("NCCL_"):
                found.setdefault(name, (value, f" (from {path})"))
    return found


def judge(name: str, value: str, place: str, wrong: State) -> Row:
    """A row for one variable; ``wrong`` is the state of one that cannot be meant."""
    found = f"{value}{place}"
    if name not in KNOWN:
        near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.85)
        return Row(name, found, "warn", "not in NVIDIA's guide" + (f"; is {near[0]} meant?" if near else ""))
    if name not in MATTERS:
        return Row(name, found)
    meaning, values, advice = MATTERS[name]
    found += f": {meaning}"
    if not re.fullmatch(values.pattern, value):
        return Row(name, found, wrong, f"give {values.words}")
    cards = [card.name for card in Path("/sys/class/infiniband").glob("*")]
    if name == "NCCL_IB_HCA" and not select(cards, value):
        return Row(name, found, "warn", "no adapter here has such a name, and NCCL takes IP sockets")
    if advice and value != "0":
        return Row(name, found, "warn", advice)
    return Row(name, found)
