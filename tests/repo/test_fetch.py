"""Fetching the tests of transformers for `make test-hf`."""

import importlib.util
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("fetch", Path(__file__).parents[1] / "hf" / "upstream" / "fetch.py")
fetch = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(fetch)


def test_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(
        SystemExit, match=r"transformers==5.0.0 .* needs a network .* make test-hf TRANSFORMERS_TESTS="
    ):
        fetch.download("transformers==5.0.0", str(tmp_path))


def test_a_folder_without_tests(tmp_path, monkeypatch):
    monkeypatch.setenv("TRANSFORMERS_TESTS", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="has no test_modeling_common.py"):
        fetch.find_tests()
