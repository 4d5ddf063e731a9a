"""All tests run offline, on one thread, and with a fixed seed."""

import gc
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs all tests that trace models, so that each program is traced once. Slow tests
    begin first, so that no worker is left alone with one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        names = vars(getattr(item, "module", None) or object)
        if "interpreted" in names or "InterpretedDrafts" in names:
            item.add_marker(pytest.mark.xdist_group("traced"))


def pytest_collection_finish() -> None:
    """Leaves the modules out of the search for cyclic garbage, which would look at their million
    objects every time, and whenever a test collects garbage: up to a tenth of all time."""
    gc.collect()
    gc.freeze()
