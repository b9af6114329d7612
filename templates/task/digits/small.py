*"--data.global_batch_size 128 --data.micro_batch_size 32".split(),
*"--model.width 16 --model.depth 2".split(),
