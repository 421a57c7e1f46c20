"""The page that lists the papers' items."""

import re
from collections import Counter
from pathlib import Path

PAGES = Path(__file__).parents[2] / "docs"
PAGE = (PAGES / "research" / "papers.md").read_text()
# How many tables and figures each paper has.
TABLES = {"TNN": 15, "SKI": 2, "RTF": 13}
FIGURES = {"TNN": 3, "SKI": 3, "RTF": 5}


def test_counts_are_those_of_the_rows():
    table = re.findall(r"^\| ([a-z ]+) \| .* \| (\d+) \|$", PAGE, re.MULTILINE)
    counts = {state: int(count) for state, count in table}
    numbers, states = zip(*re.findall(r"^\| (\d+) \| .*? \| ([a-z ]+) \| .* \|$", PAGE, re.MULTILINE), strict=True)
    assert counts == Counter(states)
    assert list(map(int, numbers)) == list(range(1, len(numbers) + 1))


def test_the_page_names_no_issues():
    """Its readers do not know them."""
    assert "issue" not in PAGE


def numbers_in(text: str) -> set[int]:
    """Those of "2, 3 and 6 to 8"."""
    ranges = re.findall(r"(\d+)(?: to (\d+))?", text)
    return {number for first, last in ranges for number in range(int(first), int(last or first) + 1)}


def test_every_table_and_figure_has_a_place():
    """The first column of "Where each table stands": "TNN 12, 13; RTF 8 to 11, figures 1, 3"."""
    section = (PAGES / "research" / "results.md").read_text().split("## Where each table stands")[1].split("\n## ")[0]
    found = {kind: {paper: set() for paper in TABLES} for kind in ("table", "figure")}
    for cell in re.findall(r"^\| ((?:TNN|SKI|RTF) .*?) \|", section, re.MULTILINE):
        for part in re.split(r"(?=TNN|SKI|RTF)", cell)[1:]:
            tables, *figures = re.split(r"figures? ", part.split("%")[0][3:])
            found["table"][part[:3]] |= numbers_in(tables) if "faster" not in part else set()
            found["figure"][part[:3]] |= numbers_in("".join(figures))
    for kind, counts in (("table", TABLES), ("figure", FIGURES)):
        assert found[kind] == {paper: set(range(1, count + 1)) for paper, count in counts.items()}, kind
