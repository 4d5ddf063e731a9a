"""What a recipe measures with. Everything that is measured is kept and not run again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from outrider import assets
from outrider.drafters.heads.head import Head
from outrider.drafters.heads.kinds import HeadFormat, format_of
from outrider.engine import Engine
from outrider.lab.bench import CellResult, DataSpec, MethodSpec, plan_of, run_bench
from outrider.lab.bench.identity import source_hash
from outrider.lab.bench.measure import as_prompt
from outrider.lab.bench.plan import EMBEDDED
from outrider.lab.data import as_prompts, chosen, read_data
from outrider.lab.frontier.document import dumps
from outrider.lab.metadata import run_metadata
from outrider.lab.whole_file import write_whole
from outrider.methods import METHODS
from outrider.runtime import HFModel, load_model
from recipes.reproduce import outputs
from recipes.reproduce.effect import Values
from recipes.reproduce.outputs import Number
from recipes.reproduce.recipe import MissingDraftError, NotTestableError, UntimedError
from recipes.reproduce.subject import Kind, Size, Subject

T = TypeVar("T")

Report = Callable[[str], None]


class Cells:
    """The results of a plan.

    Args:
        results: of the runner.

    Raises:
        NotTestableError: a method failed.
    """

    def __init__(self, results: Sequence[CellResult]) -> None:
        for result in results:
            if result.error:
                raise NotTestableError(f"{result.cell}: {result.error}")
        self.all = list(results)

    def one(self, title: str, **where: Any) -> CellResult:
        """The cell of a method with this title and these attributes, such as ``gamma=3``."""
        found = [
            each
            for each in self.all
            if each.cell.title == title
            and all(getattr(each.cell, name) == value for name, value in where.items())
        ]
        assert len(found) == 1, f"{len(found)} cells {title!r} with {where}"
        return found[0]


class Lab:
    """Runs the benchmarks of recipes on one subject.

    Args:
        subject: models and prompts.
        size: how much to run.
        folder: for everything that is measured; a run that was interrupted goes on from it.
        report: called with what is being done.
        seed: of the first repeat.
    """

    def __init__(
        self,
        subject: Subject,
        size: Size,
        folder: Path,
        report: Report = lambda stage: None,
        seed: int = 0,
    ) -> None:
        self.subject = subject
        self.size = size
        self.folder = folder
        self.seed = seed
        self.cells: list[CellResult] = []
        self._report = report
        self._models: dict[str, HFModel] = {}

    @property
    def draft(self) -> str:
        """The draft that recipes take where they need one.

        Raises:
            MissingDraftError: the subject has none.
        """
        self.require_draft()
        return self.subject.drafts[0]

    def require_draft(self) -> None:
        """Raises MissingDraftError if the subject has no draft model."""
        if not self.subject.drafts:
            raise MissingDraftError(f"{self.subject.name} has no draft model")

    def speculative(self, **parameters: object) -> str:
        """Rejection sampling of chains, under the name ``speculative``: the method of the first
        draft model, or of the head where the subject has no draft model.

        Args:
            parameters: of the method, such as ``gamma=4``.

        Raises:
            MissingDraftError: the subject has neither.
        """
        method = "speculative"
        if self.subject.drafts or not self.subject.heads:
            self.require_draft()
        else:
            method = _format_of(self.subject.heads[0]).method
        written = "".join(f"{name}={value}," for name, value in parameters.items())
        return f"{method}:{written}label=speculative"

    def prompt_ids(self, kind: Kind) -> list[list[int]]:
        """The prompts of a kind as token ids, as many as the size of the run says."""
        target = self.model(self.subject.target, "target")
        engine = Engine(target, None, METHODS["plain"], generation_config=False)
        spec = self.subject.prompts[kind]
        data = chosen(read_data(spec.source), spec.tasks, spec.limit or self.size.prompts)
        data = as_prompts(data, spec.prompts, target)
        return [engine.encode(as_prompt(each)) for each in data][: self.size.prompts]

    def choose(self, quick: T, full: T) -> T:
        """A setting by the size of the run."""
        return full if self.size.timed else quick

    def require_times(self) -> None:
        """Raises UntimedError in a run that measures no times."""
        if not self.size.timed:
            raise UntimedError("the effect is one of times, which a quick run does not measure")

    def require_full(self, why: str) -> None:
        """Raises UntimedError in a quick run of a recipe that takes too long for one."""
        if not self.size.timed:
            raise UntimedError(f"not in quick runs, since {why}")

    # ------------------------------------------------------------------------- measurements

    def bench(
        self,
        *methods: str | MethodSpec,
        data: Kind | DataSpec = "code",
        **settings: Any,
    ) -> Cells:
        """The cells of these methods beside plain decoding. The runner loads the models itself: it
        may not pack the weights of models that somebody else holds, and forward passes over
        unpacked weights take up to twice as long.

        Args:
            methods: as the benchmark takes them; a label names a method on the page.
            data: a kind of prompts, or a data set.
            settings: of the plan, in place of the subject's and the size's.
        """
        size, subject = self.size, self.subject
        spec = data if isinstance(data, DataSpec) else subject.prompts[data]
        limited = replace(spec, limit=spec.limit or size.prompts)
        values: dict[str, Any] = {
            "target": subject.target,
            "drafts": [*subject.drafts[:1], *subject.heads[:1]],
            "methods": list(methods),
            "data": [limited],
            "max_new_tokens": size.tokens,
            "ignore_eos": True,
            "repeats": size.repeats,
            "batch_sizes": [size.batch_size],
            "dtype": size.dtype,
            "compile": subject.compile,
            "warmup": int(size.timed),
            "seed": self.seed,
        } | settings
        if not size.timed and not any(values.get("temperatures", (0.0,))):
            values["repeats"] = 1  # greedy outputs are the same in each
        values["max_repeats"] = values["repeats"]
        if not subject.drafts:
            self._check_drafts(methods)
        plan = plan_of(values)
        results = run_bench(
            plan,
            lambda at: self._report(f"{at.done}/{at.total} {at.stage}"),
            folder=self.folder.joinpath(*plan.meters),  # cells do not say which meters were read
        )
        self.cells += results
        return Cells(results)

    def kept(self, name: str, compute: Callable[[], Any], **settings: Any) -> Any:
        """What a computation returns, as JSON; read from disk if the same code has computed it with
        the same settings before.

        Args:
            name: of the computation.
            compute: returns what JSON can hold.
            settings: all that the result depends on besides the code and the subject.
        """
        code = sha256(Path(compute.__code__.co_filename).read_bytes()).hexdigest()
        depends = json.dumps(
            [
                *(name, code, source_hash(), self.seed),
                *(self.subject.target, self.subject.drafts, settings),
            ],
            sort_keys=True,
        )
        file = self.folder / f"{name}-{sha256(depends.encode()).hexdigest()[:16]}.json"
        if not file.exists():
            self._report(name)
            text = dumps(compute())
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, text)
        return json.loads(file.read_text(encoding="utf-8"))

    def _check_drafts(self, methods: Sequence[str | MethodSpec]) -> None:
        """Raises MissingDraftError if a method needs the draft model that the subject lacks."""
        for each in methods:
            spec = each if isinstance(each, MethodSpec) else MethodSpec.parse(each)
            if spec.method.needs_draft and spec.draft is None:
                raise MissingDraftError(f"{self.subject.name} has no draft model for {spec.title}")

    # -------------------------------------------------------------------------------- models

    def model(self, name: str, role: str = "draft") -> HFModel:
        """A loaded model; ``embedded`` is the target or the draft of the embedded pair."""
        key = f"{role} {name}"
        if key not in self._models:
            source = self.source(name, role)
            self._models[key] = load_model(source, dtype=self.size.dtype, device="auto", role=role)
        return self._models[key]

    def source(self, name: str, role: str = "draft") -> str:
        """The folder of a model of the embedded pair; the name of any other."""
        paths = {"target": assets.target_path, "draft": assets.draft_path}
        return str(paths[role]()) if name == EMBEDDED else name

    def cost(self, draft: str | None = None) -> float:
        """c by counting: weights that a forward pass of the draft reads over those of the target.
        An embedding table that the output layer does not share is read by the row. Without a draft
        model, c is that of the head."""
        target = self.model(self.subject.target, "target")
        if draft is None and not self.subject.drafts and self.subject.heads:
            head = self.subject.heads[0]
            read = _weights_of_head(_format_of(head).load(head, target))
        else:
            read = _weights_read(self.model(draft or self.draft, "draft"))
        return read / _weights_read(target)

    def speed(self, cell: CellResult, c: float, passes: float) -> Values:
        """Tokens per second of each output where times are measured, otherwise counted.

        Args:
            cell: of a benchmark.
            c: counted cost of a draft pass.
            passes: draft passes of a round.
        """
        measured = outputs.tokens_per_second
        number: Number = measured if self.size.timed else outputs.counted_speed(c, passes)
        return outputs.values(cell, number)

    @property
    def unit_of_speed(self) -> str:
        """What :meth:`speed` is measured in."""
        return "tokens/s" if self.size.timed else "tokens per counted target pass"

    def about(self, command: str) -> Mapping[str, Any]:
        """Models, sizes and machine."""
        return run_metadata(
            subject=self.subject.name,
            target=self.subject.target,
            drafts=[*self.subject.drafts, *self.subject.heads],
            seed=self.seed,
            compile=self.subject.compile,
            size=self.size.name,
            prompts=self.size.prompts,
            tokens=self.size.tokens,
            repeats=self.size.repeats,
            source=source_hash(),
            command=command,
        )


def _weights_read(model: HFModel) -> int:
    module: Any = model.module
    total = sum(each.numel() for each in module.parameters())
    table = module.get_input_embeddings().weight
    head = module.get_output_embeddings()
    tied = head is not None and head.weight is table
    return total if tied else total - table.numel()


def _format_of(head: str) -> HeadFormat:
    found = format_of(head)
    assert found is not None
    return found


def _weights_of_head(head: Head) -> int:
    """Without its embedding tables, of which it reads rows."""
    modules = [each for each in vars(head).values() if isinstance(each, nn.Module)]
    tables = [part for each in modules for part in each.modules() if isinstance(part, nn.Embedding)]
    whole = sum(each.numel() for module in modules for each in module.parameters())
    return whole - sum(table.weight.numel() for table in tables)
