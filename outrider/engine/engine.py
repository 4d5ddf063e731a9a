"""The engine: one target, one method, any number of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, overload

from outrider.core.errors import InvalidParameterError
from outrider.core.protocols import Verifier
from outrider.core.values import check_flag, shown
from outrider.drafters.chain.draft_length import DraftLength
from outrider.drafters.chain.none import NoDraft
from outrider.engine.admission import STRETCH, Memory
from outrider.engine.detokenize import Detokenizer
from outrider.engine.fused_verification import CompiledVerifier
from outrider.engine.hints import ChatHint
from outrider.engine.intake import Intake, read_sampling, read_samplings
from outrider.engine.prompts import Array, Prompt, Prompts, ReadPrompt, read_prompt, read_prompts
from outrider.engine.request import Event, Request, Result, Results, Row
from outrider.engine.running_batch import RunningBatch
from outrider.engine.settings import Settings
from outrider.engine.special_stops import SpecialStops
from outrider.engine.stop import Ending
from outrider.methods import METHODS, Method, Parts, Recipe
from outrider.methods.method import NUM_SPECULATIVE_TOKENS
from outrider.runtime import HFModel, check_kinds, check_vocabularies
from outrider.runtime.executors.compile_cache import compiled_program
from outrider.runtime.hf.eos import eos_ids
from outrider.runtime.hf.generation_config import check_demands, obeyed
from outrider.runtime.kv_cache.storage import KvDtype
from outrider.sampling import Sampling


class Engine:
    """Generates text by one method; build it with :func:`outrider.load`.

    It may be used from several threads, and its models by several engines: every call runs batches
    of its own. Under ``max_memory`` a request for which other threads leave no room is an error.

    Args:
        target: the model whose distribution the text has.
        draft: the model that rides ahead, where the method needs one.
        method: a row of ``outrider.methods``.
        num_speculative_tokens: γ, most tokens drafted per round (of a tree: its most levels), 1
            to 64; None takes the drafter's own depth if it has one, such as a tree's, else 5.
        draft_confidence: stop drafting after a token less probable than this; 0 never.
        draft_length: ``fixed``; ``heuristic[:START]``, which grows by two where all of a draft was
            accepted and else shrinks by one; ``confidence:C``; or ``survival:THETA``, which stops
            once the drafted tokens' joint probability is below 1 - θ.
        max_batch_size: rows that run at the same time; more requests wait for a free one.
        max_memory: most bytes of KV buffers, target's and draft's together; a number, or a
            text such as ``512MiB`` or ``2GB``. Requests wait until theirs fit.
        kv_dtype: how KV buffers store numbers: ``auto`` (as the models do), ``bfloat16`` or
            ``int8`` (a scale per token and head); see ``runtime/kv_cache/storage.py`` for the
            error. In the target's KV buffers it changes the distribution that is sampled; in the
            draft's it does not.
        options: the method's own parameters by name, such as ``{"budget": 0.2}``.
        verifier: a rule of your own in place of the method's.
        measure: work out how far a lossy rule strays, for ``result.stats``; costs a few passes
            over the vocabulary per drafted token.
        generation_config: obey the target's generation config, as ``generate`` does: its values
            where ``Sampling`` leaves a parameter None, and its rules (``bad_words_ids``, say) for
            every text; see ``runtime/hf/generation_config.py``. False asks for the bare model.
            End-of-sequence tokens are taken from it either way.

    Attributes:
        limit: longest text in tokens, prompt included: the target's context.
        shared_limit: longest text that every model has room for; rows beyond it go on without
            drafts.
        obeyed: what of the generation config changes texts, by name; empty if nothing does.

    Raises:
        InvalidParameterError: a number outside its range, an option the method has not.
        IncompatibleError: a method without the draft model it needs, a rule that cannot verify it.
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
        draft_length: str | DraftLength | None = "fixed",
        max_batch_size: int = 16,
        max_memory: int | str | None = None,
        kv_dtype: KvDtype = "auto",
        options: Mapping[str, object] | None = None,
        verifier: Verifier | None = None,
        measure: bool = True,
        generation_config: bool = True,
    ) -> None:
        _check_parts(target, draft, method)
        settings = Settings.checked(
            method,
            num_speculative_tokens=num_speculative_tokens,
            draft_confidence=draft_confidence,
            draft_length=draft_length,
            max_batch_size=max_batch_size,
            max_memory=max_memory,
            kv_dtype=kv_dtype,
            options=options,
            verifier=verifier,
            measure=measure,
            generation_config=generation_config,
        )
        method.require_draft(draft)
        memory_budget, num_speculative_tokens = (
            settings.memory_budget,
            settings.num_speculative_tokens,
        )
        self.draft = draft if method.needs_draft else None
        self.target = target = target.with_kv_dtype(kv_dtype, memory_budget)
        if self.draft is not None:
            self.draft = self.draft.with_kv_dtype(kv_dtype, memory_budget)
        self.method = method
        self.max_batch_size = settings.max_batch_size
        if self.draft is target:  # one model in two roles needs two clocks and two health checks
            self.draft = type(target)(target.module, target.tokenizer, f"draft {target.name}")
        if self.draft is not None:
            check_kinds(target, self.draft)
        if self.draft is not None and not method.any_vocabulary:
            check_vocabularies(target, self.draft)
        self.recipe = recipe = settings.recipe
        self.measure = settings.measure
        parts = Parts(
            target,
            self.draft,
            settings.draft_confidence,
            num_speculative_tokens,
            settings.draft_length,
        )
        self.drafter = recipe.build(parts)
        able = self.drafter.capabilities
        plan, target = target.plan, able.target or target
        models = (target, *able.models)
        for model in models:
            if model not in (self.draft, self.target):  # made of the target by the drafter
                model.plan = plan
        self.target = target
        self.limit = target.limit
        self.shared_limit = min(model.limit for model in models)
        self.prompt_limit = target.prompt_limit
        if num_speculative_tokens is None:
            num_speculative_tokens = able.depth or NUM_SPECULATIVE_TOKENS
        self.num_speculative_tokens = num_speculative_tokens
        self.verification: CompiledVerifier | None = None
        if target.compiled is not None:
            make = partial(compiled_program, device=target.device)
            self.verification = CompiledVerifier(make, num_speculative_tokens, exact=target.exact)
        self.eos_ids = eos_ids(target)
        self._hint = ChatHint(target.tokenizer)
        self._intake = Intake(
            target,
            method,
            recipe,
            self.limit,
            self.prompt_limit,
            able.drafts,
            self.eos_ids,
            generation_config,
        )
        self.generation_config = generation_config
        self.obeyed: dict[str, object] = {}
        if generation_config:
            check_demands(target.generation_config, target.name)
            self.obeyed = obeyed(target.generation_config)
        self._memory = None
        if memory_budget is not None:
            self._memory = Memory(
                memory_budget.num_bytes,
                target,
                self.drafter,
                num_speculative_tokens,
                STRETCH if method.any_vocabulary else 1,
            )

    @property
    def verifier(self) -> Verifier:
        """The rule for batches in which some row samples."""
        return self.recipe.verifier

    def verifier_at(self, temperature: float) -> Verifier:
        """The rule that verifies a request at this temperature."""
        return _verifier(self.recipe, temperature == 0)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a Sequence[str], too
        self,
        prompts: str,
        sampling: Sampling | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> Result: ...
    @overload
    def generate(  # type: ignore[overload-overlap]  # a Tensor is an Iterable[Tensor], too
        self,
        prompts: Array | Mapping[str, Any],
        sampling: Sampling | Iterable[Sampling] | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> Result | Results: ...
    @overload
    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling: Sampling | Iterable[Sampling] | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> Results: ...
    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling | Iterable[Sampling] | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> Result | Results:
        """Continues one prompt or thousands.

        Args:
            prompts: one prompt: a text, a 1-D tensor or array of token ids, or a tokenizer's output
                with 1-D ``input_ids``. Or a batch: an iterable of prompts and lists of token ids, a
                2-D tensor or array, or a tokenizer's output with 2-D ``input_ids``. Padding is
                removed where ``attention_mask`` says so.
            sampling: for all, or one per prompt; the default is ``Sampling()``.
            add_special_tokens: whether the tokenizer puts its special tokens around texts. One that
                already begins with the beginning-of-sequence token does not get a second one.

        Returns:
            A :class:`Result` for a prompt alone, else :class:`Results` in the order of the prompts.

        Raises:
            PromptError: what is no prompt, an empty one, one longer than the context, token ids out
                of range.
            InvalidParameterError: sampling parameters that are none, or do not fit the model.
            NonFiniteLogitsError: a model produced NaN or infinite logits.
            OutOfMemoryError: the KV buffers do not fit: those of one request alone, before any
                runs, or all of them, where ``max_memory`` is not set.
        """
        read, single = read_prompts(prompts)
        samplings = read_samplings(sampling, len(read))
        requests = self._requests(read, samplings, add_special_tokens)
        finished: dict[int, Result] = {}
        for index, row in self._run(requests):
            if row.finished:
                finished[index] = row.result()
        if single:
            return finished[0]
        return Results(finished[index] for index in range(len(requests)))

    def stream(
        self, prompt: Prompt, sampling: Sampling | None = None, *, add_special_tokens: bool = True
    ) -> Iterator[Event]:
        """Continues one prompt, an event per round; log-probabilities included.

        Closing the iterator, or an exception such as Ctrl-C, frees the row; the engine can be used
        on. Arguments, and errors before the first event, as those of :meth:`generate`.
        """
        sampling = read_sampling(sampling)
        if sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)
        requests = self._requests([read_prompt(prompt)], [sampling], add_special_tokens)
        return (row.event() for _, row in self._run(requests))

    def run(
        self, prompt: Prompt, sampling: Sampling | None = None, *, add_special_tokens: bool = True
    ) -> Iterator[Row]:
        """As :meth:`stream`, but gives the row after each round: its tokens and statistics so far,
        and, by ``row.event()``, what was added."""
        samplings = [read_sampling(sampling)]
        requests = self._requests([read_prompt(prompt)], samplings, add_special_tokens)
        return (row for _, row in self._run(requests))

    def settled(self, sampling: Sampling) -> Sampling:
        """The parameters that a request with these has: those that are None filled in from the
        generation config, or by default."""
        return self._intake.settled(sampling)

    def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """A prompt's token ids, checked.

        Raises:
            PromptError: what is no prompt, an empty one, one longer than the context, or ids out of
                range.
        """
        return self._intake.encode(read_prompt(prompt), add_special_tokens)

    def _requests(
        self,
        prompts: Sequence[ReadPrompt],
        samplings: Sequence[Sampling],
        add_special_tokens: bool,
    ) -> list[Request]:
        check_flag("add_special_tokens", add_special_tokens)
        requests = self._intake.requests(prompts, samplings, add_special_tokens)
        if self._memory is not None:
            for request in requests:
                self._memory.check(request)
        return requests

    def _run(self, requests: list[Request]) -> Iterator[tuple[int, Row]]:
        """The loop of every method; each row after each of its rounds. Rows of like length run
        together; a free slot is refilled."""
        apart = self.recipe.greedy_apart
        kinds = [(r.sampling.in_order, apart and not r.sampling.greedy) for r in requests]
        for kind in sorted(set(kinds)):
            group = [i for i, other in enumerate(kinds) if other == kind]
            yield from self._run_group(requests, group, plainly=kind[0])

    def _run_group(
        self, requests: list[Request], group: list[int], *, plainly: bool
    ) -> Iterator[tuple[int, Row]]:
        """The same for requests that may share a batch; ``plainly`` as method ``plain`` does."""
        recipe = METHODS["plain"].recipe() if plainly else self.recipe
        slots = RunningBatch(
            self.target,
            NoDraft() if plainly else self.drafter,
            partial(_verifier, recipe),
            self.num_speculative_tokens,
            self.measure,
            self._memory,
            self.verification,
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
                    if row.finished:
                        self._hint(row)
                    yield index_of[id(row)], row
                for row in slots.leave():
                    del index_of[id(row)]
        finally:
            slots.close()

    def _row(self, request: Request) -> Row:
        tokenizer, first_ids = self.target.tokenizer, request.first_ids
        detokenizer = special = None
        if tokenizer is not None:
            detokenizer = Detokenizer(tokenizer, first_ids)
            special = SpecialStops.among(request.sampling.stop_strings, tokenizer, first_ids)
        room = self._intake.room(request.prompt_ids)
        return Row(request, Ending(request.sampling, self.eos_ids, room, detokenizer, special))


def _verifier(recipe: Recipe, greedy: bool) -> Verifier:
    return recipe.greedy_verifier if greedy else recipe.verifier


def _check_parts(target: object, draft: object, method: object) -> None:
    """Raises InvalidParameterError for what is no loaded model, or no method."""
    for role, model in (("target", target), ("draft", draft)):
        if not isinstance(model, HFModel) and not (role == "draft" and model is None):
            raise InvalidParameterError(
                f"{role}={shown(model)}: must come from outrider.load_model; outrider.load takes "
                f"folders, hub ids and transformers models"
            )
    if not isinstance(method, Method):
        raise InvalidParameterError(
            f"method={shown(method)}: must be one of outrider.METHODS.values(); outrider.load "
            f"takes names"
        )
