"""What a simulation has to know of nn.DataParallel: there is one process."""

from .traits import Traits


class Layout(Traits):
    """One process, whose first device holds the model, the gradients and the optimizer's state."""

    other_strategy = "fsdp"
    note = (
        "the first device is simulated as if it computed the whole batch: with others, its activations take less, and "
        "what is copied between them is not counted"
    )
