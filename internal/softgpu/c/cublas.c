// The classic interface of the software cuBLAS, as far as XLA calls it. Matrices are column-major.
#include <stdlib.h>

#include "softblas.h"

struct blas_handle {
  soft_stream stream;
  int pointer_mode;  // 0: alpha and beta are on the host, 1: on the device
  int math_mode;
};

SG_EXPORT int cublasCreate_v2(struct blas_handle **handle) {
  *handle = calloc(1, sizeof **handle);
  return BLAS_OK;
}

SG_EXPORT int cublasDestroy_v2(struct blas_handle *handle) {
  free(handle);
  return BLAS_OK;
}

SG_EXPORT int cublasGetVersion_v2(struct blas_handle *handle, int *version) {
  (void)handle;
  *version = BLAS_VERSION;
  return BLAS_OK;
}

SG_EXPORT int cublasGetProperty(int which, int *value) {  // 0: major, 1: minor, 2: patch level
  if (which < 0 || which > 2) return BLAS_INVALID_VALUE;
  *value = which == 0 ? BLAS_VERSION / 10000
           : which == 1 ? BLAS_VERSION / 100 % 100 : BLAS_VERSION % 100;
  return BLAS_OK;
}

SG_EXPORT const char *cublasGetStatusName(int status) { return blas_status_name(status); }
SG_EXPORT const char *cublasGetStatusString(int status) { return blas_status_name(status); }

SG_EXPORT int cublasSetStream_v2(struct blas_handle *handle, soft_stream stream) {
  handle->stream = stream;
  return BLAS_OK;
}

SG_EXPORT int cublasGetStream_v2(struct blas_handle *handle, soft_stream *stream) {
  *stream = handle->stream;
  return BLAS_OK;
}

// The software cuBLAS needs no workspace on the device.
SG_EXPORT int cublasSetWorkspace_v2(struct blas_handle *handle, void *memory, size_t bytes) {
  (void)handle, (void)memory, (void)bytes;
  return BLAS_OK;
}

SG_EXPORT int cublasSetPointerMode_v2(struct blas_handle *handle, int mode) {
  if (mode != 0 && mode != 1) sg_fail("cuBLAS pointer mode %d", mode);
  handle->pointer_mode = mode;
  return BLAS_OK;
}

SG_EXPORT int cublasGetPointerMode_v2(struct blas_handle *handle, int *mode) {
  *mode = handle->pointer_mode;
  return BLAS_OK;
}

// Math modes allow less precision than asked for; here nothing is ever rounded by them.
SG_EXPORT int cublasSetMathMode(struct blas_handle *handle, int mode) {
  handle->math_mode = mode;
  return BLAS_OK;
}

SG_EXPORT int cublasGetMathMode(struct blas_handle *handle, int *mode) {
  *mode = handle->math_mode;
  return BLAS_OK;
}

// Atomics would allow sums in any order; here the order is always the same.
SG_EXPORT int cublasSetAtomicsMode(struct blas_handle *handle, int mode) {
  (void)handle, (void)mode;
  return BLAS_OK;
}

// operand describes op(X), rows x cols, where X is column-major with leading dimension ld.
static struct matrix operand(const void *data, int type, int64_t rows, int64_t cols, int transposed,
                             int64_t ld, int64_t batch_step) {
  return (struct matrix){.data = (char *)(uintptr_t)data, .type = type, .rows = rows, .cols = cols,
                         .row_step = transposed ? ld : 1, .col_step = transposed ? 1 : ld,
                         .batch_step = batch_step};
}

static int scale_type(int compute) {
  switch (compute) {
    case COMPUTE_F16: case COMPUTE_F16_PEDANTIC: return BLAS_F16;
    case COMPUTE_F64: case COMPUTE_F64_PEDANTIC: return BLAS_F64;
  }
  return BLAS_F32;
}

SG_EXPORT int cublasGemmStridedBatchedEx(struct blas_handle *handle, int op_a, int op_b, int rows,
                                         int cols, int inner, const void *alpha, const void *a,
                                         int type_a, int ld_a, long long step_a, const void *b,
                                         int type_b, int ld_b, long long step_b, const void *beta,
                                         void *c, int type_c, int ld_c, long long step_c,
                                         int batch, int compute, int algorithm) {
  (void)algorithm;
  // 0: as it is, 1: transposed, 2: conjugated, which is the same for real numbers
  if (op_a < 0 || op_a > 2 || op_b < 0 || op_b > 2) sg_fail("cuBLAS operations %d %d", op_a, op_b);
  struct product p = {
      .a = operand(a, type_a, rows, inner, op_a, ld_a, step_a),
      .b = operand(b, type_b, inner, cols, op_b, ld_b, step_b),
      .c = operand(c, type_c, rows, cols, 0, ld_c, step_c),
      .d = operand(c, type_c, rows, cols, 0, ld_c, step_c),
      .batch = batch, .compute = compute, .scale_type = scale_type(compute),
      .epilogue = EPILOGUE_DEFAULT, .on_device = handle->pointer_mode,
      .alpha_at = alpha, .beta_at = beta,
  };
  if (!p.on_device) {
    p.alpha = blas_load(alpha, p.scale_type, 0);
    p.beta = blas_load(beta, p.scale_type, 0);
  }
  return blas_queue(handle->stream, &p);
}

SG_EXPORT int cublasGemmEx(struct blas_handle *handle, int op_a, int op_b, int rows, int cols,
                           int inner, const void *alpha, const void *a, int type_a, int ld_a,
                           const void *b, int type_b, int ld_b, const void *beta, void *c,
                           int type_c, int ld_c, int compute, int algorithm) {
  return cublasGemmStridedBatchedEx(handle, op_a, op_b, rows, cols, inner, alpha, a, type_a, ld_a,
                                    0, b, type_b, ld_b, 0, beta, c, type_c, ld_c, 0, 1, compute,
                                    algorithm);
}
