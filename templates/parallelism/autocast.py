def build_autocast(device: torch.device, precision: str) -> Callable[[], torch.autocast]:
    """What opens the arithmetic of ``train.precision`` on ``device``."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return partial(torch.autocast, device.type, dtype=dtype, enabled=dtype is not None)
