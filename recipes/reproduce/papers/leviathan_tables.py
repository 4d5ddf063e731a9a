"""Leviathan, Kalman and Matias, "Fast Inference from Transformers via Speculative Decoding", ICML
2023, tables 2 and 3: α and speed by the size of the draft, and α of n-gram drafts.

https://arxiv.org/abs/2211.17192
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.drafters.ngram.drafter import vocabulary_digest
from outrider.lab.analysis.prediction import published_factors
from outrider.lab.bench import CellResult, MethodSpec
from outrider.train.corpus import STDLIB, collect
from outrider.train.ngram import build_ngram
from outrider.train.ngram_documents import encoded
from recipes.reproduce.blame import Compared, blamed
from recipes.reproduce.effect import greater, mean
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import alpha, tokens_per_round, values
from recipes.reproduce.papers.draft_size import described
from recipes.reproduce.recipe import Findings, PaperModels, Recipe, Table

GAMMA = 3
TEMPERATURES = (0.0, 1.0)
ITSELF = "the target"
PUBLISHED = {  # T5-small drafts for T5-XXL on English to German; c is that of the appendix
    0.0: published_factors(3.4, alpha=0.75, gamma=7, c=0.02),
    1.0: published_factors(2.6, alpha=0.62, gamma=7, c=0.02),
}
"""The paper's fastest speed-ups by temperature."""
MEGABYTES = 2.0
"""Of source code that the n-grams are counted on."""


def ngram_file(lab: Lab) -> Path:
    """A table of n-grams, n up to 4, of source code that the target has seen much of."""
    target = lab.model(lab.subject.target, "target")
    tokenizer: Any = target.tokenizer
    file = lab.folder / f"ngram-{vocabulary_digest(tokenizer.get_vocab())[:12]}.safetensors"
    if not file.exists():
        (source,) = collect([STDLIB], int(MEGABYTES * 1e6))
        texts = [document.text for document in source.documents]
        file.parent.mkdir(parents=True, exist_ok=True)
        digest = vocabulary_digest(tokenizer.get_vocab())
        build_ngram(file, encoded(tokenizer, texts), target.num_tokens, 4, vocabulary=digest)
    return file


def measure(lab: Lab) -> Findings:
    """α and speed of drafts from two n-grams to the target itself, at both temperatures."""
    lab.require_draft()  # the target stands for the largest draft alone
    table = ngram_file(lab)
    grams = {"unigram": 1, "bigram": 2}
    sources = {described(lab.model(draft)): draft for draft in lab.subject.drafts}
    models = [*sources, ITSELF]
    methods: list[str | MethodSpec] = [
        f"ngram:file={table},order={n},label={name}" for name, n in grams.items()
    ]
    costs = dict.fromkeys(grams, 0.0) | {name: lab.cost(each) for name, each in sources.items()}
    costs[ITSELF] = 1.0
    sources[ITSELF] = lab.source(lab.subject.target, "target")
    methods += [
        MethodSpec("speculative", draft=source, label=name) for name, source in sources.items()
    ]
    by_temperature = {}
    for temperature in TEMPERATURES:
        by_temperature[temperature] = lab.bench(
            *methods,
            drafts=[*lab.subject.drafts],
            gammas=[GAMMA],
            temperatures=[temperature],
        )
    small, large = min(models, key=lambda name: costs[name]), ITSELF

    def cell(name: str, temperature: float) -> CellResult:
        return by_temperature[temperature].one(name)

    def speed(name: str, temperature: float) -> Any:
        return lab.speed(cell(name, temperature), costs[name], GAMMA)

    def alphas(name: str, temperature: float) -> Any:
        return values(cell(name, temperature), alpha)

    effects = []
    for T in TEMPERATURES:
        effects += [
            greater(
                f"T = {T:g}: smallest draft faster than largest", speed(small, T), speed(large, T)
            ),
            greater(f"T = {T:g}: its α is lower", alphas(large, T), alphas(small, T)),
            greater(
                f"T = {T:g}: a draft model's α exceeds bigrams'",
                alphas(small, T),
                alphas("bigram", T),
            ),
            greater(
                f"T = {T:g}: bigrams' α exceeds unigrams'",
                alphas("bigram", T),
                alphas("unigram", T),
                expected="few prompts",
            ),
        ]
    rows = [
        [
            name,
            f"{costs[name]:.3f}",
            *(
                text
                for T in TEMPERATURES
                for text in (
                    f"{cell(name, T).speed['alpha']:.3f}",
                    f"{mean(values(cell(name, T), tokens_per_round)):.2f}",
                    f"{mean(speed(name, T)) / mean(lab.speed(cell('plain', T), 0, 0)):.2f}×",
                )
            ),
        ]
        for name in (*grams, *models)
    ]
    head = ["draft", "c"]
    for T in TEMPERATURES:
        head += [f"α, T = {T:g}", "tokens per round", "speed-up"]
    higher = [
        name
        for name in (*grams, small)
        if cell(name, 0).speed["alpha"] >= cell(name, 1).speed["alpha"]
    ]
    tables, shortfalls = blamed(
        lab,
        [
            Compared(
                f"{small}, T = {T:g}",
                cell(small, T),
                cell("plain", T),
                costs[small],
                PUBLISHED[T].speedup,
                PUBLISHED[T],
            )
            for T in TEMPERATURES
        ],
    )
    return Findings(
        effects,
        [Table(f"α and speed, γ {GAMMA}", head, rows), *tables],
        notes=[
            "The target as its own draft stands for the largest draft: its α is 1, and it gains "
            "nothing. The paper's α is at least as high at T = 0 as at T = 1, with two exceptions; "
            f"here that holds for {', '.join(higher) or 'none of the drafts'}.",
            "The paper's α: 0.03 to 0.13 for unigrams, 0.05 to 0.23 for bigrams, 0.53 to 0.9 for "
            f"draft models. The n-grams were counted on {MEGABYTES:g} MB of Python source.",
        ],
        shortfalls=shortfalls,
    )


RECIPE = Recipe(
    "leviathan-tables-2-3",
    "α and speed by draft",
    "Leviathan et al., ICML 2023, tables 2 and 3",
    "The smallest draft is the fastest although its α is the lowest; n-grams reach α of 0.03 to "
    "0.23.",
    measure,
    PaperModels(
        "google-t5/t5-11b", ("google-t5/t5-small", "google-t5/t5-base", "google-t5/t5-large")
    ),
)
