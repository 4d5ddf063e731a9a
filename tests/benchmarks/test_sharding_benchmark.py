"""The benchmark of sharded rounds: its models and its page."""

import json
from pathlib import Path

from transformers import AutoConfig

from benchmarks import sharding

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def test_its_models_can_be_split_among_four_processes(tmp_path: Path) -> None:
    options = sharding.save_models(tmp_path)
    assert options[::2] == ["--target", "--draft"]
    configs = [AutoConfig.from_pretrained(folder) for folder in options[1::2]]
    assert [config.num_key_value_heads % 4 for config in configs] == [0, 0]
    assert configs[0].vocab_size == configs[1].vocab_size
    assert configs[0].num_hidden_layers > configs[1].num_hidden_layers


def test_the_published_page_is_that_of_the_published_numbers() -> None:
    report = json.loads((RESULTS / "sharding.json").read_text(encoding="utf-8"))
    page = sharding.markdown(report)
    assert page == (RESULTS / "sharding.md").read_text(encoding="utf-8")
    assert page.count("round, draft rank0") == len(report["found"]) == 2
