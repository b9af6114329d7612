"""What each of 8 ranks holds, and sends in a step, for a GPT in fp32 with AdamW: python docs/fits.py.

A step has M micro-batches of one sequence per rank. Formulas stand in docs/fits.md.
"""

RANKS, MICROBATCHES = 8, 8
GIB = 2**30
# Of each model: parameters, blocks, width, tokens of a sequence.
MODELS = {"100 million": (1e8, 12, 768, 1024), "7 billion": (7e9, 32, 4096, 2048)}


def rows(parameters, blocks, width, tokens):
    """Return the GiB that a rank holds without activations, and sends in a step, by strategy."""
    half = (RANKS - 1) / RANKS * 4 * parameters  # Of an all-reduce: a reduce-scatter, or an all-gather.
    activation = 4 * tokens * width
    state = 16 * parameters  # A weight, its gradient and two moments, of 4 bytes each.
    shard = state / RANKS
    return {
        "ddp": (state, 2 * half),
        "fsdp": (shard + 4 * parameters / blocks, MICROBATCHES * 3 * half),
        "fsdp, bf16": (shard + 2 * parameters / blocks, MICROBATCHES * 2 * half),
        "fsdp, reshard_after_forward false": (shard + 4 * parameters, MICROBATCHES * 2 * half),
        "tensor": (shard, MICROBATCHES * blocks * 4 * 2 * (RANKS - 1) / RANKS * activation),
        "pipeline, a stage in the middle": (shard, MICROBATCHES * 2 * activation),
    }


def main():
    columns = [rows(*model) for model in MODELS.values()]
    for strategy in columns[0]:
        numbers = [f"{number / GIB:.3g}" for column in columns for number in column[strategy]]
        print("|", strategy, "|", " | ".join(numbers), "|")


if __name__ == "__main__":
    main()
