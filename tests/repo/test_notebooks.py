"""The notebooks run from the first cell to the last, with few steps; `make notebooks` runs them in full."""

import os
import sys

import pytest

from helpers import processes
from helpers.scripts import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.py"))
assert len(NOTEBOOKS) == 4


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(notebook, tmp_path):
    """The assertions of the notebook hold."""
    environment = os.environ | {"MAX_STEPS": "2", "MPLBACKEND": "Agg"}
    processes.run([sys.executable, notebook], check=True, cwd=tmp_path, env=environment)
