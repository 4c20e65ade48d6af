"""KVzip: score slots by the attention they get when the model repeats the text.

After prefill, the prompt is run once more after itself, piece by piece. A slot's score is the highest attention that
any query of the piece that repeats it gives it. No question is involved, so the kept slots suit any question; prefill
takes about twice as long. A piece's attention is normalised over the stored slots that it repeats, the sinks and the
piece itself, as in the paper. The paper asks for the repetition in words; here a piece begins with the tokens before.

`plus` is KVzip+ (KVzap, arXiv 2601.07891): the attention is multiplied by the L2 norm of the projected value (W_o v)
and divided by that of the query's hidden state at the layer's input. Passes run layer by layer for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvcli.errors import BadModel, ContextOverflow
from kvcli.kv.footprint import NO_SIZES, Footprint, ModelSizes
from kvcli.policies.scoring.running_scores import RunningScores
from kvcli.policies.scoring.topk import Alloc, TopK
from kvcli.settings.profile import Needs
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from torch import Tensor

    from kvcli.engine.forward_request import Passes, Rows
    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.policy import CompressionPoint, LayerContext, PolicyRequirements
    from kvcli.kv.slots import Masks, Slots

    LayerRows = tuple[Tensor, Tensor, Tensor | None]  # one layer's queries [H, N, D], keys [K, N, D], input [N, E]


@dataclass(frozen=True)
class KVzip(TopK):
    """KVzip (Kim et al., 2025, arXiv 2505.23416): keeps tokens that repeating the text needs; prefill twice as long.

    With 50% of the tokens, the demo model's accuracy is 0.955; choosing them takes 798 ms (measurements/policies.md).
    """

    alloc: Alloc = "global"  # budget per head: equal, AdaKV, PyramidKV, from a file, over all heads, PrefixKV
    floor: Annotated[float, Range(0, 1)] = 0.0  # of ada, headmap, global: minimum of a head, as share of the average
    piece: Annotated[int, Range(1)] = 512  # tokens repeated per pass
    lead: Annotated[int, Range(0)] = 8  # tokens before a piece, repeated with it
    plus: bool = False  # multiply by the relative size of the projected value in the residual stream (KVzip+)

    name: ClassVar[str] = "kvzip"
    by: ClassVar[str] = "attention while the prompt is repeated"
    needs: ClassVar[Needs] = Needs(frozenset({"skims"}), "a repetition that reads all of the text")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_chunk:
            raise ValueError("per_chunk = true is impossible: a text is repeated after all of it was read")
        if self.keep_new:
            raise ValueError(f"keep_new = {self.keep_new} is impossible: generated tokens are never repeated")

    def footprint(self, n: int, of: ModelSizes = NO_SIZES) -> Footprint:
        """Return the footprint, with the repetition of n rows, and `lead` rows for each piece but the first."""
        again = n + (-(-n // self.piece) - 1) * self.lead if n else 0
        return replace(super().footprint(n, of), again=again)

    def requirements(self, lm: LM) -> PolicyRequirements:
        """Require no queries, because the repetition computes its own. The stored scores take 1/D of the KV cache."""
        try_ = ["--set policy.name=expected"]
        lm.recurrent_layers.refuse(lm.info.id, "a repetition would score their state, not the KV cache", try_)
        if self.plus and any(of.shared_from is not None for of in lm.shapes):
            raise BadModel(
                f"policy.plus = true needs layers with keys of their own; some of {lm.info.id} read those of others",
                code="policy_unsupported",
                try_=["--set policy.plus=false"],
            )
        return self.want(lm, lambda: RunningScores(lm))

    def select(self, at: CompressionPoint) -> Passes[Masks]:
        """Repeat the prompt after prefill, then select as all score policies do. Raises ContextOverflow if no piece
        fits into the context window after the text."""
        done = at.policy_state.compressed(at)
        if at.phase == "read":
            yield from self.score_by_repetition(at, done)
        return self.best(at, done)

    def score_by_repetition(self, at: CompressionPoint, first: int) -> Passes[None]:
        """Repeat the tokens from `first` on and replace their scores."""
        for layer, score in at.policy_state.own.total.items():
            at.policy_state.own.total[layer] = score[:, :first]
        for start, end in self.pieces(first, len(at.ids), at.lm.limit):
            yield from self._repeat(at, start, end)

    def score(self, s: Slots, at: LayerContext) -> Tensor:
        """Return the highest attention in the repetition."""
        found: Tensor = at.policy_state.own.total[at.layer].gather(1, s.pos.clamp(min=0).long())
        return found

    def pieces(self, first: int, n: int, limit: int) -> Sequence[tuple[int, int]]:
        """Split tokens `first` to n - 1 into pieces as large as fit into the context window after all n tokens."""
        room = limit - n
        size = min(self.piece, room - self.lead)
        if size < 1:
            raise ContextOverflow(
                f'policy.name = "kvzip" repeats the text after itself, but {n:,} tokens leave {room:,} of the context',
                lines=[f"the model takes {limit:,} tokens, and a repeated piece {self.lead + 1} at least"],
                try_=["--set policy.name=expected", "a shorter text"],
            )
        return [(start, min(start + size, n)) for start in range(first, n, size)]

    @property
    def weighs(self) -> str:
        return super().weighs or ("plus = true" if self.plus else "")

    def _by_layer(self, at: CompressionPoint, rows: Rows) -> Passes[list[LayerRows]]:
        """Run one pass per layer to get the hidden states between layers; a pass of no layer gives the embeddings."""
        from kvcli.engine.forward_request import ForwardRequest

        found: list[LayerRows] = []
        made = yield ForwardRequest(at.lm, rows, at.kv, is_prompt=True, layers=range(0))
        assert made.hidden is not None
        stream = made.hidden.clone()
        for i in at.layers:
            hidden = stream if i else None
            made = yield ForwardRequest(
                at.lm,
                rows,
                at.kv,
                record_queries=range(rows.n_rows),
                is_prompt=True,
                layers=range(i, i + 1),
                hidden=hidden,
            )
            found.append((made.queries[0], made.fresh[i].k, stream))
            stream = stream if made.hidden is None else made.hidden.clone()
        return found

    def _repeat(self, at: CompressionPoint, start: int, end: int) -> Passes[None]:
        """Repeat one piece and update the scores of its slots; no KV is committed."""
        import torch

        from kvcli.engine.forward_request import Rows
        from kvcli.kernels.attention_mass import Over, attention_mass
        from kvcli.kv.slots import compact

        rows = Rows.chain(at.ids[max(0, start - self.lead) : end], len(at.ids))
        q_pos, scores = torch.tensor(rows.pos, device=at.lm.device), at.policy_state.own.total
        recorded = yield from (self._by_layer(at, rows) if self.plus else _at_once(at, rows))
        for i in at.full_layers:
            (s, moment), (q, fresh, stream) = at.layer(i), recorded[i]
            near = compact(s, (s.pos < self.sinks) | ((s.pos >= start) & (s.pos < end)))
            k = torch.cat((near.k, fresh.to(near.k.dtype)), 1)
            pos = torch.cat((near.pos, q_pos.to(near.pos.dtype).expand(near.pos.shape[0], -1)), 1)
            over: Over = "max" if stream is None else "none"
            mass = attention_mass(q, q_pos, k, pos, moment.scale, softcap=moment.softcap, over=over)[
                ..., : near.n_slots
            ]
            if stream is not None:  # [K, G, w, S]
                adds = at.policy_state.outward(i, near.v, 2).unsqueeze(2)
                mass = (mass * adds / stream.to(mass.dtype).norm(dim=1).view(-1, 1)).amax((1, 2))
            score = mass.new_zeros(mass.shape[0], end)
            if (before := scores.get(i)) is not None:
                score[:, : before.shape[1]] = before
            where = near.pos.clamp(min=0).long()
            scores[i] = score.scatter_reduce_(1, where, mass.masked_fill(near.pos < 0, 0.0), "amax")


def _at_once(at: CompressionPoint, rows: Rows) -> Passes[list[LayerRows]]:
    """Run one pass through all layers."""
    from kvcli.engine.forward_request import ForwardRequest

    made = yield ForwardRequest(at.lm, rows, at.kv, record_queries=range(rows.n_rows), is_prompt=True)
    # placeholder for layers that share KV, which is not read
    keys = [made.fresh[i].k if i in made.fresh else made.queries[i] for i in at.layers]
    return [(q, k, None) for q, k in zip(made.queries, keys, strict=True)]
