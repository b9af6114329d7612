# What the tests train, as arguments: little enough to be quick.
SMALL = (
    *("--control.environments", "4", "--control.steps", "16", "--control.passes", "3"),
    *("--data.global_batch_size", "16", "--model.width", "16"),
    # The ranks of an evaluation have different numbers of batches.
    *("--control.evaluation_episodes", "9", "--data.eval_batch_size", "2"),
)
