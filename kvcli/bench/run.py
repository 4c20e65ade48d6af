"""Benchmark run: load, build prompts, measure, compare texts, measure memory; and its document at any moment."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcli.bench.environment import load_average
from kvcli.bench.measure import Case, RunSchedule, Series, Tell, measure, words_of
from kvcli.bench.profile_side import Models, plain
from kvcli.bench.side_factory import Recipe, make
from kvcli.bench.text_agreement import Tie, first_difference, tie_at
from kvcli.bench.workloads import prompt_of
from kvcli.errors import ContextOverflow, KvcliError, UsageError
from kvcli.kernels import native

if TYPE_CHECKING:
    from kvcli.bench.side import Side
    from kvcli.chat.model import Model
    from kvcli.documents import Document
    from kvcli.engine.model_info import ModelInfo
    from kvcli.schemas.bench import BenchArgs, BenchDocument, BenchRow
    from kvcli.schemas.quality import QualityDocument
    from kvcli.settings.profile import Profile

Quality = Callable[["Model", "list[Profile]"], "QualityDocument | None"]


@dataclass(frozen=True)
class BenchRequest:
    """Arguments of a benchmark. The first recipe is the baseline, unless an earlier result is."""

    args: BenchArgs
    recipes: Sequence[Recipe]
    files: Mapping[str, Document]  # workloads that are files
    earlier: BenchDocument | None = None  # compare with its rows instead
    earlier_name: str = ""
    quality: Quality | None = None
    notes: Sequence[str] = ()

    @property
    def baseline(self) -> str:
        return self.earlier_name if self.earlier is not None else self.recipes[0].name

    @property
    def plan(self) -> RunSchedule:
        return RunSchedule(self.args.reps, self.args.warmup, self.args.interleave)

    @property
    def first_profile(self) -> Recipe:
        """Recipe whose weights and tokenizer represent the model."""
        return next(recipe for recipe in self.recipes if recipe.kind == "profile")


@dataclass
class Bench:
    """A running benchmark. Its measurements are kept here if it is interrupted."""

    ask: BenchRequest
    models: Models
    environ: Mapping[str, str]
    tell: Tell
    sides: dict[str, Side] = field(default_factory=dict)
    setups: dict[str, dict[str, str]] = field(default_factory=dict)
    series: list[Series] = field(default_factory=list)
    ties: dict[tuple[str, Case], Tie] = field(default_factory=dict)
    quality: QualityDocument | None = None
    notes: list[str] = field(default_factory=list)
    load_before: list[float] | None = field(default_factory=load_average)
    complete: bool = False
    info: ModelInfo | None = None  # set after loading
    stops: Collection[int] = ()

    def run(self) -> None:
        """Run the whole benchmark. Raises KvcliError only before the first sample."""
        model = self.model
        self.info, self.stops = model.info, model.lm.stop_ids
        cases = self.cases(model)
        for recipe in self.ask.recipes:
            self.tell(0, 0, f"loading {recipe.name}")
            self.sides[recipe.name] = side = make(recipe, self.models)
            self.setups[recipe.name] = side.setup
        measure(list(self.sides.values()), cases, self.ask.plan, self.series, self.tell)
        self.explain_differences()
        if self.ask.quality is not None:
            self.ask_questions(self.ask.quality, model)
            if self.quality is not None and not self.quality.complete:
                return
        self.close()
        if self.ask.args.memory:
            self.measure_peaks()
        self.complete = True

    def ask_questions(self, quality: Quality, model: Model) -> None:
        """Run the quality suite. If it fails, the speeds are kept."""
        try:
            self.quality = quality(model, self.comparable(model))
        except Exception as error:  # out of memory, a full disk: whatever it is, the speeds are measured
            self.notes.append(f"no quality suite: {words_of(error)}")

    def comparable(self, model: Model) -> list[Profile]:
        """Profiles that use these weights: the quality suite compares them with the full cache."""
        profiles = [r.as_profile().replace(name=r.name) for r in self.ask.recipes if r.kind == "profile"]
        other = [profile.name for profile in profiles if profile.load != model.profile.load]
        if other:
            self.notes.append(f"quality not measured for {', '.join(other)}: their weights are loaded differently")
        return [profile for profile in profiles if profile.load == model.profile.load]

    @property
    def model(self) -> Model:
        """The model under plain decoding. It has the tokenizer, and its logits decide about near ties."""
        return self.models.under(plain(self.ask.first_profile.as_profile()))

    def cases(self, model: Model) -> list[Case]:
        """Build a case for every context length with every workload."""
        args = self.ask.args
        check_room(args.ctx, args.new, model.lm.limit, args.model)
        of = self.ask.files, model.tokenizer, model.lm.vocab
        return [
            Case(ctx, name, tuple(prompt_of(name, *of, ctx, args.new, args.seed)), args.new)
            for ctx in args.ctx
            for name in args.workloads
        ]

    def explain_differences(self) -> None:
        """Compute, with the plain model, whether each first difference from the baseline's text is a near tie."""
        for series in self.series:
            other = self.reference_ids(series)
            mine = series.samples[-1].ids if series.samples else ()
            at = first_difference(mine, other or ())
            if other is not None and at is not None:
                self.tell(0, 0, f"comparing the texts of {series.side}")
                text = [*series.case.prompt, *mine[:at]]
                try:
                    self.ties[series.side, series.case] = tie_at(self.model, text, mine[at], other[at])
                except Exception as error:  # any failure, as in `ask_questions`
                    self.notes.append(f"{series.side}'s first difference was not checked: {words_of(error)}")

    def reference_ids(self, series: Series) -> Sequence[int] | None:
        """Return the text to compare with; None for the baseline itself, or if there is none."""
        if not self._drew_alike(series):
            return None
        if self.ask.earlier is not None:
            row = self.earlier_row(series)
            return row.ids if row and row.ids and row.prompt_hash == hash_of(series.case.prompt) else None
        base = self.base_series(series)
        return base.samples[-1].ids if base and base is not series and base.samples else None

    def _drew_alike(self, series: Series) -> bool:
        """True if both texts were sampled with the same random numbers (only profiles share them), or greedily."""
        args, earlier = self.ask.args, self.ask.earlier
        then = earlier.args if earlier is not None else args
        if args.temperature == then.temperature == 0:
            return True
        profiles = {recipe.name for recipe in self.ask.recipes if recipe.kind == "profile"}
        sides = {series.side} if earlier is not None else {series.side, self.ask.baseline}
        return sides <= profiles and (then.temperature, then.seed) == (args.temperature, args.seed)

    def base_series(self, series: Series) -> Series | None:
        """The baseline's series on the same case."""
        same = (s for s in self.series if s.side == self.ask.baseline and s.case is series.case)
        return next(same, None)

    def earlier_row(self, series: Series) -> BenchRow | None:
        """The row of the same side and case in the earlier result."""
        rows = self.ask.earlier.rows if self.ask.earlier is not None else []
        wanted = (series.side, series.case.ctx, series.case.workload)
        return next((row for row in rows if (row.profile, row.ctx, row.workload) == wanted), None)

    def close(self) -> None:
        """Free the memory of the sides; their samples are kept."""
        for side in self.sides.values():
            side.close()
        self.sides.clear()
        self.models.close()

    def measure_peaks(self) -> None:
        """Measure peak memory of every side and case, each in a separate process. Never while something is timed."""
        recipes = {recipe.name: recipe for recipe in self.ask.recipes}
        todo = [series for series in self.series if series.samples]
        for i, series in enumerate(todo):
            from kvcli.bench.peak import peak_of

            self.tell(i, len(todo), f"memory of {series.side} · {series.case.ctx:,}")
            try:
                series.peak = peak_of(recipes[series.side], series.case.prompt, series.case.new, self.environ)
            except (KvcliError, OSError) as error:
                self.notes.append(words_of(error))


def refuse_unbuilt() -> None:
    """Raise UsageError in a checkout without built native kernels, because torch would be timed, at half the speed."""
    if native.is_unbuilt():
        why = "the native kernels of this checkout are not built"
        lines = [native.why_not(), "the benchmark would measure torch instead"]
        raise UsageError(why, code="not_built", lines=lines, try_=[native.remedy()])


def check_room(ctx: Sequence[int], new: int, limit: int, model: str) -> None:
    """Refuse contexts longer than the model's context window, and contexts that the new tokens alone fill."""
    for n in ctx:
        if n > limit:
            raise ContextOverflow(
                f"--ctx {n:,} exceeds the context limit of {model}",
                lines=[f"the limit is {limit:,} tokens"],
                detail={"ctx": n, "limit": limit},
                try_=[f"--ctx {limit}"],
            )
        if new >= n:
            raise UsageError(
                f"-n {new:,} leaves no tokens for a prompt in --ctx {n:,}",
                lines=["--ctx counts the prompt and the new tokens together"],
                try_=[f"-n {max(1, n // 4)}", *([f"--ctx {4 * new}"] if 4 * new <= limit else [])],
            )


def hash_of(ids: Sequence[int]) -> str:
    """Hash of a prompt in twelve digits."""
    return hashlib.sha256(" ".join(map(str, ids)).encode()).hexdigest()[:12]
