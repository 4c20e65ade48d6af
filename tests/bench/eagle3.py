"""Train an EAGLE-3 head for a model, on texts of this repository, and save it as other programs do.

    python tests/bench/eagle3.py FOLDER [--model smollm2-135m] [--tokens 60000] [--minutes 30] [--draft-vocab 8192]

The head learns the model's own distributions (arXiv 2503.01840), so texts need no answers. They are the documentation
and the demo's reports; half of the tokens are what the model writes after a line of them. Training unrolls three draft
passes, in which the head reads its own hidden states, as it will when it drafts. docs/design/draft-models.md has the
figures. `Plain` is also what the tests compare kvcli's own forward pass with.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import kvcli
from kvcli.demo.report import write_report
from kvcli.engine.engine import generate_together
from kvcli.engine.forward_request import Draft, NeededTensors, Passes
from kvcli.engine.hf.lm import LM
from kvcli.engine.stats import Step
from kvcli.methods.drafts.off import Off

UNROLLED, FADES = 3, 0.8  # draft passes in training, and the weight of each beside the one before
WINDOW, ROWS, POOL = 256, 512, 128  # tokens of a text at most and of a step, and texts that are sorted by length
RATE = 1e-3
ALONE = 0.4  # share of training in which only the first draft pass is learned, which is three times as fast
HELD, LOOK = 24, 240  # texts that are only tested, and seconds between tests
SHARP = 1.0  # of attention to the row itself, before training
ASKED = 64  # prompts that are answered at once
ROOT = Path(__file__).resolve().parents[2]


def config_of(lm: LM, draft_vocab: int) -> dict[str, Any]:
    """The config.json of a head for this model."""
    text = lm.model.config.get_text_config()
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": text.hidden_size,
        "target_hidden_size": text.hidden_size, "num_hidden_layers": 1, "num_attention_heads": lm.n_heads,
        "num_key_value_heads": lm.n_kv_heads, "head_dim": lm.head_dim, "intermediate_size": text.intermediate_size,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": False,
        "max_position_embeddings": lm.limit, "vocab_size": lm.vocab, "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "dtype": "bfloat16",
    }  # fmt: skip


class Norm(nn.Module):
    def __init__(self, n: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Plain(nn.Module):
    """An EAGLE-3 head in plain torch. Its tensors have the names of published checkpoints."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        e, heads, kv, d = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
        inner, eps = config["intermediate_size"], config["rms_norm_eps"]
        self.heads, self.kv, self.d, self.theta = heads, kv, d, config["rope_theta"]

        def linear(a: int, b: int) -> nn.Linear:
            return nn.Linear(a, b, bias=False)

        self.fc, self.norm = linear(3 * config["target_hidden_size"], e), Norm(e, eps)
        attn = {"q_proj": linear(2 * e, heads * d), "o_proj": linear(heads * d, e)}
        attn |= {name: linear(2 * e, kv * d) for name in ("k_proj", "v_proj")}
        mlp = {"gate_proj": linear(e, inner), "up_proj": linear(e, inner), "down_proj": linear(inner, e)}
        norms = {name: Norm(e, eps) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
        self.midlayer = nn.ModuleDict({"self_attn": nn.ModuleDict(attn), "mlp": nn.ModuleDict(mlp), **norms})
        self.lm_head = linear(e, config["draft_vocab_size"])

    def qkv(self, embedded: Tensor, hidden: Tensor, pos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [.., H, N, D] of rows: an embedded token and a hidden state [.., N, E] each."""
        layer = self.midlayer
        both = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], -1)  # type: ignore[operator]
        attn, shape = layer.self_attn, both.shape[:-1]
        q, k, v = (
            attn[f"{name}_proj"](both).view(*shape, n, self.d).transpose(-2, -3)  # type: ignore[index]
            for name, n in (("q", self.heads), ("k", self.kv), ("v", self.kv))
        )
        return self.turned(q, pos), self.turned(self.wide(k), pos), self.wide(v)

    def wide(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads // self.kv, dim=-3)

    def turned(self, x: Tensor, pos: Tensor) -> Tensor:
        inv = self.theta ** (-torch.arange(0, self.d, 2) / self.d)
        angle = torch.cat([pos[:, None] * inv] * 2, -1)
        a, b = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-b, a], -1) * angle.sin()

    def after(self, hidden: Tensor, out: Tensor) -> Tensor:
        """The hidden state after attention output [.., H, N, D], which the next draft token continues from."""
        layer: Any = self.midlayer
        x = hidden + layer.self_attn.o_proj(out.transpose(-2, -3).flatten(-2))
        y = layer.post_attention_layernorm(x)
        return x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(y)) * layer.mlp.up_proj(y))

    def unrolled(self, embedded: Tensor, hidden: Tensor, n: int) -> Iterator[Tensor]:
        """Hidden states of n passes over the same rows [B, N, E]: the first reads `hidden`, of the tokens before, each
        other one what the pass before gave for the row before, and sees of the rows before what drafting would."""
        rows = embedded.shape[1]
        pos, keys, values = torch.arange(rows, dtype=embedded.dtype), list[Tensor](), list[Tensor]()
        causal = torch.full((rows, rows), -math.inf)
        for step in range(n):
            q, k, v = self.qkv(embedded, hidden, pos)
            keys.append(k)
            values.append(v)
            scores = q @ keys[0].transpose(-1, -2) + causal.triu(1 - step)  # a row sees those before its draft
            scores[..., :step, 0] = 0.0  # rows without a past, which do not count
            nearer = [shifted(keys[j], step - j) for j in range(1, step + 1)]
            near = [(q * key).sum(-1, keepdim=True) for key in nearer]
            weights = torch.cat([scores, *near], -1).mul(self.d**-0.5).softmax(-1)
            out = weights[..., :rows] @ values[0]
            for j in range(1, step + 1):
                out = out + weights[..., rows + j - 1, None] * shifted(values[j], step - j)
            hidden = self.after(hidden, out)
            yield hidden
            hidden = torch.cat([hidden[:, :1], hidden[:, :-1]], 1)


def shifted(x: Tensor, n: int) -> Tensor:
    """Rows [.., N, D] moved down by n."""
    return torch.cat([x[..., :1, :].expand(*x.shape[:-2], n, -1), x[..., : x.shape[-2] - n, :]], -2) if n else x


# ---- what it learns from ----


@dataclass
class Text:
    """A text as the model saw it."""

    ids: Tensor  # [N]
    states: Tensor  # [N, 3 E], of three layers, in 16 bits
    last: Tensor  # [N, E]: what the model's output layer got


def layers_of(lm: LM) -> tuple[int, int, int]:
    """The layers whose input heads get, if their config names no others."""
    return 2, lm.n_layers // 2, lm.n_layers - 3


@dataclass(frozen=True)
class Recorder(Off):
    """Plain decoding that keeps the hidden states of each token."""

    layers: tuple[int, ...] = ()
    kept: list[Tensor] = field(default_factory=list)

    def propose(self, ids: Sequence[int], room: int, context: Any = None) -> Draft:
        return Draft([], [], needs=NeededTensors((*self.layers, -1)))

    def observe(self, step: Step) -> None:
        assert step.hidden is not None
        self.kept.append(step.hidden.bfloat16())

    def text(self, ids: Sequence[int]) -> Text:
        """The text that ends with these ids, of which the last was in no pass."""
        states = torch.cat(self.kept)
        e = states.shape[1] // (1 + len(self.layers))
        return Text(torch.tensor(ids[-1 - len(states) : -1]), states[:, :-e].clone(), states[:, -e:].clone())


def texts_of(model: kvcli.Model, n: int, rng: Random) -> Iterator[list[Text]]:
    """About n tokens that the model answers, greedily or sampled, a batch of answers at a time."""
    if model.lm.vocab < 4096:  # the demo continues its reports
        whole = [write_report(Random(f"eagle {i}"), 2000, 0.35).text for i in range(1 + n // 3000)]
    else:
        whole = [p.read_text() for p in sorted(ROOT.rglob("docs/**/*.md"))]
    asks = [line for text in whole for line in text.split("\n") if 40 < len(line) < 300 and "|" not in line]
    if model.lm.vocab >= 4096:
        asks = [*(ask.format(of) for ask in ASKS for of in ABOUT.split(", ")), *reworked(asks)]
    kept, rest = 0, list[str]()
    while kept < n:
        if len(rest) < ASKED:  # every request again, sampled otherwise
            rest += rng.sample(asks, len(asks))
        prompts, rest = [model.encode(ask) for ask in rest[:ASKED]], rest[ASKED:]
        samples = [{"temperature": rng.choice([0.0, 0.8]), "seed": rng.randrange(1 << 31)} for _ in prompts]
        of = [model.with_profile(model.profile.replace(sample=sample)) for sample in samples]
        batch = [task.result() for task in generate_together(*map(written, of, prompts))]
        kept += sum(len(text.ids) for text in batch)
        yield batch


def reworked(lines: Sequence[str]) -> list[str]:
    """Tasks that copy, shorten or translate a line of the documents."""
    asks = ("Summarize: {}", "Rewrite in other words: {}", "Translate to French: {}", "Repeat this text: {}")
    return [asks[i % len(asks)].format(line.lstrip("-#*0123456789. ")) for i, line in enumerate(lines[::9])]


# no question of tests/bench/drafters.py is among these
ASKS = (
    "What is {}?", "Explain {} to a child.", "Write a short story about {}.", "Give me five tips about {}.",
    "Why is {} important?", "Write a letter to a friend about {}.", "What are the advantages and disadvantages of {}?",
    "Write a Python class for {}.", "Write a poem about {}.", "How do I learn more about {}?", "Tell me about {}.",
    "List the main things to know about {}.", "Describe the history of {}.", "How does {} work?",
    "Write a Python function that counts words about {}.", "Write an introduction to an article about {}.",
)  # fmt: skip
ABOUT = (
    "gardening, the moon, electric cars, chess, bread, the Roman Empire, photosynthesis, insurance, jazz, a storm, "
    "volcanoes, time management, bees, a bank account, democracy, swimming, black holes, a library, cheese, trade, "
    "the heart, remote work, a shopping list, earthquakes, coffee, school, a robot, vaccines, football, loneliness, "
    "the printing press, budgets, dogs, a lost key, climate, painting, sleep, rivers, databases, a job interview, "
    "history, the internet, salt, friendship, a queue, matrices, travel by train, the sun, cooking rice, text files, "
    "a mountain village, algebra, whales, honesty, public transport, the Silk Road, a sorting algorithm, music, rain"
)


def written(model: kvcli.Model, prompt: Sequence[int]) -> Passes[Text]:
    """An answer, as the model saw it."""
    session = model.new_session()
    yield from session.read(prompt)
    session.drafter = recorder = Recorder(layers_of(model.lm))
    yield from session.stream(WINDOW, model.lm.stop_ids)
    return recorder.text(session.ids)


# ---- training ----


@dataclass
class Target:
    """Of the model: its embeddings, and the rows of its output layer that the head has."""

    table: Tensor  # [V, E]
    words: Tensor  # [W], rising token ids
    output: Tensor  # [W, E]
    scale: Tensor  # [3 E]: by which states are divided in training
    size: float  # of what the output layer gets


def target_of(lm: LM, texts: Sequence[Text], held: Sequence[Text], draft_vocab: int) -> Target:
    counts, unseen = (
        torch.bincount(torch.cat([t.ids for t in of]), minlength=lm.vocab).float() for of in (texts, held)
    )
    counts += torch.linspace(1, 0, lm.vocab)  # of tokens as rare here, the one that its tokenizer made first
    words = counts.topk(draft_vocab).indices.sort().values
    covered = float(torch.isin(unseen, words).float().mean())
    print(f"{draft_vocab:,} words are {covered:.1%} of unseen tokens", file=sys.stderr, flush=True)
    table, output = (weight_of(m, lm) for m in (lm.model.get_input_embeddings(), lm.model.get_output_embeddings()))
    scale = torch.cat([text.states for text in texts[:50]]).float().pow(2).mean(0).sqrt().clamp(min=1e-3)
    size = float(torch.cat([text.last for text in texts[:50]]).float().pow(2).mean().sqrt())
    return Target(table, words, output[words], scale, size)


def begun(head: Plain, texts: Sequence[Text], of: Target) -> None:
    """Set the head to what least squares find: `fc` gives what the output layer got for the token before, and attention
    to the row itself adds what the token changes of it."""
    e, d, layer = of.table.shape[1], head.d, head.midlayer
    for p in head.parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=p.shape[1] ** -0.5)
    states, last = (torch.cat([getattr(t, name)[:-1] for t in texts]).float() for name in ("states", "last"))
    after = torch.cat([t.last[1:] for t in texts]).float() / of.size
    head.fc.weight.data = solved(states / of.scale, last / of.size).T.contiguous()
    hidden = head.fc(states / of.scale)
    embedded = of.table[torch.cat([t.ids[1:] for t in texts])]
    both = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], -1)  # type: ignore[operator]
    u, s, v = torch.linalg.svd(solved(both, after - hidden).T, full_matrices=False)
    attn: Any = layer.self_attn
    attn.o_proj.weight.data.zero_()
    n = head.kv * 2 // 3  # key-value heads that attend to their own row; the others learn what to attend to
    group = head.heads // head.kv
    for i in range(n):
        at, root = slice(i * d, (i + 1) * d), s[i * d : (i + 1) * d].sqrt()
        attn.v_proj.weight.data[at] = root[:, None] * v[at]
        near = nn.init.orthogonal_(torch.empty(d, e)) * (e / d) ** 0.5 * SHARP
        attn.k_proj.weight.data[at] = torch.cat([near, near * 0], 1)
        for j in range(i * group, (i + 1) * group):
            out = slice(j * d, (j + 1) * d)
            attn.q_proj.weight.data[out] = torch.cat([near, near * 0], 1)
            attn.o_proj.weight.data[:, out] = u[:, at] * root / group
    head.midlayer.mlp.down_proj.weight.data.mul_(0.1)  # type: ignore[union-attr, operator]
    head.norm.weight.data.fill_(of.size)
    head.lm_head.weight.data.copy_(of.output)
    head.lm_head.requires_grad_(False)  # rows of the model's own output layer, as they are


def solved(x: Tensor, y: Tensor) -> Tensor:
    """Return the matrix that makes y of x by least squares, with a small ridge."""
    square = x.T @ x
    square += 1e-3 * square.diagonal().mean() * torch.eye(len(square))
    found: Tensor = torch.linalg.solve(square.double(), (x.T @ y).double()).float()
    return found


@dataclass
class Training:
    """A head, its texts, and what they say of it. It goes on from the folder's `state.pt`, if there is one."""

    model: kvcli.Model
    folder: Path
    draft_vocab: int
    rng: Random
    texts: list[Text] = field(default_factory=list)

    def __post_init__(self) -> None:
        held = self.held = written_in(self.folder)[:HELD]
        self.begins = {begin_of(text) for text in held}
        self.look()
        self.config = config_of(self.model.lm, self.draft_vocab)
        self.of = target_of(self.model.lm, self.texts, held, self.draft_vocab)
        self.head, self.saved = Plain(self.config), self.folder / "state.pt"
        self.step, self.spent, self.best = 0, 0.0, 0.0
        with torch.no_grad():
            begun(self.head, self.texts[:150], self.of)
        moved = [p for p in self.head.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(moved, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
        if self.saved.exists():
            state = torch.load(self.saved, weights_only=True)
            self.head.load_state_dict(state["head"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.spent, self.best = state["step"], state["spent"], state["best"]
            self.of.words, self.of.scale, self.of.size = state["words"], state["scale"], state["size"]
            self.of.output = self.head.lm_head.weight.data

    def look(self) -> None:
        """Read what has been written by now, without answers that begin as those held out."""
        self.texts = [text for text in written_in(self.folder)[HELD:] if begin_of(text) not in self.begins]

    def batches(self) -> Iterator[list[Text]]:
        """Steps of texts of about equal length, without end."""
        while True:
            self.look()
            self.rng.shuffle(self.texts)
            for at in range(0, len(self.texts), POOL):
                pool = sorted(self.texts[at : at + POOL], key=lambda text: len(text.ids), reverse=True)
                found = list[list[Text]]()
                while pool:
                    n = max(1, ROWS // len(pool[0].ids))
                    found.append(pool[:n])
                    pool = pool[n:]
                self.rng.shuffle(found)
                yield from found

    def run(self, minutes: float) -> None:
        """Train until so much time was spent in all."""
        began, mean, said = time.monotonic() - self.spent, 0.0, -math.inf
        for batch in self.batches():
            self.spent = time.monotonic() - began
            share = self.spent / (60 * minutes)
            if share >= 1 or self.spent - said > LOOK:
                right = self.right()
                line = f"{time.strftime('%T')} step {self.step}, {share:.0%}, loss {mean:.3f}, right {right}"
                print(line, f"of {sum(len(t.ids) for t in self.texts):,} tokens", file=sys.stderr, flush=True)
                said = self.spent = time.monotonic() - began
                self.keep(right[0])
            if share >= 1:
                return
            loss = self.learn(batch, share)
            mean = loss if not mean else 0.95 * mean + 0.05 * loss

    def keep(self, right: float) -> None:
        """Save the head if no other was better on the held-out texts, and what training goes on from."""
        if right >= self.best:
            self.best = right
            save(self.folder, self.config, self.head, self.of, self.model.lm.vocab)
        state = {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}
        state |= {"step": self.step, "spent": self.spent, "best": self.best}
        torch.save({**state, "words": self.of.words, "scale": self.of.scale, "size": self.of.size}, self.saved)

    def learn(self, batch: Sequence[Text], share: float) -> float:
        """Make one step of training, of which `share` has passed, and return its loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = RATE * min(1, (self.step + 1) / 30) * (1 - share)
        loss, _ = losses(self.head, batch, self.of, UNROLLED if share > ALONE else 1)
        self.head.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def right(self) -> list[float]:
        """By pass, the share of rows of the held-out texts whose first choice is the model's."""
        with torch.no_grad():
            return losses(self.head, self.held, self.of, UNROLLED)[1]


def written_in(folder: Path) -> list[Text]:
    return [text for part in sorted(folder.glob("texts/*.pt")) for text in torch.load(part, weights_only=False)]


def begin_of(text: Text) -> tuple[int, ...]:
    return tuple(text.ids[:12].tolist())


def weight_of(module: Any, lm: LM) -> Tensor:
    """A table of the model in 32 bits, also where it is quantized."""
    if type(module) is nn.Embedding:
        return module(torch.arange(lm.vocab)).float()
    eye = torch.eye(lm.model.config.get_text_config().hidden_size, dtype=lm.dtype)
    with torch.inference_mode():
        return module(eye).float().T.contiguous().clone()


def losses(head: Plain, batch: Sequence[Text], of: Target, passes: int) -> tuple[Tensor, list[float]]:
    """The loss, and by pass the share of rows whose first choice is the model's."""
    total, right, counted = torch.zeros(()), [0.0] * passes, [0.0] * passes
    n = max(len(text.ids) for text in batch)
    states = torch.stack([F.pad(t.states, (0, 0, 0, n - len(t.ids))) for t in batch]).float() / of.scale
    last = torch.stack([F.pad(t.last, (0, 0, 0, n - len(t.ids))) for t in batch]).float()
    is_real = torch.stack([torch.arange(n) < len(t.ids) for t in batch])
    embedded = of.table[torch.stack([F.pad(text.ids, (0, n - len(text.ids))) for text in batch])]
    # a row has the hidden state of the token before it
    hidden = head.fc(torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1))
    with torch.no_grad():
        wanted = (last @ of.output.T).log_softmax(-1)
        best, wanted = wanted.argmax(-1), wanted.exp_()
    for step, gave in enumerate(head.unrolled(embedded, hidden, passes)):
        counts = is_real.clone()
        counts[:, : step + 1] = False
        said = head.lm_head(head.norm(gave[counts])).log_softmax(-1)
        cross = -(wanted[counts] * said).sum(-1).mean()
        total = total + FADES**step * cross
        right[step] += float((said.argmax(-1) == best[counts]).sum())
        counted[step] += float(counts.sum())
    return total, [round(a / b, 3) for a, b in zip(right, counted, strict=True)]


def save(folder: Path, config: dict[str, Any], head: Plain, of: Target, vocab: int) -> None:
    """As published checkpoints are: `d2t` is the distance of a word's id in the model's vocabulary."""
    knows, words = torch.zeros(vocab, dtype=torch.bool), of.words
    knows[words] = True
    tensors = {name: p.detach().bfloat16().contiguous() for name, p in head.named_parameters()}
    tensors["fc.weight"] = (head.fc.weight.detach() / of.scale).bfloat16()
    save_file({**tensors, "d2t": words - torch.arange(len(words)), "t2d": knows}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=60_000, help="that the model writes, if FOLDER has no texts")
    parser.add_argument("--part", type=int, default=0, help="another one writes further texts")
    parser.add_argument("--minutes", type=float, default=15, help="of training in all; 0 = only write texts")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, texts = kvcli.load(asked.model, profile="exact"), asked.folder / "texts"
    texts.mkdir(parents=True, exist_ok=True)
    if not [*texts.glob(f"{asked.part}-*.pt")]:
        for i, batch in enumerate(texts_of(model, asked.tokens, Random(asked.part))):
            torch.save(batch, texts / "unfinished")
            (texts / "unfinished").rename(texts / f"{asked.part}-{i:03}.pt")  # a run may be training already
    writing = time.process_time()
    if not asked.minutes:
        return
    training = Training(model, asked.folder, asked.draft_vocab, Random(0))
    with torch.enable_grad():
        training.run(asked.minutes)
    figures = {"model": asked.model, "tokens": sum(len(t.ids) for t in training.texts), "writing_s": round(writing)}
    size = (asked.folder / "model.safetensors").stat().st_size
    print(json.dumps({**figures, "steps": training.step, "right_by_pass": training.right(), "bytes": size}))


if __name__ == "__main__":
    main()
