"""Releases: a README whose links work elsewhere."""

import re
import runpy
from pathlib import Path

from helpers.scripts import ROOT

REPOSITORY = "https://example.org/tnn"
LINKS = runpy.run_path(str(ROOT / "docs" / "site" / "links.py"))


def test_links_of_the_readme():
    """All lead somewhere, and pictures to the picture itself."""
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"\]\(([^)]+)\)", LINKS["absolute_links"](text, ROOT, REPOSITORY))
    assert all(target.startswith(("https://", "#")) for target in targets)
    paths = [target.removeprefix(REPOSITORY).partition("#")[0] for target in targets if target.startswith(REPOSITORY)]
    assert all((ROOT / path.split("/main/")[1]).exists() for path in paths)
    assert {Path(path).suffix for path in paths if path.startswith("/raw/")} == {".png"}
