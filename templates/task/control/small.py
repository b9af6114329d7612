*"--data.global_batch_size 8 --data.micro_batch_size 2".split(),
*"--train.epochs 22 --model.width 16 --dataset.steps 24".split(),
*"--dataset.passes 2 --dataset.minibatches 3".split(),
*"--dataset.entropy_weight 0.3 --dataset.clip 0.01".split(),
