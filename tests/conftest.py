"""Settings and hooks for all tests."""

import fcntl
import gc
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from warpfit_server.compile_cache import engine_environment

pytest.register_assert_rewrite("support.suites.derivatives", "support.suites.losses")

# As in an engine process: code that was compiled from other sources is no longer current.
os.environ.update(engine_environment(None))

# A shell's background job ignores interrupts, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no failure: nothing here is timed. Each run draws other examples;
# `--hypothesis-profile=many` draws more of them.
own = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
for name, count in (("many", 1000), ("few", 15)):
    settings.register_profile(name, max_examples=count, **own)
settings.load_profile("few")

# What is imported and collected is no garbage, and looking through all of it again and again would
# take a tenth of the time; see `pytest_collection_finish`.
gc.disable()


@pytest.hookimpl(optionalhook=True)  # GPU tests do not need pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    """Processes of ``pytest -n auto``: one more than cores, because tests of servers often wait.

    Each loads libraries and keeps servers, about a gigabyte.
    """
    return min(4, len(os.sched_getaffinity(0)) + 1)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which no test runs."""
    is_short = config.option.markexpr == "not thorough" and collection_path.suffix == ".py"
    is_thorough = is_short and "\npytestmark = pytest.mark.thorough" in collection_path.read_text()
    return True if is_thorough else None


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but not among what is there already."""
    gc.freeze()
    gc.enable()


def pytest_sessionstart() -> None:
    """Let one of several processes have the engines' code compiled, while the others wait.

    All at once they would take longer than a test may.
    """
    if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
        return  # it collects the tests, and so compiles every module's bytecode for the others
    from warpfit_server.compile_cache import default_cache_directory, make_private_directory
    from warpfit_server.engine.cpu.codegen import parts
    from warpfit_server.engine.cuda.derivatives import launches
    from warpfit_server.machine import available_cores

    def load_lowering() -> None:
        make_private_directory(default_cache_directory())
        with (default_cache_directory() / "tests.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            launches.load()

    steps = [lambda: parts.precompile(available_cores()), load_lowering]
    for step in steps if os.environ["PYTEST_XDIST_WORKER"] == "gw1" else reversed(steps):
        step()
