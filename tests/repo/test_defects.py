"""The list of deliberate defects stays applicable; `python tests/defects.py` shows that tests catch them."""

from defects import DEFECTS, ROOT


def test_all_can_be_applied():
    for defect in DEFECTS:
        assert (ROOT / defect.file).read_text().count(defect.old) == 1 and defect.old != defect.new, defect.name
        assert all((ROOT / name).exists() for name in defect.test_files()), defect.name
    assert len(DEFECTS) >= 25 and len({defect.name for defect in DEFECTS}) == len(DEFECTS)
