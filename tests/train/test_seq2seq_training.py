"""Training an encoder-decoder: pairs from code, batches by step, losses of texts only."""

import numpy as np
import pytest
import torch
from transformers import T5ForConditionalGeneration

from outrider.runtime import Seq2SeqModel
from outrider.train.loop import Settings, train
from outrider.train.optim import Schedule, build_adamw, build_optimizers
from outrider.train.pairs import END, PAD, PairBatches, encode_pairs, recombined, signatures
from outrider.train.seq2seq import T5Shape, build_t5, translation, translation_distillation
from outrider.train.tokenizer import train_pair_tokenizer

CODE = """
class A:
    async def f(self, a: int, /, b: str = "x", *rest, c, **more) -> None: ...
def bare(a, b): ...
def g(x=1): ...
"""
S, T = 12, 8
TINY = T5Shape(300, 16, 24, encoder_layers=1, decoder_layers=2, heads=2)


def rows(num: int, seed: int = 0) -> np.ndarray:
    """Random pairs whose text is the first half of its source."""
    generator = np.random.default_rng(seed)
    made = np.full((num, S + T), PAD, dtype=np.uint16)
    for row in made:
        length = int(generator.integers(2, S))
        row[:length] = generator.integers(2, 300, length)
        half = min(length // 2, T - 1)
        row[S : S + half] = row[:half]
        row[S + half] = END
    return made


def test_signatures_of_source_code() -> None:
    assert sorted(signature.pair for signature in signatures(CODE)) == [
        ("def bare(a, b)", "bare(a, b)"),
        (
            "def f(self, a: int, b: str='x', *rest, c, **more) -> None",
            "f(self, a, b, *rest, c, **more)",
        ),
        ("def g(x=1)", "g(x)"),
    ]
    assert list(signatures("def broken(:")) == []


def test_recombined_signatures_consist_of_parts_of_others() -> None:
    found = list(signatures(CODE))
    made = list(recombined(found, 50, seed=0))
    assert made == list(recombined(found, 50, seed=0))
    assert len(set(made) - set(found)) > 20
    arguments = {argument for signature in found for argument in signature.arguments}
    for signature in made:
        assert signature.name in {"f", "bare", "g"}
        assert set(signature.arguments) <= arguments


def test_rows_are_padded_and_long_pairs_are_left_out() -> None:
    tokenizer = train_pair_tokenizer(["def g(x=1)", "g(x)"] * 3, 300)
    assert tokenizer.pad_token_id == PAD
    assert tokenizer.eos_token_id == END
    made = encode_pairs([("def g(x=1)", "g(x)"), ("a" * 99, "b"), ("a", "z" * 99)], tokenizer, S, T)
    assert made.shape == (1, S + T)
    source, text = made[0, :S].tolist(), made[0, S:].tolist()
    assert tokenizer.decode([t for t in source if t != PAD]) == "def g(x=1)"
    end = text.index(END)
    assert tokenizer.decode(text[:end]) == "g(x)"
    assert set(text[end + 1 :]) <= {PAD}
    assert encode_pairs([], tokenizer, S, T).shape == (0, S + T)


def test_an_epoch_visits_every_pair_once() -> None:
    data = rows(12)
    batches = PairBatches(data, 4, seed=1)
    seen = torch.cat([batches(step) for step in range(3)]).tolist()
    assert sorted(seen) == sorted(data.tolist())
    assert torch.equal(batches(5), batches(5))
    assert not torch.equal(batches(0), batches(3))
    with pytest.raises(ValueError, match="12 pairs are too few for batches of 13"):
        PairBatches(data, 13, seed=1)


def test_padding_counts_in_no_loss() -> None:
    """A row has the same loss alone and padded to any width."""
    model = build_t5(TINY, 0).eval()
    short = torch.from_numpy(rows(1, seed=3).astype(np.int64))
    wide = torch.nn.functional.pad(short[:, S:], (0, 5), value=PAD)
    wide = torch.cat([torch.nn.functional.pad(short[:, :S], (0, 7), value=PAD), wide], 1)
    loss, padded = translation(model, S)(short), translation(model, S + 7)(wide)
    torch.testing.assert_close(loss, padded)
    tokens = [t for t in short[0, :S].tolist() if t != PAD]
    labels = [t for t in short[0, S:].tolist() if t != PAD]
    theirs = model(input_ids=torch.tensor([tokens]), labels=torch.tensor([labels])).loss
    torch.testing.assert_close(loss, theirs)


def test_a_draft_equal_to_its_target_has_no_loss() -> None:
    batch = torch.from_numpy(rows(4).astype(np.int64))
    target, other = build_t5(TINY, 0), build_t5(TINY, 1)
    same = translation_distillation(build_t5(TINY, 0), target, S)(batch)
    assert abs(same.item()) < 1e-6
    assert translation_distillation(other, target, S)(batch).item() > 1e-3


def test_the_initialisation() -> None:
    """T5's own except for wide relative position biases."""
    made = build_t5(TINY, 0)
    torch.manual_seed(0)
    own = dict(T5ForConditionalGeneration(made.config).named_parameters())
    for name, parameter in made.named_parameters():
        if name.endswith("relative_attention_bias.weight"):
            assert 1.2 < parameter.std() < 2.8, "64 normal draws of standard deviation 2"
        else:
            assert torch.equal(parameter, own[name])


def test_muon_leaves_out_lookup_tables() -> None:
    """Embeddings and T5's position biases are looked up, not multiplied."""
    model = build_t5(TINY, 0)
    muon, adamw = build_optimizers(model, 1e-3)
    looked_up = {id(p) for p in adamw.param_groups[0]["params"]}
    assert id(model.shared.weight) in looked_up
    biased = model.decoder.block[0].layer[0].SelfAttention
    assert id(biased.relative_attention_bias.weight) in looked_up
    assert id(biased.q.weight) in {id(p) for p in muon.param_groups[0]["params"]}


def test_a_stopped_run_resumes_bit_for_bit_and_learns(tmp_path) -> None:
    schedule = Schedule(learning_rate=1e-2, steps=30)
    batches = PairBatches(rows(8), 8, seed=0)

    def run(folder, until=None):
        model = build_t5(TINY, 0)
        settings = Settings(schedule, until=until, checkpoint_every=10, optimizers=build_adamw)
        train("tiny", model, translation(model, S), batches, settings, folder)
        return model

    run(tmp_path / "twice", until=10)
    twice, once = run(tmp_path / "twice"), run(tmp_path / "once")
    assert all(
        torch.equal(a, b) for a, b in zip(twice.parameters(), once.parameters(), strict=True)
    )
    fresh = build_t5(TINY, 0)
    with torch.no_grad():
        before, after = (float(translation(m, S)(batches(0))) for m in (fresh, once))
    assert after < before / 2
    assert Seq2SeqModel(once).decoder_prompt == (PAD,)
