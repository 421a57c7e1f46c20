"""CHANGELOG.md in the form of Keep a Changelog, with a section for the version of the package."""

import re

import modeling_tnn
from helpers.scripts import ROOT
from modeling_tnn.configuration_tnn import OLD_NAMES, OLD_VALUES
from tnn_scripts.common.parser import RENAMED

TEXT = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
SUBJECTS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"}


def test_sections():
    unreleased, *releases = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
    assert unreleased == "Unreleased"
    versions = [re.fullmatch(r"(\d+\.\d+\.\d+) - \d{4}-\d\d-\d\d", release)[1] for release in releases]
    assert versions[0] == modeling_tnn.__version__
    assert versions == sorted(set(versions), key=lambda version: [-int(part) for part in version.split(".")])
    assert set(re.findall(r"^### (.*)$", TEXT, re.MULTILINE)) <= SUBJECTS


def test_old_names_that_still_load():
    """What the code accepts under an old name stays documented."""
    values = [old for renamed in OLD_VALUES.values() for old in renamed]
    missing = [name for name in (*OLD_NAMES, *values, *RENAMED) if name not in TEXT]
    assert not missing
