"""The benchmark of attention: it measures small buffers, and its page has the ratios."""

import pytest
import torch

from benchmarks.attention import DTYPES, Shape, main, markdown, measured
from benchmarks.page import about
from outrider.runtime.kernels import build


@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_all_ways_are_measured(dtype: torch.dtype) -> None:
    build.load_kernels()
    found = measured(Shape((4, 2), 16, 2, 0.01), dtype, 3, 20, threads=2, turns=1)
    assert list(found) == ["ours", "torch", "reading"]
    assert all(milliseconds > 0 for milliseconds in found.values())


def test_the_page_has_the_ratios() -> None:
    milliseconds = {"ours": 2.0, "torch": 5.0, "reading": 1.0}
    row = {"dtype": "float32", "context": 300, "tokens": 5, "milliseconds": milliseconds}
    where = about("command", heads=(9, 3), width=64, layers=30, between=4.0)
    page = markdown({"about": where, "rows": [row]})
    assert "30 layers of 9 heads of queries and 3 of keys and values, 64 wide" in page
    assert "| float32 | 300 | 5 | 2.00 | 5.00 | 2.50 | 0.50 |" in page


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--layers", "0"], "--layers"),
        (["--tokens", "5", "0"], "--tokens"),
        (["--heads", "4", "0"], "--heads"),
        (["--between", "-1"], "--between"),
        (["--contexts", "3", "--tokens", "4"], "--contexts 3"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    given: list[str],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["attention", *given])
    with pytest.raises(SystemExit):
        main()
    assert named in capsys.readouterr().err.splitlines()[-1]
