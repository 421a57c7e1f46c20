"""CHANGELOG.md in the form of Keep a Changelog, with a section for the version of the package and short entries."""

import re

import modeling_tnn
from helpers.scripts import ROOT
from tnn_scripts.common.parser import RENAMED

TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
SUBJECTS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"}


def test_sections():
    """The newest one is the version of the package, which has a date once it is tagged."""
    names = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
    versions = [re.fullmatch(r"(\d+\.\d+\.\d+) (?:- \d{4}-\d\d-\d\d|\(unreleased\))", name)[1] for name in names]
    assert versions[0] == modeling_tnn.__version__ and "(unreleased)" not in "".join(names[1:])
    assert versions == sorted(set(versions), key=lambda version: [-int(part) for part in version.split(".")])
    assert set(re.findall(r"^### (.*)$", TEXT, re.MULTILINE)) <= SUBJECTS


def test_entries_are_short():
    assert not re.findall(r"^- .*\n(?:  .*\n){2,}", TEXT, re.MULTILINE)


def test_old_names_that_still_load():
    """What the code accepts under an old name stays documented."""
    assert not [name for name in RENAMED if name not in TEXT]
