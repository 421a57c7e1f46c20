"""The page that lists the papers' items."""

import re
from collections import Counter
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "pages" / "development" / "papers.md").read_text()


def test_counts_are_those_of_the_rows():
    table = re.findall(r"^\| ([a-z ]+) \| .* \| (\d+) \|$", PAGE, re.MULTILINE)
    counts = {state: int(count) for state, count in table}
    numbers, states = zip(*re.findall(r"^\| (\d+) \| .*? \| ([a-z ]+) \| .* \|$", PAGE, re.MULTILINE), strict=True)
    assert counts == Counter(states)
    assert list(map(int, numbers)) == list(range(1, len(numbers) + 1))


def test_the_page_names_no_issues():
    """Its readers do not know them."""
    assert "issue" not in PAGE
