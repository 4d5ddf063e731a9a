"""``outrider ngram build``: counts n-grams of a corpus, or of a model's samples, into a file."""

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.engines import open_engine
from outrider.cli.errors import fail, say
from outrider.cli.group import Group, add_command
from outrider.cli.options.models import (
    EMBEDDED,
    Compile,
    Device,
    Dtype,
    KvDtype,
    MaxMemory,
    Models,
    QuantizeTarget,
    Target,
    TrustRemoteCode,
)
from outrider.cli.options.output import AsJson
from outrider.cli.options.sampling import MaxNewTokens, Seed, Temperature
from outrider.cli.options.speculation import Speculation
from outrider.cli.progress import Progress
from outrider.cli.prompt import read_prompts
from outrider.cli.start import start

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_CORPUS, _TABLE, _SAMPLES = "Corpus", "Table", "Samples"
_BATCH_SIZE = 32  # of the target when it generates samples


def build(
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="The n-gram file to write.", rich_help_panel=_TABLE),
    ],
    order: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=5, help="Longest n-grams to count.", rich_help_panel=_TABLE
        ),
    ] = 4,
    min_count: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Leave out n-grams of two or more tokens that occur less often; their probability "
            "goes to shorter ones. Makes the file smaller.",
            rich_help_panel=_TABLE,
        ),
    ] = 1,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Count this text file, these JSON lines (FILE.jsonl, the text under the key "
            "'text'), or the .txt, .md, .py and .jsonl files of this folder. May be repeated.",
            rich_help_panel=_CORPUS,
        ),
    ] = None,
    from_samples: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Count N tokens that the target generates, preceded by the last four tokens of "
            "their prompts.",
            rich_help_panel=_CORPUS,
        ),
    ] = 0,
    target: Target = EMBEDDED,
    dtype: Dtype = "auto",
    device: Device = "auto",
    trust_remote_code: TrustRemoteCode = False,
    quantize_target: QuantizeTarget = None,
    kv_dtype: KvDtype = "auto",
    compile: Compile = "off",
    max_memory: MaxMemory = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Prompts for the samples, used in turn: one per line, or JSON lines with a "
            "'prompt' if FILE ends in .jsonl. Default: the beginning-of-sequence token.",
            rich_help_panel=_SAMPLES,
        ),
    ] = None,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 256,
    as_json: AsJson = False,
) -> None:
    """Count n-grams, in the target's tokens, into a file that method 'ngram' drafts from.

    From text that resembles the target's output:

      outrider ngram build --out code.safetensors --text src/

      outrider generate "def f(x):" --method ngram -o file=code.safetensors

    Or from the target's own samples:

      outrider ngram build --out own.safetensors --from-samples 20000
    """
    if not text and not from_samples:
        raise fail("nothing to count: name a --text file or folder, or --from-samples N tokens")
    if not out.absolute().parent.is_dir():
        raise fail(f"--out {out}: there is no folder {out.parent}")
    prompts = None if file is None else read_prompts(file)
    start()
    from outrider import assets
    from outrider.drafters.ngram.drafter import vocabulary_digest
    from outrider.runtime import load_tokenizer
    from outrider.sampling import Sampling
    from outrider.train.ngram import build_ngram
    from outrider.train.ngram_documents import encoded, read_texts, samples

    sampling = Sampling(temperature=temperature, seed=seed, max_new_tokens=max_new_tokens)
    source = str(assets.target_path()) if target == EMBEDDED else target
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code, role="target")
    vocabulary = tokenizer.get_vocab()

    models = Models(
        target,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        quantize_target=quantize_target,
        kv_dtype=kv_dtype,
        compile=compile,
    )
    sample_prompts = _sample_prompts(prompts, tokenizer) if from_samples else []
    plain = Speculation(method="plain")
    engine = (
        open_engine(models, plain, max_batch_size=_BATCH_SIZE, max_memory=max_memory)
        if from_samples
        else None
    )

    def documents() -> "Iterator[list[int]]":
        yield from encoded(tokenizer, read_texts(text or ()))
        if engine is not None:
            yield from samples(engine, from_samples, sampling, sample_prompts)

    began = time.perf_counter()
    with Progress(as_json) as progress:
        progress.show("counting")
        report = build_ngram(
            out,
            documents(),
            max(vocabulary.values()) + 1,
            order,
            min_count,
            vocabulary=vocabulary_digest(vocabulary),
        )
    report["sampled"] = from_samples
    if as_json:
        typer.echo(json.dumps(report))
        return
    counts = ", ".join(f"{count:,} of order {k}" for k, count in enumerate(report["grams"], 1))
    say(
        f"{_token_counts(report)}; n-grams: {counts}; {report['bytes'] / 1e6:.1f} MB in "
        f"{time.perf_counter() - began:.1f} s: {out}"
    )


def _token_counts(report: dict[str, Any]) -> str:
    """The number of tokens counted, by where they come from."""
    tokens, sampled = report["tokens"], report["sampled"]
    if not sampled:
        return f"{tokens:,} tokens"
    return (
        f"{tokens:,} tokens, {sampled:,} of them written by the target and {tokens - sampled:,} "
        f"of text and of the prompts before them"
    )


def _sample_prompts(prompts: list[str] | None, tokenizer: Any) -> "Sequence[str | list[int]]":
    """The prompts to sample from; by default the token that begins a sequence."""
    if prompts is not None:
        return prompts
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if start is None:
        raise fail(
            "the target's tokenizer has no beginning-of-sequence token: pass prompts with -f"
        )
    return [[start]]


ngram = typer.Typer(
    name="ngram",
    cls=Group,
    help="N-gram drafts: build the file that method 'ngram' drafts from.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@ngram.callback()
def _ngram() -> None:
    """Without this callback typer would make ``build``, the only command, the group itself."""


add_command(ngram, build, "build")
