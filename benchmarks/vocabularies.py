"""Draft models with other vocabularies: tokens per target pass with `tli` and `slem`.

    python -m benchmarks.vocabularies [--max-new-tokens 64] [--out DIR]

No second model with its own vocabulary is available here, so the embedded draft gets other ones:
its own ids shuffled (the same strings, as a check: nothing may change), and its byte-level
vocabulary cut to the first 3,000 and 1,000 tokens (fewer merges, the same weights for the remaining
tokens). Unlike a real model with such a vocabulary, the draft was not trained on text tokenised
that way, so the loss measured here is larger than that of the methods. Everything runs in float32,
so that the counts are the same on every machine; nothing is timed.

transformers runs the same pairs with ``assistant_tokenizer`` at temperature 0, by exact match of
text. Above temperature 0, its intersection (version 5.23) raises an AttributeError if all tokens of
the draft are in the target's vocabulary, as here. If both vocabularies have the same size, it
accepts no ``assistant_tokenizer`` and treats ids as equal, so shuffled ids cannot be run. Writes
JSON and a Markdown table.

Legend: V the draft's vocabulary, H hidden width.
"""

import copy
import json
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from benchmarks import page
from benchmarks.vs_transformers import PROMPTS
from outrider import Engine, Sampling, assets
from outrider.methods import METHODS
from outrider.runtime import HFModel, load_model

SIZES = (3000, 1000)
NUM_SPECULATIVE_TOKENS = 5
COMMAND = "python -m benchmarks.vocabularies"
METHODS_OF = {"own": ("speculative", "sample-match", "tli", "slem")}


def with_tokens(draft: HFModel, kept: list[int], name: str) -> HFModel:
    """The draft with some of its tokens in a given order, and only the merges among them."""
    tokenizer: Any = draft.tokenizer
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    number = {old: new for new, old in enumerate(kept)}
    vocab = {form: number[old] for form, old in data["model"]["vocab"].items() if old in number}
    merges = [pair for pair in data["model"]["merges"] if {*pair, "".join(pair)} <= {*vocab}]
    data["model"] |= {"vocab": vocab, "merges": merges}
    for added in data["added_tokens"]:
        added["id"] = number[added["id"]]
    end = tokenizer.eos_token
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(data)), bos_token=end, eos_token=end
    )
    module: Any = copy.deepcopy(draft.module)
    ends = (module.get_input_embeddings, module.get_output_embeddings)
    rows = [end().weight.detach()[torch.tensor(kept)] for end in ends]
    module.resize_token_embeddings(len(kept))
    with torch.no_grad():
        for end, rows_VH in zip(ends, rows, strict=True):
            end().weight.copy_(rows_VH)
    return HFModel(module, words, name)


def drafts(draft: HFModel, sizes: tuple[int, ...] = SIZES) -> dict[str, HFModel]:
    """The draft with each vocabulary that is compared."""
    order = torch.randperm(draft.num_tokens, generator=torch.Generator().manual_seed(0))
    found = {"own": draft, "shuffled": with_tokens(draft, order.tolist(), "shuffled")}
    for size in sizes:
        found[f"first {size}"] = with_tokens(draft, list(range(size)), f"first {size}")
    return found


def ours(target: HFModel, draft: HFModel, method: str, sampling: Sampling) -> dict[str, float]:
    """Outrider with one method on all prompts."""
    engine = Engine(target, draft, METHODS[method], num_speculative_tokens=NUM_SPECULATIVE_TOKENS)
    stats = engine.generate(PROMPTS, sampling).stats
    return {"length": stats.acceptance_length, "rate": stats.acceptance_rate, "alpha": stats.alpha}


def theirs(target: HFModel, draft: HFModel, num: int) -> dict[str, float]:
    """transformers on the same prompts, greedy: tokens per target pass, prefill included."""
    assistant: Any = copy.deepcopy(draft.module)
    config = assistant.generation_config
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    passes = emitted = 0

    def count(*_: object) -> None:
        nonlocal passes
        passes += 1

    hook = target.module.register_forward_pre_hook(count)
    for prompt in PROMPTS:
        config.num_assistant_tokens = NUM_SPECULATIVE_TOKENS
        tokenizer: Any = target.tokenizer
        inputs = tokenizer(prompt, return_tensors="pt")
        module: Any = target.module
        done = module.generate(
            **inputs,
            assistant_model=assistant,
            tokenizer=target.tokenizer,
            assistant_tokenizer=draft.tokenizer,
            do_sample=False,
            max_new_tokens=num,
            min_new_tokens=num,
        )
        emitted += done.shape[1] - inputs["input_ids"].shape[1]
    hook.remove()
    return {"length": emitted / passes}


def measure(
    target: HFModel, draft: HFModel, temperature: float, num: int, sizes: tuple[int, ...] = SIZES
) -> dict[str, dict[str, dict[str, float]]]:
    """The results by method and vocabulary, at one temperature."""
    sampling = Sampling(temperature=temperature, max_new_tokens=num, ignore_eos=True)
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for name, each in drafts(draft, sizes).items():
        for method in METHODS_OF.get(name, ("tli", "slem")):
            rows.setdefault(method, {})[name] = ours(target, each, method, sampling)
        if each.num_tokens != target.num_tokens and temperature == 0:
            rows.setdefault("transformers", {})[name] = theirs(target, each, num)
    return rows


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about = report["about"]
    library = page.version("transformers", about)
    settings = (
        f"transformers {library}, embedded pair, float32, γ = "
        f"{NUM_SPECULATIVE_TOKENS}, {about['prompts']} prompts × {about['max_new_tokens']} tokens. "
        "Tokens per pass of the target; in brackets α."
    )
    lines = page.header("Drafts with another vocabulary", about, settings)
    for temperature, rows in report["temperatures"].items():
        names = list(rows["tli"])
        shown = [
            (method, *(_cell(cells.get(name)) for name in names)) for method, cells in rows.items()
        ]
        lines += ["", f"Temperature {temperature}:"]
        lines += page.table(("draft's vocabulary", *names), shown)
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, float] | None) -> str:
    if found is None:
        return ""
    return f"{found['length']:.2f}" + (f" ({found['alpha']:.2f})" if "alpha" in found else "")


def main() -> None:
    """Parses the options, measures, writes the report and prints the page."""
    parser = page.parser(__doc__, threads=None)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()
    target = load_model(assets.target_path(), dtype="float32", device="cpu", role="target")
    draft = load_model(assets.draft_path(), dtype="float32", device="cpu", role="draft")
    report = {
        "about": page.about(
            f"{COMMAND} --max-new-tokens {options.max_new_tokens}",
            prompts=len(PROMPTS),
            max_new_tokens=options.max_new_tokens,
        ),
        "temperatures": {
            str(temperature): measure(target, draft, temperature, options.max_new_tokens)
            for temperature in (0.0, 0.8)
        },
    }
    page.publish(options.out, "vocabularies", report, markdown(report))


if __name__ == "__main__":
    main()
