"""The tests of the installed release of transformers, from its source archive on the package index.

The wheel has no tests. The archive is fetched once, by pip, into `build/`, and never enters this repository. It holds
the common tests. `TRANSFORMERS_TESTS` names another folder: a checkout's has all.

Example:
    python tests/hf/upstream/fetch.py  # prints the folder with the tests
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers

BUILD = Path(__file__).resolve().parents[3] / "build"


def download(requirement: str, folder: str) -> Path:
    """The source archive of `requirement`, which pip checks against the hash that the index names.

    Raises:
        SystemExit: pip did not get it.
    """
    options = ["--no-deps", "--no-binary", "transformers", "--dest", folder]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", *options, requirement]
    done = subprocess.run(command, capture_output=True, text=True)
    archives = list(Path(folder).glob("transformers-*.tar.gz"))
    if done.returncode or not archives:
        sys.exit(
            f"{done.stderr.strip()}\n\nThe tests of {requirement} are in its source archive, which pip did not get "
            "from the package index. `make test-hf` needs a network the first time; without one, unpack the archive "
            "yourself and name its tests: make test-hf TRANSFORMERS_TESTS=<folder>/tests"
        )
    return archives[0]


def fetch() -> Path:
    """The folder with the tests of the installed transformers; fetched unless it is there."""
    name = f"transformers-{transformers.__version__}"
    tests = BUILD / name / "tests"
    if not tests.is_dir():
        BUILD.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILD) as folder:
            with tarfile.open(download(name.replace("-", "=="), folder)) as archive:
                wanted = [member for member in archive if member.name.startswith(f"{name}/tests/")]
                archive.extractall(folder, wanted, filter="data")
            (Path(folder) / name).rename(BUILD / name)
    return tests


def find_tests() -> Path:
    """The folder that `TRANSFORMERS_TESTS` names, or else that of the installed release.

    Raises:
        FileNotFoundError: there are no tests in it.
    """
    folder = os.environ.get("TRANSFORMERS_TESTS")
    tests = Path(folder).absolute() if folder else fetch()
    if not (tests / "test_modeling_common.py").is_file():
        raise FileNotFoundError(f"TRANSFORMERS_TESTS={folder} is not possible: it has no test_modeling_common.py.")
    return tests


if __name__ == "__main__":
    sys.stdout.write(f"{find_tests()}\n")
