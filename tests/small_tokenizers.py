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


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def chatml(
    *added: AddedToken, words: tuple[str, ...] = (), template: str | None = CHATML, normalizer: Any = None
) -> Any:
    """Bytes, `words` that no rule leads to, and added tokens: as newer chat models have it."""
    vocab = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {word: len(vocab) + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens(list(added))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = template
    return fast


def act(*words: str, special: bool = False, **flags: bool) -> list[AddedToken]:
    return [AddedToken(word, normalized=False, special=special, **flags) for word in words]


@cache
def first_space() -> Any:
    """As Llama 2 is converted today: a space leads the whole text, not what follows a control token."""
    chars = ["\u2581", *(chr(c) for c in range(33, 127))]
    vocab = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}} | {c: 257 + i for i, c in enumerate(chars)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return _wrap(tokenizer)


@cache
def unigram(template: str | None = CHAT) -> Any:
    """With control tokens that its model would find in letters, as those of a sentencepiece vocabulary are."""
    words = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        ("<|end|>", 0.0),
        *((chr(c), -9.0) for c in range(33, 127)),
        ("\u2581", -2.0),
    ]
    tokenizer = Tokenizer(models.Unigram(words, 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Replace("\u2581", " ")
    return _wrap(tokenizer, template)


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
