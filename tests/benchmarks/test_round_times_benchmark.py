"""The benchmark of round times: the two checkouts take turns, and the page shows their ratio."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import round_times


class Recorded:
    """A checkout whose times are given; notes who was asked."""

    def __init__(self, name: str, time: float, asked: list[str]) -> None:
        self.name, self.time, self.asked = name, time, asked

    def round_time(self, case: str) -> float:
        self.asked.append(self.name)
        return self.time


def test_the_checkouts_take_turns_in_alternating_order() -> None:
    asked: list[str] = []
    before: Any = Recorded("before", 100.0, asked)
    after: Any = Recorded("after", 90.0, asked)
    row = round_times.compare(before, after, "plain", 4)
    assert asked == ["after", "before", "before", "after"] * 2
    assert row["ratios"] == [0.9] * 4


def test_the_page_shows_times_and_ratios() -> None:
    row = {"case": "plain", "before": [100.0] * 3, "after": [90.0] * 3, "ratios": [0.9] * 3}
    about = {"date": "d", "hardware": "h", "versions": {"torch": "t"}}
    settings: dict[str, Any] = {"threads": 2, "dtype": "float32", "compile": "auto", "repeats": 3}
    settings |= {"load": 0.0, "inflated": False}
    names = {"before": "abc", "after": "def", "command": "c"}
    page = round_times.markdown({"about": about, "rows": [row], **settings, **names})
    assert "| plain | 100 | 90 | 0.900 (0.900 to 0.900) |" in page
    assert "Before: abc; after: def." in page
    inflated = {"about": about, "rows": [row], **settings, **names, "inflated": True}
    assert "0.9 billion parameters" in round_times.markdown(inflated)


def test_a_folder_without_the_project_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        round_times.main(["--before", str(tmp_path)])
    assert "must be the folder of another checkout" in capsys.readouterr().err
