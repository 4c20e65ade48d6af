"""Small tokenizers of every kind kvcli meets, made in memory."""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvcli.demo import weights_dir

CHAT = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}<|assistant|>"
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + CHAT
)
DROPS_SYSTEM = CHAT.replace("for m in messages", "for m in messages if m['role'] != 'system'")


@cache
def demo() -> Any:
    return AutoTokenizer.from_pretrained(weights_dir())


def _wrap(tokenizer: Tokenizer, template: str | None = CHAT) -> Any:
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<|end|>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.chat_template = template
    return fast


@cache
def byte_fallback(template: str | None = CHAT) -> Any:
    """As Llama 2 and Gemma have it: words with a mark for the space, bytes for everything else."""
    words = ["▁", "▁Hello", "Hello", "▁world", "wor", "ld", "é", "\n", ",", ".", "▁▁", "�"]
    words += [chr(c) for c in range(33, 127)]
    vocab = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}}
    vocab |= {word: 257 + i for i, word in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return _wrap(tokenizer, template)


@cache
def metaspace() -> Any:
    """As newer sentencepiece conversions have it."""
    words = ["▁", "▁Hello", "Hello", "▁world", "wor", "ld", "\n", ","] + [chr(c) for c in range(33, 127)]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(["<unk>", *words]))}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    return _wrap(tokenizer)


@cache
def letters(size: int, seed: int) -> Any:
    """Of so many ids: letters, a space, bytes that are no character by themselves, and pairs that `seed` chose."""
    random = Random(seed)
    alphabet = [*"abcdefghijklmnopqrstuvwxyz \n", *(f"<0x{b:02X}>" for b in b"\xc3\xa9\xf0\x9f\x98\x80")]
    words, merges = ["<unk>", *dict.fromkeys(alphabet)], list[tuple[str, str]]()
    while len(words) < size - 3:
        one, other = (random.choice([w for w in words[1:] if w[0] != "<" and w != "\n"]) for _ in range(2))
        if one + other not in words and " " not in other:
            words.append(one + other)
            merges.append((one, other))
    vocab = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return _wrap(tokenizer)


KINDS = {"byte-level": demo, "byte fallback": byte_fallback, "metaspace": metaspace}


@cache
def marked(special: tuple[str, ...] = (), added: tuple[str, ...] = (), template: str | None = CHAT) -> Any:
    """Byte-level, a letter a token; with control tokens, and with added ones that are text as well."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in added])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = template
    return fast
