"""int8 and int4 weights for draft, target or both: pass times, bytes, α, perplexity and speed.

    python -m benchmarks.quantize [--rows 8] [--repeats 60] [--compile] [--out DIR]
    python -m benchmarks.quantize --model runs/smollm2/model [--rows 8]

Times forward passes over 1 and 6 tokens after a context of 128, with all kinds of weights
alternating: of the embedded draft and target, and of the draft inflated to about 200 million
parameters (``benchmarks.inflate``), whose speed is limited by memory bandwidth. Torchao's own
int8 tensors are compared, eagerly. With ``--compile``, all kinds are also timed under
``torch.compile`` (without a cache, over the same number of tokens), which takes minutes.

α = Σ min(p, q) is measured at every position of held-out text, this project's own sources, for
every draft with every target. The bar is an int8 draft that is 1.2 times as fast as the float32 one
with α within 0.02. Finally, measures tokens per second of speculative decoding. Writes JSON and a
Markdown page.

With ``--model``, a folder or a GGUF file, only the quality of that model is measured: the
perplexity of every kind on the same text, and its α as a draft of the model itself, that is one
less the total variation that the kind causes. Of a GGUF file the blocks are also kept as they are.
The table is printed and written to ``quantize-NAME.md``.
"""

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import outrider
from benchmarks import page
from benchmarks.inflate import Shape, inflate
from benchmarks.vs_transformers import PROMPTS
from outrider import Sampling, load_model
from outrider.engine import Engine
from outrider.runtime import HFModel
from outrider.runtime.hf.gguf import is_gguf
from outrider.runtime.hf.quantize import KEEP, quantize
from outrider.train.evaluate import acceptance

KINDS = ("none", "int8", "int8:32", "int4", "int4:128")
WIDTHS = (1, 6)
CONTEXT = 128
LENGTH = 256
LARGE = Shape(hidden_size=2048, num_layers=4, num_key_value_heads=16, intermediate_size=5632)
PAIRS = (  # target, draft; None decodes plainly
    *(("none", draft) for draft in (None, *KINDS)),
    *(("int8", draft) for draft in (None, "none", "int8")),
    ("int4", "int4"),
)

Run = Callable[[], object]


def of_kind(module: PreTrainedModel, kind: str) -> PreTrainedModel:
    """The model unquantized, quantized by Outrider, or by torchao alone."""
    if kind == "none":
        return module
    module = copy.deepcopy(module)
    if kind != "torchao int8":
        return quantize(module, kind)
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(module, Int8WeightOnlyConfig(set_inductor_config=False))
    return module


def size(module: nn.Module) -> int:
    """Bytes of all parameters and buffers; shared ones count once."""
    tensors: list[Any] = [*module.parameters(), *module.buffers()]
    parts = [
        getattr(t, name)
        for t in tensors
        for name in (t.__tensor_flatten__()[0] if hasattr(t, "__tensor_flatten__") else ("data",))
    ]
    shared = {part.data_ptr(): part.numel() * part.element_size() for part in parts}
    return sum(shared.values())


def medians(runs: Mapping[str, Run], repeats: int) -> dict[str, float]:
    """Median seconds of each; runs alternate, so that other load affects all of them alike."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 2):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if repeat > 1:
                taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def step(module: PreTrainedModel, width: int) -> Run:
    """A pass after a cached context, which is restored afterwards."""
    text_1T = torch.arange(CONTEXT)[None] % 1000 + 100
    cache: Any = module(input_ids=text_1T, use_cache=True).past_key_values

    def run() -> None:
        module(input_ids=text_1T[:, :width], past_key_values=cache, use_cache=True)
        cache.crop(-width)

    return run


def compiled(module: PreTrainedModel, width: int) -> Run:
    """A compiled pass over ``width`` tokens without context, after warm-up."""
    text_1T = torch.arange(width)[None] + 100
    graph: Any = torch.compile(module.forward, dynamic=False)

    def run() -> None:
        graph(input_ids=text_1T, use_cache=False)

    run()
    return run


def times(
    base: PreTrainedModel, repeats: int, build: Callable[[PreTrainedModel, int], Run]
) -> list[dict[str, Any]]:
    """Bytes, and seconds by width, of each kind of weights."""
    modules = {kind: of_kind(base, kind) for kind in (*KINDS, "torchao int8")}
    rows: dict[str, dict[str, Any]] = {
        kind: {"kind": kind, "seconds": {}, "bytes": size(module)}
        for kind, module in modules.items()
    }
    for width in WIDTHS:
        runs = {kind: build(module, width) for kind, module in modules.items()}
        for kind, seconds in medians(runs, repeats).items():
            rows[kind]["seconds"][str(width)] = seconds
        torch._dynamo.reset()
    return list(rows.values())


def held_out(tokenizer: Any, rows: int, length: int = LENGTH) -> Tensor:
    """Rows of this project's own sources, which are newer than the pair."""
    files = sorted(Path(outrider.__file__).parent.rglob("*.py"))
    ids: list[int] = []
    for file in files:
        ids += tokenizer(file.read_text(encoding="utf-8"))["input_ids"]
        if len(ids) >= 4 * rows * length:
            break
    picked = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return picked[:: max(1, len(picked) // rows)][:rows]


def quality(pair: tuple[HFModel, HFModel], rows: int) -> dict[str, Any]:
    """Perplexities of every kind, and α of every pair of kinds at temperatures 0 and 1."""
    text_BT = held_out(pair[0].tokenizer, rows)
    logits: dict[str, dict[str, Tensor]] = {"target": {}, "draft": {}}
    for role, model in zip(logits, pair, strict=True):
        for kind in KINDS:
            logits_BTV = of_kind(model.module, kind)(input_ids=text_BT, use_cache=False).logits
            logits[role][kind] = logits_BTV[:, :-1].flatten(0, 1)
    following = text_BT[:, 1:].flatten()
    return {
        "places": following.numel(),
        "perplexity": {
            role: {
                kind: math.exp(nn.functional.cross_entropy(logits_NV, following).item())
                for kind, logits_NV in of_role.items()
            }
            for role, of_role in logits.items()
        },
        "alpha": [
            {
                "target": p,
                "draft": q,
                "alpha": [acceptance(p_NV, q_NV, t).mean().item() for t in (0.0, 1.0)],
            }
            for p, p_NV in logits["target"].items()
            for q, q_NV in logits["draft"].items()
        ],
    }


def quality_of(source: str, rows: int) -> list[dict[str, Any]]:
    """The perplexity of every kind of a model's weights, and α of the kind as a draft of the model
    in float32, at temperatures 0 and 1."""
    model = load_model(source, dtype="float32", device="cpu")
    text_BT = held_out(model.tokenizer, rows)
    following = text_BT[:, 1:].flatten()
    kinds = (*KINDS, KEEP) if is_gguf(source) else KINDS
    found: list[dict[str, Any]] = []
    p_NV = torch.empty(0)
    for kind in kinds:
        if kind == KEEP:
            module = load_model(source, dtype="float32", device="cpu", quantized=KEEP).module
        else:
            module = of_kind(model.module, kind)
        logits_NV = module(input_ids=text_BT, use_cache=False).logits[:, :-1].flatten(0, 1)
        if kind == "none":
            p_NV = logits_NV
        perplexity = math.exp(nn.functional.cross_entropy(logits_NV, following).item())
        alpha = [acceptance(p_NV, logits_NV, t).mean().item() for t in (0.0, 1.0)]
        found.append(
            {"kind": kind, "bytes": size(module), "perplexity": perplexity, "alpha": alpha}
        )
    return found


def quality_page(source: str, positions: int, rows: Sequence[Mapping[str, Any]]) -> str:
    """The quality of one model as a page."""
    first = rows[0]["perplexity"]
    lines = [
        f"# Quantized weights of {Path(source).name}",
        "",
        f"{date.today().isoformat()}, float32 arithmetic, {positions:,} positions of held-out text "
        "(this project's own sources). α is that of the kind as a draft of the unquantized model.",
        *page.table(
            ("weights", "MB", "perplexity", "against unquantized", "α, T = 0", "α, T = 1"),
            (
                (
                    row["kind"],
                    f"{row['bytes'] / 1e6:.1f}",
                    f"{row['perplexity']:.3f}",
                    f"{row['perplexity'] / first - 1:+.2%}",
                    *(f"{each:.4f}" for each in row["alpha"]),
                )
                for row in rows
            ),
        ),
    ]
    return "\n".join(lines) + "\n"


def speeds(pair: tuple[HFModel, HFModel], tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Tokens per second of each pair of kinds, γ = 5, greedy, batch 1, each prompt in turn."""
    models = {
        (role, kind): model if kind == "none" else load_model(model, quantized=kind)
        for role, model in zip(("target", "draft"), pair, strict=True)
        for kind in KINDS
    }
    engines = {
        names: outrider.load(
            models["target", names[0]],
            None if names[1] is None else models["draft", names[1]],
            "plain" if names[1] is None else "speculative",
            "fixed",
            max_batch_size=1,
            measure=False,
        )
        for names in PAIRS
    }
    sampling = Sampling(temperature=0, max_new_tokens=tokens, ignore_eos=True)
    rates: dict[tuple[str, str | None], list[float]] = {names: [] for names in PAIRS}
    lengths = {}
    for repeat in range(repeats + 1):
        for names, engine in engines.items():
            start = time.perf_counter()
            results = [engine.generate(prompt, sampling) for prompt in PROMPTS[:4]]
            taken = time.perf_counter() - start
            lengths[names] = sum(len(r.token_ids) for r in results) / sum(
                r.stats.rounds for r in results
            )
            if repeat:
                rates[names].append(len(results) * tokens / taken)
    return [
        {
            "target": target,
            "draft": draft,
            "tokens_per_second": statistics.median(rates[target, draft]),
            "spread": [min(rates[target, draft]), max(rates[target, draft])],
            "acceptance_length": lengths[target, draft],
        }
        for target, draft in PAIRS
    ]


def verdict(report: Mapping[str, Any]) -> str:
    """Whether an int8 draft is 1.2 times as fast at α within 0.02."""
    seconds = {row["kind"]: row["seconds"]["1"] for row in report["models"][0]["rows"]}
    faster = seconds["none"] / seconds["int8"]
    alphas = {row["draft"]: row["alpha"] for row in report["quality"]["alpha"][: len(KINDS)]}
    apart = max(abs(a - b) for a, b in zip(alphas["none"], alphas["int8"], strict=True))
    met = "met" if faster >= 1.2 and apart <= 0.02 else "missed"
    return (
        f"Bar, an int8 draft at least 1.2 times as fast per step as the unquantized one, at α "
        f"within 0.02: **{met}**, {faster:.2f} times as fast, α {apart:.4f} apart (the larger of "
        f"T = 0 and 1)."
    )


def markdown(report: Mapping[str, Any]) -> str:
    """The report as a page."""
    about, quality = report["about"], report["quality"]
    lines = page.header(
        "Quantized weights",
        about,
        f"torchao {about['torchao']}. Activations and unquantized weights in {about['dtype']}. "
        f"Passes over 1 and 6 tokens after {CONTEXT}; kinds alternate, medians of "
        f"{about['repeats']} (inflated: a sixth of that). Compiled: a pass over as many tokens "
        "without context. 'torchao int8' are torchao's own tensors, which are dequantized in every "
        "pass; int8 and int4 are those of `quantize_draft` and `quantize_target`. The inflated "
        "draft is the embedded one with parameters that contribute nothing.",
    )
    lines += ["", verdict(report)]
    lines += page.table(
        ("model", "weights", "MB", "ms, 1 token", "ms, 6 tokens", "faster, 1 / 6 tokens"),
        _pass_rows(report["models"]),
        left=2,
    )
    perplexity = quality["perplexity"]
    lines += [
        "",
        f"On {quality['places']:,} positions of held-out text (this project's own sources):",
        *page.table(
            ("weights", "perplexity of the target", "of the draft"),
            (
                (kind, f"{perplexity['target'][kind]:.3f}", f"{perplexity['draft'][kind]:.3f}")
                for kind in KINDS
            ),
        ),
        *page.table(
            ("target", "draft", "α, T = 0", "α, T = 1"),
            (
                (row["target"], row["draft"], *(f"{each:.4f}" for each in row["alpha"]))
                for row in quality["alpha"]
            ),
            left=2,
        ),
        "",
        f"Decoding, greedy, γ = 5, batch 1, 4 prompts of {about['tokens']} tokens, medians of "
        f"{about['rounds']}. With an unquantized target, all rows have the same output, whatever "
        "the draft.",
    ]
    lines += page.table(
        (
            "target",
            "draft",
            "tokens/s",
            "spread",
            "acceptance length",
            "against plain, unquantized",
        ),
        _speed_rows(report["speeds"]),
        left=2,
    )
    return "\n".join(lines) + "\n"


def _pass_rows(models: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Bytes and pass times of each model with each kind of weights."""
    for model in models:
        plain = model["rows"][0]["seconds"]
        for row in model["rows"]:
            one, six = (row["seconds"][str(width)] for width in WIDTHS)
            yield (
                model["name"],
                row["kind"],
                f"{row['bytes'] / 1e6:.1f}",
                f"{one * 1e3:.2f}",
                f"{six * 1e3:.2f}",
                f"{plain['1'] / one:.2f} / {plain['6'] / six:.2f}",
            )


def _speed_rows(found: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Speed of each pair; the first is plain decoding with unquantized weights."""
    plain_rate = found[0]["tokens_per_second"]
    for row in found:
        rate = row["tokens_per_second"]
        low, high = row["spread"]
        yield (
            row["target"],
            row["draft"] or "(plain)",
            f"{rate:.1f}",
            f"{low:.1f}-{high:.1f}",
            f"{row['acceptance_length']:.2f}",
            f"{rate / plain_rate:.2f}",
        )


@torch.no_grad()
def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measures everything."""
    import torchao

    engine: Engine = outrider.load(dtype="float32")
    assert engine.draft is not None
    pair = engine.target, engine.draft
    bases: Sequence[tuple[str, PreTrainedModel]] = (
        ("draft, 2.5M", pair[1].module),
        ("target, 12.6M", pair[0].module),
        ("inflated draft, 200M", inflate(pair[1].module, LARGE)),
    )
    models = []
    for name, base in bases:
        few = options.repeats if base is not bases[-1][1] else max(5, options.repeats // 6)
        models.append({"name": name, "rows": times(base, few, step)})
        print(models[-1], flush=True)
        if options.compile and base is not bases[1][1]:
            rows = times(base, few, compiled)
            models.append({"name": f"{name}, compiled", "rows": rows})
            print(models[-1], flush=True)
    return {
        "about": page.about(
            f"python -m benchmarks.quantize --rows {options.rows} --repeats {options.repeats} "
            f"--rounds {options.rounds} --tokens {options.tokens}"
            + (" --compile" if options.compile else ""),
            torchao=torchao.__version__,
            dtype=str(pair[0].dtype).removeprefix("torch."),
            repeats=options.repeats,
            tokens=options.tokens,
            rounds=options.rounds,
        ),
        "models": models,
        "quality": quality(pair, options.rows),
        "speeds": speeds(pair, options.tokens, options.rounds),
    }


def main() -> None:
    """Parses the options, measures, writes the report and prints the page."""
    parser = page.parser(__doc__)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--model", help="measure only the quality of this folder or GGUF file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.model is not None:
        with torch.no_grad():
            rows = quality_of(options.model, options.rows)
        text = quality_page(options.model, options.rows * (LENGTH - 1), rows)
        options.out.mkdir(parents=True, exist_ok=True)
        file = options.out / f"quantize-{Path(options.model).stem}.md"
        file.write_text(text, encoding="utf-8")
        print(text)
        return
    report = run(options)
    page.publish(options.out, "quantize", report, markdown(report))


if __name__ == "__main__":
    main()
