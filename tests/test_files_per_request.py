"""How many files of the package a request runs through.

A reader who follows one request has to open these files (``docs/lifecycle.md`` names the ten
steps). Work that a request does not ask for, such as log-probabilities or stop strings, is not
called.
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import outrider
from outrider import Sampling

MOST_FILES = 40
ROOT = Path(outrider.__file__).parent


def files_called(run: Any) -> set[str]:
    """The files of the package of which a function is called, relative to the package."""
    found: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    paths = (Path(name) for name in found)
    return {str(path.relative_to(ROOT)) for path in paths if path.is_relative_to(ROOT)}


def test_a_request_runs_through_few_files() -> None:
    """``generate`` of the embedded pair, run eagerly, after a first request has filled caches; with
    drafts of fixed length, since a governor is a subject of its own."""
    engine = outrider.load(num_speculative_tokens="fixed")
    for sampling in (
        Sampling(temperature=0.8, seed=1, max_new_tokens=24),
        Sampling(temperature=0, max_new_tokens=24),
    ):
        engine.generate(["def f(x):"], sampling)
        files = files_called(lambda: engine.generate(["def f(x):"], sampling))  # noqa: B023
        assert "engine/scheduler.py" in files
        assert len(files) <= MOST_FILES, "\n".join(sorted(files))
