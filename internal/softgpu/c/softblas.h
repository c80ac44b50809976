// A software cuBLAS and cuBLASLt: numbers of the interface and parts. Names, numbers and argument
// order are those that cuBLAS documents; the text is ours.
//
//   cublas.c         the classic interface: handles, GemmEx, GemmStridedBatchedEx
//   cublaslt.c       the Lt interface: descriptors, layouts, heuristic, matmul
//   cublas_gemm.c    the product itself; cublas_kernel.h is its inner part, for f32 and for f64
#ifndef SOFTGPU_SOFTBLAS_H
#define SOFTGPU_SOFTBLAS_H

#include <stddef.h>
#include <stdint.h>

#include "softlib.h"

enum blas_status {
  BLAS_OK = 0,
  BLAS_INVALID_VALUE = 7,
  BLAS_INTERNAL_ERROR = 14,
  BLAS_NOT_SUPPORTED = 15,
};

enum { BLAS_VERSION = 130802 };  // 13.8.2

enum blas_type {
  BLAS_F32 = 0,
  BLAS_F64 = 1,
  BLAS_F16 = 2,
  BLAS_BF16 = 14,
  BLAS_E4M3 = 28,
  BLAS_E5M2 = 29,
};

enum blas_compute {
  COMPUTE_F16 = 64,
  COMPUTE_F16_PEDANTIC = 65,
  COMPUTE_F32 = 68,
  COMPUTE_F32_PEDANTIC = 69,
  COMPUTE_F64 = 70,
  COMPUTE_F64_PEDANTIC = 71,
  COMPUTE_F32_FAST_F16 = 74,
  COMPUTE_F32_FAST_BF16 = 75,
  COMPUTE_F32_FAST_TF32 = 77,
};

enum blas_epilogue {
  EPILOGUE_DEFAULT = 1,
  EPILOGUE_RELU = 2,
  EPILOGUE_BIAS = 4,
  EPILOGUE_RELU_BIAS = 6,
  EPILOGUE_GELU = 32,
  EPILOGUE_GELU_BIAS = 36,
  EPILOGUE_GELU_AUX = 160,
  EPILOGUE_GELU_AUX_BIAS = 164,
};

// A matrix in device memory. Steps are in elements, so that orders and transposes are alike: the
// element in row r and column c of batch b is at r*row_step + c*col_step + b*batch_step.
struct matrix {
  char *data;
  int type;
  int64_t rows, cols;
  int64_t row_step, col_step, batch_step;
};

// A product is D = activation(alpha * A x B + beta * C + bias), for every batch. A is rows x inner,
// B inner x cols; both already transposed as asked.
struct product {
  struct matrix a, b, c, d;
  int64_t batch;
  int compute, scale_type, epilogue;

  int on_device;             // the factors are read when the product runs
  double alpha, beta;        // if they are on the host
  const void *alpha_at, *beta_at;  // if they are on the device, of scale_type

  const char *bias;          // one number for each row of D
  int bias_type;
  int64_t bias_row_step, bias_col_step, bias_batch_step;
  struct matrix aux;         // what GELU is applied to; data is 0 if it is not wanted
  const float *a_scale, *b_scale;  // of 8-bit operands: one number on the device each, or 0
  double fault;              // the product is too large by this share, as a broken GPU's
};

// blas_width is the bytes of an element, or 0 for a type that is not played.
size_t blas_width(int type);
double blas_load(const void *data, int type, int64_t at);

// blas_problem names what is not played in a product, or gives 0.
const char *blas_problem(const struct product *p, char *text, size_t size);

// blas_queue makes a copy of a product and puts it on the stream. What is not played ends the
// process by name.
int blas_queue(soft_stream stream, const struct product *p);

const char *blas_status_name(int status);

#endif
