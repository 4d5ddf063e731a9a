"""The table of the servers' benchmark."""

from argparse import Namespace

from benchmarks.serving import METHODS, Row, markdown, ratios, run


def rows() -> list[Row]:
    """Engines that take a millisecond, and servers that take a little longer."""
    made = []
    for method in METHODS:
        for name, seconds in (("engine, ", 1.0), ("outrider serve, ", 1.02)):
            made.append(
                Row(name + method, lambda num, prompts, new, s=seconds: s / num, {1: [], 8: []})
            )
    return made


def test_ratios_and_bars() -> None:
    measured = rows()
    given = Namespace(clients=[1, 8], requests=2, repeats=3, max_new_tokens=4)
    run(measured, [[1, 2], [3]] * 8, given)
    assert measured[0].speeds[1] == [8.0] * 3  # two requests of four tokens in a second
    found = ratios(measured, given.clients)
    assert all(abs(found[method][num] - 1 / 1.02) < 1e-9 for method in METHODS for num in (1, 8))
    about = {
        "date": "2026-11-22", "hardware": "a machine", "torch": "2", "load": 0.0, "command": "x",
        "threads": 1, "compile": "off", "max_new_tokens": 4, "repeats": 3, "clients": [1, 8],
    }  # fmt: skip
    page = markdown(measured, about, found)
    assert "| | 1 client | 8 clients |" in page
    assert "speculative, 8 clients: 0.980 (bar: 0.9, met)" in page
    found["plain"][1] = 0.9
    assert "plain, 1 clients: 0.900 (bar: 0.97, missed)" in markdown(measured, about, found)
