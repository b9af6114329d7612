"""Write texts as one file of tokens, which dataset.path takes, and a description of these tokens:

.venv/bin/python scripts/prepare.py data/code.bin src/*/*.py
.venv/bin/python scripts/prepare.py data/mix.bin code/*.py --mix 0.5 mail/*.txt --mix 2 poems/*.txt

Each file is a document, or with --lines each line. Tokens are bytes, or those of a tokenizer.json
of the package tokenizers. The documents of a mixture are spread evenly over the file, so that the
test set, which is its end, has some of each.
"""

import argparse
import heapq
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    """Write the tokens and, once all of them are written, their description."""
    parser = build_parser()
    arguments = parser.parse_args()
    check_arguments(arguments, parser)
    description = arguments.output.with_suffix(".json")
    description.parent.mkdir(parents=True, exist_ok=True)
    # A run reads no tokens that lack a description, so none reads a file that is still incomplete.
    description.unlink(missing_ok=True)
    tokenizer, about = choose_tokenizer(arguments)
    documents = mix_documents(arguments)
    num_tokens, num_bytes = write_tokens(arguments.output, documents, tokenizer, about)
    if num_tokens == 0:
        parser.error("the files have no text")
    about["bytes_per_token"] = num_bytes / num_tokens
    description.write_text(json.dumps(about) + "\n")
    vocabulary = about["vocabulary"]
    print(f"{arguments.output}: {num_tokens:,} tokens of a vocabulary of {vocabulary}")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=keep_lines)
    parser.add_argument("output", type=Path, help="NAME.bin; its description is NAME.json")
    parser.add_argument("texts", nargs="+", help="files of text")
    mix_help = "a weight and files; 0.5 takes every second document"
    parser.add_argument("--mix", action="append", nargs="+", default=[], help=mix_help)
    parser.add_argument("--lines", action="store_true", help="a document is a line, not a file")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json, in place of bytes")
    return parser


def check_arguments(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Add ``groups``, a list of (weight, paths), to the arguments; end if an argument is wrong."""
    arguments.groups = [(1.0, [Path(name) for name in arguments.texts])]
    for weight, *names in arguments.mix:
        try:
            arguments.groups.append((float(weight), [Path(name) for name in names]))
        except ValueError as error:
            parser.error(f"--mix takes a weight and files: {error}")
    inputs = [arguments.tokenizer] if arguments.tokenizer else []
    for weight, paths in arguments.groups:
        if not 0 < weight < math.inf:
            parser.error("--mix takes a weight above 0, and files")
        inputs.extend(paths)
    for path in inputs:
        if not path.is_file():
            parser.error(f"{path} is no file")
    if arguments.output.suffix != ".bin":
        parser.error(f"the output is {arguments.output}; give a name that ends in .bin")


def choose_tokenizer(arguments: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Return the tokenizer, None for bytes, and the description of its tokens.

    ``end`` is the token after each document. A tokenizer is copied next to the tokens, where
    `generate` finds it.
    """
    if arguments.tokenizer is None:
        # No text has the byte 0, so it can mark the end of a document.
        return None, {"dtype": "uint16", "vocabulary": 256, "end": 0, "tokenizer": None}
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    # The file of a model may ask to cut texts to the length of its inputs, or to pad them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    copy = arguments.output.with_suffix(".tokenizer.json")
    tokenizer.save(str(copy))
    numbers = tokenizer.get_vocab()
    largest = max(numbers.values())
    end = numbers.get("<|endoftext|>", largest + 1)
    # A vocabulary whose size is a multiple of 64 makes the last layer faster on GPUs.
    vocabulary = 64 * (max(end, largest) // 64 + 1)
    dtype = "uint16" if vocabulary <= 2**16 else "uint32"
    return tokenizer, {"dtype": dtype, "vocabulary": vocabulary, "end": end, "tokenizer": copy.name}


def mix_documents(arguments: argparse.Namespace) -> Iterator[bytes]:
    """Yield the documents of all groups so that each group is spread evenly over the result."""
    groups = [read_group(*group, arguments.lines) for group in arguments.groups]
    # Each group is sorted by the share of its bytes that has been read. The merged documents have
    # the same order, so that half of every group lies in the first half of the file.
    for _, document in heapq.merge(*groups):
        yield document


def read_group(weight: float, paths: list[Path], by_line: bool) -> Iterator[tuple[float, bytes]]:
    """Yield each document ``weight`` times on average, after the share of the bytes read so far."""
    total_bytes = sum(path.stat().st_size for path in paths)
    bytes_read = 0
    copies_due = 0.0
    for path in paths:
        with path.open("rb") as file:
            for document in file if by_line else [file.read()]:
                bytes_read += len(document)
                copies_due += weight
                # A weight of 0.5 makes one copy due after every second document.
                while copies_due >= 1:
                    copies_due -= 1
                    yield bytes_read / max(1, total_bytes), document


def write_tokens(
    output: Path, documents: Iterator[bytes], tokenizer: Any, about: dict[str, Any]
) -> tuple[int, int]:
    """Write the tokens of each document and its end; returns the number of tokens and of bytes.

    Bytes are those of the documents, from which a run computes its loss in bits per byte.
    """
    dtype = np.dtype(about["dtype"])
    end = np.array([about["end"]], dtype)
    num_tokens = 0
    num_bytes = 0
    with output.open("wb") as file:
        for document in documents:
            tokens: Any = np.frombuffer(document, np.uint8)
            if tokenizer is not None:
                text = document.decode(errors="replace")
                tokens = tokenizer.encode(text, add_special_tokens=False).ids
            file.write(np.array(tokens, dtype).tobytes())
            file.write(end.tobytes())
            num_tokens += len(tokens) + 1
            num_bytes += len(document)
    return num_tokens, num_bytes


if __name__ == "__main__":
    main()
