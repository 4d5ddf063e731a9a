"""All tests run offline, on one thread, and with a fixed seed."""

import gc
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported

# Inductor reads this when it is imported. The part of a program that allocates tensors and calls
# its loops and our kernels takes the compiler longest, and runs once per operator: unoptimised, it
# compiles a quarter faster. The loops are optimised as ever, so that all bits stay the same. A
# cache folder of their own keeps such programs away from a user's.
os.environ["AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL"] = "O0"
os.environ["OUTRIDER_CACHE"] = os.environ.get("OUTRIDER_CACHE") or os.path.join(
    os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "outrider-tests"
)

import pytest
import torch

ROOT = Path(__file__).parents[1]

# pytest 9.2 gives its handlers to loggers that do not propagate, too. With a handler, torch writes
# down every symbol, guard and graph of what it traces and compiles: a twentieth of tracing.
_trace_log: Any = logging.getLogger("torch.__trace")
_trace_log.addHandler = lambda _: None
_trace_log.handlers.clear()

torch.set_num_threads(1)
gc.set_threshold(20_000)  # from 700: tracing makes millions of objects that stay


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def _older_objects() -> Iterator[None]:
    """Leaves what a module's tests left behind, such as traced programs, out of the search for
    cyclic garbage: it would take longer after every module, and some tests search often."""
    yield
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest group of files begins first, then files with slow tests, so that no worker is
    left alone with one at the end."""

    def urgency(item: pytest.Item) -> int:
        return 0 if group(item.nodeid) == TRACED else 1 + (not item.get_closest_marker("slow"))

    items.sort(key=urgency)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs all tests that trace models, so that each program is traced once, and one the
    tests of each other file, so that its fixtures are made once. pytest 9.2 does not see the groups
    that xdist 3.8 has for this."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group(nodeid)

    config.option.loadscopereorder = False  # it would begin with the groups of most tests
    return Groups(config, log)


TRACED = "traced"


def group(nodeid: str) -> str:
    """The group of tests that a test belongs to."""
    file = nodeid.split("::")[0]
    return TRACED if _traces(ROOT / file) else file


@cache
def _traces(file: Path) -> bool:
    named = r"\b(interpreted|InterpretedDrafts|from test_fused_drafts)\b"
    return re.search(named, file.read_text()) is not None


def pytest_collection_finish() -> None:
    """Leaves the modules out of the search for cyclic garbage, which would look at their million
    objects every time, and whenever a test collects garbage: up to a tenth of all time. Programs
    share precompiled headers, since the tests compile many of them; torch names such headers by
    hashes that openssl computes."""
    compile_cache = sys.modules.get("outrider.runtime.executors.compile_cache")
    if compile_cache is not None and shutil.which("openssl"):
        compile_cache.PRECOMPILE_HEADERS = True  # type: ignore[attr-defined]
    gc.collect()
    gc.freeze()
    count = gc.get_freeze_count()  # walks through them, and each server and benchmark asks for it
    gc.get_freeze_count = lambda: count
