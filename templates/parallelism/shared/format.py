#// Uses Literal. //#
format: Literal["full", "sharded"] = "full"
"""full: one file, which rank 0 assembles and writes. sharded: a folder; each rank writes its part meanwhile."""
