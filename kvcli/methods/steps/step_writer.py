"""Write an answer by reasoning steps: a smaller model drafts them, one pass verifies them, and the target model's own
steps are written in parallel."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from kvcli.engine.drafting.draft_kv import DraftTreeKV
from kvcli.engine.forward_request import Passes, Rows, SamplingContext
from kvcli.engine.stats import Step
from kvcli.errors import BadInput
from kvcli.methods.steps.judge import Judge
from kvcli.models.text import decode
from kvcli.settings.schema import NO_PENALTY

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from kvcli.engine.sequence.session import GenerationSession
    from kvcli.kv.slots import Usage
    from kvcli.methods.steps.lookahead_reasoning import Cut, LookaheadReasoning

Ends = Callable[[Sequence[int]], bool]


def ends(tokenizer: PreTrainedTokenizerBase, cut: Cut) -> Ends:
    """Return a function that is True if the text of these ids is a whole step."""
    mark = "\n\n" if cut == "paragraph" else "\n"

    def is_whole(ids: Sequence[int]) -> bool:
        text = decode(tokenizer, ids).lstrip()
        return mark in text or (cut == "sentence" and text.endswith((".", "!", "?")))

    return is_whole


@dataclass(slots=True)
class StepBranch:
    """Branch of a drafted step that differs from the target model's tokens, with the target model's own step so far."""

    n: int  # drafted tokens before the step
    step: list[int]
    own: list[int]
    row: int  # row of the last token but one of `own` in the tree
    most: int  # maximum tokens
    is_over: bool = False
    is_refused: bool = False


class Writer:
    """Writer of one sequence's answer by reasoning steps; it has a session of the smaller model."""

    def __init__(self, settings: LookaheadReasoning, draft: GenerationSession, ends: Ends) -> None:
        self._wants, self._draft, self._ends = settings, draft, ends
        self.judge = Judge(settings)
        self.drafted = self.same = self.accepted = 0  # steps; `same`: accepted steps with the target model's own tokens

    def usage(self) -> list[Usage]:
        """Memory of the smaller model's KV cache and recurrent states."""
        return [replace(use, tier="draft") for use in (*self._draft.cache.usage(), *self._draft.states.usage())]

    def step(self, session: GenerationSession, stop: Collection[int] = (), most: float = float("inf")) -> Passes[Step]:
        """Write several reasoning steps, at most `most` tokens; or one token if steps do not fit.

        Afterwards the session is as `GenerationSession.step` leaves it.
        """
        _refuse(session)
        began, lm = session.lm.clock(), session.lm
        # one token before the compression point, which only the session crosses
        room = int(min(session.next_compression_at - session.committed - 1, most, lm.limit - session.committed - 1))
        drafted = yield from self._ahead(session.ids, session, stop, room)
        if not drafted:
            return (yield from session.step(stop, most))
        ids = [i for step in drafted for i in step]
        how = SamplingContext(session.sampler, session.history, None, session.ids, session.answer_at)
        at = len(session.ids) - 1
        rows, tree = Rows.chain([session.ids[-1], *ids], at), DraftTreeKV(lm, session.cache, at)
        made = yield from tree.add(rows.ids, rows.parent, draw=how)
        lanes, n, same = list[StepBranch](), 0, 0
        for step in drafted:
            drawn = (made.drawn(n + i) for i in range(len(step)))
            other = next(((i, own) for i, (own, id) in enumerate(zip(drawn, step, strict=False)) if own != id), None)
            if other is None:
                same += 1
            else:
                i, own = other
                if not (says := self.judge.looks(partial(_likelihood, made.logits[n : n + len(step)], step))):
                    lane = StepBranch(
                        n, step, step[:i], n + i, min(self._wants.tokens, room - n), is_refused=says is False
                    )
                    lanes.append(lane)
                    self._add(lane, own, stop)
                    if lane.is_refused:
                        break
            n += len(step)
        yield from self._write(tree, lanes, how, stop)
        refused = next((lane for lane in lanes if lane.is_refused), None)
        if refused is not None:
            new, path = [*ids[: refused.n], *refused.own], tree.above(refused.row)
        elif ids[-1] in stop or len(ids) == room:
            new, path = ids, tree.above(len(ids) - 1)
        else:  # the target model's token after the last row
            new, path = [*ids, made.drawn(len(ids))], tree.above(len(ids))
        self._count(drafted, refused, same)
        session.adopt([*session.ids, *new], session.committed + len(path), tree.held(path))
        right = refused.n if refused is not None else len(ids)
        return Step(rows, made.logits, list(range(right + 1)), new, lm.clock() - began)

    def _ahead(
        self, text: Sequence[int], session: GenerationSession, stop: Collection[int], room: int
    ) -> Passes[list[list[int]]]:
        """Draft steps with the smaller model, sampled with the same noise."""
        draft, found, n = self._draft, list[list[int]](), 0
        if len(text) + room >= draft.lm.limit:
            return found
        known = [min(i, draft.lm.vocab - 1) for i in text]  # padding ids have no embedding in the smaller model
        draft.start_answer(known, session.sampler)
        while room > 0 and (yield from draft.prefill_chunk(known)):
            pass
        while len(found) < self._wants.ahead and n < room:
            step: list[int] = []
            while len(step) < min(self._wants.tokens, room - n):
                (new,) = (yield from draft.step(most=1)).new
                if new >= session.lm.vocab:
                    return found
                step.append(new)
                if new in stop or self._ends(step):
                    break
            found.append(step)
            n += len(step)
            if step[-1] in stop:
                break
        return found

    def _write(
        self, tree: DraftTreeKV, lanes: Sequence[StepBranch], how: SamplingContext, stop: Collection[int]
    ) -> Passes[None]:
        """Write the target model's own steps, one token of each per pass; steps after a rejected one are not needed."""
        while True:
            refused = next((i for i, lane in enumerate(lanes) if lane.is_refused), len(lanes))
            if not (open_ := [lane for lane in lanes[: refused + 1] if not lane.is_over]):
                return
            n = len(tree)
            made = yield from tree.add([lane.own[-1] for lane in open_], [lane.row for lane in open_], draw=how)
            for at, lane in enumerate(open_):
                lane.row = n + at
                self._add(lane, made.drawn(at), stop)

    def _add(self, lane: StepBranch, token: int, stop: Collection[int]) -> None:
        """Add the next token of the target model's own step; at its end the drafted step is judged."""
        lane.own.append(token)
        lane.is_over = token in stop or len(lane.own) >= lane.most or self._ends(lane.own)
        if lane.is_over and not lane.is_refused:
            lane.is_refused = not self.judge.compares(lane.step, lane.own)

    def _count(self, drafted: Sequence[Sequence[int]], refused: StepBranch | None, same: int) -> None:
        n, taken = 0, 0
        for step in drafted:
            if refused is not None and n >= refused.n:
                break
            n, taken = n + len(step), taken + 1
        self.drafted += len(drafted)
        self.accepted += taken
        self.same += min(same, taken)


def _likelihood(logits: Tensor, step: Sequence[int]) -> float:
    """Return the geometric mean of the probabilities that logits [n, V] give to the n tokens of a step."""
    of_rows = logits.float().log_softmax(-1)
    return float(of_rows[list(range(len(step))), list(step)].mean().exp())


def _refuse(session: GenerationSession) -> None:
    """Refuse settings that need all tokens before a token, because several branches are written at once."""
    if session.constraint is not None:
        raise BadInput(
            "reasoning steps cannot follow a schema or grammar",
            code="steps",
            try_=["--set reasoning_steps.method=none"],
        )
    if penalties := session.sampler.penalties:
        set_ = ", ".join(f"{key} {value:g}" for key, value in penalties.items())
        raise BadInput(
            "reasoning steps cannot have penalties",
            code="steps",
            lines=[f"set, by the profile or the model's own settings: {set_}"],
            try_=[
                " ".join(f"--set sample.{key}={NO_PENALTY[key]:g}" for key in penalties),
                "--set reasoning_steps.method=none",
            ],
        )
