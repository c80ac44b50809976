// Products of the software cuBLAS against plain loops in double.
//
//   gemmcheck check SEED     random products through both interfaces
//   gemmcheck speed N        an N x N x N product in f32, in GFLOP for a second of CPU time
//   gemmcheck refuse NAME    asks for something that is not played; the process must end
#define _GNU_SOURCE
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef struct CUstream_st *stream;
int cuStreamCreate(stream *, unsigned);
int cuStreamSynchronize(stream);

int cublasCreate_v2(void **);
int cublasSetStream_v2(void *, stream);
int cublasSetPointerMode_v2(void *, int);
int cublasGemmStridedBatchedEx(void *, int, int, int, int, int, const void *, const void *, int, int,
                               long long, const void *, int, int, long long, const void *, void *,
                               int, int, long long, int, int, int);
int cublasLtMatmulDescCreate(void **, int, int);
int cublasLtMatmulDescDestroy(void *);
int cublasLtMatmulDescSetAttribute(void *, int, const void *, size_t);
int cublasLtMatrixLayoutCreate(void **, int, uint64_t, uint64_t, int64_t);
int cublasLtMatrixLayoutDestroy(void *);
int cublasLtMatrixLayoutSetAttribute(void *, int, const void *, size_t);
int cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int, void *,
                                   int *);
int cublasLtMatmul(void *, void *, const void *, const void *, void *, const void *, void *,
                   const void *, const void *, void *, void *, void *, const void *, void *, size_t,
                   stream);

enum { F32 = 0, F64 = 1, F16 = 2, BF16 = 14 };

static void die(const char *format, ...) {
  va_list list;
  va_start(list, format);
  vfprintf(stderr, format, list);
  va_end(list);
  fputc('\n', stderr);
  _exit(1);
}

#define MUST(call)                                  \
  do {                                              \
    int result_ = (call);                           \
    if (result_) die("%s gave %d", #call, result_); \
  } while (0)

static uint64_t state;

static uint64_t next(void) {  // splitmix64
  uint64_t x = state += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

static int below(int n) { return (int)(next() % (uint64_t)n); }

static size_t width(int type) { return type == F64 ? 8 : type == F32 ? 4 : 2; }

static double load(const void *p, int type, int64_t i) {
  switch (type) {
    case F32: return ((const float *)p)[i];
    case F64: return ((const double *)p)[i];
    case F16: return (double)((const _Float16 *)p)[i];
  }
  uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

static void store(void *p, int type, int64_t i, double v) {
  float f = (float)v;
  uint32_t bits;
  switch (type) {
    case F32: ((float *)p)[i] = f; return;
    case F64: ((double *)p)[i] = v; return;
    case F16: ((_Float16 *)p)[i] = (_Float16)f; return;
  }
  memcpy(&bits, &f, 4);
  ((uint16_t *)p)[i] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// A matrix as the program sees it: column-major, or row-major.
struct matrix {
  int type, order;
  int64_t rows, cols, ld, step;  // step from batch to batch
  char *data;
};

static int64_t at(const struct matrix *m, int64_t batch, int64_t r, int64_t c) {
  return batch * m->step + (m->order ? r * m->ld + c : c * m->ld + r);
}

static struct matrix make(int type, int order, int64_t rows, int64_t cols, int64_t batch) {
  struct matrix m = {.type = type, .order = order, .rows = rows, .cols = cols};
  m.ld = (order ? cols : rows) + below(5);
  m.step = m.ld * (order ? rows : cols) + below(7);
  m.data = malloc((size_t)(m.step * batch + 8) * width(type));
  for (int64_t i = 0; i < m.step * batch; i++) store(m.data, type, i, (below(2001) - 1000) / 1000.0);
  return m;
}

static void *layout(const struct matrix *m, int batch) {
  void *l;
  MUST(cublasLtMatrixLayoutCreate(&l, m->type, (uint64_t)m->rows, (uint64_t)m->cols, m->ld));
  MUST(cublasLtMatrixLayoutSetAttribute(l, 1, &m->order, 4));
  MUST(cublasLtMatrixLayoutSetAttribute(l, 5, &batch, 4));
  MUST(cublasLtMatrixLayoutSetAttribute(l, 6, &m->step, 8));
  return l;
}

static stream s;
static void *handle;

static double gelu(double x) {
  return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

static void near(double got, double want, int type, const char *what) {
  double bound = type == F64 ? 1e-12 : type == F32 ? 2e-5 : type == F16 ? 2e-3 : 1e-2;
  if (!(fabs(got - want) <= bound * (1 + fabs(want)))) die("%s: %.9g, not %.9g", what, got, want);
}

// lt plays the product of the Lt interface; classic that of the other one.
struct trial {
  struct matrix a, b, c, d, aux;
  int m, n, k, batch, op_a, op_b, compute, scale, on_device, epilogue;
  char *bias;
  char factors[2][8];
};

static void lt(struct trial *t) {
  void *desc;
  MUST(cublasLtMatmulDescCreate(&desc, t->compute, t->scale));
  MUST(cublasLtMatmulDescSetAttribute(desc, 2, &t->on_device, 4));
  MUST(cublasLtMatmulDescSetAttribute(desc, 3, &t->op_a, 4));
  MUST(cublasLtMatmulDescSetAttribute(desc, 4, &t->op_b, 4));
  MUST(cublasLtMatmulDescSetAttribute(desc, 7, &t->epilogue, 4));
  if (t->epilogue & 4) MUST(cublasLtMatmulDescSetAttribute(desc, 8, &t->bias, 8));
  if (t->epilogue & 128) {
    MUST(cublasLtMatmulDescSetAttribute(desc, 11, &t->aux.data, 8));
    MUST(cublasLtMatmulDescSetAttribute(desc, 12, &t->aux.ld, 8));
    MUST(cublasLtMatmulDescSetAttribute(desc, 13, &t->aux.step, 8));
  }
  void *la = layout(&t->a, t->batch), *lb = layout(&t->b, t->batch);
  void *lc = layout(&t->c, t->batch), *ld = layout(&t->d, t->batch);
  uint64_t choice[16];
  int found = 0;
  MUST(cublasLtMatmulAlgoGetHeuristic(0, desc, la, lb, lc, ld, 0, 1, choice, &found));
  if (found != 1) die("no algorithm");
  char factors[2][8];
  memcpy(factors, t->factors, sizeof factors);
  void *from = t->on_device ? t->factors : factors;
  MUST(cublasLtMatmul(0, desc, from, t->a.data, la, t->b.data, lb, (char *)from + 8, t->c.data, lc,
                      t->d.data, ld, choice, 0, 0, s));
  memset(factors, 0, sizeof factors);  // the library must have made copies of all of this
  cublasLtMatmulDescDestroy(desc);
  void *layouts[] = {la, lb, lc, ld};
  for (int i = 0; i < 4; i++) cublasLtMatrixLayoutDestroy(layouts[i]);
}

static void classic(struct trial *t) {
  MUST(cublasSetPointerMode_v2(handle, t->on_device));
  MUST(cublasGemmStridedBatchedEx(
      handle, t->op_a, t->op_b, t->m, t->n, t->k, t->factors[0], t->a.data, t->a.type,
      (int)t->a.ld, t->a.step, t->b.data, t->b.type, (int)t->b.ld, t->b.step, t->factors[1],
      t->d.data, t->d.type, (int)t->d.ld, t->d.step, t->batch, t->compute, -1));
}

static void compare(struct trial *t, double alpha, double beta, const char *before, int bias_type) {
  struct matrix c = t->c;
  if (t->c.data == t->d.data) c.data = (char *)(uintptr_t)before;
  for (int b = 0; b < t->batch; b++)
    for (int i = 0; i < t->m; i++)
      for (int j = 0; j < t->n; j++) {
        double v = 0;
        for (int k = 0; k < t->k; k++)
          v += load(t->a.data, t->a.type, t->op_a ? at(&t->a, b, k, i) : at(&t->a, b, i, k)) *
               load(t->b.data, t->b.type, t->op_b ? at(&t->b, b, j, k) : at(&t->b, b, k, j));
        v = alpha * v + beta * load(c.data, c.type, at(&c, b, i, j));
        if (t->epilogue & 4) v += load(t->bias, bias_type, i);
        if (t->epilogue & 128)
          near(load(t->aux.data, t->aux.type, at(&t->aux, b, i, j)), v, t->aux.type, "aux");
        if (t->epilogue & 2) v = v > 0 ? v : 0;
        if (t->epilogue & 32) v = gelu(v);
        near(load(t->d.data, t->d.type, at(&t->d, b, i, j)), v, t->d.type, "element");
      }
}

static void one(void) {
  static const int types[] = {F32, F64, F16, BF16}, epilogues[] = {1, 2, 4, 6, 32, 36, 160, 164};
  int type = types[below(4)], use_lt = below(2);
  struct trial t = {.m = below(150) + 1, .n = below(300) + 1, .k = below(300) + 1,
                    .batch = below(3) + 1, .op_a = below(2), .op_b = below(2),
                    .on_device = below(2), .epilogue = use_lt ? epilogues[below(8)] : 1,
                    .compute = type == F64 ? 70 : below(2) ? 68 : 77,
                    .scale = type == F64 ? F64 : F32};
  int out = type == F64 || below(2) ? type : F32;
  int order[3] = {0};
  for (int i = 0; i < 3; i++) order[i] = use_lt && below(2);
  t.a = make(type, order[0], t.op_a ? t.k : t.m, t.op_a ? t.m : t.k, t.batch);
  t.b = make(type, order[1], t.op_b ? t.n : t.k, t.op_b ? t.k : t.n, t.batch);
  t.d = make(out, order[2], t.m, t.n, t.batch);
  t.aux = make(out, order[2], t.m, t.n, t.batch);
  t.c = t.d;
  if (use_lt && below(2)) t.c = make(out, order[2], t.m, t.n, t.batch);
  struct matrix bias = make(out, 0, t.m, 1, 1);
  t.bias = bias.data;
  double alpha = below(3) ? 1 : 0.5, beta = below(2) ? 0 : 2;
  store(t.factors[0], t.scale, 0, alpha);
  store(t.factors[1], t.scale, 0, beta);
  size_t bytes = (size_t)(t.d.step * t.batch) * width(out);
  char *before = malloc(bytes);
  memcpy(before, t.d.data, bytes);
  if (use_lt) lt(&t);
  else classic(&t);
  MUST(cuStreamSynchronize(s));
  compare(&t, alpha, beta, before, out);
  char *all[] = {t.a.data, t.b.data, t.d.data, t.aux.data, t.bias, before,
                 t.c.data == t.d.data ? 0 : t.c.data};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

static void speed(int n) {
  struct matrix a = make(F32, 0, n, n, 1), b = make(F32, 0, n, n, 1), c = make(F32, 0, n, n, 1);
  float factors[2] = {1, 0};
  for (int op = 0; op < 4; op++) {
    struct timespec from, to;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &from);
    MUST(cublasGemmStridedBatchedEx(handle, op & 1, op >> 1, n, n, n, &factors[0], a.data, F32,
                                    (int)a.ld, 0, b.data, F32, (int)b.ld, 0, &factors[1], c.data,
                                    F32, (int)c.ld, 0, 1, 68, -1));
    MUST(cuStreamSynchronize(s));
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &to);
    double seconds = (double)(to.tv_sec - from.tv_sec) + 1e-9 * (double)(to.tv_nsec - from.tv_nsec);
    printf("%d operations %d %d: %.1f GFLOP/s\n", n, op & 1, op >> 1, 2e-9 * n * n * n / seconds);
  }
}

// refuse asks for one thing that is not played. Each of them is a descriptor's attribute, except for
// types.
static void refuse(const char *name) {
  static const struct {
    const char *name;
    int number, value;
    size_t bytes;
  } asked[] = {{"epilogue", 7, 152, 4},       {"scale mode", 31, 2, 4}, {"pointer mode", 2, 3, 4},
               {"amax", 21, 64, 8},           {"attribute", 99, 1, 4},  {"compute", 0, 72, 4}};
  void *desc;
  struct matrix m = make(F32, 0, 4, 4, 1);
  if (!strcmp(name, "type")) m.type = 3;
  MUST(cublasLtMatmulDescCreate(&desc, 68, F32));
  for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
    int64_t value = asked[i].value;
    if (!strcmp(asked[i].name, name))
      MUST(cublasLtMatmulDescSetAttribute(desc, asked[i].number, &value, asked[i].bytes));
  }
  void *l = layout(&m, 1);
  uint64_t choice[16];
  int found = 1;
  if (!cublasLtMatmulAlgoGetHeuristic(0, desc, l, l, l, l, 0, 1, choice, &found) || found)
    die("there is an algorithm");
  float factors[2] = {1, 0};
  cublasLtMatmul(0, desc, &factors[0], m.data, l, m.data, l, &factors[1], m.data, l, m.data, l,
                 choice, 0, 0, s);
}

int main(int count, char **arguments) {
  if (count != 3) die("gemmcheck check|speed|refuse X");
  MUST(cuStreamCreate(&s, 0));
  MUST(cublasCreate_v2(&handle));
  MUST(cublasSetStream_v2(handle, s));
  if (!strcmp(arguments[1], "speed")) {
    speed(atoi(arguments[2]));
  } else if (!strcmp(arguments[1], "refuse")) {
    refuse(arguments[2]);
  } else {
    state = strtoull(arguments[2], 0, 10);
    for (int i = 0; i < 60; i++) one();
    printf("60 products\n");
  }
  return 0;
}
