"""Faults in the C and Triton kernels, the engine, the KV cache, the prefix cache and the drafts."""

from tests.recipes.faults.fault import Fault

C, CUDA, PREFIX = "kernels/native/c/", "kvcli/engine/cuda_graphs/", "kvcli/prefix_cache/"
CACHE, PACING, DRAFT = "kvcli/kv/cache/", "kvcli/drafts/pacing/", "kvcli/drafts/draft_models/"
FUSED_ATTEND = "kernels/attend_invariant/fused.py"
K = "tests/kernels/test_"
FAULTS = [
    # the C kernels
    Fault(
        "N1",
        C + "attend.c",
        "share = mass == 0 ? 0.f : 1.f / mass",
        "share = 1.f / mass",
        "tests/test_attend_invariant.py",
    ),
    Fault("N2", C + "attend_job.h", "low < -1 ? -1 : low", "low", "tests/test_attend_invariant_quantized.py"),
    Fault("N3", C + "layer.c", "held = pick(y > 126.f, splat(126.f), y), e", "held = y, e", K + "gated_delta.py"),
    Fault("N4", C + "gated_delta.c", "sum_across(squares) + 1e-6f", "sum_across(squares)", K + "gated_delta.py"),
    Fault("N5", C + "page_scores.c", "is_bad || top == -NEVER", "top == -NEVER", K + "page_scores.py"),
    Fault(
        "N6",
        C + "linear_quantized.c",
        "e == 255 ? 0x7fc00000u : (uint32_t)",
        "(uint32_t)",
        f"{K}linear_quantized.py {K}moe_linear.py",
    ),
    Fault("N7", C + "pool.c", "= room_for(n_threads, bytes", "= room_for(1, bytes", K + "pool.py"),
    Fault(
        "N8",
        C + "attend_job.h",
        "memset(j->k + n * dk, 0, (B - n) * dk), memset(j->v + n * dv, 0, (B - n) * dv);",
        "",
        "tests/test_quantized.py",
    ),
    Fault(
        "N9",
        C + "attend.c",
        "else finish(&one, p, at), j.is_laid = 0;",
        "else finish(&one, p, at);",
        "tests/test_attend_invariant.py",
    ),
    # the Triton kernels, in Triton's interpreter
    Fault("T1", FUSED_ATTEND, "(deep - 2 + unit) // unit + 1)", "(deep - 2 + unit) // unit)", K + "fused_attention.py"),
    Fault("T2", FUSED_ATTEND, "m_seen & (pos >= 0)[None, :] &", "m_seen &", K + "fused_attention.py"),
    Fault(
        "T3",
        "kernels/attention_mass/fused.py",
        'tl.where(lse == float("-inf"), 0.0, lse)',
        "lse",
        K + "fused_boundary.py",
    ),
    Fault("T4", "kernels/argmax/fused.py", 'tl.where(b_s != b_s, float("inf"), b_s)', "b_s", K + "fused_argmax.py"),
    Fault(
        "T6",
        "kernels/quantized_key_scores/fused.py",
        "tl.dot((left - more.to(tl.float32)).to(tl.bfloat16), k, score)",
        "score",
        K + "fused_boundary.py",
    ),
    Fault("T7", FUSED_ATTEND, "tl.maximum(span - 72, 0)", "tl.maximum(span - 71, 0)", K + "fused_attention.py"),
    Fault(
        "T8",
        "kernels/merge_attention/fused.py",
        "m_read = (weight > 0)[:, None]",
        "m_read = (a + i < n_parts)[:, None]",
        K + "fused_attention.py",
    ),
    Fault(
        "T9",
        "kernels/quantize_kv/fused.py",
        "tl.minimum(tl.maximum(low, -LARGEST), LARGEST)",
        "low",
        K + "fused_packed.py",
    ),
    Fault(
        "T10",
        "kernels/rms_norm/fused.py",
        "tl.sum(b_x * b_x, 0) / H + eps",
        "tl.sum(b_x * b_x, 0) / H",
        K + "fused_norm.py",
    ),
    # the engine
    Fault(
        "E1",
        CUDA + "captured_pass.py",
        "here.count.numpy()[0] = path, len(path)",
        "here.count.numpy()[0] = path, 1",
        "tests/test_captured_pass.py",
    ),
    Fault(
        "E2",
        CUDA + "captured_pass.py",
        "sum(rows for rows, _ in sizes)",
        "max(rows for rows, _ in sizes)",
        "tests/test_captured_pass.py",
    ),
    Fault(
        "E3", CUDA + "captured_pass.py", "key = (*sizes, *told, *(", "key = (*sizes, *(", "tests/test_captured_pass.py"
    ),
    Fault(
        "E4",
        CUDA + "capture.py",
        "except torch.OutOfMemoryError:\n        raise\n    except",
        "except",
        "tests/test_captured_pass.py",
    ),
    Fault(
        "E5",
        "kvcli/engine/hf/direct_forward.py",
        "all(torch.equal(a, b[: len(near)]) for",
        "all(True for",
        "tests/test_fused.py",
    ),
    Fault(
        "E6",
        "kvcli/kv/recurrent_state.py",
        "self.rec[key] = held.clone()",
        "self.rec[key] = held",
        "tests/test_hybrids.py",
    ),
    Fault("E8", "kvcli/kv/recurrent_state.py", " / (at[-1] - at[i])", "", "tests/test_hybrids.py"),
    Fault(
        "E10",
        "kvcli/engine/hf/mla.py",
        "all(float((a - b).double().norm()) <= within * float(b.double().norm()) for",
        "all(True for",
        "tests/test_mla.py",
    ),
    Fault(
        "E11",
        "kvcli/engine/prefill/layerwise.py",
        "end = 0 if self._comes_back else rows.pos[-1] + 1",
        "end = rows.pos[-1] + 1",
        "tests/test_sliding_windows.py tests/test_revival.py",
    ),
    Fault(
        "E12",
        "kvcli/engine/prefill/layerwise.py",
        "[i for i, row in enumerate(live) if row in",
        "[i for i, row in enumerate(live, self._at) if row in",
        "tests/test_revival.py",
    ),
    # the KV cache
    Fault(
        "V1",
        CACHE + "precision_budget.py",
        "self.apart[layer] * len(counts[0]) if",
        "self.apart[layer] if",
        "tests/test_budget.py",
    ),
    Fault(
        "V2", CACHE + "precision_budget.py", "v_dim // width_of(v_dim, group)", "v_dim // group", "tests/test_budget.py"
    ),
    Fault(
        "V3",
        CACHE + "tiered_cache.py",
        "self._has_dropped &= n > 0",
        "self._has_dropped &= n >= 0",
        "tests/test_demote.py",
    ),
    Fault(
        "V4",
        CACHE + "tiered_cache.py",
        "if n <= self._top.n_slots(layer) - self._sinks:",
        "if n <= self._top.n_slots(layer):",
        "tests/test_tiered_cache.py",
    ),
    Fault(
        "V5",
        CACHE + "tiered_cache.py",
        "int((pos >= low).sum(1).max()), rung.group)",
        "int((pos >= low).sum(1).max()), 1)",
        "tests/test_sliding_windows.py",
    ),
    Fault(
        "V6",
        "kvcli/kv/tiers/extents.py",
        "os.posix_fallocate(fd, self._end, end - self._end)",
        "os.ftruncate(fd, end)",
        "tests/test_tiered_cache.py",
    ),
    Fault(
        "V7",
        "kvcli/kv/tiers/extents.py",
        "self._free.append((offset, size))\n            raise",
        "raise",
        "tests/test_faults.py",
    ),
    Fault("V8", "kvcli/kv/sparse/sparse_tier.py", "self._choice.pop(layer, None)", "pass", "tests/test_sparse_tier.py"),
    Fault(
        "V9",
        "kvcli/kv/sparse/sparse_tier.py",
        "return chosen & pages.open.unsqueeze(1) |",
        "return chosen |",
        "tests/test_sparse_tier.py",
    ),
    # the prefix cache
    Fault("P1", PREFIX + "snapshot_file.py", 'if said != f"{total:08x}":', "if False:", "tests/test_snapshot_file.py"),
    Fault(
        "P2",
        PREFIX + "prefix_cache.py",
        "if session.ids[:n] != list(ids[:n]):",
        "if False:",
        "tests/test_snapshot_file.py",
    ),
    Fault(
        "P3",
        PREFIX + "prefix_cache.py",
        "if list(block.ids[: one.n]) != list(ids[one.start : one.end]):",
        "if False:",
        "tests/test_prefix_cache.py",
    ),
    Fault(
        "P4", PREFIX + "block_tree.py", "if name != name_of(parent, ids):", "if False:", "tests/test_prefix_cache.py"
    ),
    Fault("P5", PREFIX + "span_lookup.py", " and ids.max() < lm.vocab", "", "tests/test_span_lookup.py"),
    Fault(
        "P6",
        PREFIX + "prefix_cache.py",
        "n - windows[layer].size + 1)",
        "n - windows[layer].size + 2)",
        "tests/test_prefix_cache.py",
    ),
    # the drafts
    Fault(
        "D1",
        PACING + "source_payoff.py",
        ">= price:\n                self._rest = _REST",
        ">= price:\n                pass",
        "tests/drafts/test_source_payoff.py",
    ),
    Fault(
        "D2",
        PACING + "draft_controller.py",
        "units = seconds / self._clock.plain - before",
        "units = seconds / self._clock.plain",
        "tests/drafts/test_draft_controller.py tests/drafts/test_model_draft.py",
    ),
    Fault(
        "D3",
        PACING + "draft_controller.py",
        "for when in self._doubts if self._passes - when < _LATELY]",
        "for when in self._doubts]",
        "tests/drafts/test_draft_controller.py",
    ),
    Fault(
        "D4",
        DRAFT + "chunk_retrieval.py",
        "or not self._trigger.is_due:",
        "or True:",
        "tests/drafts/test_chunk_retrieval.py",
    ),
    Fault(
        "D5",
        DRAFT + "chunk_trigger.py",
        "if self._since < LEAST or self._vain >= TRIED:",
        "if self._since < LEAST:",
        "tests/drafts/test_chunk_retrieval.py",
    ),
    Fault("D6", DRAFT + "assistant_head.py", "_WIDER = 2 ", "_WIDER = 1 ", "tests/drafts/test_assistant.py"),
    Fault(
        "D7",
        "kvcli/methods/drafts/model.py",
        "if closes and self.working + self.depth > draft.limit:",
        "if closes and self.working > draft.limit:",
        "tests/drafts/test_obligations.py",
    ),
    Fault(
        "D8",
        DRAFT + "cross_vocabulary.py",
        "if self._n_read >= self._it.max_depth:",
        "if self._n_read > self._it.max_depth:",
        "tests/drafts/test_cross_vocabulary.py",
    ),
    Fault(
        "D9",
        DRAFT + "chunk_retrieval.py",
        "self._held = self._held if self._n else ()",
        "pass",
        "tests/drafts/test_chunk_retrieval.py",
    ),
]
