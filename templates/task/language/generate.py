"""Text that a model writes: it continues a prompt, token by token."""

from typing import Any

import torch

from .config import Config
from .dataset import describe
from .distributed import Process
from .experiment import load_experiment


def generate(options: Any, config: Config, given: set[str], process: Process) -> None:
    """Print a prompt and its continuation by ``options.length`` tokens, on rank 0.

    The text is the same on any number of ranks.
    """
    _, parallel, _, _ = load_experiment(options.checkpoint, config, given, process)
    parallel.module.eval()
    tokenizer = load_tokenizer(config)
    tokens = encode(options.prompt, tokenizer)
    generator = torch.Generator().manual_seed(config.run.seed)
    for _ in range(options.length):
        window = tokens[-config.model.context :]
        # Some strategies need inputs of one shape. The model is causal, so the zeros after the text
        # do not change what it predicts for the text.
        padding = [0] * (config.model.context - len(window))
        inputs = torch.tensor([window + padding], device=parallel.device)  # Shape (1, context).
        with torch.no_grad():
            outputs = parallel.predict(inputs)
        token = None
        # Only some ranks may have outputs, which are of shape (1, context, vocabulary).
        if outputs is not None:
            logits = outputs[0, len(window) - 1].cpu().double()
            token = choose_token(logits, options.temperature, generator)
        # Outputs of several ranks may differ by rounding, so every rank adds the same one's token.
        choices = [choice for choice in process.all_gather(token) if choice is not None]
        tokens.append(choices[0])
    if process.rank == 0:
        if tokenizer is None:
            # A model of bytes may write some that are no UTF-8.
            print(bytes(tokens).decode(errors="replace"))
        else:
            print(tokenizer.decode(tokens))


def load_tokenizer(config: Config) -> Any:
    """Return the tokenizer that the data set was prepared with, or None if its tokens are bytes."""
    path = describe(config.dataset.path)["tokenizer"]
    if path is None:
        return None
    from tokenizers import Tokenizer  # type: ignore[import-not-found, unused-ignore]

    return Tokenizer.from_file(path)


def encode(prompt: str, tokenizer: Any) -> list[int]:
    """Return the tokens of a prompt; of an empty one, the newline of texts in bytes."""
    tokens = list(prompt.encode())
    if tokenizer is not None:
        tokens = tokenizer.encode(prompt, add_special_tokens=False).ids
    return tokens or [10]


def choose_token(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    """Draw a token from (vocabulary,) logits; a temperature of 0 picks the likeliest one."""
    # A temperature of 1e-9 instead of 0 leaves a probability of 1 for the largest logit.
    probabilities = (logits / max(temperature, 1e-9)).softmax(dim=0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
