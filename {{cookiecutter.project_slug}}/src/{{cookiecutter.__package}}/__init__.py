"""Distributed training in plain PyTorch."""

import time

# The clock of "first step after ... s": read before anything heavy is imported.
STARTED = time.perf_counter()
