"""The engine: one target, one method, any number of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import overload

from outrider.core.errors import IncompatibleError
from outrider.core.protocols import Verifier
from outrider.drafters.policy import DraftLength
from outrider.drafters.whole import WholeDrafter
from outrider.engine.admission import STRETCH, Memory, parse_bytes
from outrider.engine.budget import NUM_SPECULATIVE_TOKENS, check_range, check_speculative_tokens
from outrider.engine.detokenize import Detokenizer
from outrider.engine.intake import Intake, Prompt
from outrider.engine.judged import CompiledJudge
from outrider.engine.request import Event, Request, Result, Results, Row
from outrider.engine.slots import Slots, models_of
from outrider.engine.stop import Ending
from outrider.methods import Method, Parts, Recipe
from outrider.models import HFModel, check_kinds, check_vocabularies
from outrider.models.ends import eos_ids
from outrider.models.package import packaged
from outrider.models.slabs import Allowance, KvDtype, check_kv_dtype
from outrider.sampling import Sampling


class Engine:
    """Generates text by one method; build it with :func:`outrider.load`.

    It may be used from several threads, and its models by several engines: every call runs batches
    of its own. Under ``max_memory`` a request for which other threads leave no room is an error.

    Args:
        target: the model whose law the text has.
        draft: the model that rides ahead, where the method needs one.
        method: a row of ``outrider.methods``.
        num_speculative_tokens: γ, most tokens drafted per round (of a tree: its most levels), 1
            to 64; None takes the drafter's own depth if it has one, such as a tree's, else 5.
        draft_confidence: stop drafting after a token less probable than this; 0 never.
        draft_length: ``fixed``; ``heuristic[:START]``, which grows by two where all of a draft was
            accepted and else shrinks by one; ``confidence:C``; or ``survival:THETA``, which stops
            once the drafted tokens' joint probability is below 1 - θ.
        max_batch_size: rows that run at the same time; more requests wait for a free one.
        max_memory: most bytes of key-value slabs, target's and draft's together; a number, or a
            text such as ``512MiB`` or ``2GB``. Requests wait until theirs fit.
        kv_dtype: how slabs store numbers: ``auto`` (as the models do), ``bfloat16`` or ``int8``
            (a scale per token and head); see ``models/slabs.py`` for the error. In the target's
            slabs it changes the law that is sampled; in the draft's it does not.
        options: the method's own parameters by name, such as ``{"budget": 0.2}``.
        verifier: a rule of your own in place of the method's.
        measure: work out how far a lossy rule strays, for ``result.stats``; costs a few passes
            over the vocabulary per drafted token.

    Raises:
        InvalidParameterError: a number outside its range, an option the method has not.
        IncompatibleError: a method without the draft model it needs, a rule that cannot judge it.
        VocabularyMismatchError: draft and target with different vocabularies, where the method
            needs equal ones.
    """

    def __init__(
        self,
        target: HFModel,
        draft: HFModel | None,
        method: Method,
        *,
        num_speculative_tokens: int | None = None,
        draft_confidence: float = 0.0,
        draft_length: str | DraftLength = "fixed",
        max_batch_size: int = 16,
        max_memory: int | str | None = None,
        kv_dtype: KvDtype = "auto",
        options: Mapping[str, object] | None = None,
        verifier: Verifier | None = None,
        measure: bool = True,
    ) -> None:
        check_speculative_tokens(num_speculative_tokens)
        check_range("max_batch_size", max_batch_size, 65536)
        check_kv_dtype(kv_dtype)
        allowance = None if max_memory is None else Allowance(parse_bytes(max_memory))
        recipe = method.recipe(options)
        if verifier is not None:
            recipe = Recipe(verifier, verifier, recipe.drafter)
        if method.needs_draft and draft is None:
            raise IncompatibleError(
                f"method {method.name!r} needs a draft model: pass draft=..., or take "
                f"method='plain'"
            )
        length = DraftLength.parse(draft_length) if isinstance(draft_length, str) else draft_length
        if length.and_confidence(draft_confidence) and not method.stops_when_unsure:
            raise IncompatibleError(
                f"draft_confidence={draft_confidence}, draft_length={str(draft_length)!r}: method "
                f"{method.name!r} drafts no chain that could stop when it is unsure; leave them at "
                f"0 and 'fixed'"
            )
        self.draft = draft if method.needs_draft else None
        self.target = target = target.storing(kv_dtype, allowance)
        if self.draft is not None:
            self.draft = self.draft.storing(kv_dtype, allowance)
        self.method = method
        self.max_batch_size = max_batch_size
        if self.draft is target:  # one model in two roles needs two clocks and two health checks
            self.draft = type(target)(target.module, target.tokenizer, f"draft {target.name}")
        if self.draft is not None:
            check_kinds(target, self.draft)
        if self.draft is not None and not method.any_vocabulary:
            check_vocabularies(target, self.draft)
        self.recipe = recipe
        self.measure = measure
        parts = Parts(target, self.draft, draft_confidence, num_speculative_tokens, length)
        self.drafter = recipe.build(parts)
        plan, target = target.plan, getattr(self.drafter, "target", target)
        models = (target, *models_of(self.drafter))
        for model in models:
            if model not in (self.draft, self.target):  # made of the target by the drafter
                model.plan = plan
        self.target = target
        self.limit = min(model.limit for model in models)
        self.prompt_limit = min(model.prompt_limit for model in models)
        if num_speculative_tokens is None:
            num_speculative_tokens = getattr(self.drafter, "depth", NUM_SPECULATIVE_TOKENS)
        self.num_speculative_tokens = num_speculative_tokens
        if isinstance(self.drafter, WholeDrafter):
            self.drafter.num_whole = num_speculative_tokens
        self.judge: CompiledJudge | None = None
        if target.compiled is not None:
            make = partial(packaged, device=target.device)
            self.judge = CompiledJudge(make, num_speculative_tokens, exact=target.exact)
        self.eos_ids = eos_ids(target)
        self._intake = Intake(target, method, recipe, self.limit, self.prompt_limit)
        self._memory = None
        if allowance is not None:
            self._memory = Memory(
                allowance.num_bytes,
                target,
                self.drafter,
                models[1:],
                num_speculative_tokens,
                STRETCH if method.any_vocabulary else 1,
            )

    @property
    def verifier(self) -> Verifier:
        """The rule for batches in which some row samples."""
        return self.recipe.verifier

    def verifier_at(self, temperature: float) -> Verifier:
        """The rule that judges a request at this temperature."""
        return self._verifier(temperature == 0)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self, prompts: str, sampling: Sampling | Sequence[Sampling] | None = None
    ) -> Result: ...
    @overload
    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None = None
    ) -> Results: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] | None = None,
    ) -> Result | Results:
        """Continues one prompt or thousands.

        Args:
            prompts: a text, or a list of texts and token-id lists.
            sampling: for all, or one per prompt; the default is ``Sampling()``.

        Returns:
            A :class:`Result` for a single text, else :class:`Results` in the order of the prompts.

        Raises:
            PromptError: an empty prompt, one longer than the context, token ids out of range.
            NonFiniteLogitsError: a model produced NaN or infinite logits.
            OutOfMemoryError: the key-value slabs do not fit: those of one request alone, before any
                runs, or all of them, where ``max_memory`` is not set.
        """
        single = isinstance(prompts, str)
        listed: Sequence[Prompt] = [prompts] if isinstance(prompts, str) else prompts  # type: ignore[assignment]
        requests = self._requests(listed, sampling)
        finished: dict[int, Result] = {}
        for index, row in self._run(requests):
            if row.finished:
                finished[index] = row.result()
        if single:
            return finished[0]
        return Results(finished[index] for index in range(len(requests)))

    def stream(self, prompt: Prompt, sampling: Sampling | None = None) -> Iterator[Event]:
        """Continues one prompt, an event per round; log-probabilities included.

        Closing the iterator, or an exception such as Ctrl-C, frees the row; the engine can be used
        on. Raises as :meth:`generate`, before the first event.
        """
        sampling = sampling or Sampling()
        if sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)
        requests = self._requests([prompt], sampling)
        return (row.event() for _, row in self._run(requests))

    def run(self, prompt: Prompt, sampling: Sampling | None = None) -> Iterator[Row]:
        """As :meth:`stream`, but gives the row after each round: its tokens and statistics so far,
        and, by ``row.event()``, what was added."""
        requests = self._requests([prompt], sampling)
        return (row for _, row in self._run(requests))

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """A prompt's token ids, checked.

        Raises:
            PromptError: empty, longer than the context, or ids out of range.
        """
        return self._intake.encode(prompt)

    def _requests(
        self, prompts: Sequence[Prompt], sampling: Sampling | Sequence[Sampling] | None
    ) -> list[Request]:
        requests = self._intake.requests(prompts, sampling)
        if self._memory is not None:
            for request in requests:
                self._memory.check(request)
        return requests

    def _run(self, requests: list[Request]) -> Iterator[tuple[int, Row]]:
        """The loop of every method; each row after each of its rounds. Rows of like length run
        together; a free slot is refilled."""
        indices = range(len(requests))
        groups = [list(indices)]
        if self.recipe.greedy_apart:
            greedy = [i for i in indices if requests[i].sampling.greedy]
            groups = [greedy, [i for i in indices if not requests[i].sampling.greedy]]
        for group in groups:
            yield from self._run_group(requests, group)

    def _run_group(self, requests: list[Request], group: list[int]) -> Iterator[tuple[int, Row]]:
        slots = Slots(
            self.target,
            self.drafter,
            self._verifier,
            self.num_speculative_tokens,
            self.measure,
            self._memory,
            self.judge,
        )
        waiting = deque(sorted(group, key=lambda i: -len(requests[i].prompt_ids)))
        index_of: dict[int, int] = {}
        try:
            while waiting or slots.rows:
                free = self.max_batch_size - len(slots.rows)
                if waiting and free:
                    count = slots.room_for([requests[i] for i in islice(waiting, free + 1)], free)
                    rows = [self._row(requests[i]) for i in islice(waiting, count)]
                    index_of |= {id(row): waiting.popleft() for row in rows}
                    slots.admit(rows)
                slots.step()
                for row in slots.rows:
                    yield index_of[id(row)], row
                for row in slots.leave():
                    del index_of[id(row)]
        finally:
            slots.close()

    def _row(self, request: Request) -> Row:
        tokenizer = self.target.tokenizer
        detokenizer = None if tokenizer is None else Detokenizer(tokenizer, request.first_ids)
        room = self._intake.room(request.prompt_ids)
        return Row(request, Ending(request.sampling, self.eos_ids, room, detokenizer))

    def _verifier(self, greedy: bool) -> Verifier:
        return self.recipe.greedy_verifier if greedy else self.recipe.verifier
