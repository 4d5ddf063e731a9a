"""The benchmark of verification rules times every rule, and its page has all results."""

import json

from benchmarks.rules import BARS, bars, drafts, markdown, measure, rules


def test_every_rule_for_sampled_chains_is_timed_and_reported() -> None:
    verified = rules()
    assert next(iter(verified)) == "Rejection"
    assert set(BARS) <= set(verified)
    assert "Greedy" not in verified
    sizes = [measure(2, 3, 500, 3), measure(1, 2, 300, 3)]
    for size in sizes:
        assert set(size["ratios"]) == set(verified)
        assert size["ratios"]["Rejection"] == 1
    about = dict.fromkeys(("date", "hardware", "threads", "torch", "repeats", "command"), "x")
    report = {"about": about, "sizes": sizes}
    page = markdown(report)
    assert all(f"| {name}" in page for name in verified)
    assert all(f"| {text} |" in page for text, _, _ in bars(sizes))
    assert json.loads(json.dumps(report)) == report


def test_the_distributions_have_the_stated_acceptance_rate() -> None:
    made, p_BNV, alpha = drafts(4, 6, 20_000)
    assert 0.6 < alpha < 0.8
    assert made[0].probs_BNV is not None
    assert p_BNV.shape == made[0].probs_BNV.shape
    assert made[0].tokens_BN.tolist() != made[1].tokens_BN.tolist()
