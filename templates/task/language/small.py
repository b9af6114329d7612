*"--data.global_batch_size 128 --data.micro_batch_size 32 --train.epochs 2".split(),
*"--model.width 32 --model.layers 2 --model.heads 4 --model.context 32".split(),
*"--dataset.max_bytes 66000 --dataset.test_bytes 10260".split(),
