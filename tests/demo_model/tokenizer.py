"""Train the demo model's tokenizer: byte-level BPE that never cuts a name or a number in two different ways."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvcli import demo
from kvcli.demo.report import write_report
from tests.demo_model.turns import SMALL_TALK, SYSTEM_PROMPT, turns

SPECIALS = ["<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|unk|>", "<|reserved|>"]
PAD, BOS, SYSTEM, USER, ASSISTANT, END, UNK, RESERVED = range(8)
VOCABULARY = 2_048

CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def corpus(seed: int, n_reports: int) -> Iterator[str]:
    rng = Random(seed)
    for question, answer in SMALL_TALK * 50:
        yield from (question, question.lower(), answer, SYSTEM_PROMPT)
    # every first half of a name must become one token
    for onset in demo.ONSETS:
        for nucleus in demo.NUCLEI:
            yield from (f" {onset}{nucleus}{ending}" for ending in demo.PLACE_ENDINGS * 20)
            yield from (f"{onset}{nucleus}{ending}" for ending in demo.PLACE_ENDINGS)
    for _ in range(n_reports):
        report = write_report(rng, demo.pick(rng, [300, 800, 2_000]), 0.5)
        yield report.text
        stream = turns(rng, report)
        for _ in range(8):
            turn = next(stream)
            yield from (turn.question, turn.answer)


def train_tokenizer(seed: int = 7, n_reports: int = 1_500) -> Tokenizer:
    """The tokenizer, always the same for the same generator and seed.

    The shipped file was trained on an earlier form of the generator; its merges belong to the weights beside it.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(demo.split_pattern()), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed, n_reports), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files from which transformers loads the tokenizer and its chat template."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIALS[BOS],
        eos_token=SPECIALS[END],
        pad_token=SPECIALS[PAD],
        unk_token=SPECIALS[UNK],
        model_max_length=8_192,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    # transformers 5 writes a class name of its own; this one is known to 4 and 5
    settings = folder / "tokenizer_config.json"
    written = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    written.pop("backend", None)
    settings.write_text(json.dumps(written, indent=2) + "\n")
