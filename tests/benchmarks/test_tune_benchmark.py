"""The comparison of tune's choice with an exhaustive search, on a simulated machine."""

from argparse import Namespace

import pytest
from simulated_machine import SimulatedMachine

from benchmarks import page
from benchmarks.tune import compared, finals, markdown, search
from outrider.lab.tune.machine import Source
from outrider.lab.tune.tuner import Tuner
from outrider.lab.tune.tuning import TuneSettings


def test_the_choice_is_near_the_best_of_the_search() -> None:
    """The machine draws with a fixed seed, so this never fails by chance."""
    machine = SimulatedMachine(
        {"copies": [0.8, 0.8, 0.7, 0.7]},
        {"copies": lambda rows: 0.0},
        lambda rows, width: 0.02 + 0.001 * max(0, rows * width - 8),
    )
    source = Source("copies", "prompt-lookup", None, (1, 2, 3, 4))
    tuner = Tuner(machine, [source], TuneSettings((1, 4), 2, 48))
    tuning = tuner.run()
    options = Namespace(
        batch_size=[1, 4],
        prompts=8,
        repeats=3,
        final_repeats=3,
        max_new_tokens=48,
        search_minutes=60.0,
    )
    searched = search(tuner, options)
    found = compared(tuning, searched, finals(tuner, tuning, searched, options))
    for size, each in found["batch_sizes"].items():
        assert each["share_of_best"] >= 0.93, size
        assert each["configurations"] == 4
        assert each["within"] >= 3
    document = {
        "about": page.about("c", minutes=2),
        "pairs": {"simulated": found},
    }
    assert markdown(document).count("| simulated |") == 2
    assert found["batch_sizes"][1]["ratios"]["plain decoding, batch 1"] == pytest.approx(1.0)
