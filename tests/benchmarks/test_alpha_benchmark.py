"""The table of α: every source is a method with valid options, and the page has all results."""

from benchmarks.alpha import library, markdown, sources
from outrider.methods import METHODS


def test_sources_are_methods_with_valid_options() -> None:
    for source in sources("table.safetensors"):
        METHODS[source.method].recipe(source.options)


def test_the_corpus_has_the_requested_size() -> None:
    sizes = [sum(map(len, library(megabytes))) for megabytes in (0.1, 0.5)]
    assert 0 < sizes[0] <= 1e5 < sizes[1] <= 5e5


def test_the_page() -> None:
    cell = {"alpha": 0.25, "error": 0.01, "coverage": 0.5}
    rows = [{"name": s.name, "paper": s.paper, "cells": [cell, cell]} for s in sources("t")]
    about = dict.fromkeys(("date", "hardware", "dtype", "texts", "tokens", "command"), "x")
    page = markdown({"about": about | {"ngram_tokens": 12_345}, "rows": rows})
    assert "| unigram | 0.250 ± 0.010 | 0.250 ± 0.010 | 50% / 50% | 0.03-0.13 |" in page
    assert "counted on 12,345 tokens" in page
