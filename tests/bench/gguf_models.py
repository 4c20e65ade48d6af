"""Do we compute what a GGUF file says? Logits beside transformers' own reading of it, top tokens beside llama.cpp's.

    python tests/bench/gguf_models.py --files FILE.gguf,.. [--tokens 2000] [--without llama.cpp] [--out FILE]

Needs accelerate for transformers' side and llama-cpp-python for the other. The text is this project's documentation.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import kvcli
from kvcli.engine.engine import run
from kvcli.engine.forward_request import ForwardRequest, Rows
from kvcli.engine.hf.lm import LM
from kvcli.engine.hf.model_probe import quiet
from kvcli.engine.sequence.session import commit
from tests import make
from tests.bench.harness import ROOT, Words, measurement, picked
from tests.bench.harness import Rows as Found
from tests.gguf_files import finish

CHUNK = 256  # rows


@measurement("Logits of GGUF files beside those of others")
def gguf_models(files: tuple[Path, ...] = (), tokens: int = 2000, without: Words = ()) -> Found:
    for file in files:
        yield compare(file, tokens, picked(without, ["llama.cpp", "transformers"]))


def compare(file: Path, tokens: int, without: list[str]) -> dict[str, Any]:
    """Figures of one file."""
    with (
        tempfile.TemporaryDirectory() as cache,
        kvcli.load(str(file), set={"load.dtype": "fp32"}, cache=Path(cache)) as model,
    ):
        ids = model.tokenizer(text(), add_special_tokens=True)["input_ids"][:tokens]
        ours = logits(model.lm, ids)
        found: dict[str, Any] = {"file": file.name, "tokens": len(ids), "notes": list(model.info.notes)}
    if "transformers" not in without:
        found["relative_error"] = relative(ours, theirs(file, ids))
    if "llama.cpp" not in without:
        other, found["tokens_as_llama_cpp"] = llama_cpp(file, ids, text())
        found |= {"top_as_llama_cpp": same_top(ours, other), "relative_to_llama_cpp": relative(ours, other)}
        with tempfile.TemporaryDirectory() as folder:
            plain, _ = llama_cpp(in_float(file, Path(folder) / "float.gguf"), ids, text())
        found |= {"top_as_llama_cpp_in_float": same_top(ours, plain), "relative_to_float": relative(ours, plain)}
        found["top_of_llama_cpp_with_itself"] = same_top(other, plain)
    return found


def text() -> str:
    """Prose and tables of this project."""
    return "\n\n".join(
        (ROOT / name).read_text(encoding="utf-8") for name in ("docs/design/kv-cache.md", "docs/models.md")
    )


def logits(lm: LM, ids: list[int]) -> Tensor:
    """[N, V] of our engine, in chunks, each stored before the next."""
    kv = make.dense(lm)
    made = []
    for a in range(0, len(ids), CHUNK):
        rows = Rows.chain(ids[a : a + CHUNK], a)
        (of,) = run([ForwardRequest(lm, rows, kv, want=range(rows.n_rows))])
        made.append(of.logits.float())
        commit(kv, rows, of, range(rows.n_rows))
    return torch.cat(made)


def theirs(file: Path, ids: list[int]) -> Tensor:
    """[N, V] of transformers with the file's weights unpacked to float32 by its own reader."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import GgufConfig

    with quiet(), torch.inference_mode():
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
            local_files_only=True,
        )
        made: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    return made


def llama_cpp(file: Path, ids: list[int], said: str) -> tuple[Tensor, bool]:
    """[N, V] of llama.cpp on the file itself, keys and values in float32; and whether it cuts the text alike."""
    import llama_cpp as lib
    import numpy as np

    hear = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(hear, None)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(str(file).encode(), lib.llama_model_default_params())
    vocab = lib.llama_model_get_vocab(model)
    wants = lib.llama_context_default_params()
    wants.n_ctx, wants.n_batch, wants.n_ubatch, wants.swa_full = len(ids), CHUNK, CHUNK, True
    wants.type_k = wants.type_v = lib.GGML_TYPE_F32
    wants.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = lib.llama_init_from_model(model, wants)
    batch, n_vocab, made = lib.llama_batch_init(CHUNK, 0, 1), lib.llama_vocab_n_tokens(vocab), []
    for a in range(0, len(ids), CHUNK):
        part = ids[a : a + CHUNK]
        batch.n_tokens = len(part)
        for i, token in enumerate(part):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, a + i, 1, 0, 1
        assert lib.llama_decode(context, batch) == 0
        rows = lib.llama_get_logits(context)
        made.append(torch.from_numpy(np.ctypeslib.as_array(rows, shape=(len(part), n_vocab)).copy()))
    raw, room = said.encode(), (lib.llama_token * len(said))()
    n = lib.llama_tokenize(vocab, raw, len(raw), room, len(said), True, True)
    lib.llama_free(context)
    lib.llama_model_free(model)
    return torch.cat(made), list(room[:n])[: len(ids)] == ids


def in_float(file: Path, to: Path) -> Path:
    """The same numbers unpacked: with packed weights llama.cpp rounds what they are multiplied by to 8 bits."""
    import gguf

    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(to, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for t in reader.tensors:
        writer.add_tensor(t.name, gguf.quants.dequantize(t.data, t.tensor_type))
    finish(writer)
    return to


def same_top(mine: Tensor, other: Tensor) -> float:
    """The share of rows with the same likeliest token."""
    return float((mine.argmax(1) == other.argmax(1)).double().mean())


def relative(mine: Tensor, other: Tensor) -> float:
    """The worst row: what it is off by, over its size."""
    pairs = zip(mine.split(CHUNK), other.split(CHUNK), strict=True)  # a vocabulary times all tokens are gigabytes
    off = [(a - b).square().mean(1) / b.square().mean(1) for a, b in pairs]
    return float(torch.cat(off).sqrt().max())


if __name__ == "__main__":
    gguf_models.main()
