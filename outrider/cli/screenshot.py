"""Generates the README's picture of a trace: ``python -m outrider.cli.screenshot``."""

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from outrider.cli.demo import PROMPTS, STOP
from outrider.cli.engines import open_engine
from outrider.cli.follow import follow
from outrider.cli.options.models import Models
from outrider.cli.options.speculation import Speculation
from outrider.cli.start import start
from outrider.cli.summary import summary_line
from outrider.cli.trace import Painter, legend

PICTURE = Path(__file__).parents[2] / "docs" / "img" / "trace.svg"
PROMPT = PROMPTS[1]
COMMAND = 'outrider generate "$PROMPT" --trace --temperature 0'
WIDTH = 80


def screenshot(target: str = "embedded", draft: str | None = None, tokens: int = 120) -> str:
    """The trace of a real run as SVG, without its speed, which would change from run to run."""
    start()
    from outrider.sampling import Sampling

    engine = open_engine(Models(target, draft), Speculation(num_speculative_tokens=5))
    console = Console(
        record=True,
        width=WIDTH,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        highlight=False,
    )
    painter = Painter(engine, engine.encode(PROMPT), colour=True)
    pieces: list[Segment] = []
    sampling = Sampling(temperature=0, max_new_tokens=tokens, stop=STOP)
    result = follow(
        engine, PROMPT, sampling, lambda event: pieces.extend(painter.paint(event).segments)
    )
    console.print(f"$ {COMMAND}", markup=False)
    console.print(legend(console), end="")
    text = Text(PROMPT, style="dim", end="")
    for segment in pieces:
        text.append(segment.text, segment.style)
    console.print(text)
    if not result.text.endswith("\n"):
        console.print()
    summary = re.sub(r", \d+ tok/s", "", summary_line(result))
    console.print(summary, markup=False)
    picture = console.export_svg(title="Outrider")
    return re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # loads no remote font


if __name__ == "__main__":
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(screenshot(), encoding="utf-8")
    sys.stdout.write(f"wrote {PICTURE.name}\n")
