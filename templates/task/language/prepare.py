"""Write texts as one file of tokens, which dataset.path takes, with a description of its tokens:

.venv/bin/python scripts/prepare.py data/code.bin src/*/*.py
.venv/bin/python scripts/prepare.py data/mix.bin code/*.py --mix 0.5 mail/*.txt --mix 2 poems/*.txt --tokenizer bpe.json

Each file is a document, or with --lines each line. Tokens are bytes, or those of a file of the package tokenizers. The
documents of a mixture are spread evenly over the file, so the test set, which is its end, has some of each.
"""

import argparse
import heapq
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np


def documents(weight: float, paths: list[Path], lines: bool) -> Iterator[tuple[float, bytes]]:
    """Yield documents, as often as ``weight`` states on average, and how far in all of them each one ends."""
    size, done, due = sum(path.stat().st_size for path in paths), 0, 0.0
    for path in paths:
        with path.open("rb") as file:
            for document in file if lines else [file.read()]:
                done += len(document)
                due += weight
                while due >= 1:
                    due -= 1
                    yield done / max(1, size), document


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("output", type=Path, help="the file to write, NAME.bin; its description is NAME.json")
parser.add_argument("texts", nargs="+", help="files of text")
parser.add_argument("--mix", action="append", nargs="+", default=[], help="a weight and files; 0.5: every second one")
parser.add_argument("--lines", action="store_true", help="each line is a document, and not each file")
parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; without one, tokens are bytes")
arguments = parser.parse_args()
try:
    groups = [(float(weight), [*map(Path, paths)]) for weight, *paths in [("1", *arguments.texts), *arguments.mix]]
except ValueError as error:
    parser.error(f"--mix takes a weight and files: {error}")
if not all(0 < weight < float("inf") for weight, _ in groups):
    parser.error("--mix takes a weight above 0, and files")
for path in [path for _, paths in groups for path in paths] + [arguments.tokenizer] * bool(arguments.tokenizer):
    if not path.is_file():
        parser.error(f"{path} is no file")
if arguments.output.suffix != ".bin":
    parser.error(f"the output is {arguments.output}; give a name that ends in .bin")

description = arguments.output.with_suffix(".json")
description.parent.mkdir(parents=True, exist_ok=True)
description.unlink(missing_ok=True)  # Without it, no run reads a file that is not complete.
vocabulary, end, tokenizer, name = 256, 0, None, None  # No text has the byte 0.
if arguments.tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    name = arguments.output.with_suffix(".tokenizer.json").name
    tokenizer.save(str(arguments.output.with_name(name)))
    numbers = tokenizer.get_vocab()
    end = numbers.get("<|endoftext|>", max(numbers.values()) + 1)
    vocabulary = (max(end, *numbers.values()) // 64 + 1) * 64  # A multiple of 64 is faster on GPUs.
dtype, tokens, size = np.dtype(np.uint16 if vocabulary <= 2**16 else np.uint32), 0, 0
with arguments.output.open("wb") as file:
    for _, document in heapq.merge(*(documents(*group, arguments.lines) for group in groups)):
        encoded = np.frombuffer(document, np.uint8)
        if tokenizer:
            encoded = tokenizer.encode(document.decode(errors="replace"), add_special_tokens=False).ids
        file.write(np.array(encoded, dtype).tobytes() + dtype.type(end).tobytes())
        tokens, size = tokens + len(encoded) + 1, size + len(document)
if not tokens:
    parser.error("the files have no text")
about = {"dtype": dtype.name, "vocabulary": vocabulary, "end": end, "bytes_per_token": size / tokens, "tokenizer": name}
description.write_text(json.dumps(about) + "\n")
print(f"{arguments.output}: {tokens:,} tokens of a vocabulary of {vocabulary}")
