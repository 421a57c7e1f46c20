"""The tests of transformers as a package, `tests`, which runs the installed release over our models.

What their folder lacks comes from `stand_ins/`: a source archive has none of the folders below `tests/`.

Import this module before anything of `tests`.
"""

import sys
import types
from pathlib import Path

import transformers
import transformers.utils
from fetch import find_tests

FOLDER = find_tests()

# The tests would load transformers again, from the sources beside them: what is installed is what we test.
transformers.utils.direct_transformers_import = lambda path: transformers

package = types.ModuleType("tests")
package.__path__ = [str(FOLDER), str(Path(__file__).with_name("stand_ins"))]
sys.modules["tests"] = package
