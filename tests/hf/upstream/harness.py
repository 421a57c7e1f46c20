"""The tests of transformers as a package, `tests`, which runs the installed release over our models.

A source archive has none of the folders below `tests/`: what the common tests take from them is empty then.

Import this module before anything of `tests`.
"""

import sys
import types

import transformers
import transformers.utils
from fetch import find_tests

FOLDER = find_tests()

# The tests would load transformers again, from the sources beside them: what is installed is what we test.
transformers.utils.direct_transformers_import = lambda path: transformers


class Absent:
    """In place of a mixin of tests that only a checkout has."""

    def test_export(self):
        self.skipTest("only a checkout has this test")


# Fields that every configuration takes, which the common tests of configurations set and read back.
FIELDS = {"return_dict": False, "output_hidden_states": True, "dtype": "float16", "chunk_size_feed_forward": 3,
          "architectures": ["TnnModel"], "id2label": {0: "one", 1: "other"}, "label2id": {"one": 0, "other": 1},
          "problem_type": "regression"}  # fmt: skip

sys.modules["tests"] = types.ModuleType("tests")
sys.modules["tests"].__path__ = [str(FOLDER)]
for folder, name, content in (
    ("exporters", "test_export", {"ExportTesterMixin": Absent}),
    ("generation", "test_utils", {"GenerationTesterMixin": type("GenerationTesterMixin", (), {})}),
    ("utils", "test_configuration_utils", {"config_common_kwargs": FIELDS}),
):
    if not (FOLDER / folder).is_dir():
        package, module = types.ModuleType(f"tests.{folder}"), types.ModuleType(f"tests.{folder}.{name}")
        package.__path__, sys.modules[package.__name__], sys.modules[module.__name__] = [], package, module
        vars(module).update(content)
