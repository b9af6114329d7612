"""Checks Markdown with a Markdown parser: links lead somewhere, tables are tables, code blocks end."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterator

from markdown_it import MarkdownIt
from markdown_it.rules_block.table import escapedSplit

PARSER = MarkdownIt("commonmark").enable("table")


class Document:
    """A Markdown file: the anchors of its headings, its links to other files, and its faults."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.lines, self.tokens = path, text.splitlines(), PARSER.parse(text)
        titles = [self.tokens[i + 1].content for i, token in enumerate(self.tokens) if token.type == "heading_open"]
        self.anchors = {anchor_of(title) for title in titles}
        inline = [child for token in self.tokens for child in token.children or []]
        targets = [str(child.attrs.get("href", child.attrs.get("src"))) for child in inline if child.attrs]
        self.links = [target for target in targets if not re.match(r"[a-z]+:", target)]

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with the file by itself, with the line where it begins."""
        for token in self.tokens:
            first, end = token.map or (0, 1)
            texts = [child.content for child in token.children or [] if child.type == "text"]
            if token.type == "fence" and self.lines[end - 1].strip() != token.markup:
                yield f"{self.path}: a code block does not end: {self.lines[first]}"
            elif token.type == "table_open" and len({cells(line) for line in self.lines[first:end]}) > 1:
                yield f"{self.path}: rows of a table differ in length: {self.lines[first]}"
            elif any(re.search(r"^\||\]\(", text) for text in texts):
                yield f"{self.path}: looks like a table or a link, but is none: {self.lines[first]}"

    def broken_links(self, documents: dict[str, Document], files: Collection[str]) -> Iterator[str]:
        """Yield the links to files, folders or headings that do not exist; all paths start at the project."""
        folders = {posixpath.dirname(file) for file in files}
        for link in self.links:
            name, _, anchor = link.partition("#")
            path = posixpath.normpath(posixpath.join(posixpath.dirname(self.path), name)) if name else self.path
            if path not in files and path not in folders:
                yield f"{self.path}: no file {link}"
            elif anchor and (path not in documents or anchor not in documents[path].anchors):
                yield f"{self.path}: no heading {link}"


def cells(row: str) -> int:
    """Return the number of cells in a row of a table; escaped bars do not separate cells."""
    return len(escapedSplit(row.strip().removeprefix("|").removesuffix("|")))


def anchor_of(title: str) -> str:
    """Return the anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
