"""Text that a model writes: it continues a prompt, token by token."""

from typing import Any

import torch

from .config import Config
from .dataset import describe
from .distributed import Process
from .experiment import load_experiment


def generate(options: Any, config: Config, given: set[str], process: Process) -> None:
    """Print a prompt and its continuation, the same on any number of ranks; an empty prompt is token 10."""
    _, parallel, _, _ = load_experiment(options.checkpoint, config, given, process)
    parallel.module.eval()
    generator = torch.Generator().manual_seed(config.run.seed)
    prompt, context, tokenizer = options.prompt, config.model.context, None
    if file := describe(config.dataset.path)["tokenizer"]:
        from tokenizers import Tokenizer  # type: ignore[import-not-found, unused-ignore]

        tokenizer = Tokenizer.from_file(file)
    text = list(tokenizer.encode(prompt, add_special_tokens=False).ids if tokenizer else prompt.encode()) or [10]
    for _ in range(options.length):
        window = text[-context:]
        # The zeros after the text do not change what the model predicts before them; all inputs have the same shape.
        inputs = torch.tensor([window + [0] * (context - len(window))], device=parallel.device)
        with torch.no_grad():
            outputs = parallel.predict(inputs)
        token = None
        if outputs is not None:
            logits = outputs[0, len(window) - 1].cpu().double() / max(options.temperature, 1e-9)
            token = int(torch.multinomial(logits.softmax(dim=0), 1, generator=generator))
        # Rank 0 may lack the outputs, and ranks that have them may differ by rounding.
        text.append(next(token for token in process.all_gather(token) if token is not None))
    if process.rank == 0:
        print(tokenizer.decode(text) if tokenizer else bytes(text).decode(errors="replace"))
