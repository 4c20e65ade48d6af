"""Many sequences of one model at once: whatever becomes of the others, each answer is the one it is alone.

    python tests/bench/stress_sequences.py [--runs 200] [--seed 0] [--models demo,llama,...] [--dtypes fp32,bf16]

Each run asks 8 to 16 texts under profiles by lot, greedy and sampled, with penalties, stop strings, grammars and scores
by lot; some prompts are equal or share a beginning, some sessions are warm, some are asked twice,
also after an answer that was left or lacked memory. Half of the runs go
through the thread of event loops with a small pool of memory, the others through an engine in this thread. Sequences
join and leave between any two steps, prompts are cut by a clock that leaps, and passes and commits lack memory by lot.
Ids, text, end and scores of each answer that ends must be those of a session that nothing else runs beside. Run i of
seed s is the first run of seed s + i.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kvcli
from kvcli import assemble
from kvcli.api import End, Turn, turn_of
from kvcli.chat import turn as turn_module
from kvcli.chat.admission import EngineLimits
from kvcli.chat.model import Model
from kvcli.chat.text_session import TextSession
from kvcli.chat.warm_sessions import WarmSessions
from kvcli.engine import engine as engine_module
from kvcli.engine.engine import Engine
from kvcli.engine.loading.open_lm import install_kernels
from kvcli.engine.sequence import session as session_module
from kvcli.errors import BadConfig, BadModel, Busy, DoesNotFit
from kvcli.kv.out_of_memory import CacheFull
from kvcli.models.grammar import Grammar
from kvcli.settings.profile import Profile
from tests import families, make, small_tokenizers
from tests.bench.harness import Rows, Words, is_unbroken, measurement
from tests.bench.stress_exact import costs, jumping_clock

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODELS = ("demo", "llama", "gemma3", "gpt_oss", "qwen3_moe", "gemma4_shared", "youtu", "qwen3_5_text")
# so small that profiles evict, quantize, prune and select within these texts
SMALL: dict[str, Any] = {"policy.compression_interval": 8, "kv.residual": 16, "kv.group": 16, "prune.min_prompt": 8}
SMALL |= {"sparse.floor": 48, "sparse.dense_layers": 1, "sparse.recent": 16, "sparse.selection_interval": 32}
SMALL |= {"policy.window": 40}
SECOND = ("draft", "specextend", "specextend-paper")  # which need a second model
GRAMMARS = ("start: /[^x]*/", 'start: "The " /[a-z ]{3,30}/ "."', 'start: ("yes" | "no") (" " /[0-9]+/)?')


@cache
def loaded(name: str, dtype: str) -> Model:
    if name == "demo":
        return kvcli.load("demo", "exact", set={"load.dtype": dtype, "load.verify": False})
    lm = make.model(name, DTYPES[dtype])
    install_kernels(lm)
    return Model(lm, small_tokenizers.demo(), Profile.load("exact"))


@cache
def profiles(name: str, dtype: str) -> list[str]:
    """Shipped profiles that this model takes without a change of its weights."""

    def is_taken(profile: str) -> bool:
        with suppress(BadConfig, BadModel):
            loaded(name, dtype).open(profile, settings(profile)).close()
            return True
        return False

    known = sorted(path.stem for path in (Path(kvcli.__file__).parent / "profiles").glob("*.toml"))
    usual = Profile.load("exact").load
    fit = [one for one in known if Profile.load(one).load == usual and (name == "demo" or one not in SECOND)]
    return list(filter(is_taken, fit))


def settings(name: str) -> dict[str, Any]:
    """Small sizes of what this profile does."""
    values = Profile.load(name).values
    found = dict.fromkeys((key for key in SMALL if key in values and _is_active(values, key.split(".")[0])), 0)
    return {key: SMALL[key] for key in found} | ({"spec.model": "demo"} if name in SECOND else {})


def _is_active(values: Mapping[str, object], table: str) -> bool:
    if table == "kv":
        return values["kv.k_bits"] != 16
    return values.get(f"{table}.name", values.get(f"{table}.method", "")) not in ("none", "full", "off")


@dataclass
class Ask:
    """One question: of which session, with which options, and what becomes of it."""

    profile: str
    set: dict[str, Any]
    ids: list[int]
    options: dict[str, Any]
    leaves_after: int | None  # events, after which it is given up
    delay: int
    is_warm: bool
    more: list[int]  # of a second question to the same session, after the answer
    answers: list[Turn] = field(default_factory=list)

    def __str__(self) -> str:
        said = {key: value for key, value in self.options.items() if key != "constraint"}
        held = " constrained" if "constraint" in self.options else ""
        return f"{self.profile} {self.set} {len(self.ids)} ids{' warm' * self.is_warm} {said}{held}"

    @property
    def prompts(self) -> Iterator[list[int]]:
        """The prompts whose answers are known."""
        yield self.ids
        for turn in self.answers:
            yield [*self.ids, *turn.ids, *self.more]


def options_of(rng: random.Random, model: Model, name: str, profile: str) -> dict[str, Any]:
    """Options of an answer by lot."""
    found: dict[str, Any] = {"max_new_tokens": rng.randint(1, 40), "temperature": 0.0}
    if rng.random() < 0.6:
        found |= {"temperature": rng.choice([0.3, 0.8, 1.5]), "seed": rng.randrange(5)}
        found |= rng.choice([{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"typical_p": 0.8}])
        found |= rng.choice([{}, {}, {"xtc_probability": 0.5, "xtc_threshold": 0.1}, {"top_n_sigma": 1.5}])
    if rng.random() < 0.3:
        found |= rng.choice([{"repetition_penalty": 1.3}, {"presence_penalty": 0.6}, {"frequency_penalty": 0.4}])
    if rng.random() < 0.2:
        found |= {"dry_multiplier": 0.8, "dry_allowed_length": 1}
    if rng.random() < 0.25:
        found["stop"] = rng.choice(["e", [" the", "9"], "\n", ["well", "ing", "ab"]])
    if rng.random() < 0.2:
        found["stop_loops"] = 8
    if name == "demo" and rng.random() < 0.2:
        found["constraint"] = held(model, rng.choice(GRAMMARS))
    else:
        found["ignore_eos"] = rng.random() < 0.6
    if rng.random() < 0.4:
        found["top_logprobs"] = rng.choice([0, 1, 5, 20])
    if rng.random() < 0.2 and "lazy" not in profile:
        found["prompt_logprobs"] = True
    return found


_held: dict[tuple[int, str], Any] = {}


def held(model: Model, grammar: str) -> Any:
    key = id(model), grammar
    _held[key] = _held.get(key) or model.constraint(Grammar.of_text(grammar))
    return _held[key]


def prompt_of(rng: random.Random, model: Model, name: str) -> list[int]:
    n = min(int(rng.choice([1, 20, 60, 150, 300]) * (1 + rng.random())), model.limit - 200)
    if name != "demo":
        ids = families.prompt(n, min(97, model.lm.vocab), rng.randrange(6))
        return ids[: n // 3] * 3 if rng.random() < 0.4 and n > 3 else ids
    text = report()
    at = rng.randrange(len(text) - 2000)
    part = text[at : at + 3 * n]
    return model.encode(f"{part}\nRepeat: {part[: len(part) // 2]}" if rng.random() < 0.5 else part)


@cache
def report() -> str:
    return kvcli.read_document("demo:report").text


def asks_of(rng: random.Random, model: Model, name: str, dtype: str) -> list[Ask]:
    found, known = list[Ask](), profiles(name, dtype)
    few = rng.sample(known, min(5, len(known))) if rng.random() < 0.5 else known
    for _ in range(rng.randint(8, 16)):
        profile = rng.choice(few)
        ids = prompt_of(rng, model, name)
        options = options_of(rng, model, name, profile)
        if found and rng.random() < 0.5:  # one that is asked as well, or begins alike
            other = rng.choice(found)
            share = rng.choice([1.0, 1.0, 0.7, 0.3])
            ids = other.ids if share == 1 else [*other.ids[: int(share * len(other.ids))], *ids[:20]]
            profile = rng.choice([profile, other.profile])
            options = rng.choice([options, other.options])
        if "lazy" in profile:
            options = {key: value for key, value in options.items() if key != "prompt_logprobs"}
        changes = settings(profile) | {"prefill.chunk": rng.choice([16, 32, 64, 256])}
        leaves = rng.randint(1, 12) if rng.random() < 0.15 else None
        more = prompt_of(rng, model, name)[: rng.randint(1, 60)] if rng.random() < 0.4 else []
        found.append(Ask(profile, changes, ids, options, leaves, rng.randrange(30), rng.random() < 0.4, more))
    return found


def wanted(model: Model, ask: Ask) -> list[Turn]:
    """The answers of a session that nothing runs beside."""
    turns = list[Turn]()
    with model.open(ask.profile, ask.set) as text:
        for _, ids in zip(ask.answers, ask.prompts, strict=False):
            if ask.is_warm or assemble.is_lossless(text.profile):
                text.close()  # whatever is kept changes nothing
            turns.append(text.generate(ids, **ask.options))
    return turns


class Storm:
    """One run: its questions, and how they are disturbed."""

    def __init__(self, rng: random.Random, model: Model, name: str, dtype: str) -> None:
        self.rng, self.model, self.found = rng, model, Counter[str]()
        self.asks = asks_of(rng, model, name, dtype)
        self.longest = rng.choice([0.0, 0.002, 0.02, 0.25, 10.0])
        self.rows = rng.choice([24, 100, 2048])
        self.lacks, self.lacking = rng.choice([0, 0, 2, 10]), rng.choice([0.005, 0.03, 0.1])
        self._now = 0.0

    def clock(self) -> float:
        self._now += self.rng.expovariate(self.rng.choice([10, 1000, 100000]))
        return self._now

    def lack(self) -> None:
        """Lack memory by lot."""
        if self.lacks and self.rng.random() < self.lacking:
            self.lacks -= 1
            self.found["lacks"] += 1
            raise CacheFull("injected")

    @contextmanager
    def disturbed(self) -> Iterator[None]:
        run, commit = engine_module.run, session_module.commit

        def failing_run(*args: Any) -> Any:
            self.lack()
            return run(*args)

        def failing_commit(*args: Any) -> Any:
            self.lack()
            commit(*args)
            self.lack()

        with (
            mock.patch.object(engine_module, "run", failing_run),
            mock.patch.object(session_module, "commit", failing_commit),
            mock.patch.object(turn_module, "free_caches"),  # a garbage collection takes longer than a run
            jumping_clock(self.rng),
        ):
            yield

    def ended(self, ask: Ask, error: BaseException | None) -> bool:
        """Note that an answer came to no end; True if its session may be asked again, with the same result."""
        self.found["left" if error is None or isinstance(error, CancelledError) else "refused"] += 1
        ask.leaves_after = None
        return ask.is_warm or assemble.is_lossless(self.model.chosen(ask.profile, ask.set).profile)

    # in this thread

    def here(self) -> None:
        engine = Engine(self.rows, self.longest, self.clock)
        opened = [self.model.open(ask.profile, ask.set) for ask in self.asks]
        for ask in self.asks:
            ask.is_warm = False
        due = sorted(range(len(self.asks)), key=lambda i: self.asks[i].delay)
        tasks, heard, n = dict[int, Any](), Counter[int](), 0
        with self.disturbed():
            while True:
                while due and (self.asks[due[0]].delay <= n or not tasks):
                    i = due.pop(0)
                    work = opened[i].answer(self.asks[i].ids, **self.asks[i].options)
                    tasks[i] = engine.add(work, lambda event, i=i: heard.update([i]))  # type: ignore[misc]
                is_more, n = engine.step(), n + 1
                for i, task in list(tasks.items()):
                    ask = self.asks[i]
                    if ask.leaves_after is not None and heard[i] >= ask.leaves_after:
                        task.cancel()
                    if not task.is_over:
                        continue
                    del tasks[i]
                    if task.error is None:
                        ask.answers.append(task.result())
                        goes_on = len(ask.answers) == 1
                    elif isinstance(task.error, (DoesNotFit, CancelledError)):
                        goes_on = self.ended(ask, task.error)
                    else:
                        raise task.error
                    if goes_on and ask.more:
                        tasks[i] = engine.add(opened[i].answer(list(ask.prompts)[-1], **ask.options))
                        is_more, ask.more = True, ask.more if ask.answers else []
                if not is_more and not due and not tasks:
                    break
        for text in opened:
            text.close()

    def samples(self) -> None:
        """Ask some questions for several samples each, with the next seeds."""
        asked, self.asks = self.asks[:4], []
        for ask in asked:
            n, options = self.rng.randint(2, 5), {"seed": 0} | ask.options
            seed = options.pop("seed")
            if not options["temperature"]:
                options["temperature"] = 0.8
            with self.model.open(ask.profile, ask.set) as text, jumping_clock(self.rng):
                for i, events in enumerate(text.samples(ask.ids, n, seed=seed, **options)):
                    of = replace(ask, options=options | {"seed": seed + i}, more=[], answers=[])
                    of.answers.append(turn_of(events))
                    self.asks.append(of)

    # in the thread that event loops share

    def there(self) -> None:
        shared, needs = self.model.engine, list[int]()
        for ask in self.asks:
            session = self.model.open(ask.profile, ask.set)
            new = int(ask.options["max_new_tokens"])
            needs.append(session.model.kv_bytes(len(ask.ids) + len(ask.more) + 2 * new, new))
        pool = int(max(needs) * self.rng.choice([1.0, 1.5, 3.0, 6.0]))
        queue = self.rng.choice([2, 256, 256])
        shared.limits = EngineLimits(pool if self.rng.random() < 0.8 else None, queue, self.rng.choice([0, 2, 8]))
        shared._engine = Engine(self.rows, self.longest, self.clock)
        before = shared.snapshot().preempted
        with self.disturbed():
            asyncio.run(self._all())
        self.found["preempted"] += shared.snapshot().preempted - before
        self.found["bad"] += (status := shared.snapshot()).running + status.waiting
        shared.limits = EngineLimits()

    async def _all(self) -> None:
        warm = WarmSessions(self.model, self.rng.choice([0, 4 << 20, 1 << 30]))
        await asyncio.gather(*(self._ask(ask, warm) for ask in self.asks))
        await warm.aclose()
        for text in [*self.model.engine._sessions]:
            await text.aclose()

    async def _ask(self, ask: Ask, warm: WarmSessions) -> None:
        for _ in range(ask.delay):
            await asyncio.sleep(0.0005)
        own = None if ask.is_warm else self.model.open(ask.profile, ask.set)
        for ids in [ask.ids, None] if ask.more else [ask.ids]:
            ids = ids or list(ask.prompts)[-1]
            try:
                if own is not None:
                    turn = await self._turn(own, ask, ids)
                else:
                    async with warm.session(ids, ask.profile, ask.set) as session:
                        turn = await self._turn(session, ask, ids)
            except (DoesNotFit, Busy) as error:
                if not self.ended(ask, error):
                    break
                continue
            if turn is not None:
                ask.answers.append(turn)
            elif not self.ended(ask, None):
                break
        if own is not None and self.rng.random() < 0.5:
            await own.aclose()

    async def _turn(self, session: TextSession, ask: Ask, ids: list[int]) -> Turn | None:
        n = 0
        client = self.rng.choice(["", "a", "b"])
        async with aclosing(session.astream(ids, client=client, **ask.options)) as stream:
            async for event in stream:
                n += 1
                if isinstance(event, End):
                    return event.turn
                if ask.leaves_after is not None and n >= ask.leaves_after:
                    return None
        raise AssertionError("a stream ends with End")

    def compare(self, tell: Callable[[str], object]) -> None:
        for ask in self.asks:
            for i, (got, want) in enumerate(zip(ask.answers, wanted(self.model, ask), strict=True)):
                if got.stats.shortages:  # it took a step of its profile
                    self.found["degraded"] += 1
                    break
                self.found["answers"] += 1
                self.found["tokens"] += len(got.ids)
                names = ("ids", "text", "finish", "thinking", "loop", "scores", "prompt_scores")
                if others := [name for name in names if getattr(got, name) != getattr(want, name)]:
                    self.found["bad"] += 1
                    at = next((j for j, (a, b) in enumerate(zip(got.ids, want.ids, strict=False)) if a != b), -1)
                    tell(f"answer {i} of {ask}: {', '.join(others)}, from token {at} of {len(want.ids)}")


def storm(runs: int, seed: int = 0, models: Words = MODELS, dtypes: Words = tuple(DTYPES)) -> Counter[str]:
    """What became of the answers of all runs, and how many were not those of a session alone ("bad")."""
    found = Counter[str](tried=runs, bad=0)
    for i in range(seed, seed + runs):
        rng = random.Random(i)
        name, dtype = rng.choice(models), rng.choice(dtypes)
        way = rng.choice([Storm.here, Storm.here, Storm.there, Storm.there, Storm.samples])
        model = loaded(name, dtype)
        model.costs = costs(rng)
        one = Storm(rng, model, name, dtype)
        where = f"--seed {i} ({name}, {dtype}, {way.__name__})"
        try:
            way(one)
            one.compare(lambda said, where=where: print(f"{where}: {said}", file=sys.stderr, flush=True))  # type: ignore[misc]
        except Exception as error:
            one.found["bad"] += 1
            print(f"{where}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        found += one.found
    return found + Counter(bad=0)


@measurement("Sequences beside others", is_right=is_unbroken)
def stress_sequences(runs: int = 200, seed: int = 0, models: Words = MODELS, dtypes: Words = tuple(DTYPES)) -> Rows:
    found = storm(runs, seed, models, dtypes)
    yield {"what": f"answers of many sequences at once, {found['tokens']:,} tokens", **found, "bad": found["bad"]}


if __name__ == "__main__":
    stress_sequences.main()
