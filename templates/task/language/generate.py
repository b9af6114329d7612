"""Text that a model writes: it continues a prompt, token by token."""

from typing import Any

import torch

from .config import Config
from .dataset import describe
from .distributed import Process
from .experiment import load_experiment


def generate(options: Any, config: Config, given: set[str], process: Process) -> None:
    """Print a prompt and its continuation by ``options.length`` tokens, on rank 0."""
    _, parallel, _, _ = load_experiment(options.checkpoint, config, given, process)
    parallel.module.eval()
    tokens = list(options.prompt.encode())
    tokenizer: Any = None
    tokenizer_path = describe(config.dataset.path)["tokenizer"]
    if tokenizer_path is not None:
        from tokenizers import Tokenizer  # type: ignore[import-not-found, unused-ignore]

        tokenizer = Tokenizer.from_file(tokenizer_path)
        tokens = tokenizer.encode(options.prompt, add_special_tokens=False).ids
    tokens = tokens or [10]  # Without a prompt, a text in bytes begins with a newline.
    generator = torch.Generator().manual_seed(config.run.seed)
    for _ in range(options.length):
        window = tokens[-config.model.context :]
        # Some strategies need inputs of one shape. A causal model ignores the zeros after the text.
        padding = [0] * (config.model.context - len(window))
        inputs = torch.tensor([window + padding], device=parallel.device)  # Shape (1, context).
        with torch.no_grad():
            outputs = parallel.predict(inputs)
        token = None
        if outputs is not None:  # Some ranks have none; the shape is (1, context, vocabulary).
            logits = outputs[0, len(window) - 1].cpu().double()
            # A temperature of 1e-9 instead of 0 leaves a probability of 1 for the largest logit.
            probabilities = (logits / max(options.temperature, 1e-9)).softmax(dim=0)
            token = int(torch.multinomial(probabilities, 1, generator=generator))
        # Outputs of several ranks may differ by rounding, so every rank adds the same one's token.
        choices = [choice for choice in process.all_gather(token) if choice is not None]
        tokens.append(choices[0])
    if process.rank == 0:
        if tokenizer is None:
            print(bytes(tokens).decode(errors="replace"))
        else:
            print(tokenizer.decode(tokens))
