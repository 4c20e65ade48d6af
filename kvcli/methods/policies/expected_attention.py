"""Expected Attention: score slots by the attention expected from future queries.

Future queries are assumed to be distributed like the recorded ones. The paper takes mean and covariance over all
queries of the prompt; here over `samples` of them, spread evenly, plus the newest if a prompt has too few. Queries are
rotated back to position 0, and forward by the mean rotation over the next `horizon` positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from kvcli.errors import BadModel
from kvcli.policies.scoring.topk import TopK
from kvcli.settings.schema import Range

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvcli.engine.hf.lm import LM
    from kvcli.engine.policy.policy import LayerContext, PolicyRequirements
    from kvcli.kv.slots import Slots

RECENT = 64  # newest queries, used too where fewer samples than this are recorded, as of a short question


@dataclass(frozen=True)
class Expected(TopK):
    """Expected Attention (2025, arXiv 2510.00636): keeps tokens by attention of future queries times value norm.

    With 50% of the tokens, the demo model's accuracy is 0.413, or 0.542 less than with all (measurements/policies.md).
    """

    samples: Annotated[int, Range(2)] = 256  # prompt queries that stand for future queries
    horizon: Annotated[int, Range(1)] = 512  # future positions over which the rotation of queries is averaged
    covariance: bool = True  # use the covariance of queries, besides their mean
    epsilon: Annotated[float, Range(0)] = 0.0  # added to expected attention before multiplying by the value norm

    name: ClassVar[str] = "expected"
    by: ClassVar[str] = "the attention expected from later questions"

    def requirements(self, lm: LM) -> PolicyRequirements:
        """Return the policy's requirements. Raises BadModel if the model's rotary frequencies are not found."""
        from kvcli.engine.hf.rope import rotaries

        try:
            found = rotaries(lm)  # by layer; None = no rotary embedding there
        except BadModel as none:
            raise BadModel(
                f'policy.name = "expected" needs the rotary frequencies of {lm.info.id}, and does not find them',
                code="policy_unsupported",
                lines=[none.message, *none.lines],
                try_=["--set policy.name=keydiff", "--set policy.name=snap"],
            ) from None
        return self.want(lm, known=found, recent_queries=RECENT, probes=self.probes, lasting=self.keep_new > 0)

    def probes(self, n: int) -> Sequence[int]:
        """Return the positions of the sampled queries of a prompt of n tokens."""
        first = min(self.sinks, max(0, n - 1))
        count = min(self.samples, n - first)
        return [first + i * (n - first) // count for i in range(count)]

    def score(self, s: Slots, at: LayerContext) -> Tensor:
        """Return the expected attention times the norm of the value."""
        import torch

        from kvcli.kernels.rope import unrotate
        from kvcli.policies.scoring.mean_rotation import mean_turn

        rotary, width = at.policy_state.known[at.layer], torch.promote_types(at.q.dtype, torch.float32)
        q, q_pos = self._sample(at)
        if not q.shape[1]:  # without queries all keys are equally likely
            return expected(s, q.new_zeros(s.k.shape[0], s.k.shape[2], dtype=width), None, 0.0, 0.0, 0.0)
        q = q.to(width) if rotary is None else unrotate(q.to(width), q_pos, rotary)  # [H, w, D]
        turn = mean_turn(rotary, torch.arange(at.n, at.n + self.horizon, device=q.device), q.shape[2], q.dtype)
        mean, cov = q.mean(1), None
        if self.covariance:
            off = q - mean.unsqueeze(1)
            cov = turn @ (off.transpose(1, 2) @ off / q.shape[1]) @ turn.T  # [H, D, D]
        return expected(s, mean @ turn.T, cov, at.scale, at.softcap, self.epsilon)

    def _sample(self, at: LayerContext) -> tuple[Tensor, Tensor]:
        """Return the recorded queries that are spread evenly, if there are enough of them; else all recorded ones."""
        wanted = set(self.probes(at.n_prompt)) if at.n_prompt else set()
        rows = [row for row, pos in enumerate(at.q_pos.tolist()) if pos in wanted]
        return (at.q[:, rows], at.q_pos[rows]) if len(rows) >= min(RECENT, self.samples) else (at.q, at.q_pos)


def expected(s: Slots, mean: Tensor, cov: Tensor | None, scale: float, softcap: float, epsilon: float) -> Tensor:
    """Return the expected attention of normally distributed queries, times value norm [K, S].

    mean [H, D] and cov [H, D, D] of future queries, after the mean rotation; cov None = the mean alone.
    E exp(q·k) = exp(mean·k + k·cov·k / 2), normalised over the slots; a softcap is applied to the exponent.
    """
    import torch

    from kvcli.policies.scoring.token_units import norm

    kv, _, d = s.k.shape
    k = s.k.to(mean.dtype)
    mean = mean.view(kv, -1, d)
    z = mean @ k.transpose(1, 2) * scale  # [K, G, S]
    if cov is not None:
        for g in range(mean.shape[1]):  # one query head of each group at a time, so that temporaries are [K, S, D]
            z[:, g] += ((k @ cov.view(kv, -1, d, d)[:, g]) * k).sum(2) * (scale * scale / 2)
    if softcap > 0:
        z = softcap * torch.tanh(z / softcap)
    share = z.masked_fill((s.pos < 0).unsqueeze(1), -torch.inf).softmax(dim=2).mean(1)
    share = share.nan_to_num(0.0)  # a head without slots
    return (share + epsilon) * norm(s.v.to(mean.dtype))
