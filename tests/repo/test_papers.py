"""The page that lists the papers' items, and the one that says where each table and figure stands."""

import re
from collections import Counter

from helpers.scripts import ROOT

PAGES = ROOT / "docs" / "research"
# How many tables and figures each paper has.
TABLES = {"TNN": 15, "SKI": 2, "RTF": 13}
FIGURES = {"TNN": 3, "SKI": 3, "RTF": 5}


def test_counts_are_those_of_the_rows():
    page = (PAGES / "papers.md").read_text()
    counts = {state: int(count) for state, count in re.findall(r"^\| ([a-z ]+) \| .* \| (\d+) \|$", page, re.M)}
    numbers, states = zip(*re.findall(r"^\| (\d+) \| .*? \| ([a-z ]+) \| .* \|$", page, re.M), strict=True)
    assert counts == Counter(states) and list(map(int, numbers)) == list(range(1, len(numbers) + 1))
    assert "issue" not in page, "its readers do not know the issues"


def numbers_in(text: str) -> set[int]:
    """Those of "2, 3 and 6 to 8"."""
    ranges = re.findall(r"(\d+)(?: to (\d+))?", text)
    return {number for first, last in ranges for number in range(int(first), int(last or first) + 1)}


def test_every_table_and_figure_has_a_place():
    """The first column of "Where each table stands": "TNN 12, 13; RTF 8 to 11, figures 1, 3"."""
    section = (PAGES / "results.md").read_text().split("## Where each table stands")[1].split("\n## ")[0]
    found = {paper: (set(), set()) for paper in TABLES}
    for cell in re.findall(r"^\| ((?:TNN|SKI|RTF) .*?) \|", section, re.M):
        for part in re.split(r"(?=TNN|SKI|RTF)", cell)[1:]:
            tables, *figures = re.split(r"figures? ", part.split("%")[0][3:])
            found[part[:3]][0].update(numbers_in(tables) if "faster" not in part else ())
            found[part[:3]][1].update(numbers_in("".join(figures)))
    for paper, counts in found.items():
        assert counts == (set(range(1, TABLES[paper] + 1)), set(range(1, FIGURES[paper] + 1))), paper
