"""Building n-gram tables: the counts, the memory that they take, and the sources."""

import json
from pathlib import Path

import pytest
from tiny_models import VOCAB, byte_tokenizer, engine_of, ragged_prompts, tiny
from tiny_ngrams import corpus

from outrider import Sampling
from outrider.core.errors import InvalidParameterError
from outrider.drafters.ngram.table import NgramTable
from outrider.train import ngram
from outrider.train.ngram import build_ngram
from outrider.train.ngram_documents import encoded, read_texts, samples

V = 20


@pytest.mark.parametrize("min_count", [1, 3])
@pytest.mark.parametrize(("positions", "chunk"), [(1, 1 << 24), (50, 7), (1 << 22, 64)])
def test_the_file_does_not_depend_on_the_size_of_ranges_and_chunks(
    positions: int, chunk: int, min_count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = corpus(V, [300, 0, 40, 1, 90])
    build_ngram(tmp_path / "whole", documents, V, 4, min_count)
    monkeypatch.setattr(ngram, "_POSITIONS", positions)
    monkeypatch.setattr(ngram, "_CHUNK", chunk)
    build_ngram(tmp_path / "parts", documents, V, 4, min_count)
    assert (tmp_path / "parts").read_bytes() == (tmp_path / "whole").read_bytes()


def test_sorts_are_limited_in_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No sort has more positions than the limit, except by those of one frequent context."""
    seen = []
    positions = ngram._positions

    def watched(*arguments: object) -> object:
        found = positions(*arguments)  # type: ignore[arg-type]
        seen.append(len(found))
        return found

    monkeypatch.setattr(ngram, "_POSITIONS", 100)
    monkeypatch.setattr(ngram, "_positions", watched)
    documents = corpus(V, [2000])
    frequent = max(documents[0].count(x) for x in range(V))
    build_ngram(tmp_path / "file", documents, V, 3)
    assert max(seen) <= 100 + frequent
    assert sum(seen) == 1999 + 1998


def test_numbers_of_tokens_grams_and_bytes(tmp_path: Path) -> None:
    numbers = build_ngram(tmp_path / "file", [[1, 2, 1, 2], [2, 1], []], V, 3)
    assert numbers["tokens"] == 6
    assert numbers["grams"] == [2, 2, 2]  # 1 2; 12 21; 121 212: none extends across documents
    assert numbers["bytes"] == (tmp_path / "file").stat().st_size
    assert NgramTable.open(tmp_path / "file").about.trained_on == 6
    fewer = build_ngram(tmp_path / "fewer", [[1, 2, 1, 2], [2, 1], []], V, 3, 2)
    assert fewer["grams"] == [2, 2, 0]
    assert NgramTable.open(tmp_path / "fewer").best([1]) == 2


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"documents": []}, "corpus is empty"),
        ({"documents": [[], []]}, "corpus is empty"),
        ({"documents": [[1, V]]}, f"token ids 1 to {V}: the vocabulary is 0 to {V - 1}"),
        ({"documents": [[-1, 3]]}, "token ids -1 to 3"),
        ({"order": 0}, "order=0: must be 1 to 5"),
        ({"order": 6}, "order=6: must be 1 to 5"),
        ({"min_count": 0}, "min_count=0"),
    ],
)
def test_bad_input_is_named(settings: dict[str, object], why: str, tmp_path: Path) -> None:
    good: dict[str, object] = {"documents": [[1, 2]], "num_tokens": V, "order": 2}
    with pytest.raises(InvalidParameterError, match=why):
        build_ngram(tmp_path / "file", **good | settings)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------- sources


def test_texts_of_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "b.txt").write_text("of a file\n")
    (tmp_path / "c.bin").write_bytes(b"not text")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "d.jsonl").write_text('{"text": "one"}\n\n{"text": "two\\n", "id": 3}\n')
    (tmp_path / "a" / "e.py").write_text("x = 1\n")
    assert list(read_texts([tmp_path])) == ["one", "two\n", "x = 1\n", "of a file\n"]
    assert list(read_texts([tmp_path / "c.bin", tmp_path / "b.txt"])) == ["not text", "of a file\n"]
    monkeypatch.setattr("outrider.train.ngram_documents._LONG_FILE", 10)
    (tmp_path / "b.txt").write_text("line\n" * 5)
    assert "".join(read_texts([tmp_path / "b.txt"])) == "line\n" * 5
    assert len(list(read_texts([tmp_path / "b.txt"]))) > 1


@pytest.mark.parametrize("line", ["{", '["text"]', '{"txt": "x"}', '{"text": 3}'])
def test_lines_without_a_text_are_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "set.jsonl"
    file.write_text(f'{{"text": "one"}}\n{line}\n')
    with pytest.raises(InvalidParameterError, match=r"set\.jsonl', line 2: no JSON object"):
        list(read_texts([file]))
    with pytest.raises(InvalidParameterError, match=r"missing' *: cannot be read|cannot be read"):
        list(read_texts([tmp_path / "missing"]))


def test_a_text_is_encoded_as_a_prompt_with_an_end_token() -> None:
    tokenizer = byte_tokenizer()
    texts = ["def f(x):", "", "print(hello world)<eos>"] + ["x"] * 200
    found = list(encoded(tokenizer, texts))
    assert len(found) == len(texts)
    for ids, text in zip(found, texts, strict=True):
        own = tokenizer(text)["input_ids"]
        assert ids == (own if text.endswith("<eos>") else [*own, tokenizer.eos_token_id])


def test_samples_are_the_targets_outputs() -> None:
    """As plain decoding gives them, with a new seed for each pass over the prompts."""
    engine = engine_of(tiny("llama"), max_batch_size=2)
    prompts = ragged_prompts([9, 2, 3])
    sampling = Sampling(max_new_tokens=10, seed=5, ignore_eos=True)
    found = list(samples(engine, 45, sampling, prompts))
    assert [len(ids) for ids in found] == [4 + 10, 2 + 10, 3 + 10, 4 + 10, 2 + 5]  # 45 are new
    results = engine.generate(prompts[:2], sampling)
    assert found[0] == [*prompts[0][-4:], *results[0].token_ids]
    assert found[1] == [*prompts[1], *results[1].token_ids]
    assert found[3][-10:] != found[0][-10:]
    assert all(0 <= x < VOCAB for ids in found for x in ids)


def test_escaped_json_lines_are_decoded(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in ("Ünï", "a\nb")]
    (tmp_path / "x.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert list(read_texts([tmp_path / "x.jsonl"])) == ["Ünï", "a\nb"]
