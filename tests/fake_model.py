"""A model that says what it is told to, at the speed it is told to: for tests of everything above the model."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvcli.api import Cancel, End, Event, Finish, Live, Read, Text, Thought, Turn
from kvcli.engine.model_info import ModelInfo
from kvcli.engine.sequence.state import Repetition
from kvcli.engine.stats import Stats
from kvcli.errors import ContextOverflow
from kvcli.models.thinking import ThinkingFormat

if TYPE_CHECKING:
    from kvcli.prefix_cache.prefix_cache import SaveResult

PARAGRAPH = (
    "The service restarted twice because the cache directory was full; both times it recovered without losing a "
    "request. The first restart came at four in the morning, when the nightly job had written its report. "
)


class FakeTokenizer:
    """One id for each character."""

    chat_template = "fake"
    is_fast = False
    all_special_ids: tuple[int, ...] = ()
    unk_token_id = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, ids))

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[None]:
        return [None] * len(tokens)

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_: Any) -> str:
        return "".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<assistant>"


@dataclass
class FakeProfile:
    name: str = "fafo"
    exactness: str = "exact"
    load: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(adapters=()))
    sample: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(seed=5))
    thinking: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(mode="auto", max_tokens=0))


def fake_info(**changes: Any) -> ModelInfo:
    facts: dict[str, Any] = {
        "id": "demo", "path": "/models/demo", "family": "llama", "parameters": 1_000_003, "layers": 2, "heads": 4,
        "kv_heads": 2, "head_dim": 16, "vocab": 259, "dtype": "float32", "quant": "none", "backend": "torch",
        "device": "cpu", "limit": 2048, "weight_bytes": 4_000_012, "load_seconds": 0.1,
    }  # fmt: skip
    return ModelInfo(**(facts | changes))


@dataclass
class FakeModel:
    """Answers every prompt with `answer`, cut into pieces of about a word."""

    answer: str = PARAGRAPH
    delay: float = 0.0  # seconds for each piece
    read_delay: float = 0.0  # seconds for each chunk of the prompt
    chunks: int = 3
    drafts: bool = True
    cached: int = 0
    kv: dict[str, int] = field(default_factory=lambda: {"dense": 17_930_000})
    profile: FakeProfile = field(default_factory=FakeProfile)
    info: ModelInfo = field(default_factory=fake_info)
    tokenizer: Any = field(default_factory=FakeTokenizer)
    cautions: Sequence[str] = ()
    promise: str = "exact"
    engine: None = None
    drafts_by: str = ""
    template_variables: dict[str, Any] = field(default_factory=dict)
    thinking_format: Any = ThinkingFormat
    on_overflow: str = "error"
    pack: None = None
    prompts: list[Sequence[int]] = field(default_factory=list)  # what it was asked
    seeds: list[int | None] = field(default_factory=list)  # and with which seed
    held: list[object] = field(default_factory=list)  # and held to what
    loop: Repetition | None = None  # in which the answer ends
    approx: str = ""  # what it may miss of the text
    thought: str = ""  # before its answer
    idled: int = 0  # how often it could do what it had left

    def is_compressed_prefix(self, ids: Sequence[int]) -> bool:
        return False  # it has no KV cache to condense

    def condense(self, end: int, most: int, cancel: Cancel) -> None:
        return None

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int | None = None,
        ignore_eos: bool = False,
        stop: Sequence[str] = (),
        cancel: Cancel | None = None,
        seed: int | None = None,
        messages: Sequence[object] = (),
        constraint: object = None,
    ) -> Iterator[Event]:
        self.seeds.append(seed)
        self.held.append(constraint)
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        if len(ids) > self.info.limit:
            raise ContextOverflow(
                "the chat is longer than the context window",
                lines=[f"{len(ids):,} tokens of text > {self.info.limit:,}"],
                detail={"prompt": len(ids), "reserve": 0, "limit": self.info.limit},
                try_=["--ctx 4096", "/drop 1"],
            )
        self.prompts.append(list(ids))
        stats = Stats(prompt=len(ids), cached=self.cached, limit=self.info.limit, kv_fp16=17_930_000, peak=431 << 20)
        stats.approx = self.approx
        yield Live(stats)
        cancelled = cancel or (lambda: False)
        yield from self._read(len(ids), stats, cancelled)
        if self.thought:
            yield Thought(self.thought, ())
        said = yield from self._write(stats, len(ids), max_new_tokens or 10**9, cancelled)
        finish: Finish = "interrupted" if cancelled() else "length" if said != self.answer else "stop"
        finish = "loop" if self.loop else finish
        yield End(Turn(said, tuple(map(ord, said)), finish, stats, self.loop, self.thought))

    def _read(self, n: int, stats: Stats, cancelled: Cancel) -> Iterator[Event]:
        for i in range(1, self.chunks + 1):
            if cancelled():
                return
            time.sleep(self.read_delay)
            stats.read += self.read_delay or 0.01
            done = max(self.cached, n * i // self.chunks)
            yield Read(done, n, self.cached, stats.read)

    def _write(self, stats: Stats, n: int, limit: int, cancelled: Cancel) -> Iterator[Any]:
        said = ""
        for i, piece in enumerate(re.findall(r"\s*\S+\s*$|\s*\S+", self.answer)):
            if cancelled() or stats.new >= limit:
                break
            time.sleep(self.delay)
            gained = (1, 2, 5, 8, 7, 3)[i % 6] if self.drafts else 1
            count(stats, gained, self.delay or 0.01)
            stats.first_token = stats.first_token or stats.read + 0.01
            stats.kv, stats.context = dict(self.kv), n + stats.new
            said += piece
            yield Text(piece, tuple(map(ord, piece)))
        return said

    def can_condense(self, ids: Sequence[int]) -> bool:
        return False

    def open(self) -> FakeModel:
        return self

    def with_profile(self, profile: FakeProfile) -> FakeModel:
        return FakeModel(**(vars(self) | {"profile": profile}))

    def take_cache(self, other: FakeModel) -> bool:
        return False

    def keep(self, cancel: Cancel) -> SaveResult:
        # imports torch, and a program in a terminal of the tests is quicker without
        from kvcli.prefix_cache.prefix_cache import SaveResult

        return SaveResult()

    def idle(self, cancel: Cancel) -> None:
        self.idled += 1

    def why_again(self) -> list[str]:
        return []

    def close(self) -> None:
        pass

    @property
    def limit(self) -> int:
        return self.info.limit

    def kv_table(self) -> list[dict[str, Any]]:
        return [
            {"layer": layer, "tier": tier, "slots": 1976, "nbytes": size // self.info.layers}
            for layer in range(self.info.layers)
            for tier, size in self.kv.items()
        ]


def count(stats: Stats, gained: int, seconds: float) -> None:
    """Fold one pass that gained so many tokens, as Stats.fold does with a step."""
    stats.passes += 1
    stats.new += gained
    stats.decode += seconds
    stats.recent.append(gained)
    if gained > 1:
        stats.drafted_passes += 1
        stats.draft_tokens += 8
        stats.accepted_tokens += gained - 1
        stats.histogram.extend([0] * (gained - len(stats.histogram)))
        stats.histogram[gained - 1] += 1
