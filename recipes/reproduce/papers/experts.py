"""Experts of a mixture that a verification pass touches: the survey post "Speculative Decoding" and
its formula, on a small model of Mixtral's architecture (Jiang et al., 2024).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from outrider.lab.analysis.experts import experts_touched
from recipes.reproduce.effect import Values, certain, greater, mean, rising
from recipes.reproduce.lab import Lab
from recipes.reproduce.recipe import Figure, Findings, Recipe, Table

EXPERTS, PER_TOKEN = 8, 2
TOKENS = (1, 2, 4, 6, 9)
GAMMA = 5
VOCABULARY, CONTEXT = 512, 24


def mixtral(seed: int) -> MixtralForCausalLM:
    """Four layers of width 64 with random weights."""
    torch.manual_seed(seed)
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        max_position_embeddings=64,
    )
    return MixtralForCausalLM(config).eval()


@torch.inference_mode()
def touched(model: MixtralForCausalLM, contexts: int, seed: int) -> dict[str, list[float]]:
    """Experts that the last T tokens of each context are routed to, averaged over layers, by T."""
    found: dict[str, list[float]] = {str(T): [] for T in TOKENS}
    generator = torch.Generator().manual_seed(seed)
    for _ in range(contexts):
        tokens = torch.randint(VOCABULARY, (1, CONTEXT), generator=generator)
        layers: Any = model(tokens, output_router_logits=True).router_logits
        for T in TOKENS:
            chosen = [each[-T:].topk(PER_TOKEN, -1).indices.unique().numel() for each in layers]
            found[str(T)].append(sum(chosen) / len(chosen))
    return found


def measure(lab: Lab) -> Findings:
    """Experts touched by 1 to 9 tokens, beside the formula for uniform routing."""
    contexts = lab.choose(64, 512)
    found = lab.kept(
        "experts", lambda: touched(mixtral(lab.seed), contexts, lab.seed), contexts=contexts
    )
    by_tokens: dict[float, Values] = {T: _values(found[str(T)]) for T in TOKENS}
    formula = {T: experts_touched(EXPERTS, PER_TOKEN, T) for T in TOKENS}
    more = TOKENS[1:]
    bound = {T: dict.fromkeys(by_tokens[T], formula[T]) for T in TOKENS}
    right = experts_touched(EXPERTS, PER_TOKEN, GAMMA)
    effects = [
        rising("more tokens touch more experts", by_tokens),
        *(
            greater(f"{T} tokens: fewer experts than with uniform routing", bound[T], by_tokens[T])
            for T in more[1:]
        ),
        certain(
            "the post's 6.10 is the formula at 5 tokens", f"{right:.2f}", abs(right - 6.10) < 0.01
        ),
    ]
    rows = [
        [
            str(T),
            f"{mean(by_tokens[T]):.2f}",
            f"{formula[T]:.2f}",
            f"{mean(by_tokens[T]) / PER_TOKEN:.2f}",
        ]
        for T in TOKENS
    ]
    head = ["tokens of a pass", "experts touched", "formula", "β if reading is all"]
    pass_over = experts_touched(EXPERTS, PER_TOKEN, GAMMA + 1)
    return Findings(
        effects,
        [Table(f"{PER_TOKEN} of {EXPERTS} experts per token", head, rows)],
        [
            Figure(
                "Experts touched",
                "tokens of a pass",
                "experts",
                {
                    "measured": [(T, mean(by_tokens[T])) for T in TOKENS],
                    "uniform routing": list(formula.items()),
                },
            )
        ],
        [
            "The post prints (2/8)^5 in the formula, which would give 7.99; its 6.10 and 3.05 are "
            f"those of (6/8)^5. A pass that verifies {GAMMA} drafted tokens has {GAMMA + 1}: "
            f"{pass_over:.2f} experts, {pass_over / PER_TOKEN:.2f} times as many as one token. The "
            "weights are random, so the routing is that of an untrained model.",
        ],
    )


def _values(listed: list[float]) -> Values:
    return {(0, index, 0): value for index, value in enumerate(listed)}


RECIPE = Recipe(
    "experts",
    "Experts touched by a verification pass",
    "Survey post on speculative decoding, section on mixtures of experts",
    "Verifying 5 drafts touches 6.10 of 8 experts, 3.05 times as many as one token.",
    measure,
)
