"""The Dockerfile, without Docker: what it copies is enough for the command that the image runs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from conftest import Bake, run


def words_of(dockerfile: str, instruction: str) -> list[str]:
    """Return the words of an instruction in JSON."""
    (words,) = re.findall(rf"^{instruction} (\[.*\])$", dockerfile, re.MULTILINE)
    return list(json.loads(words))


def test_the_image_has_what_its_command_needs(bake: Bake, tmp_path: Path) -> None:
    project, image = bake(docker=True), tmp_path / "app"
    dockerfile, ignored = ((project / name).read_text() for name in ("Dockerfile", ".dockerignore"))
    image.mkdir()
    for line in re.findall(r"^COPY (.*)$", dockerfile, re.MULTILINE):
        *sources, target = line.split()
        for source in sources:
            copy = shutil.copytree if (project / source).is_dir() else shutil.copy2
            copy(project / source, image / target)
    assert {path.name for path in image.iterdir()} == set(re.findall(r"^!(.*)$", ignored, re.MULTILINE))
    assert set(re.findall(r"-c (\S+)", dockerfile)) <= {path.name for path in image.iterdir()}

    entry_point, command = words_of(dockerfile, "ENTRYPOINT"), words_of(dockerfile, "CMD")
    assert "max_steps:" in run(*entry_point, *command, "--print_config", cwd=image).stdout
    shown = re.findall(r"^# docker run .* my-experiment (.*)$", dockerfile, re.MULTILINE)
    assert [line.split() for line in shown] == [command]
