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
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import kvcli
from kvcli.engine.engine import generate_together, run_to_end
from kvcli.engine.forward_request import LAST_STATE, ForwardRequest, Passes, Rows
from kvcli.engine.hf.lm import LM
from kvcli.kv.tiers.dense import Dense

UNROLLED, FADES = 3, 0.8  # draft passes in training, and the weight of each beside the one before
WINDOW, TOGETHER = 256, 4  # tokens of a training text, and how many of them make a step
RATE = 1e-3
ASKED = 16  # prompts that are answered at once
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


def seen(lm: LM, ids: Sequence[int]) -> Passes[Text]:
    """One pass, in ranges of layers that end where a hidden state is wanted."""
    cache, n, ends = Dense(lm.shapes, lm.dtype, lm.device), len(ids), layers_of(lm)
    rows, hidden, found, at = Rows.chain(ids, 0), None, dict[int, Tensor](), 0
    new: dict[int, Any] = {}
    for end in (*sorted(set(ends)), lm.n_layers):
        is_last = end == lm.n_layers
        result = yield ForwardRequest(
            lm, rows, cache, layers=range(at, end), hidden=hidden, want=range(n) if is_last else (),
            record_hidden_states=LAST_STATE if is_last else (),
        )  # fmt: skip
        assert result.hidden is not None
        new |= result.fresh
        at, hidden = end, result.hidden.clone()
        found[end] = hidden
    states = torch.cat([found[end] for end in ends], 1)
    return Text(torch.tensor(ids), states.bfloat16(), found[lm.n_layers].bfloat16())


def texts_of(model: kvcli.Model, n: int, rng: Random) -> Iterator[list[int]]:
    """About n tokens of documents, and as many that the model writes."""
    from kvcli.demo.report import write_report

    is_demo = model.lm.vocab < 4096
    if is_demo:
        whole = [write_report(Random(f"eagle {i}"), 2000, 0.35).text for i in range(1 + n // 3000)]
    else:
        whole = [p.read_text() for p in sorted(ROOT.rglob("docs/**/*.md"))]
    lines = [line for text in whole for line in text.split("\n") if 40 < len(line) < 300 and "|" not in line]
    rng.shuffle(lines)
    kept, known = 0, [model.tokenizer.encode(text) for text in whole]
    while kept < n:
        (ids,) = rng.choices(known, [len(ids) for ids in known])
        at = rng.randrange(max(1, len(ids) - WINDOW))
        found = ids[at : at + WINDOW]
        kept += len(found)
        yield found
    asked, kept = 0, 0
    while kept < n:
        prompts = []
        for line in lines[asked : asked + ASKED]:
            how = rng.choice(ASKS) if not is_demo else "{}"
            prompts.append(model.encode(how.format(line.lstrip("-#*0123456789. "))))
        asked = (asked + len(prompts)) % max(1, len(lines) - ASKED)
        samples = [{"temperature": rng.choice([0.0, 0.8]), "seed": kept + i} for i in range(len(prompts))]
        of = [model.with_profile(model.profile.replace(sample=sample)) for sample in samples]
        for task in generate_together(*map(written, of, prompts)):
            kept += len(task.result())
            yield task.result()


ASKS = (
    "{}", "Explain this: {}", "Write a short story that begins with: {}", "Rewrite in other words: {}",
    "What does this mean? {}", "Write a letter about this: {}", "List five things to know about: {}",
    "Write a Python function for this: {}", "Give advice on this: {}", "Summarize: {}",
)  # fmt: skip


def written(model: kvcli.Model, prompt: Sequence[int]) -> Any:
    """The end of a prompt, and an answer to it."""
    session = model.new_session()
    yield from session.read(prompt)
    yield from session.stream(WINDOW - 32, model.lm.stop_ids)
    return session.ids[-WINDOW:]


def collected(model: kvcli.Model, n: int, rng: Random) -> list[Text]:
    found, total, began = list[Text](), 0, time.perf_counter()
    for ids in texts_of(model, n // 2, rng):
        if len(ids) < 32:
            continue
        found.append(run_to_end(seen(model.lm, ids)))
        if total // 10_000 != (total + len(ids)) // 10_000:
            print(f"{total + len(ids):,} tokens read, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        total += len(ids)
    return found


# ---- training ----


def trained(model: kvcli.Model, texts: list[Text], draft_vocab: int, minutes: float, rng: Random) -> tuple[Any, ...]:
    """The head, its words, and the shares of first choices that were right, by pass, in texts that it did not see."""
    lm = model.lm
    torch.set_num_threads(1)
    table = weight_of(lm.model.get_input_embeddings(), lm)
    output = weight_of(lm.model.get_output_embeddings(), lm)
    counts = torch.zeros(lm.vocab)
    for text in texts:
        counts += torch.bincount(text.ids, minlength=lm.vocab)
    words = counts.topk(draft_vocab).indices.sort().values
    its = output[words]
    config = config_of(lm, draft_vocab)
    head = Plain(config)
    for name, p in head.named_parameters():
        if p.ndim == 2:
            nn.init.normal_(
                p, std=p.shape[1] ** -0.5 * (0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1)
            )
    head.lm_head.weight.data.copy_(its)
    head.lm_head.requires_grad_(False)  # rows of the model's own output layer, as they are
    rng.shuffle(texts)
    held, texts = texts[: max(4, len(texts) // 20)], texts[max(4, len(texts) // 20) :]
    optimizer = torch.optim.AdamW(
        [p for p in head.parameters() if p.requires_grad], lr=RATE, betas=(0.9, 0.95), weight_decay=0.0
    )
    began, step, mean = time.process_time(), 0, 0.0
    queue = list[Text]()
    while (share := (time.process_time() - began) / (60 * minutes)) < 1:
        if len(queue) < TOGETHER:
            queue += rng.sample(texts, len(texts))
        batch, queue = queue[:TOGETHER], queue[TOGETHER:]
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1, (step + 1) / 30) * (1 - share) ** 0.7
        loss, _ = losses(head, batch, table, its, words)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        optimizer.step()
        step, mean = step + 1, loss.item() if not step else 0.95 * mean + 0.05 * loss.item()
        if step % 25 == 0:
            with torch.no_grad():
                right = losses(head, held, table, its, words)[1]
            print(f"step {step}, {share:.0%}, loss {mean:.3f}, right {right}", file=sys.stderr, flush=True)
    with torch.no_grad():
        return config, head, words, losses(head, held, table, its, words)[1], step


def weight_of(module: Any, lm: LM) -> Tensor:
    """A table of the model in 32 bits, also where it is quantized."""
    if type(module) is nn.Embedding:
        return module(torch.arange(lm.vocab)).float()
    eye = torch.eye(lm.model.config.get_text_config().hidden_size, dtype=lm.dtype)
    with torch.inference_mode():
        return module(eye).float().T.contiguous().clone()


def losses(
    head: Plain, batch: Sequence[Text], table: Tensor, output: Tensor, words: Tensor
) -> tuple[Tensor, list[float]]:
    """The loss, and by pass the share of rows whose first choice is the model's."""
    total, right, counted = torch.zeros(()), [0.0] * UNROLLED, [0.0] * UNROLLED
    n = max(len(text.ids) for text in batch)
    pad = [F.pad(text.ids, (0, n - len(text.ids))) for text in batch]
    states = torch.stack([F.pad(t.states, (0, 0, 0, n - len(t.ids))) for t in batch]).float()
    last = torch.stack([F.pad(t.last, (0, 0, 0, n - len(t.ids))) for t in batch]).float()
    is_real = torch.stack([torch.arange(n) < len(t.ids) for t in batch])
    embedded = table[torch.stack(pad)]
    # a row has the hidden state of the token before it
    hidden = head.fc(torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1))
    wanted = (last @ output.T).log_softmax(-1)
    best = wanted.argmax(-1)
    for step, gave in enumerate(head.unrolled(embedded, hidden, UNROLLED)):
        said = head.lm_head(head.norm(gave)).log_softmax(-1)
        counts = is_real.clone()
        counts[:, : step + 1] = False
        cross = -(wanted.exp() * said).sum(-1)[counts].mean()
        total = total + FADES**step * cross
        right[step] += float((said.argmax(-1) == best)[counts].sum())
        counted[step] += float(counts.sum())
    return total, [round(a / b, 3) for a, b in zip(right, counted, strict=True)]


def save(folder: Path, config: dict[str, Any], head: Plain, words: Tensor, vocab: int) -> None:
    """As published checkpoints are: `d2t` is the distance of a word's id in the model's vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    knows = torch.zeros(vocab, dtype=torch.bool)
    knows[words] = True
    tensors = {name: p.detach().bfloat16().contiguous() for name, p in head.named_parameters()}
    save_file({**tensors, "d2t": words - torch.arange(len(words)), "t2d": knows}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=60_000)
    parser.add_argument("--minutes", type=float, default=15, help="of CPU time, for training")
    parser.add_argument("--draft-vocab", type=int, default=8192)
    asked = parser.parse_args()
    torch.manual_seed(0)
    rng, began = Random(0), time.perf_counter()
    model = kvcli.load(asked.model, profile="exact")
    saved = asked.folder / "texts.pt"
    texts = torch.load(saved, weights_only=False) if saved.exists() else collected(model, asked.tokens, rng)
    if not saved.exists():
        asked.folder.mkdir(parents=True, exist_ok=True)
        torch.save(texts, saved)
    read = time.perf_counter() - began
    with torch.enable_grad():
        config, head, words, right, steps = trained(model, texts, asked.draft_vocab, asked.minutes, rng)
    save(asked.folder, config, head, words, model.lm.vocab)
    figures = {"model": asked.model, "tokens": sum(len(t.ids) for t in texts), "reading_s": round(read)}
    size = (asked.folder / "model.safetensors").stat().st_size
    print(json.dumps({**figures, "steps": steps, "right_by_pass": right, "bytes": size}))


if __name__ == "__main__":
    main()
