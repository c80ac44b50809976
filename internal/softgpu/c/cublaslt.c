// The Lt interface of the software cuBLAS: a product is described by a descriptor, which has
// attributes, and a layout for each matrix.
#include <stdio.h>
#include <stdlib.h>

#include "softblas.h"

// ---- attributes

// A field is an attribute: its number, its name in the interface, where it is kept, and its size.
struct field {
  int number;
  const char *name;
  size_t at, bytes;
};

static const struct field *find(const struct field *fields, int number, const char *of) {
  for (const struct field *f = fields; f->name; f++)
    if (f->number == number) return f;
  sg_fail("cublasLt attribute %d of a %s", number, of);
}

static int set(const struct field *f, void *object, const void *value, size_t bytes) {
  if (bytes != f->bytes) return BLAS_INVALID_VALUE;
  memcpy((char *)object + f->at, value, bytes);
  return BLAS_OK;
}

static int get(const struct field *f, const void *object, void *value, size_t bytes,
               size_t *written) {
  if (written) *written = f->bytes;
  if (bytes == 0) return BLAS_OK;
  if (bytes < f->bytes) return BLAS_INVALID_VALUE;
  memcpy(value, (const char *)object + f->at, f->bytes);
  return BLAS_OK;
}

#define FIELD(NUMBER, STRUCT, MEMBER) \
  {NUMBER, #MEMBER, offsetof(struct STRUCT, MEMBER), sizeof((struct STRUCT *)0)->MEMBER}

// ---- layouts

struct blas_layout {
  uint32_t type;
  int32_t order;  // 0: columns, 1: rows lie in one piece
  uint64_t rows, cols;
  int64_t ld;
  int32_t batch_count;
  int64_t batch_step;
  uint64_t plane;
};

static const struct field layout_fields[] = {
    FIELD(0, blas_layout, type),        FIELD(1, blas_layout, order),
    FIELD(2, blas_layout, rows),        FIELD(3, blas_layout, cols),
    FIELD(4, blas_layout, ld),          FIELD(5, blas_layout, batch_count),
    FIELD(6, blas_layout, batch_step),  FIELD(7, blas_layout, plane),
    {0},
};

SG_EXPORT int cublasLtMatrixLayoutCreate(struct blas_layout **layout, int type, uint64_t rows,
                                         uint64_t cols, int64_t ld) {
  *layout = calloc(1, sizeof **layout);
  **layout = (struct blas_layout){.type = (uint32_t)type, .rows = rows, .cols = cols, .ld = ld,
                                  .batch_count = 1};
  return BLAS_OK;
}

SG_EXPORT int cublasLtMatrixLayoutDestroy(struct blas_layout *layout) {
  free(layout);
  return BLAS_OK;
}

SG_EXPORT int cublasLtMatrixLayoutSetAttribute(struct blas_layout *layout, int number,
                                               const void *value, size_t bytes) {
  return set(find(layout_fields, number, "matrix layout"), layout, value, bytes);
}

SG_EXPORT int cublasLtMatrixLayoutGetAttribute(const struct blas_layout *layout, int number,
                                               void *value, size_t bytes, size_t *written) {
  return get(find(layout_fields, number, "matrix layout"), layout, value, bytes, written);
}

// ---- descriptors

// The order of members is that of the attributes' numbers. Members after aux_step are checked to
// have the value that means nothing, or are hints about speed.
struct blas_desc {
  int32_t compute, scale_type, pointer_mode, op_a, op_b, op_c, fill, epilogue;
  void *bias;
  int64_t bias_step;
  void *aux;
  int64_t aux_ld, aux_step;
  int64_t alpha_vector_step;
  int32_t sm_count;
  void *a_scale, *b_scale, *c_scale, *d_scale, *amax_d;
  int32_t aux_type;
  void *aux_scale, *aux_amax;
  int8_t fast_accumulation;
  int32_t bias_type;
  int32_t chunks_rows, chunks_cols;
  void *counters_in, *counters_out;
  int32_t a_scale_mode, b_scale_mode, c_scale_mode, d_scale_mode, aux_scale_mode;
  void *d_out_scale;
  int32_t d_out_scale_mode;
};

static const struct field desc_fields[] = {
    FIELD(0, blas_desc, compute),            FIELD(1, blas_desc, scale_type),
    FIELD(2, blas_desc, pointer_mode),       FIELD(3, blas_desc, op_a),
    FIELD(4, blas_desc, op_b),               FIELD(5, blas_desc, op_c),
    FIELD(6, blas_desc, fill),               FIELD(7, blas_desc, epilogue),
    FIELD(8, blas_desc, bias),               FIELD(10, blas_desc, bias_step),
    FIELD(11, blas_desc, aux),               FIELD(12, blas_desc, aux_ld),
    FIELD(13, blas_desc, aux_step),          FIELD(14, blas_desc, alpha_vector_step),
    FIELD(15, blas_desc, sm_count),          FIELD(17, blas_desc, a_scale),
    FIELD(18, blas_desc, b_scale),           FIELD(19, blas_desc, c_scale),
    FIELD(20, blas_desc, d_scale),           FIELD(21, blas_desc, amax_d),
    FIELD(22, blas_desc, aux_type),          FIELD(23, blas_desc, aux_scale),
    FIELD(24, blas_desc, aux_amax),          FIELD(25, blas_desc, fast_accumulation),
    FIELD(26, blas_desc, bias_type),         FIELD(27, blas_desc, chunks_rows),
    FIELD(28, blas_desc, chunks_cols),       FIELD(29, blas_desc, counters_in),
    FIELD(30, blas_desc, counters_out),      FIELD(31, blas_desc, a_scale_mode),
    FIELD(32, blas_desc, b_scale_mode),      FIELD(33, blas_desc, c_scale_mode),
    FIELD(34, blas_desc, d_scale_mode),      FIELD(35, blas_desc, aux_scale_mode),
    FIELD(36, blas_desc, d_out_scale),       FIELD(37, blas_desc, d_out_scale_mode),
    {0},
};

// Attributes that must be zero: what they ask for is not played.
static const int unplayed[] = {5, 14, 19, 20, 21, 23, 24, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37};

SG_EXPORT int cublasLtMatmulDescCreate(struct blas_desc **desc, int compute, int scale_type) {
  *desc = calloc(1, sizeof **desc);
  **desc = (struct blas_desc){.compute = compute, .scale_type = scale_type, .fill = 2,
                              .epilogue = EPILOGUE_DEFAULT, .aux_type = -1, .bias_type = -1};
  return BLAS_OK;
}

SG_EXPORT int cublasLtMatmulDescDestroy(struct blas_desc *desc) {
  free(desc);
  return BLAS_OK;
}

SG_EXPORT int cublasLtMatmulDescSetAttribute(struct blas_desc *desc, int number, const void *value,
                                             size_t bytes) {
  return set(find(desc_fields, number, "matmul descriptor"), desc, value, bytes);
}

SG_EXPORT int cublasLtMatmulDescGetAttribute(const struct blas_desc *desc, int number, void *value,
                                             size_t bytes, size_t *written) {
  return get(find(desc_fields, number, "matmul descriptor"), desc, value, bytes, written);
}

// ---- preferences: how to choose an algorithm. There is one, which needs no workspace.

struct blas_preference {
  uint64_t values[16];
};

SG_EXPORT int cublasLtMatmulPreferenceCreate(struct blas_preference **preference) {
  *preference = calloc(1, sizeof **preference);
  return BLAS_OK;
}

SG_EXPORT int cublasLtMatmulPreferenceDestroy(struct blas_preference *preference) {
  free(preference);
  return BLAS_OK;
}

SG_EXPORT int cublasLtMatmulPreferenceSetAttribute(struct blas_preference *preference, int number,
                                                   const void *value, size_t bytes) {
  if (number < 0 || number > 12) sg_fail("cublasLt attribute %d of a preference", number);
  if (bytes > 8) return BLAS_INVALID_VALUE;
  memcpy(&preference->values[number], value, bytes);
  return BLAS_OK;
}

SG_EXPORT int cublasLtMatmulPreferenceGetAttribute(const struct blas_preference *preference,
                                                   int number, void *value, size_t bytes,
                                                   size_t *written) {
  if (number < 0 || number > 12) sg_fail("cublasLt attribute %d of a preference", number);
  if (bytes > 8) return BLAS_INVALID_VALUE;
  memcpy(value, &preference->values[number], bytes);
  if (written) *written = bytes;
  return BLAS_OK;
}

// ---- products

static struct matrix matrix(const struct blas_layout *l, const void *data, int transposed) {
  int turned = transposed != (l->order == 1);
  struct matrix m = {.data = (char *)(uintptr_t)data, .type = (int)l->type,
                     .rows = (int64_t)l->rows, .cols = (int64_t)l->cols,
                     .row_step = turned ? l->ld : 1, .col_step = turned ? 1 : l->ld,
                     .batch_step = l->batch_step};
  if (transposed) {
    m.rows = (int64_t)l->cols;
    m.cols = (int64_t)l->rows;
  }
  return m;
}

// describe makes a product; it names what the descriptor and the layouts ask for in vain, or
// returns 0.
static const char *describe(struct product *p, const struct blas_desc *desc,
                            const struct blas_layout *a, const struct blas_layout *b,
                            const struct blas_layout *c, const struct blas_layout *d, char *text,
                            size_t size) {
  for (size_t i = 0; i < sizeof unplayed / sizeof *unplayed; i++) {
    const struct field *f = find(desc_fields, unplayed[i], "matmul descriptor");
    int64_t value = 0;
    memcpy(&value, (const char *)desc + f->at, f->bytes);
    if (!value) continue;
    snprintf(text, size, "attribute %s = %ld", f->name, value);
    return text;
  }
  if (desc->pointer_mode != 0 && desc->pointer_mode != 1) {
    snprintf(text, size, "pointer mode %d", desc->pointer_mode);
    return text;
  }
  const struct blas_layout *layouts[] = {a, b, c, d};
  for (int i = 0; i < 4; i++)
    if ((layouts[i]->order != 0 && layouts[i]->order != 1) || layouts[i]->plane) {
      snprintf(text, size, "matrix order %d", layouts[i]->order);
      return text;
    }
  *p = (struct product){
      .a = matrix(a, 0, desc->op_a != 0), .b = matrix(b, 0, desc->op_b != 0),
      .c = matrix(c, 0, 0), .d = matrix(d, 0, 0), .batch = d->batch_count,
      .compute = desc->compute, .scale_type = desc->scale_type, .epilogue = desc->epilogue,
      .on_device = desc->pointer_mode, .bias = desc->bias,
      .bias_type = desc->bias_type >= 0 ? desc->bias_type : (int)d->type,
      .bias_row_step = 1, .bias_batch_step = desc->bias_step,
      .a_scale = desc->a_scale, .b_scale = desc->b_scale,
  };
  if (desc->epilogue & 128) {  // the auxiliary output has D's order
    struct blas_layout aux = *d;
    aux.ld = desc->aux_ld;
    aux.batch_step = desc->aux_step;
    if (desc->aux_type >= 0) aux.type = (uint32_t)desc->aux_type;
    p->aux = matrix(&aux, desc->aux, 0);
  }
  return blas_problem(p, text, size);
}

// What a heuristic answers, as cublasLt.h lays it out.
struct blas_choice {
  uint64_t algorithm[8];
  size_t workspace;
  int state;
  float waves;
  int reserved[4];
};

enum { ONLY_ALGORITHM = 1 };

SG_EXPORT int cublasLtMatmulAlgoGetHeuristic(
    void *handle, const struct blas_desc *desc, const struct blas_layout *a,
    const struct blas_layout *b, const struct blas_layout *c, const struct blas_layout *d,
    const struct blas_preference *preference, int wanted, struct blas_choice *choices, int *found) {
  (void)handle, (void)preference;
  struct product p;
  char text[200];
  *found = 0;
  if (describe(&p, desc, a, b, c, d, text, sizeof text)) {
    // The real library also has products without an algorithm: XLA may then take another way.
    fprintf(stderr, "softgpu: cublasLt has no algorithm: %s\n", text);
    return BLAS_NOT_SUPPORTED;
  }
  if (wanted < 1) return BLAS_INVALID_VALUE;
  choices[0] = (struct blas_choice){.algorithm = {ONLY_ALGORITHM}, .waves = 1};
  *found = 1;
  return BLAS_OK;
}

SG_EXPORT int cublasLtMatmulAlgoInit(void *handle, int compute, int scale, int a, int b, int c,
                                     int d, int number, uint64_t *algorithm) {
  (void)handle, (void)compute, (void)scale, (void)a, (void)b, (void)c, (void)d;
  memset(algorithm, 0, sizeof ((struct blas_choice *)0)->algorithm);
  algorithm[0] = (uint64_t)number;
  return BLAS_OK;
}

SG_EXPORT int cublasLtMatmulAlgoCheck(void *handle, const struct blas_desc *desc,
                                      const struct blas_layout *a, const struct blas_layout *b,
                                      const struct blas_layout *c, const struct blas_layout *d,
                                      const uint64_t *algorithm, struct blas_choice *choice) {
  int found;
  (void)algorithm;
  return cublasLtMatmulAlgoGetHeuristic(handle, desc, a, b, c, d, 0, 1, choice, &found);
}

SG_EXPORT int cublasLtMatmul(void *handle, const struct blas_desc *desc, const void *alpha,
                             const void *a, const struct blas_layout *layout_a, const void *b,
                             const struct blas_layout *layout_b, const void *beta, const void *c,
                             const struct blas_layout *layout_c, void *d,
                             const struct blas_layout *layout_d, const uint64_t *algorithm,
                             void *workspace, size_t bytes, soft_stream stream) {
  (void)handle, (void)algorithm, (void)workspace, (void)bytes;
  struct product p;
  char text[200];
  if (describe(&p, desc, layout_a, layout_b, layout_c, layout_d, text, sizeof text))
    sg_fail("cublasLtMatmul: %s", text);
  p.a.data = (char *)(uintptr_t)a;
  p.b.data = (char *)(uintptr_t)b;
  p.c.data = (char *)(uintptr_t)c;
  p.d.data = d;
  p.alpha_at = alpha;
  p.beta_at = beta;
  if (!p.on_device) {
    p.alpha = blas_load(alpha, p.scale_type, 0);
    p.beta = blas_load(beta, p.scale_type, 0);
  }
  return blas_queue(stream, &p);
}

// ---- the library

SG_EXPORT int cublasLtCreate(void **handle) {
  *handle = calloc(1, 1);
  return BLAS_OK;
}

SG_EXPORT int cublasLtDestroy(void *handle) {
  free(handle);
  return BLAS_OK;
}

SG_EXPORT size_t cublasLtGetVersion(void) { return BLAS_VERSION; }
SG_EXPORT size_t cublasLtGetCudartVersion(void) { return SG_CUDA_VERSION; }
SG_EXPORT const char *cublasLtGetStatusName(int status) { return blas_status_name(status); }
SG_EXPORT const char *cublasLtGetStatusString(int status) { return blas_status_name(status); }
