"""The n-gram file: distributions against plain counting, and damaged files.

Legend: V vocabulary.
"""

import json
import struct
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tiny_ngrams import Counts, corpus, ngram_file

from outrider.core.errors import InvalidParameterError, ModelLoadError
from outrider.drafters.ngram.table import NgramTable

V = 6
DOCUMENTS = corpus(V, [60, 1, 0, 25, 2])


def contexts(longest: int) -> list[tuple[int, ...]]:
    return [h for length in range(longest + 1) for h in product(range(V), repeat=length)]


@pytest.mark.parametrize("min_count", [1, 2, 4])
@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_distributions_are_those_of_the_counts(order: int, min_count: int) -> None:
    """For every context, seen or not: the distribution, its argmax, and single probabilities."""
    table = NgramTable.open(ngram_file(DOCUMENTS, V, order=order, min_count=min_count))
    counts = Counts(DOCUMENTS, V, order, min_count)
    for h in contexts(min(order, 4)):
        expected = counts.distribution(h)
        nodes = table.nodes(h)
        q_V = table.distribution(nodes)
        assert q_V.tolist() == pytest.approx(expected, abs=2e-8), h
        assert q_V.sum() == pytest.approx(1, abs=1e-6)
        assert q_V.min() > 0
        assert q_V[table.best(nodes)] > max(expected) - 1e-7
        assert [table.probability(nodes, x) for x in range(V)] == pytest.approx(q_V.tolist())
        assert len(nodes) <= max(order - 1, 0)


def test_distributions_depend_on_the_context() -> None:
    """Otherwise the test above would show little."""
    table = NgramTable.open(ngram_file(DOCUMENTS, V, order=3))
    distributions = {tuple(table.distribution(table.nodes(h)).round(6)) for h in contexts(2)}
    assert len(distributions) > 2 * V
    assert len({table.best(table.nodes(h)) for h in contexts(2)}) > 2


def test_a_file_contains_the_models_of_lower_order() -> None:
    file = ngram_file(DOCUMENTS, V, order=4)
    for order in (1, 2, 3):
        long = NgramTable.open(file, order)
        short = NgramTable.open(ngram_file(DOCUMENTS, V, order=order))
        for h in contexts(3):
            assert long.nodes(h) == short.nodes(h)
            assert (long.distribution(long.nodes(h)) == short.distribution(short.nodes(h))).all()
            assert long.best(long.nodes(h)) == short.best(short.nodes(h))


def test_stepping_equals_looking_up_the_longer_context() -> None:
    table = NgramTable.open(ngram_file(DOCUMENTS, V, order=4))
    text = [x for document in DOCUMENTS for x in document]
    nodes: list[int] = []
    for t, x in enumerate(text):
        nodes = table.step(nodes, x)
        assert nodes == table.nodes(text[: t + 1]) == table.nodes(text[max(0, t - 2) : t + 1])


def test_a_large_vocabulary() -> None:
    """Ids beyond 16 bits, and a token that the file does not contain."""
    large, high = 70_000, 66_000
    table = NgramTable.open(ngram_file([[high, 7, high, 7, high + 1]], large, order=3))
    assert table.distribution(table.nodes([high])).argmax() == table.best(table.nodes([high])) == 7
    assert table.best(table.nodes([high, 7])) in (high, high + 1)
    assert table.distribution([]).sum() == pytest.approx(1, abs=1e-5)
    assert table.nodes([7, large + 3]) == []
    assert table.nodes([large + 3, 7]) == [7]


def test_replacing_a_file_does_not_affect_open_readers() -> None:
    file = ngram_file(DOCUMENTS, V, order=2)
    table = NgramTable.open(file)
    before = table.distribution(table.nodes([1])).tolist()
    file.with_name("other").write_bytes(ngram_file([[1, 5] * 9], V, order=2).read_bytes())
    file.with_name("other").replace(file)
    assert table.distribution(table.nodes([1])).tolist() == before
    assert NgramTable.open(file).distribution([1])[5] > 0.5


# ------------------------------------------------------------------------------- broken files


def refused(file: Path, why: str) -> None:
    with pytest.raises(ModelLoadError, match=why) as error:
        NgramTable.open(file)
    message = str(error.value)
    assert str(file) in message
    assert "outrider ngram build" in message
    assert "\n" not in message


def test_every_damaged_byte_is_detected(tmp_path: Path) -> None:
    """In the header too."""
    content = ngram_file(DOCUMENTS, V, order=3).read_bytes()
    file = tmp_path / "damaged"
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for place in [*range(8, header, 17), *range(header, len(content), 7), len(content) - 1]:
        file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        if content[place : place + 1] != b" ":  # padding of the header, which no reader looks at
            refused(file, "damaged|no n-gram model|no safetensors|version")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.2, 0.7, 0.999])
def test_a_truncated_file(share: float, tmp_path: Path) -> None:
    content = ngram_file(DOCUMENTS, V, order=3).read_bytes()
    file = tmp_path / "short"
    file.write_bytes(content[: int(share * len(content))])
    refused(file, "no safetensors file, or cut short")


def test_files_of_another_kind(tmp_path: Path) -> None:
    for name, content in (("pickle", b"\x80\x04\x95" * 400), ("text", b"some text\n" * 400)):
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, "no safetensors file")
    save_file({"weight": np.zeros(3, np.float32)}, tmp_path / "model")
    refused(tmp_path / "model", "no n-gram model")
    refused(tmp_path, "no such file")
    refused(tmp_path / "missing", "no such file")


def test_another_version_and_changed_metadata(tmp_path: Path) -> None:
    content = ngram_file(DOCUMENTS, V, order=3).read_bytes()
    end = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:end])
    for name, value, why in (
        ("version", 9, "version is 9"),
        ("order", 2, "checksum"),
        ("vocabulary", "f00", "checksum"),
        ("something", "new", "cannot be read"),
    ):
        about = json.loads(header["__metadata__"]["outrider-ngram"]) | {name: value}
        metadata = {"outrider-ngram": json.dumps(about)}
        changed = json.dumps(header | {"__metadata__": metadata}).encode()
        (tmp_path / name).write_bytes(struct.pack("<Q", len(changed)) + changed + content[end:])
        refused(tmp_path / name, why)


@pytest.mark.parametrize("order", [0, 4, -1])
def test_an_order_that_the_file_does_not_have(order: int) -> None:
    with pytest.raises(InvalidParameterError, match=f"order={order}: .* orders 1 to 3"):
        NgramTable.open(ngram_file(DOCUMENTS, V, order=3), order)
