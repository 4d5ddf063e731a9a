"""The collector of cyclic garbage is paused, and is afterwards as it was."""

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from outrider.imports.garbage import collection_paused, importing


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A collector that is on and has frozen nothing; leaves all objects frozen, as the suite does
    (``conftest.py``)."""
    was_on = gc.isenabled()
    gc.unfreeze()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)
    gc.enable()
    yield
    (gc.enable if was_on else gc.disable)()
    gc.freeze()


def _is_in(made: object, generation: int | None) -> bool:
    return any(each is made for each in gc.get_objects(generation))


@pytest.mark.usefixtures("collector")
def test_what_a_pause_leaves_is_young() -> None:
    """So that the next collection frees what was garbage already."""
    with collection_paused():
        assert not gc.isenabled()
        made: list[int] = []
    assert gc.isenabled()
    assert _is_in(made, 0)


@pytest.mark.usefixtures("collector")
def test_what_is_made_meanwhile_counts_as_old() -> None:
    with importing():
        assert not gc.isenabled()
        made: list[int] = []
        assert _is_in(made, 0)
    assert gc.isenabled()
    assert _is_in(made, 2)


@pytest.mark.usefixtures("collector")
def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with importing():
        made: list[int] = []
    assert not gc.isenabled()
    assert _is_in(made, 0)


@pytest.mark.usefixtures("collector")
def test_one_pause_within_another_does_not_end_it() -> None:
    with importing():
        with importing():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.usefixtures("collector")
def test_what_somebody_has_frozen_stays_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    gc.freeze()
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)
    with importing():
        pass
    assert gc.isenabled()
    assert not _is_in(frozen, None)


@pytest.mark.usefixtures("collector")
def test_an_error_ends_the_pause() -> None:
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


@pytest.mark.parametrize("spared", [False, True])
def test_a_process_ends_without_a_search(spared: bool) -> None:
    code = (
        "from outrider.imports.garbage import end_without_collection\n"
        f"if {spared}: end_without_collection()\n"
        "class Cycle:\n"
        "    def __init__(self): self.itself = self\n"
        "    def __del__(self, print=print): print('found')\n"
        "Cycle()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ([] if spared else ["found"])
