// The product of two matrices, in blocks that fit into caches.
#define _GNU_SOURCE
#pragma GCC optimize("fp-contract=fast")
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "softblas.h"

// Rows of a register block, and sizes of the blocks that are packed: 96 x 256 of A and 256 x 256 of B
// in f32 fill 350 KB of a second-level cache.
enum { ROWS = 6, BLOCK_ROWS = 96, BLOCK_INNER = 256, BLOCK_COLS = 256 };

// The innermost loop is compiled for three generations of processors, and the best one is taken
// when the library is loaded. (The thread sanitizer is not ready at that time.)
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__clang__)
#define FAST __attribute__((target_clones("avx512f", "fma", "default")))
#else
#define FAST
#endif

static const struct {
  int type;
  size_t width;
} widths[] = {{BLAS_F32, 4},  {BLAS_F64, 8},  {BLAS_F16, 2},
              {BLAS_BF16, 2}, {BLAS_E4M3, 1}, {BLAS_E5M2, 1}};

size_t blas_width(int type) {
  for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
    if (widths[i].type == type) return widths[i].width;
  return 0;
}

// ---- small types

static float e4m3[256], e5m2[256];
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

// decode gives the value of an 8-bit number with so many bits of fraction.
static float decode(int bits, int fraction_bits, int bias) {
  int fraction = bits & ((1 << fraction_bits) - 1), exponent = (bits & 127) >> fraction_bits;
  float one = (float)(1 << fraction_bits);
  float v = exponent ? ldexpf(1 + (float)fraction / one, exponent - bias)
                     : ldexpf((float)fraction / one, 1 - bias);
  return bits & 128 ? -v : v;
}

static void make_tables(void) {
  for (int i = 0; i < 256; i++) {
    e4m3[i] = (i & 127) == 127 ? NAN : decode(i, 3, 7);  // no infinities
    e5m2[i] = decode(i, 2, 15);
    if ((i & 124) == 124) e5m2[i] = i & 3 ? NAN : i & 128 ? -INFINITY : INFINITY;
  }
}

static inline float from_e4m3(uint8_t v) { return e4m3[v]; }
static inline float from_e5m2(uint8_t v) { return e5m2[v]; }

// to_tf32 keeps 10 bits of the fraction, rounded to nearest.
static inline float to_tf32(float v) {
  uint32_t bits = soft_bits(v);
  if ((bits & 0x7f800000) == 0x7f800000) return v;
  return soft_float((bits + 0xfff + ((bits >> 13) & 1)) & ~0x1fffu);
}

double blas_load(const void *data, int type, int64_t at) {
  switch (type) {
    case BLAS_F32: return ((const float *)data)[at];
    case BLAS_F64: return ((const double *)data)[at];
    case BLAS_F16: return soft_from_f16(((const uint16_t *)data)[at]);
    case BLAS_BF16: return soft_from_bf16(((const uint16_t *)data)[at]);
  }
  sg_fail("cuBLAS reads an element of type %d", type);
}

static void put(void *data, int type, int64_t at, double v) {
  switch (type) {
    case BLAS_F32: ((float *)data)[at] = (float)v; return;
    case BLAS_F64: ((double *)data)[at] = v; return;
    case BLAS_F16: ((uint16_t *)data)[at] = soft_to_f16((float)v); return;
    case BLAS_BF16: ((uint16_t *)data)[at] = soft_to_bf16((float)v); return;
  }
  sg_fail("cuBLAS writes an element of type %d", type);
}

// ---- the end of a product

// factors are what a product is scaled by, as known when it runs.
struct factors {
  double alpha, beta;
  int tf32;  // round f32 operands as tensor cores do
};

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static char *start(const struct matrix *m, int64_t batch) {
  return m->data + batch * m->batch_step * (int64_t)blas_width(m->type);
}

static void *aligned(size_t bytes) {
  void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!memory) sg_fail("cuBLAS has no %zu bytes", bytes);
  return memory;
}

static double gelu(double x) {  // the tanh form, as cuBLASLt documents
  return 0.5 * x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

// element ends one element of D: its sum scaled, C and bias added, the activation.
static double element(const struct product *p, const struct factors *f, int64_t batch, double sum,
                      int64_t row, int64_t col) {
  double v = f->alpha * sum;
  if (f->beta != 0)
    v += f->beta * blas_load(start(&p->c, batch), p->c.type,
                             row * p->c.row_step + col * p->c.col_step);
  if (p->epilogue & EPILOGUE_BIAS)
    v += blas_load(p->bias, p->bias_type, batch * p->bias_batch_step + row * p->bias_row_step +
                                              col * p->bias_col_step);
  if (p->aux.data)
    put(start(&p->aux, batch), p->aux.type, row * p->aux.row_step + col * p->aux.col_step, v);
  if (p->epilogue & EPILOGUE_RELU) v = v > 0 ? v : 0;
  if (p->epilogue & EPILOGUE_GELU) v = gelu(v);
  return v;
}

// FINISH defines the end of a block of sums, whose rows are BLOCK_COLS apart. A product without C and
// epilogue, which is nearly every one, has loops of its own.
#define PLAIN(TYPE, CONVERT)                                                              \
  for (int64_t i = 0; i < p->d.rows; i++)                                                 \
    for (int64_t j = 0; j < cols; j++)                                                    \
      ((TYPE *)d)[i * p->d.row_step + (col + j) * p->d.col_step] =                        \
          (TYPE)CONVERT(alpha * block[i * BLOCK_COLS + j]);                               \
  return

#define FINISH(REAL)                                                                      \
  static void NAME(finish)(const struct product *p, const struct factors *f,              \
                           int64_t batch, const REAL *block, int64_t col, int64_t cols) { \
    char *d = start(&p->d, batch);                                                        \
    REAL alpha = (REAL)f->alpha;                                                          \
    if (f->beta == 0 && p->epilogue == EPILOGUE_DEFAULT) {                                \
      switch (p->d.type) {                                                                \
        case BLAS_F32: PLAIN(float, );                                                    \
        case BLAS_F64: PLAIN(double, );                                                   \
        case BLAS_F16: PLAIN(uint16_t, soft_to_f16);                                      \
        case BLAS_BF16: PLAIN(uint16_t, soft_to_bf16);                                    \
      }                                                                                   \
    }                                                                                     \
    for (int64_t i = 0; i < p->d.rows; i++)                                               \
      for (int64_t j = 0; j < cols; j++)                                                  \
        put(d, p->d.type, i * p->d.row_step + (col + j) * p->d.col_step,                  \
            element(p, f, batch, block[i * BLOCK_COLS + j], i, col + j));                 \
  }

#define REAL float
#define LANES 16
#define NAME(x) x##_in_f32
FINISH(float)
#include "cublas_kernel.h"
#undef REAL
#undef LANES
#undef NAME

#define REAL double
#define LANES 8
#define NAME(x) x##_in_f64
FINISH(double)
#include "cublas_kernel.h"
#undef REAL
#undef LANES
#undef NAME

// ---- what is played

const char *blas_problem(const struct product *p, char *text, size_t size) {
  const struct { const char *name; int type, small; } used[] = {
      {"A", p->a.type, 1}, {"B", p->b.type, 1}, {"C", p->c.type, 0}, {"D", p->d.type, 0},
      {"the bias", p->epilogue & EPILOGUE_BIAS ? p->bias_type : BLAS_F32, 0},
      {"the auxiliary output", p->aux.data ? p->aux.type : BLAS_F32, 0},
      {"alpha and beta", p->scale_type, 0},
  };
  for (size_t i = 0; i < sizeof used / sizeof *used; i++) {
    size_t width = blas_width(used[i].type);
    if (width > 1 || (width == 1 && used[i].small)) continue;
    snprintf(text, size, "data type %d of %s", used[i].type, used[i].name);
    return text;
  }
  switch (p->compute) {
    case COMPUTE_F16: case COMPUTE_F16_PEDANTIC: case COMPUTE_F32: case COMPUTE_F32_PEDANTIC:
    case COMPUTE_F64: case COMPUTE_F64_PEDANTIC: case COMPUTE_F32_FAST_F16:
    case COMPUTE_F32_FAST_BF16: case COMPUTE_F32_FAST_TF32: break;
    default: snprintf(text, size, "compute type %d", p->compute); return text;
  }
  switch (p->epilogue) {
    case EPILOGUE_DEFAULT: case EPILOGUE_RELU: case EPILOGUE_BIAS: case EPILOGUE_RELU_BIAS:
    case EPILOGUE_GELU: case EPILOGUE_GELU_BIAS: case EPILOGUE_GELU_AUX:
    case EPILOGUE_GELU_AUX_BIAS: break;
    default: snprintf(text, size, "epilogue %d", p->epilogue); return text;
  }
  if (p->a.cols != p->b.rows || p->a.rows != p->d.rows || p->b.cols != p->d.cols) {
    snprintf(text, size, "product of %ldx%ld and %ldx%ld into %ldx%ld", p->a.rows, p->a.cols,
             p->b.rows, p->b.cols, p->d.rows, p->d.cols);
    return text;
  }
  return 0;
}

// ---- running

static struct matrix transposed(struct matrix m) {
  struct matrix t = m;
  t.rows = m.cols, t.cols = m.rows;
  t.row_step = m.col_step, t.col_step = m.row_step;
  return t;
}

// turned gives the transposed product, B^T x A^T: rows of D are then what the program calls columns.
static struct product turned(const struct product *p) {
  struct product t = *p;
  t.a = transposed(p->b), t.b = transposed(p->a);
  t.a_scale = p->b_scale, t.b_scale = p->a_scale;
  t.c = transposed(p->c), t.d = transposed(p->d), t.aux = transposed(p->aux);
  t.bias_row_step = p->bias_col_step, t.bias_col_step = p->bias_row_step;
  return t;
}

static void multiply(const struct product *p) {
  pthread_once(&tables_once, make_tables);
  struct factors f = {.alpha = p->alpha, .beta = p->beta};
  if (p->on_device) {
    f.alpha = blas_load(p->alpha_at, p->scale_type, 0);
    f.beta = blas_load(p->beta_at, p->scale_type, 0);
  }
  if (p->a_scale) f.alpha *= *p->a_scale;
  if (p->b_scale) f.alpha *= *p->b_scale;
  f.alpha *= 1 + p->fault;
  // Tensor cores would round f32 operands; a test that compares with the CPU does not want that.
  f.tf32 = p->compute == COMPUTE_F32_FAST_TF32 && sg_setting("SOFTGPU_TF32", 0);
  // Blocks are written row by row, so rows of D should lie in one piece.
  struct product t = p->d.col_step != 1 && p->d.row_step == 1 ? turned(p) : *p;
  int wide = p->compute == COMPUTE_F64 || p->compute == COMPUTE_F64_PEDANTIC;
  for (int64_t batch = 0; batch < p->batch; batch++) {
    if (wide) multiply_in_f64(&t, &f, batch);
    else multiply_in_f32(&t, &f, batch);
  }
}

static void run_once(void *argument) {
  multiply(argument);
  free(argument);
}

static void run_again(void *argument) { multiply(argument); }  // of a graph: it is never freed

// fault is by how much products of the present GPU are too large: SOFTGPU_WRONG is GPU:PERMILLE.
static double fault(void) {
  const char *text = getenv("SOFTGPU_WRONG"), *colon = text ? strchr(text, ':') : NULL;
  int gpu;
  if (!colon || cuCtxGetDevice(&gpu) || gpu != atoi(text)) return 0;
  return atof(colon + 1) / 1000;
}

int blas_queue(soft_stream stream, const struct product *p) {
  char text[200];
  if (blas_problem(p, text, sizeof text)) sg_fail("cuBLAS: %s", text);
  struct product *copy = malloc(sizeof *copy);
  *copy = *p;
  copy->fault = fault();
  sg_log("cublas: product of %ldx%ldx%ld, types %d %d %d, batch %ld, epilogue %d", p->d.rows,
         p->d.cols, p->a.cols, p->a.type, p->b.type, p->d.type, p->batch, p->epilogue);
  return cuLaunchHostFunc(stream, soft_captures(stream) ? run_again : run_once, copy)
             ? BLAS_INTERNAL_ERROR
             : BLAS_OK;
}

const char *blas_status_name(int status) {
  switch (status) {
    case BLAS_OK: return "CUBLAS_STATUS_SUCCESS";
    case BLAS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case BLAS_INTERNAL_ERROR: return "CUBLAS_STATUS_INTERNAL_ERROR";
    case BLAS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
  }
  return "unknown status of the software cuBLAS";
}
