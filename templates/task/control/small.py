*"--data.global_batch_size 8 --dataset.steps 24 --dataset.passes 2 --dataset.minibatches 3".split(),
*"--dataset.entropy_weight 0.3 --model.width 16 --dataset.clip 0.01 --train.epochs 22".split(),
