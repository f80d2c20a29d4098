"""What is expensive and shared: one real platform for the whole test session, in a home of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before anything imports torch, Prefect or MLflow: one thread, no reporting, and never the user's own home.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"
# Name a home there to keep its platform up between runs while developing; `joynexus --home … down` ends it.
_KEPT = os.environ.get("JOYNEXUS_TEST_HOME")
_HOME = Path(_KEPT or tempfile.mkdtemp(prefix="joynexus-test-"))
os.environ.update(
    {
        "JOYNEXUS_HOME": str(_HOME),
        "PREFECT_HOME": str(_HOME / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
)

from hypothesis import settings  # noqa: E402 (after the environment above)

from configs.home import Home  # noqa: E402
from configs.platform import PlatformAddresses  # noqa: E402

# An example's time says who else works on the machine.
settings.register_profile("joynexus", deadline=None)
settings.load_profile("joynexus")


_ON_A_PLATFORM = ("flows", "joynexus", "tasks")


def _on_a_platform(nodeid: str) -> bool:
    return nodeid.removeprefix("tests/").split("/", 1)[0] in _ON_A_PLATFORM


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on a platform come first, because they take longest."""
    items.sort(key=lambda item: not _on_a_platform(item.nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where tests run in two processes, those on a platform share one process, for they share the platform; it waits
    much, so the others run beside them, a file at a time."""
    from xdist.scheduler import LoadScopeScheduling

    class ByPlatform(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "platform" if _on_a_platform(nodeid) else nodeid.split("::", 1)[0]

    return ByPlatform(config, log)


@pytest.fixture(scope="session")
def home() -> Home:
    """The session's installation."""
    return Home(_HOME)


@pytest.fixture(scope="session")
def platform(home: Home) -> Iterator[PlatformAddresses]:
    """A real platform: Prefect server and worker, Dask scheduler and workers, resident services and flows.

    The test process is pointed at it as well, so flows called here report to its server.
    """
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from joynexus import processes

    addresses = processes.ensure_up(home, progress=lambda line: print(f"platform: {line}"))
    os.environ.update(addresses.export())
    try:
        with temporary_settings({PREFECT_API_URL: addresses.prefect_api_url}):
            yield addresses
    finally:
        if not _KEPT:
            processes.down(home)
        for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
            os.environ.pop(name, None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure on the platform says where its logs lie."""
    report = yield
    if report.failed and "platform" in getattr(item, "fixturenames", ()):
        report.sections.append(("the platform's logs", str(_HOME / "logs")))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove the home unless something failed; then its logs tell why."""
    if not _KEPT and session.testsfailed == 0:
        shutil.rmtree(_HOME, ignore_errors=True)
