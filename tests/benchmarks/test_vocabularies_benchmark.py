"""The benchmark of vocabularies: equivalent drafts, measurements and the page."""

import json

import torch
from tiny_models import byte_tokenizer, full_logits, tiny_module

from benchmarks import page
from benchmarks.vocabularies import drafts, markdown, measure
from outrider.runtime import HFModel

TARGET, DRAFT = (
    HFModel(
        tiny_module(seed=seed, vocab_size=275, tie_word_embeddings=seed == 1),
        byte_tokenizer(num_tokens=275),
    )
    for seed in (0, 1)
)


def test_drafts_with_other_ids_are_equivalent() -> None:
    """Equal strings have equal logits; a cut vocabulary keeps the first tokens."""
    found = drafts(DRAFT, (270,))
    text = "def f(x):"
    tokens, others = (found[name].tokenizer(text)["input_ids"] for name in ("own", "shuffled"))  # type: ignore[misc]
    assert tokens != others
    mine = full_logits(DRAFT.module, tokens)[-1]
    theirs = full_logits(found["shuffled"].module, others)[-1]
    torch.testing.assert_close(mine.sort().values, theirs.sort().values)
    cut = found["first 270"]
    assert cut.num_tokens == len(cut.tokenizer) == 270  # type: ignore[arg-type]
    assert cut.tokenizer.decode(cut.tokenizer(text)["input_ids"]) == text  # type: ignore[union-attr, misc]


def test_measurements_are_on_the_page() -> None:
    with torch.no_grad():
        rows = measure(TARGET, DRAFT, 0.0, 3, (270,))
    assert rows["tli"]["own"] == rows["tli"]["shuffled"] == rows["speculative"]["own"]
    assert set(rows) == {"speculative", "sample-match", "tli", "slem", "transformers"}
    about = page.about("x", prompts=2, max_new_tokens=3)
    report = {"about": about, "temperatures": {"0.0": rows}}
    text = markdown(report)
    assert all(f"| {method} |" in text for method in rows)
    assert json.loads(json.dumps(report)) == report
