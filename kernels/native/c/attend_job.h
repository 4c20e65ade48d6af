// What a job of attention works on: its memory, its rows, and the blocks of the sequence that they read.
#pragma once
#include "attend_block.h"
#include "attend_packed.h"
#include <stdlib.h>
#define SPAN (B * 64)
#define TILE 64      // rows with their group: enough to make little of turning a block, few enough for the second cache
#define ENOUGH 16    // tiles that share the work well
#define LOG2E 1.44269504088896341f

typedef struct {  // what the rows saw elsewhere
  const char *out;   // [H, N, E] by strides, in fp32 if is_wide
  const float *lse;  // [H, N] by strides
  int64_t out_h, out_n, lse_h, lse_n, is_wide;
} Part;

typedef struct {  // strides in numbers; keys and values of slots lie close together
  const char *q, *k, *v, *fk, *fv;         // q [H, N, D], slots' [.., D] and [.., E], fresh rows' [K, N, D] and [K, N, E] or null
  char *out;                               // [H, N, E]
  float *lse;                              // [N, H] or null
  const int32_t *pos, *row_pos;            // positions of slots and of rows, read with a window
  const int64_t *heads;                    // [3, K]: first slot, slots, first position
  const uint8_t *sees;                     // [N, N] or null: a row sees itself and all before it
  const float *sink;                       // [H] or null
  const Part *before;                      // [n_before]
  const Packed *packed;                    // [K]: the slots in few bits, instead of k and v, D and E multiples of 16; or null
  int64_t n_before, H, K, N, D, E, qh, qn, kh, kn, vh, vn, out_h, out_n, window;  // window: 0 = none
  float scale, cap;
  int32_t is_wide, is_wide_out;
} Attend;

typedef struct {
  const Attend *a;
  long G, width, size;         // query heads of a KV head; channels in whole vectors; bytes of a number
  long tile, tiles, spans;     // fresh rows of a tile; tiles; spans to share out, 0 = each tile does them all
  int is_chain;
  float *tops, *o;             // by KV head, span and row: the states of spans to share out
  F *mass;
} Plan;

typedef struct {  // what the rows of a tile read, of one KV head
  const char *k, *v, *fk, *fv;
  const Packed *packed;
  const int32_t *pos, *row_pos;
  int64_t length, end;   // of it stored; in all
  const int64_t *order;  // the fresh row in each place behind the stored slots; null = as they come
} Sequence;

typedef struct {  // the memory of a job
  Rows rows;
  Room room;
  Sequence seq;
  uint32_t *q;
  int64_t *count, *low, *order;
  int32_t *pos;
  char *k, *v;            // a block that is gathered
  int64_t *laid;          // the fresh row in each place of the block in kt and vt, -1 = none
  int is_laid;
  float *met_top, *met_mass, *met;  // what the spans before this one came to
  void *all;
} Job;

static void *take(char **at, long bytes) {
  void *found = *at;
  *at += UP(bytes, 64);
  return found;
}
static void lay_out(Job *j, const Plan *p, long n, char *at) {
  const long kind = j->rows.kind, S = words(kind, p->a->D), W = p->width;
  j->q = take(&at, n * S * 4);
  j->count = take(&at, n * 8), j->low = take(&at, n * 8), j->order = take(&at, p->a->N * 8), j->laid = take(&at, B * 8);
  j->pos = take(&at, B * 4), j->k = take(&at, B * p->a->D * p->size), j->v = take(&at, B * p->a->E * p->size);
  j->room.kt = take(&at, S * B * 4), j->room.vt = take(&at, words(kind, B) * W * 4);
  j->room.s = take(&at, n * B * 4), j->room.p = take(&at, n * B * 4), j->room.shrink = take(&at, n * 4);
  j->rows.top = take(&at, n * 4), j->rows.mass = take(&at, n * sizeof(F)), j->rows.o = take(&at, n * W * 4);
  j->met_top = take(&at, n * 4), j->met_mass = take(&at, n * 4), j->met = take(&at, n * W * 4);
  j->all = at;
}
// Rows [first, first + count) of the pass under KV head h, with the memory that they need
static Job begin(const Plan *p, long h, long first, long rows) {
  const Attend *a = p->a;
  const long n = rows * p->G;
  Job j = {.rows = {.n = n, .D = a->D, .E = a->E, .width = p->width, .kind = a->is_wide ? WIDE : NARROW(n)}};
  const int kind = j.rows.kind;
  const long S = words(kind, a->D);
  lay_out(&j, p, n, 0);
  char *all = malloc((size_t)j.all + 64);
  lay_out(&j, p, n, (char *)UP((uintptr_t)all, 64));
  j.all = all;
  if (a->E != p->width) memset(j.room.vt, 0, words(kind, B) * p->width * 4);  // what lies behind a value's last channel
  const int64_t start = a->heads[h], length = a->heads[a->K + h], pos = a->heads[2 * a->K + h];
  j.rows.scale = a->cap > 0 ? a->scale / a->cap : a->scale * LOG2E, j.rows.cap = a->cap * LOG2E;
  j.rows.q = j.q, j.rows.count = j.count, j.rows.low = j.low;
  for (long r = 0; r < n; r++) {
    const long i = first + r / p->G, head = h * p->G + r % p->G;
    const char *q = a->q + (head * a->qh + i * a->qn) * p->size;
    if (kind != WIDENED) memcpy(j.q + r * S, q, S * 4);
    for (long d = 0; kind == WIDENED && d < a->D; d++) j.q[r * S + d] = (uint32_t)((const bf16 *)q)[d] << 16;
    j.count[r] = length + (a->fk ? i + 1 : 0);
    const int64_t low = a->window ? (int64_t)a->row_pos[i] - a->window : 0;
    j.low[r] = low < -1 ? -1 : low;  // a hole's position is -1
  }
  j.seq = (Sequence){a->k + start * a->D * p->size, a->v + start * a->E * p->size, a->fk + h * a->kh * p->size, a->fv + h * a->vh * p->size,
                     a->packed ? a->packed + h : 0, a->pos + pos, a->row_pos, length, j.count[n - 1], 0};
  return j;
}
static void empty(Job *j) {
  for (long r = 0; r < j->rows.n; r++) j->rows.top[r] = NEVER, j->rows.mass[r] = splat(0.f);
  memset(j->rows.o, 0, j->rows.n * j->rows.width * 4);
}
// The same block of slots in few bits: fresh rows have no place behind them
static Slots unpack(Job *j, const Plan *p, int64_t at) {
  const Attend *a = p->a;
  const Sequence *s = &j->seq;
  const long left = s->length - at, n = left < B ? left : B, dk = a->D * p->size, dv = a->E * p->size;
  unpack_slots(s->packed, a->is_wide, a->D, a->E, at, n, j->k, j->v);
  memset(j->k + n * dk, 0, (B - n) * dk), memset(j->v + n * dv, 0, (B - n) * dv);
  for (long i = 0; a->window && i < B; i++) j->pos[i] = i < n ? s->pos[at + i] : INT32_MIN;
  return (Slots){j->k, j->v, dk, dv, a->window ? j->pos : 0, 0, 0};
}
// The block at place `at` of the sequence: where it lies, or gathered with zeros behind the end
static Slots fetch(Job *j, const Plan *p, int64_t at) {
  const Attend *a = p->a;
  const Sequence *s = &j->seq;
  const long dk = a->D * p->size, dv = a->E * p->size, kn = a->kn * p->size, vn = a->vn * p->size;
  if (s->packed) return unpack(j, p, at);
  if (at + B <= s->length) {
    const char *k = s->k + at * dk, *v = s->v + at * dv;
    const int has_next = at + 2 * B <= s->length;
    return (Slots){k, v, dk, dv, a->window ? s->pos + at : 0, has_next ? k + B * dk : 0, has_next ? v + B * dv : 0};
  }
  for (long i = 0; i < B; i++) {
    const int64_t place = at + i, fresh = place - s->length, f = s->order && place < s->end ? s->order[fresh] : fresh;
    const int is_stored = fresh < 0, is_there = place < s->end;
    if (a->window) j->pos[i] = is_stored ? s->pos[place] : is_there ? s->row_pos[f] : INT32_MIN;
    if (is_there) {
      memcpy(j->k + i * dk, is_stored ? s->k + place * dk : s->fk + f * kn, dk);
      memcpy(j->v + i * dv, is_stored ? s->v + place * dv : s->fv + f * vn, dv);
    } else memset(j->k + i * dk, 0, dk), memset(j->v + i * dv, 0, dv);
  }
  return (Slots){j->k, j->v, dk, dv, a->window ? j->pos : 0, 0, 0};
}
// Whether a window hides a block from all rows; if it hides nothing from any, positions are of no more interest
static int is_hidden(const Job *j, Slots *b) {
  if (!b->pos) return 0;
  int64_t low = INT64_MAX, high = INT64_MIN;
  for (long r = 0; r < j->rows.n; r++) {
    low = j->low[r] < low ? j->low[r] : low;
    high = j->low[r] > high ? j->low[r] : high;
  }
  int32_t first = INT32_MAX, last = INT32_MIN;
  for (long i = 0; i < B; i++) {
    first = b->pos[i] < first ? b->pos[i] : first;
    last = b->pos[i] > last ? b->pos[i] : last;
  }
  if (first > high) b->pos = 0;
  return last <= low;
}
static void blocks(Job *j, const Plan *p, int64_t from, int64_t to) {
  for (int64_t at = from; at < to; at += B) {
    Slots b = fetch(j, p, at);
    if (!is_hidden(j, &b)) block(&j->rows, &j->room, &b, at);
  }
}
