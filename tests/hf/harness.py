"""The tests of transformers as a package, `tests`, which runs the installed release over our models.

`TRANSFORMERS_TESTS` names their folder: that of a source archive (see `fetch.py`), or of a checkout of the repository.
What is not there comes from `stand_ins/`: the archive has none of the folders below `tests/`.

Import this module before anything of `tests`.
"""

import os
import sys
import types
from pathlib import Path

import transformers
import transformers.utils

HERE = Path(__file__).resolve().parent
FOLDER = os.environ.get("TRANSFORMERS_TESTS", "")
if not Path(FOLDER, "test_modeling_common.py").is_file():
    raise FileNotFoundError(f"TRANSFORMERS_TESTS={FOLDER!r} has no test_modeling_common.py: run `make test-hf`.")

# The tests would load transformers again, from the sources beside them: what is installed is what we test.
transformers.utils.direct_transformers_import = lambda path: transformers

package = types.ModuleType("tests")
package.__path__ = [FOLDER, str(HERE / "stand_ins")]
sys.modules["tests"] = package
