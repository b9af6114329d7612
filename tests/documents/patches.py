"""Make the patches of recipes and adopted scripts anew after a change of the source: `make recipes`.

Git moves each patch, as it moves a commit, from the project that the last commit renders to that of the working tree.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from conftest import TEMPLATE, blocks, render_copy

PAGES = [*sorted(TEMPLATE.glob("docs/recipes/*.md")), *sorted(TEMPLATE.glob("docs/adopt/*.diff"))]


class Repository:
    """The project before and after the change: the tags old and new of a Git repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "repository"
        self.folder.mkdir()
        (committed := folder / "committed").mkdir()
        archive = subprocess.run(("git", "archive", "HEAD"), cwd=TEMPLATE, capture_output=True, check=True)
        subprocess.run(("tar", "--extract"), cwd=committed, input=archive.stdout, check=True)
        self.git("init", "--quiet")
        for tag, template in (("old", committed), ("new", TEMPLATE)):
            project = render_copy(template, folder / tag)
            self.git("rm", "-r", "--quiet", "--ignore-unmatch", ".")
            shutil.copytree(project, self.folder, dirs_exist_ok=True)
            self.commit(tag)
            self.git("tag", tag)

    def git(self, *words: str) -> str:
        """Run Git, and return what it prints; raises CalledProcessError."""
        command = ("git", "-c", "user.name=x", "-c", "user.email=x@example.com", *words)
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=True).stdout

    def commit(self, message: str) -> None:
        """Commit all files, also those that a project ignores."""
        self.git("add", "--all", "--force")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)

    def apply(self, patches: list[str], project: str) -> bool:
        """Apply patches to the old or the new project; returns whether all of them fit."""
        self.git("checkout", "--quiet", "--force", "--detach", project)
        command = ("patch", "-p1", "--fuzz=0", "--silent", "--no-backup-if-mismatch", "--reject-file=-", "--force")
        quiet = {"cwd": self.folder, "text": True, "capture_output": True}
        codes = [subprocess.run(command, input=patch, **quiet).returncode for patch in patches]
        return not any(codes)

    def move(self, patches: list[str]) -> bool:
        """Apply a page's patches to the old project, and move them to the new one; returns whether they conflict."""
        # What an earlier call has moved fits the new one alone.
        assert self.apply(patches, "new") or self.apply(patches, "old"), patches
        self.commit("edit")
        edit = self.git("rev-parse", "HEAD").strip()
        self.git("checkout", "--quiet", "--detach", "new")
        try:
            self.git("cherry-pick", "--allow-empty", edit)
        except subprocess.CalledProcessError:
            self.git("cherry-pick", "--abort")
            self.git("cherry-pick", "--allow-empty", "--strategy-option=theirs", edit)
            return True
        return False

    def patch(self, before: str) -> str:
        """Return the patch of the new project for the files of the one before."""
        patches = []
        for old, new in re.findall(r"^--- (\S+)\n\+\+\+ (\S+)", before, re.MULTILINE):
            name = (old if new == "/dev/null" else new).split("/", 1)[1]
            patches.append(self.git("diff", "--no-color", "new", "HEAD", "--", name).partition("--- ")[2])
        return "".join(f"--- {patch}" for patch in patches)


def main() -> None:
    with TemporaryDirectory() as folder:
        repository = Repository(Path(folder))
        for page in PAGES:
            text = page.read_text()
            patches = blocks(page, "diff") if page.suffix == ".md" else [text]
            if not patches:
                continue
            if repository.move(patches):
                print(f"{page.relative_to(TEMPLATE)} conflicts: its lines took the place of the source's; read it")
            for patch in patches:
                text = text.replace(patch, repository.patch(patch))
            page.write_text(text)


if __name__ == "__main__":
    main()
