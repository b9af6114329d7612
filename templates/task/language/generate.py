"""Text that a model writes: it continues a prompt, byte by byte."""

import torch

from .config import Config, UserError
from .distributed import Process
from .evaluate import load_experiment


def generate(
    path: str, prompt: str, length: int, temperature: float, config: Config, given: set[str], process: Process
) -> None:
    """Print a prompt and its continuation by the model of a checkpoint; a collective.

    An empty prompt is a line break. The text is drawn from ``run.seed``, the same on any number of ranks.
    """
    if length < 1 or not temperature >= 0:
        raise UserError(f"--length is {length} and --temperature {temperature}; give 1 or more, and 0 or more")
    _, parallel, _, _ = load_experiment(path, config, given, process)
    parallel.module.eval()
    generator = torch.Generator().manual_seed(config.run.seed)
    text, context = list(prompt.encode() or b"\n"), config.model.context
    for _ in range(length):
        window = text[-context:]
        # The zeros after the text do not change what the model predicts before them; all inputs have the same shape.
        inputs = torch.tensor([window + [0] * (context - len(window))], device=parallel.device)
        with torch.no_grad():
            outputs = parallel.predict(inputs)
        byte = None
        if outputs is not None:
            logits = outputs[0, len(window) - 1].cpu().double() / max(temperature, 1e-9)
            byte = int(torch.multinomial(logits.softmax(dim=0), 1, generator=generator))
        # Rank 0 may lack the outputs, and ranks that have them may differ by rounding.
        text.append(next(byte for byte in process.all_gather(byte) if byte is not None))
    if process.rank == 0:
        print(bytes(text).decode(errors="replace"))
