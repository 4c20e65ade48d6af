// Attention of a pass's rows over stored slots and each other.
//
// What a row reads is one sequence: the stored slots in their order, then its ancestors in this pass from the root down, then
// itself; which of them are stored already makes no difference. The sequence is cut into blocks of 64 and spans of 4,096 by
// place in it. Each block changes the state of its span in order, spans start empty and meet in order. So a row's bits
// depend on its sequence alone. Work is cut in two ways that give the same bits: many rows by tiles of them, each over the
// whole sequence; few rows by spans of what is stored, in whole blocks, and then what is left for each tile. The rows of a
// tree have sequences of their own and are tiles of one.
#include "attend_block.h"
#include "pool.h"
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
    j.low[r] = low < INT32_MIN ? INT32_MIN : low;
  }
  j.seq = (Sequence){a->k + start * a->D * p->size, a->v + start * a->E * p->size, a->fk + h * a->kh * p->size, a->fv + h * a->vh * p->size,
                     a->pos + pos, a->row_pos, length, j.count[n - 1], 0};
  return j;
}
static void empty(Job *j) {
  for (long r = 0; r < j->rows.n; r++) j->rows.top[r] = NEVER, j->rows.mass[r] = splat(0.f);
  memset(j->rows.o, 0, j->rows.n * j->rows.width * 4);
}
// The block at place `at` of the sequence: where it lies, or gathered with zeros behind the end
static Slots fetch(Job *j, const Plan *p, int64_t at) {
  const Attend *a = p->a;
  const Sequence *s = &j->seq;
  const long dk = a->D * p->size, dv = a->E * p->size, kn = a->kn * p->size, vn = a->vn * p->size;
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
// Another state of row r meets what came before: the one fixed order of all that a row saw
static void meet(Job *j, long r, float top, float mass, const float *o) {
  const float was = j->met_top[r], now = top > was ? top : was;
  if (top == NEVER) return;
  const float a = was == now ? 1.f : exp2_1(was - now), b = top == now ? 1.f : exp2_1(top - now);
  j->met_top[r] = now;
  j->met_mass[r] = j->met_mass[r] * a + mass * b;
  float *met = j->met + r * j->rows.width;
  for (long e = 0; e < j->rows.width; e += 16) store(met + e, fma_(o ? load(F, o + e) : splat(0.f), splat(b), load(F, met + e) * a));
}
static void meet_parts(Job *j, const Plan *p, long h, long first) {
  const Attend *a = p->a;
  float o[p->width];
  memset(o, 0, sizeof o);
  for (long r = 0; r < j->rows.n; r++) j->met_top[r] = NEVER, j->met_mass[r] = 0;
  memset(j->met, 0, j->rows.n * p->width * 4);
  for (const Part *b = a->before; b < a->before + a->n_before; b++)
    for (long r = 0; r < j->rows.n; r++) {
      const long i = first + r / p->G, head = h * p->G + r % p->G;
      const char *from = b->out + (head * b->out_h + i * b->out_n) * (b->is_wide ? 4 : 2);
      for (long e = 0; e < a->E; e++) o[e] = b->is_wide ? ((const float *)from)[e] : wide1(((const bf16 *)from)[e]);
      meet(j, r, b->lse[head * b->lse_h + i * b->lse_n] * LOG2E, 1.f, o);
    }
}
static void write_out(Job *j, const Plan *p, long h, long first) {
  const Attend *a = p->a;
  for (long r = 0; r < j->rows.n; r++) {
    const long i = first + r / p->G, head = h * p->G + r % p->G, size = a->is_wide_out ? 4 : 2;
    if (a->sink) meet(j, r, a->sink[head] * LOG2E, 1.f, 0);
    const float mass = j->met_mass[r], share = mass == 0 ? 0.f : 1.f / mass;
    char *out = a->out + (head * a->out_h + i * a->out_n) * size;
    for (long e = 0; e < a->E; e += 16) {
      const F v = load(F, j->met + r * p->width + e) * share;
      const H narrowed = narrow(v);
      memcpy(out + e * size, a->is_wide_out ? (const void *)&v : (const void *)&narrowed, (a->E - e < 16 ? a->E - e : 16) * size);
    }
    if (a->lse) a->lse[i * a->H + head] = mass == 0 ? NEVER : (j->met_top[r] + log2_(mass)) / LOG2E;
  }
}
// The span so far meets what came before it
static void close_span(Job *j) {
  for (long r = 0; r < j->rows.n; r++) meet(j, r, j->rows.top[r], sum_across(j->rows.mass[r]), j->rows.o + r * j->rows.width);
  empty(j);
}
// All blocks from place `at` on
static void finish(Job *j, const Plan *p, int64_t at) {
  do {
    const int64_t end = (at / SPAN + 1) * SPAN;
    blocks(j, p, at, end < j->seq.end ? end : j->seq.end);
    close_span(j);
    at = end;
  } while (at < j->seq.end);
}
// Fresh row i of a tile by itself, in the same memory: a tree's row, which has a sequence of its own
static Job one_of(Job *j, const Plan *p, long first, long i) {
  const Attend *a = p->a;
  const long G = p->G, r = i * G, row = first + i;
  Job one = *j;
  one.rows.n = G, one.rows.q += r * words(j->rows.kind, a->D), one.rows.count += r, one.rows.low += r, one.low += r;
  one.rows.top += r, one.rows.mass += r, one.rows.o += r * p->width, one.met_top += r, one.met_mass += r, one.met += r * p->width;
  int64_t seen = 0;
  for (long f = 0; f <= row; f++)
    if (f == row || a->sees[row * a->N + f]) j->order[seen++] = f;
  one.seq.order = j->order, one.seq.end = j->seq.length + seen;
  for (long g = 0; g < G; g++) j->count[r + g] = one.seq.end;
  return one;
}
// The same for a row whose tail is one block: what is stored of it is laid out once for all rows, and of the fresh ones those
// that were not there for the row before; what lies behind the row's own end is not seen
static void tail(Job *j, Job *one, const Plan *p, int64_t at) {
  const Attend *a = p->a;
  const Sequence *s = &one->seq;
  if (!j->is_laid) {
    Job stored = *j;
    stored.seq.end = s->length;
    const Slots b = fetch(&stored, p, at);
    lay(&j->rows, &j->room, &b);
    for (long i = 0; i < B; i++) j->laid[i] = -1;
    j->is_laid = 1;
  }
  for (int64_t f = 0; f < s->end - s->length; f++) {
    const int64_t i = s->length - at + f, row = s->order[f];
    if (j->laid[i] == row) continue;
    place(&j->rows, &j->room, i, s->fk + row * a->kn * p->size, s->fv + row * a->vn * p->size);
    j->laid[i] = row;
    if (a->window) j->pos[i] = s->row_pos[row];
  }
  Slots b = {.pos = a->window ? j->pos : 0};
  if (!is_hidden(one, &b)) block(&one->rows, &one->room, &b, at);
  close_span(one);
}
static int64_t whole(const Attend *a, long h) { return a->heads[a->K + h] / B * B; }
// One span of whole stored blocks, for the rows of a tile
static void span_chunk(void *arg, int c) {
  const Plan *p = arg;
  const long t = c % p->tiles, s = c / p->tiles % p->spans, h = c / p->tiles / p->spans;
  const long first = t * p->tile, left = p->a->N - first, rows = left < p->tile ? left : p->tile;
  const long state = ((h * p->spans + s) * p->a->N + first) * p->G;
  Job j = begin(p, h, first, rows);
  j.rows.top = p->tops + state, j.rows.mass = p->mass + state, j.rows.o = p->o + state * p->width;
  empty(&j);
  const int64_t end = (s + 1) * SPAN, last = whole(p->a, h);
  blocks(&j, p, s * SPAN, end < last ? end : last);
  free(j.all);
}
// All that is not done yet for the rows of a tile, and what comes of it
static void tile_chunk(void *arg, int c) {
  const Plan *p = arg;
  const long t = p->tiles - 1 - c % p->tiles, h = c / p->tiles;  // the longest first
  const long first = t * p->tile, left = p->a->N - first, rows = left < p->tile ? left : p->tile;
  Job j = begin(p, h, first, rows);
  meet_parts(&j, p, h, first);
  empty(&j);
  int64_t at = p->spans ? whole(p->a, h) : 0;
  for (long s = 0; p->spans && s <= at / SPAN; s++) {
    const long state = ((h * p->spans + s) * p->a->N + first) * p->G;
    for (long r = 0; r < j.rows.n; r++) {
      const float *o = p->o + (state + r) * p->width;
      if (s < at / SPAN) meet(&j, r, p->tops[state + r], sum_across(p->mass[state + r]), o);
      else j.rows.top[r] = p->tops[state + r], j.rows.mass[r] = p->mass[state + r], memcpy(j.rows.o + r * p->width, o, p->width * 4);
    }
  }
  if (p->is_chain) finish(&j, p, at);
  for (long i = 0; !p->is_chain && i < rows; i++) {
    Job one = one_of(&j, p, first, i);
    if (one.seq.end <= at + B) tail(&j, &one, p, at);
    else finish(&one, p, at), j.is_laid = 0;
  }
  write_out(&j, p, h, first);
  free(j.all);
}
static int is_chain(const Attend *a) {
  for (long i = 0; a->sees && i < a->N; i++)
    for (long f = 0; f < i; f++)
      if (!a->sees[i * a->N + f]) return 0;
  return 1;
}
EXPORT(attend)(const void *arg) {
  const Attend *a = arg;
  Plan p = {.a = a, .G = a->H / a->K, .size = a->is_wide ? 4 : 2, .width = UP(a->E, 16), .is_chain = is_chain(a) || !a->fk};
  p.tile = p.G < TILE ? TILE / p.G : 1;
  p.tiles = (a->N + p.tile - 1) / p.tile;
  int64_t longest = 0;
  for (long h = 0; h < a->K; h++) longest = whole(a, h) > longest ? whole(a, h) : longest;
  char *states = 0;
  if (!p.is_chain || (longest >= SPAN && a->K * p.tiles < ENOUGH)) {
    p.spans = longest / SPAN + 1;
    const long n = a->K * p.spans * a->N * p.G;
    char *at = states = malloc(n * (4 + sizeof(F) + p.width * 4) + 256);
    at = (char *)UP((uintptr_t)at, 64);
    p.tops = take(&at, n * 4), p.mass = take(&at, n * sizeof(F)), p.o = take(&at, n * p.width * 4);
    pool_run(span_chunk, &p, (int)(a->K * p.spans * p.tiles));
    if (!p.is_chain) {
      const long few = (a->K * a->N + ENOUGH - 1) / ENOUGH;  // of a tree's rows share what they share
      p.tile = few < p.tile ? few : p.tile, p.tiles = (a->N + p.tile - 1) / p.tile;
    }
  }
  pool_run(tile_chunk, &p, (int)(a->K * p.tiles));
  free(states);
}
