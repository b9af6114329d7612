"""How dense Python code is: what a reader meets in each line of it, and what explains it.

A line of code holds a token that is neither a comment nor part of a docstring; docstrings are all texts that stand
alone in a body, such as those under the fields of a dataclass. Comments, docstrings and blank lines are free: no figure
becomes worse by writing more of them. The figures of a package, in the order of ``densities``:

- Tokens of code per line of code. An f-string is one token, as it was before Python 3.12.
- Walrus operators per 1,000 lines of code.
- Packed assignments, in percent of all with ``=``: those of several values to as many names (``a, b = 1, 2``), and
  those of one value to several targets (``a = b = 1``); and how many of the first kind have three names or more.
- Lines with two ideas, in percent of the lines of code. An idea is a walrus, a conditional expression, a comprehension,
  a lambda, an ``and`` or ``or``, or a packed assignment, on the line where it begins.
- Lines of code over 100 characters, in percent of the lines of code; ruff also rejects such comments and docstrings.
- Comments without a subject, in percent of the comments: those that begin with a word of ``NO_SUBJECT``. A comment is
  one ``#`` with words after it, and no directive to a tool.
- Comments per 100 lines of code, and how many percent of them have a line of their own.
- Characters of a name, on average over the different names that a package assigns, or has as parameters of functions.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

WIDTH = 100
LAYOUT = {getattr(tokenize, name) for name in ("NEWLINE", "NL", "INDENT", "DEDENT", "ENDMARKER", "COMMENT")}
# Python 3.12 and newer split an f-string into tokens between these two.
FSTRING_START, FSTRING_END = (getattr(tokenize, f"FSTRING_{end}", None) for end in ("START", "END"))
DIRECTIVES = ("noqa", "type:", "pyre", "mypy", "-*-", "Copyright")
NO_SUBJECT = {"It", "Its", "They", "These", "Those", "Such", "Each", "Else", "Once", "Since", "Equal", "Kept", "Sent"}
NO_SUBJECT |= {"Shared", "Of", "By", "From", "To", "With", "Without", "In", "At", "On", "As", "Than"}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
IDEAS = (ast.NamedExpr, ast.IfExp, ast.Lambda, ast.BoolOp, *COMPREHENSIONS)
SEVERAL = (ast.Tuple, ast.List)


class Counts(NamedTuple):
    """What is counted in a file, or in several together."""

    numbers: Counter[str]
    names: frozenset[str]


def densities(texts: Iterable[str]) -> dict[str, float]:
    """Return the figures of the files of a package, given their texts."""
    counts = [count(text) for text in texts]
    total = sum((numbers for numbers, _ in counts), Counter[str]())
    names = frozenset[str]().union(*(names for _, names in counts))
    lines, comments, assignments = (max(1, total[name]) for name in ("lines of code", "comments", "assignments"))
    return {
        "tokens per line of code": total["tokens"] / lines,
        "walrus per 1,000 lines of code": 1000 * total["walrus"] / lines,
        "% of assignments packed": 100 * total["packed assignments"] / assignments,
        "packed assignments of three names": total["packed assignments of three names"],
        "% of lines with two ideas": 100 * total["lines with two ideas"] / lines,
        f"% of lines of code over {WIDTH} characters": 100 * total["long lines"] / lines,
        "% of comments without a subject": 100 * total["comments without a subject"] / comments,
        "comments per 100 lines of code": 100 * total["comments"] / lines,
        "% of comments on their own line": 100 * total["comments on their own line"] / comments,
        "characters of a name": sum(map(len, names)) / max(1, len(names)),
    }


@functools.cache
def count(text: str) -> Counts:
    """Count what a file has."""
    tree = ast.parse(text)
    tokens = [*tokenize.generate_tokens(io.StringIO(text).readline)]
    numbers = count_tokens(tokens, set(docstring_lines(tree)), text.splitlines())
    numbers += count_comments(tokens)
    ideas: Counter[int] = Counter()
    for node in ast.walk(tree):
        ideas[getattr(node, "lineno", 0)] += isinstance(node, IDEAS)
        numbers["walrus"] += isinstance(node, ast.NamedExpr)
        if isinstance(node, ast.Assign):
            count_assignment(node, numbers, ideas)
    numbers["lines with two ideas"] = sum(number >= 2 for number in ideas.values())
    return Counts(numbers, frozenset(assigned_names(tree)))


def count_tokens(tokens: list[tokenize.TokenInfo], docstrings: set[int], lines: list[str]) -> Counter[str]:
    """Count the tokens and the lines of code."""
    numbers: Counter[str] = Counter()
    code, depth = set[int](), 0
    for token in tokens:
        depth -= token.type == FSTRING_END
        if token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
            numbers["tokens"] += not depth and token.type != FSTRING_END and token.start[0] not in docstrings
        depth += token.type == FSTRING_START
    code -= docstrings
    numbers["lines of code"] = len(code)
    numbers["long lines"] = sum(len(lines[number - 1]) > WIDTH for number in code)
    return numbers


def count_comments(tokens: list[tokenize.TokenInfo]) -> Counter[str]:
    """Count the comments."""
    numbers: Counter[str] = Counter()
    for token in tokens:
        words = token.string.lstrip("# ").strip() if token.type == tokenize.COMMENT else ""
        if re.search("[A-Za-z]", words) and not words.startswith(DIRECTIVES):
            numbers["comments"] += 1
            numbers["comments on their own line"] += token.line.lstrip().startswith("#")
            numbers["comments without a subject"] += re.findall(r"\w*", words)[0] in NO_SUBJECT
    return numbers


def count_assignment(node: ast.Assign, numbers: Counter[str], ideas: Counter[int]) -> None:
    """Count an assignment, and whether it is packed."""
    target = node.targets[0]
    size = len(target.elts) if isinstance(target, SEVERAL) and isinstance(node.value, SEVERAL) else 1
    numbers["assignments"] += 1
    numbers["packed assignments"] += (size > 1) + (len(node.targets) > 1)
    numbers["packed assignments of three names"] += size > 2
    ideas[node.lineno] += isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)


def docstring_lines(tree: ast.AST) -> Iterator[int]:
    """Yield the numbers of the lines of docstrings."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield from range(value.lineno, (value.end_lineno or value.lineno) + 1)


def assigned_names(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a file assigns, and those of the parameters of its functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = [parameter.arg for parameter in node.args.args + node.args.kwonlyargs]
            yield from (name for name in parameters if name not in ("self", "cls"))
