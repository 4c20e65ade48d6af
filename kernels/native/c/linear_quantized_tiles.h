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
// Add group j of panel c to the sums `part` [M][64]
INLINE void digits_group(int bits, const Packed *p, int c, int64_t j, const uint8_t *w, int64_t deep, float *part) {
  int32_t high[16 * PANEL], low[16 * PANEL];
  F scale[4] = {0}, zero[4] = {0};
  for (int n = 0; n < 4 && bits == 4; n++)
    if (c * PANEL + n * 16 < p->N) pair_of(p, j, c * PANEL + n * 16, scale + n, zero + n);
  for (int64_t m0 = 0; m0 < p->M; m0 += 16) {
    digit_sums(w, p->high + (j * p->M + m0) * p->group, p->group, deep, high);
    digit_sums(w, p->low + (j * p->M + m0) * p->group, p->group, deep, low);
    for (int64_t m = 0; m < 16 && m0 + m < p->M; m++) {
      const int64_t of = j * p->M + m0 + m;
      const int32_t both = p->of_high[of] * 128 + p->of_low[of];
      const float step = p->step[of], whole = (float)both * step;
      for (int n = 0; n < 4; n++) {
        float *to = part + (m0 + m) * PANEL + n * 16;
        const I sum = (load(I, high + m * PANEL + n * 16) << 7) + load(I, low + m * PANEL + n * 16) - both * (bits == 8 ? 128 : 8);
        const F v = __builtin_convertvector(sum, F);
        if (bits == 8) store(to, fma_(v, splat(step), load(F, to)));
        else store(to, fma_(splat(whole), zero[n], fma_(v * step, scale[n], load(F, to))));
      }
    }
  }
}
// Convert the nibbles of a group to bytes
INLINE void spread_nibbles(const uint8_t *w, int64_t group, uint8_t *to) {
  const __m512i four_bits = _mm512_set1_epi8(15);
  for (int64_t k = 0; k < group; k += 8, w += PANEL * 4, to += PANEL * 8)
    for (int n = 0; n < 4; n++) {
      const __m512i both = _mm512_loadu_si512(w + n * 64);
      _mm512_storeu_si512(to + n * 64, _mm512_and_si512(both, four_bits));
      _mm512_storeu_si512(to + PANEL * 4 + n * 64, _mm512_and_si512(_mm512_srli_epi16(both, 4), four_bits));
    }
}
INLINE void digits_by_tiles(int bits, const Packed *p, int c, float *part) {
  const int64_t deep = p->group < 64 ? p->group : 64;
  const uint8_t *w = panel(p, c);
  uint8_t wide[128 * PANEL];
  shape_tiles(16, deep / 4);
  for (int64_t j = 0; j < p->K / p->group; j++, w += p->group * PANEL * bits / 8) {
    if (bits == 4) spread_nibbles(w, p->group, wide);
    digits_group(bits, p, c, j, bits == 4 ? wide : w, deep, part);
  }
  _tile_release();
}
