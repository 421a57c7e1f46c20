"""The list of deliberate defects stays applicable; `python tests/defects.py` shows that tests catch them."""

import pytest
from defects import DEFECTS, ROOT


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_it_can_be_applied(defect):
    assert (ROOT / defect.file).read_text().count(defect.old) == 1
    assert defect.old != defect.new
    assert all((ROOT / name).exists() for name in defect.test_files())


def test_there_are_enough():
    assert len(DEFECTS) >= 25 and len({defect.name for defect in DEFECTS}) == len(DEFECTS)
