*"--data.global_batch_size 128 --model.width 16 --model.depth 2".split(),
