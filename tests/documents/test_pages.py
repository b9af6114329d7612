"""Pages of docs/: their names of the template and of NCCL exist; costs are those of costs.py and `rehearse`."""

from __future__ import annotations

import ast
import re
import zipfile
from pathlib import Path

import pytest
from conftest import BIN, CHOICES, TEMPLATE, Bake, blocks, launch, run

ROWS = re.findall(r"^\| .* \| (.*) \|$", (TEMPLATE / "docs" / "coming-from.md").read_text(), re.MULTILINE)
# Programs and names of PyTorch, and the beginnings of commands.
OTHERS = {"cruft update", "state_dict", "gather_object", "--config FILE", "checkpoints/step-*.pt"}
NAMES = sorted({name for row in ROWS for name in re.findall(r"`([^`]+)`", row)} - OTHERS)
DOCS = TEMPLATE / "docs"
PAGES = [path.stem for path in sorted(DOCS.glob("*.md"))]
COSTS = (DOCS / "costs.md").read_text()
MEMORY = re.findall(r"^\| (\w+), (\d) ranks?(?:, rank (\d))? \| (.*) \|$", COSTS, re.MULTILINE)


@pytest.fixture(scope="module")
def texts(baked: Bake) -> dict[str, str]:
    """The texts of a project, by path."""
    project = baked(task="language", cluster="slurm")
    paths = [path for path in project.rglob("*") if path.is_file()]
    return {str(path.relative_to(project)): path.read_text() for path in paths}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_template_exists(texts: dict[str, str], name: str) -> None:
    code = "\n".join(text for path, text in texts.items() if path.startswith("src/"))
    if re.search(r"\.(py|sh|yaml)\b", name):
        assert any(path.endswith(name.split()[0]) for path in texts)
        assert all(f'"{word}"' in code for word in name.split()[1:])
    elif name.isupper():
        assert name in texts["scripts/launch.sh"]
    elif "=" in name:
        question, choice = name.split("=")
        assert choice in CHOICES[question]
    elif found := re.fullmatch(r"([A-Z]\w+)\.(\w+)", name):
        body = re.split(rf"^class {found[1]}\b", code, flags=re.MULTILINE)[1].split("\nclass ")[0]
        assert re.search(rf"^    (def )?{found[2]}\b", body, re.MULTILINE)
    elif found := re.fullmatch(r"(\w+)\.(\w+)", name):
        section = re.findall(rf"^    {found[1]}: (\w+) = field", code, re.MULTILINE)[0]
        body = code.split(f"class {section}:")[1].split("\nclass ")[0]
        assert re.search(rf"^    {found[2]}: ", body, re.MULTILINE)
    else:
        answers = {*CHOICES, *(choice for choices in CHOICES.values() for choice in choices)}
        assert name in answers or re.search(rf"^((class|def) {name}\b|{name} = )", code, re.MULTILINE)


@pytest.mark.weekly
def test_bytes_are_those_of_the_formulas_and_stale_gradients_diverge(tmp_path: Path) -> None:
    script, picture = TEMPLATE / "docs" / "costs.py", tmp_path / "costs.svg"
    assert len(script.read_text().splitlines()) <= 80
    out = run(BIN / "torchrun", "--standalone", "--nproc-per-node", "8", script, picture, cwd=tmp_path).stdout
    rows = [ast.literal_eval(line) for line in out.splitlines()]
    values = {row[:3]: row[3] for row in rows}
    shown = re.findall(r"^\| N = (\d) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", COSTS, re.MULTILINE)
    assert len(shown) == 3 and "<svg" in picture.read_text()
    for size, *numbers in ([int(number) for number in row] for row in shown):
        total = 2 * (size - 1) * 16 * 2**20
        assert numbers == [values["server", 16, size], total, values["ring", 16, size], 2 * total // size]
    assert values["waits: False", 0.1, 4] < values["waits: True", 0.1, 4] < 0.01
    assert values["waits: True", 1.2, 4] < 0.01 and values["waits: False", 1.2, 4] > 1e3


@pytest.mark.weekly
@pytest.mark.parametrize(("parallelism", "ranks"), sorted({row[:2] for row in MEMORY} | {("fsdp", "8")}))
def test_memory_is_what_a_rehearsal_prints(bake: Bake, parallelism: str, ranks: str) -> None:
    project = bake(parallelism=parallelism, task="language")
    command = re.findall(r"^scripts/launch.sh (rehearse .*)$", COSTS, re.MULTILINE)[0].replace("4", ranks, 1)
    printed = re.sub(" {2,}", "  ", launch(project, *command.split()).stdout)
    rows = [(rank or "0", numbers) for *row, rank, numbers in MEMORY if row == [parallelism, ranks]]
    if ranks == "8":
        rows = [("0", re.findall(r"^0.09528 / 8 = (\S+), which", COSTS, re.MULTILINE)[0])]
    assert rows
    for rank, numbers in rows:
        assert f"rank {rank}  " + "  ".join(numbers.split(" | ")) in printed


def test_a_ring_ends_with_all_sums() -> None:
    turns = re.findall(r"^\| \d \|((?: chunk \d \|){4}) (adds|copies)", COSTS, re.MULTILINE)
    held = [[{rank} for _ in range(4)] for rank in range(4)]  # Whose gradients are in a chunk of a rank.
    for chunks, act in turns:
        sent = [int(chunk) for chunk in re.findall(r"\d", chunks)]
        messages = [(chunk, set(held[rank][chunk])) for rank, chunk in enumerate(sent)]
        for rank, (chunk, ranks) in enumerate(messages):
            neighbor = held[(rank + 1) % 4]
            assert act == "copies" or not ranks & neighbor[chunk]
            neighbor[chunk] = ranks if act == "copies" else ranks | neighbor[chunk]
    assert [act for _, act in turns] == ["adds"] * 3 + ["copies"] * 3
    assert all(chunk == {0, 1, 2, 3} for rank in held for chunk in rank)
    bytes_sent = re.findall(r"directions: (\d+), and (\d+),", COSTS)[0]
    assert [int(number) for number in bytes_sent] == [2 * (n - 1) * 2**24 // n for n in (8, 1000)]


def test_what_fits_is_what_the_formulas_give() -> None:
    page = (DOCS / "fits.md").read_text()
    rows = run(BIN / "python", DOCS / "fits.py", cwd=TEMPLATE).stdout.splitlines()
    assert len(rows) == 6 and all(f"\n{row}\n" in page for row in rows)
    state, sent = 16 * 7e9, 3 * 7 / 8 * 4 * 7e9
    holds, seconds, an_eighth = re.findall(r"are (\d+) GB.*take ([\d.]+) s; .* eighth, ([\d.]+) s", page, re.DOTALL)[0]
    assert float(holds) == state / 1e9
    assert float(seconds) == pytest.approx(8 * sent / 25e9, abs=0.05)
    assert float(an_eighth) == pytest.approx(sent / 25e9, abs=0.05)


def test_grids_are_those_of_the_schedules_of_pytorch() -> None:
    commands = [block for block in blocks(DOCS / "costs.md", "bash") if "grids.py" in block]
    grids = [block for block in blocks(DOCS / "costs.md", "text") if block.startswith("Schedule")]
    for command, shown in zip(commands, grids, strict=True):
        words = command.split("#")[0].split()
        assert words[:2] == [".venv/bin/python", "docs/grids.py"]
        assert run(BIN / "python", *words[1:], cwd=TEMPLATE).stdout == shown
        ranks, microbatches = map(int, words[2:])
        assert shown.count(f"works in {2 * microbatches} of {2 * (microbatches + ranks - 1)} turns") == 2


def test_the_picture_of_memory_is_that_of_the_table(tmp_path: Path) -> None:
    out = run(BIN / "python", DOCS / "memory.py", tmp_path / "memory.svg", cwd=tmp_path).stdout
    totals = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    shown = re.findall(r"holds? ([\d.]+) bytes per parameter here, and FSDP2 ([\d.]+)", COSTS)[0]
    assert totals["DDP"] == ["16.0"] * 4 and (totals["tensor"], totals["FSDP2"]) == ([shown[0]] * 4, [shown[1]] * 4)
    assert sum(map(float, totals["pipeline"])) == pytest.approx(16, abs=0.1)
    curves = [
        re.findall(r' d="(M .*?)"', path.read_text(), re.DOTALL)
        for path in (DOCS / "memory.svg", tmp_path / "memory.svg")
    ]
    assert curves[0] == curves[1], "run docs/memory.py docs/memory.svg"


@pytest.mark.weekly
def test_a_trace_has_the_rows_of_the_page(bake: Bake) -> None:
    project = bake()
    (project / ".venv").symlink_to(BIN.parent)
    (project.parent / "ddp-template").symlink_to(TEMPLATE)
    command, shown = (
        next(b for b in blocks(DOCS / "costs.md", kind) if "all-reduce " in b or "trace" in b)
        for kind in ("sh", "text")
    )
    printed = run("bash", "-ec", command, cwd=project).stdout
    rows = [re.findall(r"^([a-z-]+) +([\d.]+)$", text, re.MULTILINE) for text in (printed, shown)]
    assert [name for name, _ in rows[0]] == [name for name, _ in rows[1]] and len(rows[0]) == 12
    for rank in (rows[0][:6], rows[0][6:]):
        (*parts, step) = (float(number) for _, number in rank)
        assert all(0 < part < step for part in parts)
    assert len(re.findall(r"^\d+% of all-reduce is while backward computes$", printed, re.MULTILINE)) == 2


@pytest.mark.weekly
def test_five_of_six_all_reduces_start_before_backward_ends(tmp_path: Path) -> None:
    script, picture = DOCS / "overlap.py", tmp_path / "overlap.svg"
    out = run(BIN / "torchrun", "--standalone", "--nproc-per-node", "2", script, picture, cwd=tmp_path).stdout
    spans = [[int(number) for number in line] for line in re.findall(r"layer (\d): from (\d+) to (\d+) ms", out)]
    backward, sent = spans[:6], spans[6:]
    assert [layer for layer, *_ in backward] == [layer for layer, *_ in sent] == [6, 5, 4, 3, 2, 1]
    end = backward[-1][2]
    assert all(start <= end for _, start, _ in sent[:5]) and sent[0][2] < end < sent[5][2]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_says_what_for_and_asks_three_questions(name: str) -> None:
    text = (DOCS / f"{name}.md").read_text()
    assert "\n\nYou will be able to " in text.split("\n## ")[0]
    body = text.split("## Three questions\n\n")[1]
    questions, answers = body.split("<details><summary>Answers</summary>")
    for part in (questions, answers):
        assert re.findall(r"^(\d)\. ", part, re.MULTILINE) == ["1", "2", "3"]


def test_no_page_is_long() -> None:
    for page in [*DOCS.glob("*.md"), *DOCS.glob("recipes/*.md")]:
        text = re.sub(r"^```diff\n.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        assert len([line for line in text.splitlines() if line]) <= 200, page


def test_links_of_pages_lead_to_files_and_to_headings() -> None:
    for page in [TEMPLATE / "README.md", *DOCS.glob("*.md"), *DOCS.glob("recipes/*.md")]:
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for path, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", prose):
            target = page.parent / path if path else page
            assert target.exists(), (page, path)
            if heading:
                titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
                assert heading in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], (
                    page,
                    heading,
                )


@pytest.mark.parametrize("name", [name for name in PAGES if name != "collectives"])
def test_the_first_use_of_a_word_leads_to_the_glossary(name: str) -> None:
    glossary = (DOCS / "collectives.md").read_text().split("## Twelve words")[1].split("##")[0]
    words = re.findall(r"^\| ([a-z][a-z -]+) \|", glossary, re.MULTILINE)[1:]
    assert len(words) == 12
    page = re.sub(r"^```.*?^```$", "", (DOCS / f"{name}.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    page = re.sub(r"^#.*|^.*\n(?=\| ---)|`[^`\n]+`", "", page, flags=re.MULTILINE)  # Headings, heads of tables, code.
    page = re.sub(r"\[([^]\n]*)\]\(collectives\.md#twelve-words\)", r"@\1", page)
    page = re.sub(r"\[[^]\n]*\]\([^)]*\)", "", page)
    explained = {"fsdp": {"shard"}, "gpus": {"stage"}}.get(name, set())  # It says what a shard is; "stages" is a verb.
    for word in set(words) - explained:
        first = re.search(rf"@?(?<![\w-]){word.removesuffix('y')}(y|ies|e?s|ed|ing|)(?![\w-])", page, re.IGNORECASE)
        assert not first or first[0][0] == "@", (word, page[max(0, first.start() - 40) :][:80])
        linked = re.findall(rf"@{word.removesuffix('y')}(?:y|ies|e?s|ed|ing|)(?![\w-])", page, re.IGNORECASE)
        assert len(linked) <= 1, (word, linked)


def test_files_that_a_strategy_changes_are_those_of_the_page() -> None:
    page = DOCS / "strategies.md"
    command, (shown,) = blocks(page, "bash")[1], blocks(page, "text")
    assert run("bash", "-ec", command, cwd=TEMPLATE).stdout == shown


def test_lines_that_the_page_shows_of_a_diff_are_there_in_this_order() -> None:
    (shown,) = blocks(DOCS / "strategies.md", "diff")
    lines = iter((DOCS / "diffs" / "fsdp.diff").read_text().splitlines())
    for line in shown.splitlines():
        assert line in lines, line  # The iterator continues after the line before.


@pytest.mark.weekly
def test_variables_are_in_the_library_or_gone(tmp_path: Path) -> None:
    text = (TEMPLATE / "docs" / "nccl.md").read_text()
    package, version = re.findall(r"`(nvidia-nccl-\w+)` ([\d.]+)", text)[0]
    run(BIN / "pip", "download", "--quiet", "--no-deps", f"{package}=={version}", cwd=tmp_path)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        library = wheel.read(next(name for name in wheel.namelist() if "/libnccl.so" in name))
    rows = re.findall(r"^\| (`NCCL_.*?) \| (.*)", text, re.MULTILINE)
    old = set(re.findall(r"NCCL_[A-Z0-9_]+", " ".join(row[0] for row in rows[-5:]))) | {"NCCL_BUFFLE"}
    new = set(re.findall(r"(?<!TORCH_)NCCL_[A-Z0-9_]+", text)) - old
    for names, expected in ((new, True), (old, False)):
        for name in names:
            assert bool(re.search(rf"\b{name}\b".encode(), library)) == expected, name
    assert len(new) > 15 and len(old) > 6
    lines = ("Bootstrap: Using ", "NET/IB : Using", "via P2P", "via SHM", "GDRDMA")
    assert all(line in text and line.strip().encode() in library for line in lines)


@pytest.mark.weekly
def test_a_run_looks_as_the_page_says(bake: Bake) -> None:
    page, project = DOCS / "look.md", bake()
    (project / ".venv").symlink_to(BIN.parent)
    (project.parent / "ddp-template").symlink_to(TEMPLATE)
    (commands,) = blocks(page, "sh")
    printed = run("bash", "-ec", commands, cwd=project).stdout
    wrong = re.findall(r"(\d+) of (\d+)(?: \w+)? images (?:are|is)", page.read_text().replace("\n", " "))
    assert wrong == re.findall(r"^(\d+) of (\d+) are wrong$", printed, re.MULTILINE) and len(wrong) == 2
    for name, drawn in (("curves", "curves"), ("confusion", "first")):
        texts = [
            re.findall("<!-- (.*?) -->", path.read_text()) for path in (DOCS / f"{name}.svg", project / f"{drawn}.svg")
        ]
        words = [[text for text in each if re.fullmatch(r"[a-z_/]+|\d", text)] for each in texts]
        assert words[0] == words[1] and "<svg" in (DOCS / f"{name}.svg").read_text()
