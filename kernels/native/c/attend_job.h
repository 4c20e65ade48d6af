// The data of a job of attention: its memory, its rows, and the blocks of the sequence that they read.
#pragma once
#include "attend_quantized.h"
#include <stdlib.h>
#define SPAN (B * 64)
// rows times query heads per KV head: enough to make transposing a block cheap, few enough for the second-level cache
#if HAS_TILES
#define TILE 256
#else
#define TILE 64
#endif
#define ENOUGH 16    // tiles that divide the work well
#define LOG2E 1.44269504088896341f

typedef struct {  // partial attention of the rows over other slots
  const char *out;   // [H, N, E] by strides, in fp32 if is_wide
  const float *lse;  // [H, N] by strides
  int64_t out_h, out_n, lse_h, lse_n, is_wide;
} Part;

typedef struct {  // stored slots that each row reads: selected pages in their order, then all slots after the pages
  const uint8_t *pages;   // [K, n, P]: by row, for each KV head; n = 1: all rows read the same pages
  const int64_t *behind;  // [2, K]: the first slot after the pages, and the number of slots from there on
  int64_t n, P, page;     // selections of a head: one for each row, or 1; pages of a head; slots of a page
} Chosen;

typedef struct {  // strides in numbers; keys and values of slots are contiguous
  const char *q, *k, *v, *fk, *fv;         // q [H, N, D], slots [.., D] and [.., E], new KV [K, M, D] and [K, M, E] or null
  char *out;                               // [H, N, E]
  float *lse;                              // [N, H] or null
  const int32_t *pos, *row_pos;            // positions of slots and of rows, read if there is a window
  const int64_t *heads;                    // [3, K]: first slot, number of slots, first position
  const uint8_t *sees;                     // [N, M] or null: a row sees itself and all before it
  const float *sink;                       // [H] or null
  const Part *before;                      // [n_before]
  const Packed *packed;                    // [K]: quantized slots, instead of k and v, D and E multiples of 16; or null
  const Chosen *chosen;                    // or null: all slots
  int64_t n_before, H, K, N, M, D, E, qh, qn, kh, kn, vh, vn, out_h, out_n, window;  // the N query rows are the last of M; window: 0 = none
  int64_t gone;                            // evicted slots before the first, a multiple of 64: windows hide them from all rows
  float scale, cap;
  int32_t is_wide, is_wide_out;
} Attend;

typedef struct {
  const Attend *a;
  int64_t G, width, size;         // query heads per KV head; channels in whole vectors; bytes of a number
  int64_t tile, tiles, spans;     // new rows per tile; tiles; spans to divide, 0 = each tile computes all spans
  int is_chain;
  float *tops, *o;             // by KV head, span and row: the states of divided spans
  F *mass;
} Plan;

typedef struct {  // the sequence that the rows of a tile read, for one KV head
  const char *k, *v, *fk, *fv;
  const Packed *packed;
  const int32_t *pos, *row_pos;
  int64_t gone, length, end;  // indices of evicted slots; indices of stored slots, with the evicted ones; all indices
  const int64_t *starts;  // first slots of the selected pages, which come first; null = slots in their order
  int64_t paged, page, behind;  // slots in those pages, and in one of them; the first slot after them
  const int64_t *order;  // the new row at each index after the stored slots; null = in order
} Sequence;

typedef struct {  // the work memory of a job
  Rows rows;
  Room room;
  Sequence seq;
  uint32_t *q;
  int64_t *count, *low, *order, *starts;
  int32_t *pos;
  char *k, *v;            // a gathered block
  int64_t *laid;          // the new row at each index of the block in kt and vt, -1 = none
  int is_laid;
  float *met_top, *met_mass, *met;  // the merged result of the earlier spans
} Job;

static void *take(char **at, int64_t bytes) {
  void *found = *at;
  *at += UP(bytes, 64);
  return found;
}
// How numbers are multiplied for n rows; codes of a block are arranged in the same way for any number of rows
static int kind_of(const Attend *a, int64_t n) {
  (void)n;  // on some CPUs it does not depend on the number of rows
  return a->is_wide ? WIDE : a->packed && LAID_OUT == WIDENED ? WIDENED : NARROW(n);
}
// Divide the memory from `at` on for n rows; return its end
static char *lay_out(Job *j, const Plan *p, int64_t n, char *at) {
  const int64_t kind = j->rows.kind, S = words(kind, p->a->D), W = p->width;
  j->q = take(&at, n * S * 4);
  j->count = take(&at, n * 8), j->low = take(&at, n * 8), j->order = take(&at, p->a->M * 8), j->laid = take(&at, B * 8);
  j->starts = take(&at, p->a->chosen ? p->a->chosen->P * 8 : 0);
  j->pos = take(&at, B * 4), j->k = take(&at, B * p->a->D * p->size), j->v = take(&at, B * p->a->E * p->size);
  j->room.kt = take(&at, S * B * 4), j->room.vt = take(&at, words(kind, B) * W * 4);
  j->room.s = take(&at, n * B * 4), j->room.p = take(&at, n * B * 4), j->room.shrink = take(&at, n * 4), j->room.shape = take(&at, 8);
  j->rows.top = take(&at, n * 4), j->rows.mass = take(&at, n * sizeof(F)), j->rows.o = take(&at, n * W * 4);
  j->met_top = take(&at, n * 4), j->met_mass = take(&at, n * 4), j->met = take(&at, n * W * 4);
  return at;
}
// Bytes that the largest tile needs
static size_t room(const Plan *p) {
  const int64_t n = p->tile * p->G;
  Job j = {.rows = {.kind = kind_of(p->a, n)}};
  return (size_t)lay_out(&j, p, n, 0);
}
// The stored slots that row i reads under KV head h
static Sequence sequence_of(const Job *j, const Attend *a, int64_t h, int64_t i, int64_t size) {
  const int64_t start = a->heads[h] - a->gone, pos = a->heads[2 * a->K + h] - a->gone;
  Sequence s = {a->k + start * a->D * size, a->v + start * a->E * size, a->fk + h * a->kh * size, a->fv + h * a->vh * size,
                a->packed ? a->packed + h : 0, a->pos + pos, a->row_pos, .gone = a->gone, .length = a->heads[a->K + h] + a->gone};
  if (!a->chosen) return s;
  const Chosen *c = a->chosen;
  const uint8_t *mine = c->pages + (h * c->n + i % c->n) * c->P;
  int64_t n = 0;
  for (int64_t p = 0; p < c->P; p++)
    if (mine[p]) j->starts[n++] = p * c->page;
  s.starts = j->starts, s.paged = n * c->page, s.page = c->page, s.behind = c->behind[h];
  s.length = s.paged + c->behind[a->K + h];
  return s;
}
// Set up rows [first, first + count) of the pass under KV head h, in the memory `room`
static Job begin(const Plan *p, int64_t h, int64_t first, int64_t rows, char *room) {
  const Attend *a = p->a;
  const int64_t n = rows * p->G;
  Job j = {.rows = {.n = n, .D = a->D, .E = a->E, .width = p->width, .kind = kind_of(p->a, n)}};
  const int kind = j.rows.kind;
  const int64_t S = words(kind, a->D);
  lay_out(&j, p, n, room);
  *j.room.shape = 0;
  if (a->E != p->width) memset(j.room.vt, 0, words(kind, B) * p->width * 4);  // channels after a value's last one
  j.seq = sequence_of(&j, a, h, first, p->size);
  j.rows.scale = a->cap > 0 ? a->scale / a->cap : a->scale * LOG2E, j.rows.cap = a->cap * LOG2E;
  j.rows.q = j.q, j.rows.count = j.count, j.rows.low = j.low;
  for (int64_t r = 0; r < n; r++) {
    const int64_t i = first + r / p->G, head = h * p->G + r % p->G;
    const char *q = a->q + (head * a->qh + i * a->qn) * p->size;
    if (kind != WIDENED) memcpy(j.q + r * S, q, S * 4);
    for (int64_t d = 0; kind == WIDENED && d < a->D; d++) j.q[r * S + d] = (uint32_t)((const bf16 *)q)[d] << 16;
    j.count[r] = j.seq.length + (a->fk ? i + 1 + a->M - a->N : 0);
    const int64_t low = a->window ? (int64_t)a->row_pos[i + a->M - a->N] - a->window : 0;
    j.low[r] = low < -1 ? -1 : low;  // a hole has position -1
  }
  j.seq.end = j.count[n - 1];
  return j;
}
static void empty(Job *j) {
  for (int64_t r = 0; r < j->rows.n; r++) j->rows.top[r] = NEVER, j->rows.mass[r] = splat(0.f);
  memset(j->rows.o, 0, j->rows.n * j->rows.width * 4);
}
// Dequantize a block of slots. New rows are never in the same block.
static Slots unpack(Job *j, const Plan *p, int64_t at) {
  const Attend *a = p->a;
  const Sequence *s = &j->seq;
  const int64_t left = s->length - at, n = left < B ? left : B, dk = a->D * p->size, dv = a->E * p->size;
  const Packed *packed = s->packed;
  const int is_whole = j->rows.kind == LAID_OUT && n == B;
  const int is_turned = is_whole && at + B <= packed->full && can_turn(&packed->k, a->D);
  const int is_paired = is_whole && can_pair(&packed->v, a->E);
  char *k = is_turned ? 0 : j->k, *v = is_paired ? 0 : j->v;
  unpack_slots(packed, a->is_wide, a->D, a->E, at, n, k, v);
  if (is_turned) turn_block(&packed->k, a->D, at, j->room.kt);
  if (is_paired) pair_block(&packed->v, a->E, at, j->room.vt, p->width);
  memset(j->k + n * dk, 0, (B - n) * dk), memset(j->v + n * dv, 0, (B - n) * dv);
  for (int64_t i = 0; a->window && i < B; i++) j->pos[i] = i < n ? s->pos[at + i] : INT32_MIN;
  return (Slots){k, v, dk, dv, a->window ? j->pos : 0, 0, 0};
}
// Return the number of contiguous slots from index `at` of the stored slots on, up to about a block, and the first slot
static int64_t stretch(const Sequence *s, int64_t at, int64_t *slot) {
  if (at >= s->paged) {
    *slot = s->behind + at - s->paged;
    return s->length - at;
  }
  int64_t p = at / s->page, n = s->page - at % s->page;
  *slot = s->starts[p] + at % s->page;
  for (; n < B && (p + 1) * s->page < s->paged && s->starts[p + 1] == s->starts[p] + s->page; p++) n += s->page;
  return n;
}
// Return the block at index `at` of the sequence: in its memory, or gathered, with zeros after the end
static Slots fetch(Job *j, const Plan *p, int64_t at) {
  const Attend *a = p->a;
  const Sequence *s = &j->seq;
  const int64_t dk = a->D * p->size, dv = a->E * p->size, kn = a->kn * p->size, vn = a->vn * p->size;
  int64_t slot = 0, n;
  if (s->packed) return unpack(j, p, at);
  if (at + B <= s->length && stretch(s, at, &slot) >= B) {
    const char *k = s->k + slot * dk, *v = s->v + slot * dv;
    const int has_next = at + 2 * B <= s->length;
    return (Slots){k, v, dk, dv, a->window ? s->pos + slot : 0, has_next ? k + B * dk : 0, has_next ? v + B * dv : 0};
  }
  for (int64_t i = 0; i < B; i += n) {
    const int64_t place = at + i;
    if (place < s->length) {
      n = stretch(s, place, &slot), n = n < B - i ? n : B - i;
      memcpy(j->k + i * dk, s->k + slot * dk, n * dk), memcpy(j->v + i * dv, s->v + slot * dv, n * dv);
      if (a->window) memcpy(j->pos + i, s->pos + slot, n * 4);
    } else if (place < s->end) {
      const int64_t f = s->order ? s->order[place - s->length] : place - s->length;
      n = 1, memcpy(j->k + i * dk, s->fk + f * kn, dk), memcpy(j->v + i * dv, s->fv + f * vn, dv);
      if (a->window) j->pos[i] = s->row_pos[f];
    } else {
      n = B - i, memset(j->k + i * dk, 0, n * dk), memset(j->v + i * dv, 0, n * dv);
      for (int64_t e = i; a->window && e < B; e++) j->pos[e] = INT32_MIN;
    }
  }
  for (int64_t next = at + B; s->starts && next < at + 2 * B && next < s->length; next += n) {
    n = stretch(s, next, &slot), n = n < at + 2 * B - next ? n : at + 2 * B - next;
    ask_for(s->k + slot * dk, n * dk), ask_for(s->v + slot * dv, n * dv);
  }
  return (Slots){j->k, j->v, dk, dv, a->window ? j->pos : 0, 0, 0};
}
// True if a window hides a block from all rows. If it hides no slot from any row, positions are dropped.
static int is_hidden(const Job *j, Slots *b) {
  if (!b->pos) return 0;
  int64_t low = INT64_MAX, high = INT64_MIN;
  for (int64_t r = 0; r < j->rows.n; r++) {
    low = j->low[r] < low ? j->low[r] : low;
    high = j->low[r] > high ? j->low[r] : high;
  }
  int32_t first = INT32_MAX, last = INT32_MIN;
  for (int64_t i = 0; i < B; i++) {
    first = b->pos[i] < first ? b->pos[i] : first;
    last = b->pos[i] > last ? b->pos[i] : last;
  }
  if (first > high) b->pos = 0;
  return last <= low;
}
static void blocks(Job *j, const Plan *p, int64_t from, int64_t to) {
  for (int64_t at = from < j->seq.gone ? j->seq.gone : from; at < to; at += B) {
    const Packed *few = j->seq.packed;
    const int is_straight = few && at + B <= j->seq.length && at + B <= few->full && can_multiply(&j->rows, few);
    Slots b = is_straight ? (Slots){.pos = p->a->window ? j->seq.pos + at : 0} : fetch(j, p, at);
    if (is_hidden(j, &b)) continue;
    if (is_straight) block_of_codes(&j->rows, &j->room, few, b.pos, at);
    else block(&j->rows, &j->room, &b, at);
  }
  release(&j->room);
}
