"""The README tells the truth: its Python examples run, its commands exist, its links lead somewhere."""

import re
import sys
from pathlib import Path

import pytest

from helpers import processes

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("code", EXAMPLES, ids=range(len(EXAMPLES)))
def test_example_runs(code, tmp_path):
    (tmp_path / "configuration").symlink_to(ROOT / "configuration")
    run = processes.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    for expected in re.findall(r"print\(.*\)  # (.*)", code):
        assert expected in run.stdout


FOLDERS = (".", "configuration", "docs", "model_cards")
DOCUMENTS = {path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).glob("*.md")}
DOCUMENTS.discard("model_cards/TEMPLATE.md")  # its links are variables


@pytest.mark.parametrize("document", sorted(DOCUMENTS))
def test_links(document):
    path = ROOT / document
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("document", ["README.md", "docs/training.md"])
def test_files_in_commands_exist(document):
    for file in re.findall(r"\b(?:scripts|configuration)/[\w./-]+\w", (ROOT / document).read_text()):
        assert (ROOT / file).exists(), file


def test_commands_are_targets_of_the_makefile():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert set(re.findall(r"\bmake ([\w-]+)", README)) <= targets
