# What the tests train, as arguments: little enough to be quick.
SMALL = ("--data.global_batch_size", "128")
