    weights: str | None = None
    """Weights to start a new run from: a checkpoint, a state_dict file or a .safetensors file."""
    weights_except: list[str] = field(default_factory=list)
    """Modules that keep their initial weights nevertheless, for example [head]."""
