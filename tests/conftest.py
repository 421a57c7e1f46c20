"""Fixtures and profiles of all tests, and the table of parity errors at the end."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

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


def pytest_configure(config):
    """The fixtures of `helpers`, but for a process that has workers: these start without its imports.

    What is imported stays, and is no garbage to look for until all tests are known.
    """
    gc.disable()
    if os.environ.get("EVERY_FILE_RUNS") and not hasattr(config, "workerinput"):
        config.pluginmanager.import_plugin("helpers.every_file")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        for name in ("helpers.glue", "helpers.programs"):
            config.pluginmanager.import_plugin(name)


def pytest_collection_finish(session):
    gc.enable()


def pytest_generate_tests(metafunc):
    """Each operator in each direction that it has, for tests that ask for a `variant` and do not choose them."""
    chosen = any("variant" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "variant" in metafunc.fixturenames and not chosen:
        from helpers.models import VARIANTS

        names = [f"{name}-{'causal' if causal else 'bidirectional'}" for name, causal in VARIANTS]
        metafunc.parametrize("variant", VARIANTS, ids=names)


@pytest.fixture(scope="module", autouse=True)
def frozen_heap():
    """Each training collects garbage, which need not read all that imports and earlier files have made."""
    gc.collect()
    gc.freeze()


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
