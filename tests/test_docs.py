"""The documentation is true: its Python runs, and its commands exist.

Every ```python block of README.md and docs/ runs, each page's blocks one after the other in one
namespace and in an empty folder. Every ```bash line, and every ```console line that starts with
"$ ", is a command that this checkout has.
"""

import re
import shlex
import tomllib
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

FENCE = re.compile(r"^\s*(?P<marks>`{3,}|~{3,})\s*(?P<info>.*?)\s*$")
ASSIGNMENT = re.compile(r"^\w+=")


@dataclass
class Block:
    info: str  # what stands behind the opening fence
    line: int  # of its first line of code, counted from 1
    lines: list[str]


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    block, marks = None, ""
    for number, line in enumerate(text.splitlines(), start=1):
        fence = FENCE.match(line)
        if block is None and fence:
            block, marks = Block(fence["info"], number + 1, []), fence["marks"]
        elif block is not None and fence and not fence["info"] and fence["marks"].startswith(marks):
            found.append(block)
            block = None
        elif block is not None:
            block.lines.append(line)
    assert block is None, f"the block that starts at line {block.line} is never closed"
    return found


def failure(page: Path, block: Block, namespace: dict[str, object]) -> str | None:
    """Runs the block under its page's own line numbers; if it fails, says at which file:line."""
    source = "\n" * (block.line - 1) + "\n".join(block.lines) + "\n"
    try:
        exec(compile(source, str(page), "exec"), namespace)
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(page)]
        if isinstance(error, SyntaxError) and error.filename == str(page):
            lines.append(error.lineno)
        where = f"{page.relative_to(ROOT)}:{lines[-1] if lines else block.line}"
        return f"{where}: {type(error).__name__}: {error}\n\n{traceback.format_exc()}"
    return None


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = [b for b in blocks(page.read_text(encoding="utf-8")) if b.info.startswith("py")]
    for block in python:
        where = f"{page.relative_to(ROOT)}:{block.line - 1}"
        assert block.info == "python", f"{where}: write ```python, every such block is run"
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in python:
        if failed := failure(page, block, namespace):
            pytest.fail(failed, pytrace=False)


def commands(block: Block) -> list[tuple[int, str]]:
    """The commands of a block with their line numbers, continued lines joined."""
    found: list[tuple[int, str]] = []
    continues = False
    for number, line in enumerate(block.lines, start=block.line):
        text = line.strip()
        if continues:
            found[-1] = (found[-1][0], found[-1][1] + " " + text.removesuffix("\\"))
        elif block.info == "console" and not text.startswith("$ "):
            continue  # what the command printed
        elif text and not text.startswith("#"):
            found.append((number, text.removeprefix("$ ").removesuffix("\\")))
        else:
            continue
        continues = text.endswith("\\")
    return found


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][\w-]*):", makefile, flags=re.MULTILINE))


def our_scripts() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return set(project.get("scripts", {}))


def complaint(command: str) -> str | None:
    """Why a newcomer could not run the command, or None."""
    words = shlex.split(command, comments=True)
    while words and ASSIGNMENT.match(words[0]):
        words.pop(0)
    match words:
        case ["make", *arguments]:
            targets = {word for word in arguments if not ASSIGNMENT.match(word)}
            unknown = targets - make_targets()
            return f"the Makefile has no target {', '.join(sorted(unknown))}" if unknown else None
        case ["git", "clone", *_] | ["pip", "install", *_] | ["cd", _]:
            return None
        case ["python" | "bash" | ".venv/bin/python", script, *_] if not script.startswith("-"):
            return None if (ROOT / script).is_file() else f"there is no file {script}"
        case [script, *_] if script in our_scripts():
            return None
        case ["torchrun", "--nproc-per-node", _, "-m", "kdn", *_]:
            return None
    return (
        "not a command that this test knows: make, git clone, cd, pip install, torchrun -m kdn, "
        "python or bash with a file of this repository, or a script from pyproject.toml"
    )


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_exist(page: Path) -> None:
    wrong = [
        f"{page.relative_to(ROOT)}:{number}: {command}: {why}"
        for block in blocks(page.read_text(encoding="utf-8"))
        if block.info in {"bash", "console", "sh", "shell"}
        for number, command in commands(block)
        if (why := complaint(command))
    ]
    assert not wrong, "\n".join(wrong)
