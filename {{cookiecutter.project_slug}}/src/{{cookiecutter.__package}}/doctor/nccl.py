"""NCCL's environment variables: what those that are set do, and which have a name or a value that NCCL ignores.

``nccl_variables.toml`` describes them.
"""

import difflib
import os
import re
import tomllib
from pathlib import Path

from .connectivity import select
from .report import Row, State

VARIABLES = tomllib.loads(Path(__file__).with_name("nccl_variables.toml").read_text(encoding="utf-8"))
DOCUMENTED = {*VARIABLES.pop("undescribed"), *VARIABLES}
# A list such as "ring,tree" or "^tree"; or a list per function: "ring;allreduce:^tree". Case does not matter.
LIST = r"(?i:(\w+:)?\^?({0})(,({0}))*(;\w+:\^?({0})(,({0}))*)*)"


def check_variables(backend: str) -> list[Row]:
    """Check each variable that is set; a wrong one would break a run only if NCCL is the backend."""
    wrong: State = "fail" if "nccl" in backend else "warn"
    rows = [check_variable(name, value, source, wrong) for name, (value, source) in sorted(read_variables().items())]
    return rows or [Row("NCCL variables", "none set")]


def read_variables() -> dict[str, tuple[str, str]]:
    """Return the value of each variable that is set, and the file that sets it; the environment takes precedence."""
    chosen = os.environ.get("NCCL_CONF_FILE")
    found = {name: (value, "") for name, value in os.environ.items() if name.startswith("NCCL_")}
    for path in (Path(chosen) if chosen else Path.home() / ".nccl.conf", Path("/etc/nccl.conf")):
        for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
            name, equals, value = line.partition("=")
            if equals and name.startswith("NCCL_"):
                found.setdefault(name, (value, f" (from {path})"))
    return found


def check_variable(name: str, value: str, source: str, wrong: State) -> Row:
    """Check one variable; ``wrong`` is the state of a value that NCCL does not accept."""
    found = f"{value}{source}"
    if name not in DOCUMENTED:
        near = difflib.get_close_matches(name, DOCUMENTED, n=1, cutoff=0.85)
        return Row(name, found, "warn", "not in NVIDIA's guide" + (f"; did you mean {near[0]}?" if near else ""))
    if name not in VARIABLES:
        return Row(name, found)
    variable = VARIABLES[name]
    found += f": {variable['meaning']}"
    values = LIST.format(variable["items"]) if "items" in variable else variable.get("values", ".*")
    if not re.fullmatch(values, value):
        return Row(name, found, wrong, f"give {variable['expected']}")
    adapters = [path.name for path in Path("/sys/class/infiniband").glob("*")]
    if name == "NCCL_IB_HCA" and not select(adapters, value):
        return Row(name, found, "warn", "no adapter here has such a name, so NCCL uses IP sockets")
    if "advice" in variable and value != "0":
        return Row(name, found, "warn", variable["advice"])
    return Row(name, found)
