# What the tests train, as arguments: little enough to be quick.
SMALL = (
    *("--dataset.max_bytes", "43000", "--data.global_batch_size", "64"),
    # The ranks of an evaluation have different numbers of batches.
    *("--dataset.test_bytes", "20520", "--data.eval_batch_size", "80"),
    *("--model.width", "32", "--model.layers", "2", "--model.heads", "2", "--model.context", "32"),
    *("--train.epochs", "2"),
)
