"""``outrider sharding``: measures the rounds of a target that is split among processes."""

import json
from typing import Annotated

import typer

from outrider.cli.errors import fail
from outrider.cli.options.models import Models
from outrider.cli.options.output import AsJson
from outrider.cli.options.sharding import REPLICATED, Sharding
from outrider.cli.options.speculation import Speculation
from outrider.cli.sharded import is_sharded, joined_engine
from outrider.cli.start import start

Repeats = Annotated[
    int, typer.Option(metavar="N", min=1, help="How often each exchange and forward pass runs.")
]
Tokens = Annotated[
    int, typer.Option("--max-new-tokens", metavar="N", min=1, help="Tokens of the measured rounds.")
]
_PROMPT = "def fibonacci(n):\n"


def sharding(
    models: Models,
    speculation: Speculation,
    sharding: Sharding,
    repeats: Repeats = 20,
    max_new_tokens: Tokens = 64,
    as_json: AsJson = False,
) -> None:
    """Measure what rounds cost with a target that is split among processes.

    Fits latency and bandwidth of the link between the processes, predicts from them the time of a
    forward pass and of a round, and measures both beside it: with the draft model on every
    process, and on one:

      torchrun --nproc-per-node 2 -m outrider sharding --target big/ \\
        --draft small/
    """
    if not is_sharded(sharding):
        raise fail(
            "outrider sharding needs several processes: start torchrun --nproc-per-node N -m "
            "outrider sharding"
        )
    if sharding.draft_placement != REPLICATED:
        raise fail(
            f"outrider sharding measures both placements: leave out --draft-placement "
            f"{sharding.draft_placement}"
        )
    start("outrider.cluster.sharded.measure")
    from outrider.cluster.sharded.measure import lines, measure
    from outrider.sampling import Sampling

    sampling = Sampling(temperature=0, max_new_tokens=max_new_tokens, ignore_eos=True)
    with joined_engine(sharding, models, speculation.with_fixed_length) as engine:
        found = measure(engine.ranks, engine, _PROMPT, sampling, repeats)
    if found is None:
        return
    if as_json:
        typer.echo(json.dumps(found.document()))
    else:
        for line in lines(found):
            typer.echo(line)
