"""In place of the tests of transformers' exporters, which the source archive lacks: ours are in `test_modeling.py`."""


class ExportTesterMixin:
    """Nothing."""
