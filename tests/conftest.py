"""Fixtures and profiles of all tests, and the table of parity errors at the end."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

from helpers.models import VARIANTS

# The examples are the same in every run, unless asked for more of them: --hypothesis-profile thorough.
for profile, count in {"quick": 25, "thorough": 500}.items():
    settings.register_profile(
        profile,
        max_examples=count,
        deadline=None,
        derandomize=profile == "quick",
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
settings.load_profile("quick")


@pytest.fixture(scope="session", autouse=True)
def folder_of_the_run(tmp_path_factory):
    """What several processes of pytest share; pytest removes it after a few runs."""
    os.environ["FOLDER_OF_THE_RUN"] = str(tmp_path_factory.getbasetemp().parent)


pytest_plugins = ["helpers.glue", "helpers.programs"]


@pytest.fixture(scope="module", autouse=True)
def frozen_heap():
    """Each training collects garbage, which need not read all that imports and earlier files have made."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=VARIANTS, ids=lambda variant: f"{variant[0]}-{'causal' if variant[1] else 'bidirectional'}")
def variant(request):
    return request.param


@pytest.fixture
def operator(request):
    """The operator of a subclass of `operators.OperatorTests`, in the direction `request.param`."""
    return request.instance.build(request.param)


@pytest.fixture
def decoded(request):
    """A causal operator of a subclass of `operators.OperatorTests`."""
    return request.instance.build(causal=True)


def pytest_terminal_summary(terminalreporter):
    """The worst error against the released implementations, per family and precision."""
    worst = {}
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name.startswith("parity "):
                worst[name] = max(value, worst.get(name, 0.0))
    for name in sorted(worst):
        terminalreporter.write_line(f"{name}: {worst[name]:.1e}")
