"""Fetching the tests of transformers for `make test-hf`."""

import runpy
from pathlib import Path

import pytest

FETCH = runpy.run_path(str(Path(__file__).parents[1] / "hf" / "upstream" / "fetch.py"))


def test_what_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(SystemExit, match=r"transformers==5.0.0 .* a network .* make test-hf TRANSFORMERS_TESTS="):
        FETCH["download"]("transformers==5.0.0", str(tmp_path))
    monkeypatch.setenv("TRANSFORMERS_TESTS", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="has no test_modeling_common.py"):
        FETCH["find_tests"]()
