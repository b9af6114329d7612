#// A part of Parallel, which has allow_unused, compare_used, fsdp, microbatches, module, scaler. //#
#// Uses mean_loss, split_batch. //#
microbatches = split_batch((inputs, targets), self.microbatches)
for number, (inputs, targets) in enumerate(microbatches, start=1):
    # Each micro-batch scatters its gradients: to wait for the last would keep whole ones. Replicas average
    # theirs once, after the last.
    self.fsdp.set_requires_all_reduce(number == self.microbatches)
    self.scaler.scale(mean_loss(self.module(inputs), targets)).backward()
if self.allow_unused:
    self.compare_used()
