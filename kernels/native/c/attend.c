// Attention of a pass's rows over stored slots and each other.
//
// Each row attends to one sequence: the stored slots in their order, then its ancestors in this pass from the root
// down, then itself. The result does not depend on how many of them are stored already. The sequence is cut by index
// into blocks of 64 and spans of 4,096. Each block updates the state of its span in order; spans start empty and are
// merged in order. A row's bits therefore depend on its sequence alone. Work is divided in two ways that give the same
// bits: many rows by tiles of rows, each over the whole sequence; few rows by spans of whole stored blocks, and then
// the rest for each tile. The rows of a tree have separate sequences and are tiles of one row.
#include "attend_job.h"
#include "pool.h"
// Merge another state of row r into the earlier result: the one fixed order over all slots of a row
static void meet(Job *j, int64_t r, float top, float mass, const float *o) {
  const float was = j->met_top[r], now = top > was ? top : was;
  if (top == NEVER) return;
  const float a = was == now ? 1.f : exp2_1(was - now), b = top == now ? 1.f : exp2_1(top - now);
  j->met_top[r] = now;
  j->met_mass[r] = j->met_mass[r] * a + mass * b;
  float *met = j->met + r * j->rows.width;
  for (int64_t e = 0; e < j->rows.width; e += 16) store(met + e, fma_(o ? load(F, o + e) : splat(0.f), splat(b), load(F, met + e) * a));
}
static void meet_parts(Job *j, const Plan *p, int64_t h, int64_t first) {
  const Attend *a = p->a;
  float o[p->width];
  memset(o, 0, sizeof o);
  for (int64_t r = 0; r < j->rows.n; r++) j->met_top[r] = NEVER, j->met_mass[r] = 0;
  memset(j->met, 0, j->rows.n * p->width * 4);
  for (const Part *b = a->before; b < a->before + a->n_before; b++)
    for (int64_t r = 0; r < j->rows.n; r++) {
      const int64_t i = first + r / p->G, head = h * p->G + r % p->G;
      const char *from = b->out + (head * b->out_h + i * b->out_n) * (b->is_wide ? 4 : 2);
      for (int64_t e = 0; e < a->E; e++) o[e] = b->is_wide ? ((const float *)from)[e] : wide1(((const bf16 *)from)[e]);
      meet(j, r, b->lse[head * b->lse_h + i * b->lse_n] * LOG2E, 1.f, o);
    }
}
static void write_out(Job *j, const Plan *p, int64_t h, int64_t first) {
  const Attend *a = p->a;
  for (int64_t r = 0; r < j->rows.n; r++) {
    const int64_t i = first + r / p->G, head = h * p->G + r % p->G, size = a->is_wide_out ? 4 : 2;
    if (a->sink) meet(j, r, a->sink[head] * LOG2E, 1.f, 0);
    const float mass = j->met_mass[r], share = mass == 0 ? 0.f : 1.f / mass;
    char *out = a->out + (head * a->out_h + i * a->out_n) * size;
    for (int64_t e = 0; e < a->E; e += 16) {
      const F v = load(F, j->met + r * p->width + e) * share;
      const H narrowed = narrow(v);
      memcpy(out + e * size, a->is_wide_out ? (const void *)&v : (const void *)&narrowed, (a->E - e < 16 ? a->E - e : 16) * size);
    }
    if (a->lse) a->lse[i * a->H + head] = mass == 0 ? NEVER : (j->met_top[r] + log2_(mass)) / LOG2E;
  }
}
// Merge the present span into the earlier result
static void close_span(Job *j) {
  for (int64_t r = 0; r < j->rows.n; r++) meet(j, r, j->rows.top[r], sum_across(j->rows.mass[r]), j->rows.o + r * j->rows.width);
  empty(j);
}
// All blocks from index `at` on
static void finish(Job *j, const Plan *p, int64_t at) {
  do {
    const int64_t end = (at / SPAN + 1) * SPAN;
    blocks(j, p, at, end < j->seq.end ? end : j->seq.end);
    close_span(j);
    at = end;
  } while (at < j->seq.end);
}
// New row i of a tile by itself, in the same memory: a row of a tree, which has a separate sequence
static Job one_of(Job *j, const Plan *p, int64_t first, int64_t i) {
  const Attend *a = p->a;
  const int64_t G = p->G, r = i * G, row = first + i, own = row + a->M - a->N;
  Job one = *j;
  one.rows.n = G, one.rows.q += r * words(j->rows.kind, a->D), one.rows.count += r, one.rows.low += r, one.low += r;
  one.rows.top += r, one.rows.mass += r, one.rows.o += r * p->width, one.met_top += r, one.met_mass += r, one.met += r * p->width;
  int64_t seen = 0;
  for (int64_t f = 0; f < a->M; f++)
    if (f != own && a->sees[row * a->M + f]) j->order[seen++] = f;
  j->order[seen++] = own;
  one.seq.order = j->order, one.seq.end = j->seq.length + seen;
  for (int64_t g = 0; g < G; g++) j->count[r + g] = one.seq.end;
  return one;
}
// Process a row whose tail is one block. Stored slots of the block are arranged once for all rows, new slots only where
// they differ from those of the row before. Slots after the row's end are masked.
static void tail(Job *j, Job *one, const Plan *p, int64_t at) {
  const Attend *a = p->a;
  const Sequence *s = &one->seq;
  if (!j->is_laid) {
    Job stored = *j;
    stored.seq.end = s->length;
    const Slots b = fetch(&stored, p, at);
    lay(&j->rows, &j->room, &b);
    for (int64_t i = 0; i < B; i++) j->laid[i] = -1;
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
  release(&one->room);
  close_span(one);
}
static int64_t whole(const Attend *a, int64_t h) { return (a->heads[a->K + h] + a->gone) / B * B; }
// One span of whole stored blocks, for the rows of a tile
static void span_chunk(void *arg, int c, char *room) {
  const Plan *p = arg;
  const int64_t t = c % p->tiles, s = c / p->tiles % p->spans, h = c / p->tiles / p->spans;
  const int64_t first = t * p->tile, left = p->a->N - first, rows = left < p->tile ? left : p->tile;
  const int64_t state = ((h * p->spans + s) * p->a->N + first) * p->G;
  Job j = begin(p, h, first, rows, room);
  j.rows.top = p->tops + state, j.rows.mass = p->mass + state, j.rows.o = p->o + state * p->width;
  empty(&j);
  const int64_t end = (s + 1) * SPAN, last = whole(p->a, h);
  blocks(&j, p, s * SPAN, end < last ? end : last);
}
// Compute the rest for the rows of a tile, and write the output
static void tile_chunk(void *arg, int c, char *room) {
  const Plan *p = arg;
  const int64_t t = p->tiles - 1 - c % p->tiles, h = c / p->tiles;  // the longest first
  const int64_t first = t * p->tile, left = p->a->N - first, rows = left < p->tile ? left : p->tile;
  Job j = begin(p, h, first, rows, room);
  meet_parts(&j, p, h, first);
  empty(&j);
  int64_t at = p->spans ? whole(p->a, h) : 0;
  for (int64_t s = 0; p->spans && s <= at / SPAN; s++) {
    const int64_t state = ((h * p->spans + s) * p->a->N + first) * p->G;
    for (int64_t r = 0; r < j.rows.n; r++) {
      const float *o = p->o + (state + r) * p->width;
      if (s < at / SPAN) meet(&j, r, p->tops[state + r], sum_across(p->mass[state + r]), o);
      else j.rows.top[r] = p->tops[state + r], j.rows.mass[r] = p->mass[state + r], memcpy(j.rows.o + r * p->width, o, p->width * 4);
    }
  }
  if (p->is_chain) finish(&j, p, at);
  for (int64_t i = 0; !p->is_chain && i < rows; i++) {
    Job one = one_of(&j, p, first, i);
    if (one.seq.end <= at + B) tail(&j, &one, p, at);
    else finish(&one, p, at), j.is_laid = 0;
  }
  write_out(&j, p, h, first);
}
static int is_chain(const Attend *a) {
  for (int64_t i = 0; a->sees && i < a->N; i++)
    for (int64_t f = 0; f < a->M; f++)
      if (a->sees[i * a->M + f] != (f <= i + a->M - a->N)) return 0;
  return 1;
}
EXPORT(attend)(const void *arg) {
  const Attend *a = arg;
  Plan p = {.a = a, .G = a->H / a->K, .size = a->is_wide ? 4 : 2, .width = UP(a->E, 16), .is_chain = is_chain(a) || !a->fk};
  p.tile = p.G < TILE && (!a->chosen || a->chosen->n == 1) ? TILE / p.G : 1;
  p.tiles = (a->N + p.tile - 1) / p.tile;
  int64_t longest = 0;
  for (int64_t h = 0; h < a->K; h++) longest = whole(a, h) > longest ? whole(a, h) : longest;
  char *states = 0;
  if (!a->chosen && (!p.is_chain || (longest >= SPAN && a->K * p.tiles < ENOUGH))) {
    p.spans = longest / SPAN + 1;
    const int64_t n = a->K * p.spans * a->N * p.G;
    char *at = states = malloc(n * (4 + sizeof(F) + p.width * 4) + 256);
    if (!states) return 0;
    at = (char *)UP((uintptr_t)at, 64);
    p.tops = take(&at, n * 4), p.mass = take(&at, n * sizeof(F)), p.o = take(&at, n * p.width * 4);
    if (!pool_run(span_chunk, &p, (int)(a->K * p.spans * p.tiles), room(&p))) return free(states), 0;
    if (!p.is_chain) {
      const int64_t few = (a->K * a->N + ENOUGH - 1) / ENOUGH;  // rows of a tree per tile
      p.tile = few < p.tile ? few : p.tile, p.tiles = (a->N + p.tile - 1) / p.tile;
    }
  }
  const int is_done = pool_run(tile_chunk, &p, (int)(a->K * p.tiles), room(&p));
  free(states);
  return is_done;
}
