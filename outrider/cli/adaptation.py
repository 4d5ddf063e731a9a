"""Adaptation during one command: what is generated is learned before the command ends."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.cli.options.adaptation import Adapting
from outrider.cli.options.models import Models

if TYPE_CHECKING:
    from outrider.engine import Engine
    from outrider.train.online import Adaptation


@dataclass
class Learning:
    """Adaptation during a command; without one if it is not wanted.

    Attributes:
        line: what became of it, for the summary; empty before the end, or if it is not wanted.
    """

    adaptation: "Adaptation | None" = None
    folder: Path = Path()
    line: str = ""

    def finish(self) -> None:
        """Learns from the output, saves the weights and writes the line."""
        if self.adaptation is None:
            return
        self.adaptation.flush()
        state = self.adaptation.state
        what = "1 position" if state.tokens_seen == 1 else f"{state.tokens_seen} positions"
        self.line = (
            f"adapted: version {state.version} after step {state.step}, learned from {what} | "
            f"{self.folder}"
        )
        if state.status != "running":
            self.line = f"not adapted: {state.status}"


@contextmanager
def adapting(engine: "Engine", options: Adapting, models: Models) -> Iterator[Learning]:
    """Adapts the engine within the context.

    A command generates little, so steps are small, weights are published at the end, and they serve
    without a trial.
    """
    if not options.wanted:
        yield Learning()
        return
    from outrider.train.online import AdaptSettings

    folder = options.adapt_folder or _default_folder(engine, models)
    settings = AdaptSettings(where="idle", publish_every=2**20, trial_rounds=0)
    with engine.adapt(folder, settings) as adaptation:
        yield Learning(adaptation, folder)


def _default_folder(engine: "Engine", models: Models) -> Path:
    """The folder of a pair of models in the cache. It is named by their weights, so that a draft
    model that was trained anew begins anew."""
    from outrider.cache_folder import cache_folder
    from outrider.lab.model_files import fingerprint

    draft = models.draft or models.target  # the embedded draft model has the name of its target
    key = [fingerprint(str(models.target), "target"), fingerprint(str(draft), "draft")]
    for model in (engine.target, engine.draft):
        config = None if model is None else model.module.config
        key.append(str(getattr(config, "_commit_hash", None)))  # of a hub id
    key.append(str(models.dtype))
    return cache_folder() / "adapted" / hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
