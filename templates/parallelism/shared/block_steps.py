#// Uses UserError, block, checkpoint, config, partial, re. //#
#:: if fact("shards") ::#
for name, buffer in block.named_buffers():
    if not buffer.is_contiguous() or re.search(r"int16|uint[36]|float[48]|complex32", str(buffer.dtype)):
        raise UserError(f"buffer {name} cannot be sent; make it contiguous, of a type like int32")
#:: endif ::#
if config.train.activation_checkpointing:
    if any("running_mean" in name for name, _ in block.named_buffers()):
        raise UserError("train.activation_checkpointing updates BatchNorm's statistics twice; turn it off")
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)
if config.train.compile:
    block.compile()
