"""``benchmark.json``: one record per world size, each with the settings and the code that were measured."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..reporting import set_aside
from ..runtime import replace_text

UNCOMPARED = ("run", "distributed", "checkpoint")  # Sections that do not change what a step does.


def add_record(
    path: Path, record: dict[str, Any], settings: Mapping[str, Mapping[str, Any]], provenance: dict[str, Any]
) -> list[dict[str, Any]]:
    """Add a record to a file, in place of one of its world size; returns all of them, by world size.

    Those of other settings or of another device are dropped: a difference would not be due to the world size.
    """
    compared = {name: values for name, values in settings.items() if name not in UNCOMPARED}
    new = json.loads(json.dumps(record | {"settings": compared, "provenance": provenance}))
    others = [old for old in read_records(path) if old["world_size"] != new["world_size"]]
    kept = [old for old in others if (old["settings"], old["device"]) == (new["settings"], new["device"])]
    if len(kept) < len(others):
        print(f"{path} had records of other settings, which are replaced", file=sys.stderr)
    records = sorted([*kept, new], key=lambda each: int(each["world_size"]))
    for each, efficiency in zip(records, scaling_efficiency(records), strict=True):
        each["scaling_efficiency"] = round(efficiency, 4)
    record["scaling_efficiency"] = new["scaling_efficiency"]
    replace_text(path, json.dumps(records, indent=2) + "\n")
    return records


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file; none if there is no file. A damaged one is set aside."""
    try:
        records = json.loads(path.read_bytes())
        for each in records:
            each["settings"], each["device"], each["world_size"] + each["samples_per_second"]
        return list(records)
    except FileNotFoundError:
        return []
    except (ValueError, TypeError, KeyError):
        set_aside(path)
        return []


def scaling_efficiency(records: list[dict[str, Any]]) -> list[float]:
    """Return the throughput per rank of each record, relative to that of the smallest world size.

    The global batch is the same for all, so this is strong scaling.
    """
    per_rank = [each["samples_per_second"] / each["world_size"] for each in records]
    return [rate / per_rank[0] for rate in per_rank]
