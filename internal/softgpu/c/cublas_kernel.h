// The inner part of the product, included once for f32 and once for f64. The includer defines
//
//   REAL    the type that is computed in
//   LANES   columns that are computed at once: a register, or a few of them
//   NAME()  the suffix of the functions
//
// The block of D that is being computed is kept in REAL until all of the inner dimension has been
// added, in its order, so that results do not depend on blocks of rows or columns.

typedef REAL NAME(vector) __attribute__((vector_size(LANES * sizeof(REAL))));

// micro adds the product of a panel of A (inner x ROWS) and a panel of B (inner x LANES) to ROWS rows
// of the block, which are stride elements apart.
FAST static void NAME(micro)(int64_t inner, const REAL *a, const REAL *b, REAL *block,
                             int64_t stride) {
  NAME(vector) sum[ROWS];
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++) memcpy(&sum[r], block + r * stride, sizeof sum[r]);
  for (int64_t k = 0; k < inner; k++) {
    NAME(vector) column;
    memcpy(&column, b + k * LANES, sizeof column);
#pragma GCC unroll 6
    for (int r = 0; r < ROWS; r++) sum[r] += a[k * ROWS + r] * column;
  }
#pragma GCC unroll 6
  for (int r = 0; r < ROWS; r++) memcpy(block + r * stride, &sum[r], sizeof sum[r]);
}

// pack copies count rows of an operand into panels of width rows: for each panel and each k, width
// numbers. Rows that are missing in the last panel are zeros. across is the step from row to row,
// along the step of k.
#define PACK(TYPE, ELEMENT, CONVERT)                                                           \
  static void NAME(pack_##TYPE)(REAL *out, const ELEMENT *from, int64_t count, int64_t inner,  \
                                int width, int64_t across, int64_t along) {                    \
    for (int64_t first = 0; first < count; first += width, out += inner * width) {             \
      int here = count - first < width ? (int)(count - first) : width;                         \
      if (here < width) memset(out, 0, (size_t)(inner * width) * sizeof *out);                 \
      if (across == 1) {                                                                       \
        for (int64_t k = 0; k < inner; k++)                                                    \
          for (int i = 0; i < here; i++) {                                                     \
            ELEMENT x = from[first + i + k * along];                                           \
            out[k * width + i] = (REAL)CONVERT(x);                                             \
          }                                                                                    \
        continue;                                                                              \
      }                                                                                        \
      for (int i = 0; i < here; i++)                                                           \
        for (int64_t k = 0; k < inner; k++) {                                                  \
          ELEMENT x = from[(first + i) * across + k * along];                                  \
          out[k * width + i] = (REAL)CONVERT(x);                                               \
        }                                                                                      \
    }                                                                                          \
  }
PACK(f32, float, )
PACK(f64, double, )
PACK(f16, uint16_t, soft_from_f16)
PACK(bf16, uint16_t, soft_from_bf16)
PACK(tf32, float, to_tf32)
PACK(e4m3, uint8_t, from_e4m3)
PACK(e5m2, uint8_t, from_e5m2)
#undef PACK

static void NAME(pack)(REAL *out, const struct matrix *m, const char *data, int tf32,
                       int64_t count, int64_t inner, int width, int64_t across, int64_t along) {
  const void *from = data;
  switch (m->type) {
    case BLAS_F32:
      if (tf32) NAME(pack_tf32)(out, from, count, inner, width, across, along);
      else NAME(pack_f32)(out, from, count, inner, width, across, along);
      break;
    case BLAS_F64: NAME(pack_f64)(out, from, count, inner, width, across, along); break;
    case BLAS_F16: NAME(pack_f16)(out, from, count, inner, width, across, along); break;
    case BLAS_BF16: NAME(pack_bf16)(out, from, count, inner, width, across, along); break;
    case BLAS_E4M3: NAME(pack_e4m3)(out, from, count, inner, width, across, along); break;
    case BLAS_E5M2: NAME(pack_e5m2)(out, from, count, inner, width, across, along); break;
  }
}

// multiply computes one batch, a block of columns after the other. finish turns a block of sums
// into D.
static void NAME(multiply)(const struct product *p, const struct factors *f, int64_t batch) {
  int64_t rows = p->d.rows, cols = p->d.cols, inner = p->a.cols;
  int64_t padded = (rows + ROWS - 1) / ROWS * ROWS;
  REAL *block = aligned(sizeof *block * (size_t)(padded * BLOCK_COLS));
  REAL *pa = aligned(sizeof *pa * BLOCK_ROWS * BLOCK_INNER);
  REAL *pb = aligned(sizeof *pb * BLOCK_COLS * BLOCK_INNER);
  const char *a = start(&p->a, batch), *b = start(&p->b, batch);
  size_t wa = blas_width(p->a.type), wb = blas_width(p->b.type);
  for (int64_t col = 0; col < cols; col += BLOCK_COLS) {
    int64_t here = smaller(BLOCK_COLS, cols - col);
    memset(block, 0, sizeof *block * (size_t)(padded * BLOCK_COLS));
    for (int64_t k = 0; k < inner; k += BLOCK_INNER) {
      int64_t deep = smaller(BLOCK_INNER, inner - k);
      NAME(pack)(pb, &p->b, b + (int64_t)wb * (col * p->b.col_step + k * p->b.row_step), f->tf32,
                 here, deep, LANES, p->b.col_step, p->b.row_step);
      for (int64_t row = 0; row < rows; row += BLOCK_ROWS) {
        int64_t high = smaller(BLOCK_ROWS, rows - row);
        NAME(pack)(pa, &p->a, a + (int64_t)wa * (row * p->a.row_step + k * p->a.col_step),
                   f->tf32, high, deep, ROWS, p->a.row_step, p->a.col_step);
        for (int64_t j = 0; j < here; j += LANES)
          for (int64_t i = 0; i < high; i += ROWS)
            NAME(micro)(deep, pa + i * deep, pb + j * deep, block + (row + i) * BLOCK_COLS + j,
                        BLOCK_COLS);
      }
    }
    NAME(finish)(p, f, batch, block, col, here);
  }
  free(block);
  free(pa);
  free(pb);
}
