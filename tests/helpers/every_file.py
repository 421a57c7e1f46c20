"""A plugin of pytest for `make test`: a file whose tests are all skipped is an error, as if it could not be imported.

Those named here may be skipped: `make test` does not install what they need, or no machine of CI has it.
"""

from pathlib import Path

import pytest

MAY_BE_SKIPPED = {"test_gpu", "test_page_in_browser"}
MAY_BE_SKIPPED |= {"test_toeplitz_triton", "test_loss_triton", "test_triton_compiles"}
RAN, SKIPPED = set(), set()


def pytest_collectreport(report):
    if report.skipped:
        SKIPPED.add(report.nodeid)


def pytest_runtest_logreport(report):
    if report.skipped or report.when == "call":
        (SKIPPED if report.skipped else RAN).add(report.nodeid.partition("::")[0])


def silent() -> list[str]:
    return sorted(file for file in SKIPPED - RAN if Path(file).stem not in MAY_BE_SKIPPED)


def pytest_sessionfinish(session):
    if silent():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    for file in silent():
        terminalreporter.write_line(f"ERROR: all tests of {file} were skipped", red=True)
