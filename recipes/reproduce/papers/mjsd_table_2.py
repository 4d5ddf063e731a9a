"""Qin, Hu, He, Prakriya, Cong and Sun, "Optimized Multi-Token Joint Decoding with Auxiliary Model
for LLM Inference" (MJSD), 2024, table 2: perplexity, speed and energy of five methods.

https://arxiv.org/abs/2407.09722
"""

from __future__ import annotations

from outrider.lab.bench import CellResult
from recipes.reproduce.blame import Compared, Rivals, against, blamed
from recipes.reproduce.downstream import FINAL_NUMBER, ROUGE, downstream
from recipes.reproduce.effect import greater, greater_mean, mean, over_repeats
from recipes.reproduce.lab import Cells, Lab
from recipes.reproduce.outputs import accepted_per_round, nats, values
from recipes.reproduce.recipe import Findings, PaperModels, Recipe, Table

GAMMA, BILD_GAMMA = 4, 10
WARP = {"top_k": 20, "top_p": 0.9}
"""The paper's truncation, at temperature 1."""
MODELS = PaperModels("facebook/opt-13b", ("facebook/opt-125m",))
BEAM_SEARCH = "beam search"
MJSD = "mjsd:beams=8,threshold=0.1,label=MJSD"


def sampled(lab: Lab, *methods: str) -> Cells:
    """Methods with the paper's settings, with perplexities."""
    return lab.bench(*methods, gammas=[GAMMA], temperatures=[1.0], metrics=["perplexity"], **WARP)


def measure(lab: Lab) -> Findings:
    """The paper's baselines, and the search methods that it leaves out."""
    methods = [
        "speculative",
        f"bild:mode=mjsd,fallback=0.9,rollback=2,gamma={BILD_GAMMA},label=BiLD",
    ]
    cells = sampled(lab, *methods, MJSD)
    searched = lab.bench(
        f"beam-search:num_beams=8,label={BEAM_SEARCH}", temperatures=[0.0], metrics=["perplexity"]
    )
    cold = lab.bench("speculative", gammas=[GAMMA], temperatures=[0.5], metrics=["perplexity"])
    plain, fast = cells.one("plain"), cells.one("speculative")
    bild, mjsd = cells.one("BiLD"), cells.one("MJSD")
    c = lab.cost()
    speeds = {
        "plain": lab.speed(plain, 0, 0),
        "speculative": lab.speed(fast, c, GAMMA),
        "MJSD": lab.speed(mjsd, c, GAMMA),
    }
    effects = [
        greater_mean("MJSD's log perplexity is below that of sampling", nats(plain), nats(mjsd)),
        greater_mean(
            "MJSD's log perplexity is below BiLD's",
            nats(bild),
            nats(mjsd),
            expected="few outputs",
        ),
        greater_mean(
            "BiLD's log perplexity is below that of sampling",
            nats(plain),
            nats(bild),
            expected="BiLD keeps the draft's own tokens unless the target finds "
            "them improbable, and a small draft's may be no better than sampled ones; the paper "
            "has an exception, too",
        ),
        greater("MJSD is faster than plain sampling", speeds["MJSD"], speeds["plain"]),
        greater("MJSD is faster than speculative sampling", speeds["MJSD"], speeds["speculative"]),
    ]
    rows = [
        _row(lab, "sampling (the paper's greedy)", plain, 0, 0, plain),
        _row(lab, "speculative", fast, c, GAMMA, plain),
        _row(lab, "BiLD", bild, c, BILD_GAMMA, plain),
        _row(lab, "MJSD", mjsd, c, GAMMA, plain),
        _row(lab, "sampling, T 0.5, not truncated", cold.one("plain"), 0, 0, plain),
        _row(lab, "greedy: argmax", searched.one("plain"), 0, 0, plain),
        _row(lab, "beam search, 8 beams", searched.one(BEAM_SEARCH), 0, 0, plain),
    ]
    tables, notes = downstream(
        lab, (ROUGE, FINAL_NUMBER), [*methods, MJSD], gammas=[GAMMA], temperatures=[1.0], **WARP
    )
    causes, shortfalls = blamed(
        lab,
        [
            Compared("MJSD", mjsd, plain, c, 2.21),
            Compared("speculative", fast, plain, c, 2.21 / 1.49),
        ],
    )
    rivals, sentences = against(lab, [Rivals("MJSD", mjsd, "speculative", fast, plain, 1.49)])
    argmax = mean(over_repeats(nats(searched.one("plain"))))
    head = ["", "nats per token", "perplexity", "accepted per round", "speed-up"]
    better = "above" if mean(nats(mjsd)) > argmax else "not above"
    return Findings(
        effects,
        [
            Table("Temperature 1, top-k 20, top-p 0.9 unless said otherwise", head, rows),
            *tables,
            *causes,
            *rivals,
        ],
        notes=[
            "What the paper calls greedy is multinomial sampling from the truncated distribution. "
            "True argmax decoding and beam search have no part in its table; here MJSD's log "
            f"perplexity is {better} that of argmax, so most of its gain over sampling is search. "
            "The paper's times are of CPU processes, its perplexities averages over outputs of the "
            "target's own log-probabilities, as here. BiLD's speed counts ten draft passes per "
            "round, which is too many where it falls back early.",
            "The paper: 2.21× of sampling and 1.49× of speculative decoding, perplexity about 0.8 "
            "of sampling's.",
            *notes,
        ],
        shortfalls=[*shortfalls, *sentences],
    )


def _row(
    lab: Lab, name: str, cell: CellResult, c: float, passes: int, plain: CellResult
) -> list[str]:
    ratio = mean(lab.speed(cell, c, passes)) / mean(lab.speed(plain, 0, 0))
    searches = cell.cell.title == BEAM_SEARCH  # its whole output is one round
    return [
        name,
        f"{mean(nats(cell)):.3f}",
        f"{cell.metrics['perplexity']['macro']:.2f}",
        "" if searches else f"{mean(values(cell, accepted_per_round)):.2f}",
        "" if searches and not lab.size.timed else f"{ratio:.2f}×",
    ]


RECIPE = Recipe(
    "mjsd-table-2",
    "MJSD: perplexity and speed",
    "Qin et al. (MJSD), 2024, table 2",
    "Perplexity of MJSD below BiLD's, and BiLD's below that of sampling (with one exception); "
    "2.21× of autoregressive and 1.49× of speculative decoding.",
    measure,
    MODELS,
)
