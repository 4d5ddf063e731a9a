"""The report as a Markdown page."""

from collections.abc import Mapping
from typing import Any

from benchmarks.page import table
from benchmarks.peer_workers.compare import OPENVINO_OR_LLAMA_CPP, ours, ratio

COUNTED = (
    "Equal perplexity: 16 bits, Q8_0 and OpenVINO's 8 bits change the target's by less than 1 % "
    "and are counted; Q4_0 and Q4_1 are not (`python -m benchmarks.perplexity`)."
)
LOSSY = (
    "`openvino:speculative` is not counted either, since its samples do not follow the target's "
    "distribution."
)
STARTS = ("export_seconds", "seconds", "warmup_seconds")


def markdown(report: Mapping[str, Any]) -> str:
    """All pairs, each with its table, its bars, and the rows that were not measured."""
    lines = ["# Outrider against its peers", ""]
    for name, part in report["pairs"].items():
        lines += _pair(name, part)
    return "\n".join(lines).rstrip() + "\n"


def _pair(name: str, part: Mapping[str, Any]) -> list[str]:
    about, rows = part["about"], part["rows"]
    measured = {key: row for key, row in rows.items() if "median" in row}
    best = ours(rows)
    temperature = about.get("temperature", 0)
    sampled = " over chat prompts" if about.get("chats") else ""
    sampled += f" at temperature {temperature:g}" if temperature else ""
    lines = [
        f"## The {about.get('pair', name)} pair in {about.get('dtype', 'float32')}{sampled}",
        "",
        f"{about['date']}, {about['hardware']}, batch 1, temperature {temperature:g}, "
        f"γ = {about['num_speculative_tokens']}, target of {about['parameters'] / 1e6:,.1f}M "
        f"parameters. {about['prompts']} prompts of at most {about['prompt_tokens']} tokens, "
        f"{about['max_new_tokens']} new tokens each; median of {about['repeats']} interleaved "
        f"repeats, whole calls, prefill included."
        + (" One peer in memory at a time." if about["one_at_a_time"] else ""),
        "",
        f"Command: `{about['command']}`",
    ]
    heads = ("peer", "row", "precision", "threads", "tokens/s", "spread", "acceptance length")
    lines += table(
        (*heads, "same output", f"`{best}` is"),
        (_row(key, row, ratio(rows, best, key)) for key, row in measured.items()),
        left=3,
    )
    lines += table(("bar", "at least", "measured", ""), map(_bar, part["bars"]))
    if any(bar["theirs"] == OPENVINO_OR_LLAMA_CPP for bar in part["bars"]):
        lines += ["", f"{COUNTED} {LOSSY}" if temperature else COUNTED]
    starts = [
        (key, row["version"], *(f"{row[name]:.1f}" for name in STARTS))
        for key, row in measured.items()
    ]
    lines += table(("", "version", "export (s)", "load (s)", "warm-up (s)"), starts, left=2)
    absent = [f"- {key}: {row['error']}" for key, row in rows.items() if "median" not in row]
    if absent:
        lines += ["", "Not measured:", "", *absent]
    apart = [
        f"- {key} differs from plain Outrider at "
        f"{', '.join(str(position) for position in sorted(row['first_differences']))}"
        for key, row in measured.items()
        if row.get("first_differences")
    ]
    if apart:
        lines += ["", "Positions of the first differing token, from 0:", "", *apart]
    return [*lines, ""]


def _row(key: str, row: Mapping[str, Any], times: float | None) -> list[str]:
    peer, _, name = key.partition(":")
    length = row["acceptance_length"]
    return [
        *(peer, name, row["precision"], str(row["threads"]), f"{row['median']:.1f}"),
        f"{row['slowest']:.1f}–{row['fastest']:.1f}",
        "" if length is None else format(length, ".2f"),
        _agreement(row),
        "" if times is None else f"{times:.2f}×",
    ]


def _agreement(row: Mapping[str, Any]) -> str:
    if "texts" not in row:
        return ""
    return f"{row['equal_texts']} of {row['texts']}"


def _bar(bar: Mapping[str, Any]) -> list[str]:
    outcome = {True: "met", False: "**missed**", None: "not measured"}[bar["met"]]
    value = "" if bar["ratio"] is None else f"{bar['ratio']:.2f}×"
    names = bar["ours"], bar["theirs"]
    compared = map(_named, names, bar.get("fastest", names))
    return [" / ".join(compared), f"{bar['least']:.2f}×", value, outcome]


def _named(group: str, row: str) -> str:
    return group if group == row else f"{group} (`{row}`)"
