"""The code that a metric depends on: a change anywhere in it gives another hash."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.lab.bench import imported_source as module
from outrider.lab.bench.identity import MEASURED, PACKAGE
from outrider.lab.bench.imported_source import imported_source
from outrider.lab.quality import metrics

Hash = Callable[[], str]
METRIC = "import math\nfrom . import near\nfrom mine.far import number\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package ``mine`` whose module ``metric`` imports ``near``, and ``far``, which imports the
    module ``loose`` inside a function."""
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "metric.py").write_text(METRIC)
    (package / "near.py").write_text("NEAR = 1\n")
    (package / "far.py").write_text("def number():\n    import loose\n\n    return loose.LOOSE\n")
    (package / "other.py").write_text("OTHER = 1\n")
    (tmp_path / "loose.py").write_text("LOOSE = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def hashed(folder: Path) -> Hash:
    def compute() -> str:
        imported_source.cache_clear()
        return imported_source("mine.metric", folder / "mine/metric.py")

    return compute


@pytest.mark.parametrize("file", ["mine/metric.py", "mine/near.py", "mine/far.py", "loose.py"])
def test_a_change_of_any_imported_module_counts(folder: Path, hashed: Hash, file: str) -> None:
    before = hashed()
    with (folder / file).open("a") as source:
        source.write("# changed\n")
    assert hashed() != before


def test_modules_that_are_not_imported_do_not_count(folder: Path, hashed: Hash) -> None:
    before = hashed()
    (folder / "mine/other.py").write_text("OTHER = 2\n")
    assert hashed() == before
    assert "mine.other" not in sys.modules
    assert "loose" not in sys.modules, "sources are read, not imported"


def test_distributions_count_by_their_version(
    folder: Path, hashed: Hash, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "mine/near.py").write_text("import numpy.linalg\n")
    before = hashed()
    real = module._version
    monkeypatch.setattr(module, "_version", lambda top: "0" if top == "numpy" else real(top))
    assert hashed() != before


def test_metrics_of_this_package_depend_on_what_they_call() -> None:
    files, versions = module._reached(metrics.__name__, Path(metrics.__file__))
    wanted = ("rouge", "translation", "pass_at_k", "perplexity", "logprobs", "exact_match")
    assert {f"outrider.lab.quality.{name}" for name in wanted} <= files.keys()
    assert "outrider.lab.sandbox.run" in files, "pass@k runs programs in the sandbox"
    assert {"rouge_score version", "sacrebleu version"} <= versions.keys()
    measured = {part.replace("/", ".").removesuffix(".py") for part in MEASURED}
    for name in files:
        inside = name.removeprefix(f"{PACKAGE.name}.")
        assert not any(f"{inside}.".startswith(f"{part}.") for part in measured), name
