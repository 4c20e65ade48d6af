// Digits by AMX: integer sums of 16 rows over a group, then the same chain over groups as digits_tile, with the same
// bits.
#pragma once
#define FEW_DIGITS 4  // rows from which tiles are faster

// Rows of x, `group` bytes apart, times w [group / 4][64][4] -> sums [16][64]
INLINE void digit_sums(const uint8_t *w, const int8_t *x, int64_t group, int64_t deep, int32_t *sums) {
  _tile_zero(0), _tile_zero(1), _tile_zero(2), _tile_zero(3);
  for (int64_t k = 0; k < group; k += deep, w += deep * PANEL) {
    _tile_loadd(4, x + k, group);
    _tile_loadd(6, w, 256), _tile_dpbsud(0, 4, 6), _tile_loadd(7, w + 64, 256), _tile_dpbsud(1, 4, 7);
    _tile_loadd(6, w + 128, 256), _tile_dpbsud(2, 4, 6), _tile_loadd(7, w + 192, 256), _tile_dpbsud(3, 4, 7);
  }
  TILES_AT(_tile_stored, sums, PANEL, 32);
}
// Add group j to the sums `part` [M][64]; w: its codes as bytes
INLINE void digits_group(const Packed *p, int64_t j, const uint8_t *w, int64_t deep, float *part) {
  int32_t high[16 * PANEL], low[16 * PANEL];
  const int offset = (int)p->format->offset, by_group = p->format->group != 0, zeros = by_group && has_zero(p);
  float pairs[2 * PANEL];
  if (by_group) pairs_of(p, j, j + 1, pairs);
  for (int64_t m0 = 0; m0 < p->M; m0 += 16) {
    digit_sums(w, p->high + (j * p->M + m0) * p->group, p->group, deep, high);
    digit_sums(w, p->low + (j * p->M + m0) * p->group, p->group, deep, low);
    for (int64_t m = 0; m < 16 && m0 + m < p->M; m++) {
      const int64_t of = j * p->M + m0 + m;
      const int32_t both = p->of_high[of] * 128 + p->of_low[of];
      const float step = p->step[of], whole = (float)both * step;
      for (int n = 0; n < 4; n++) {
        float *to = part + (m0 + m) * PANEL + n * 16;
        const I sum = (load(I, high + m * PANEL + n * 16) << 7) + load(I, low + m * PANEL + n * 16) - both * offset;
        const F v = __builtin_convertvector(sum, F) * step, next = by_group ? fma_(v, load(F, pairs + n * 16), load(F, to)) : v + load(F, to);
        store(to, zeros ? fma_(splat(whole), load(F, pairs + PANEL + n * 16), next) : next);
      }
    }
  }
}
INLINE void digits_by_tiles(int bits, int has_table, const Packed *p, float *part) {
  const int64_t deep = p->group < 64 ? p->group : 64;
  uint8_t bytes[bits < 8 ? 128 * PANEL : 1];
  shape_tiles(16, deep / 4);
  for (int64_t j = 0; j < p->K / p->group; j++) {
    if (bits < 8) to_bytes(bits, has_table, p->format, p->w, j * p->group, p->group, bytes);
    digits_group(p, j, bits < 8 ? bytes : (const uint8_t *)p->w + j * p->group * PANEL, deep, part);
  }
  _tile_release();
}
