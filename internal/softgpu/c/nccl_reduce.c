// Element types and reductions of the software NCCL.
#include <math.h>

#include "softnccl.h"

static const struct {
  const char *name;
  size_t width;
} types[NCCL_TYPES] = {
    [NCCL_I8] = {"i8", 1},   [NCCL_U8] = {"u8", 1},     [NCCL_I32] = {"i32", 4},
    [NCCL_U32] = {"u32", 4}, [NCCL_I64] = {"i64", 8},   [NCCL_U64] = {"u64", 8},
    [NCCL_F16] = {"f16", 2}, [NCCL_F32] = {"f32", 4},   [NCCL_F64] = {"f64", 8},
    [NCCL_BF16] = {"bf16", 2}, [NCCL_E4M3] = {"e4m3", 1}, [NCCL_E5M2] = {"e5m2", 1},
};

static const char *const ops[NCCL_OPS] = {"sum", "prod", "max", "min", "avg"};

const char *nccl_type_name(int type) {
  return type >= 0 && type < NCCL_TYPES ? types[type].name : 0;
}

const char *nccl_op_name(int op) { return op >= 0 && op < NCCL_OPS ? ops[op] : 0; }

size_t nccl_width(int type) { return types[type].width; }

// Loads and stores of each type, to and from the wide type that it is computed in.
#define SAME(x) (x)

// EACH combines element i of all ranks, in the order of ranks.
#define EACH(COMBINE)                                            \
  for (size_t i = 0; i < count; i++) {                           \
    wide a = LOAD(((const elem *)parts[0])[i]);                  \
    for (int r = 1; r < ranks; r++) {                            \
      wide b = LOAD(((const elem *)parts[r])[i]);                \
      a = COMBINE;                                               \
    }                                                            \
    ((elem *)result)[i] = (elem)STORE(a);                        \
  }                                                              \
  return

// REDUCER defines the reduction of one type. AVG is sum, then a division.
#define REDUCER(NAME, ELEM, WIDE, MAX, MIN)                                                \
  static void NAME(void *result, void *const *parts, int ranks, size_t count, int op) {   \
    typedef ELEM elem;                                                                     \
    typedef WIDE wide;                                                                     \
    switch (op) {                                                                          \
      case NCCL_SUM: EACH((wide)(a + b));                                                  \
      case NCCL_PROD: EACH((wide)(a * b));                                                 \
      case NCCL_MAX: EACH(MAX);                                                            \
      case NCCL_MIN: EACH(MIN);                                                            \
      case NCCL_AVG: EACH((wide)(r + 1 < ranks ? a + b : (a + b) / (wide)ranks));          \
    }                                                                                      \
    sg_fail("NCCL reduction %d of " #ELEM, op);                                        \
  }

#define LARGER (a > b ? a : b)
#define SMALLER (a < b ? a : b)

#define LOAD SAME
#define STORE SAME
// A number wins over a NaN, as in the device functions that NCCL's kernels use.
REDUCER(reduce_f32, float, float, fmaxf(a, b), fminf(a, b))
REDUCER(reduce_f64, double, double, fmax(a, b), fmin(a, b))
// Unsigned arithmetic wraps; the low bits are those of the signed result.
REDUCER(reduce_u8, uint8_t, uint64_t, LARGER, SMALLER)
REDUCER(reduce_u32, uint32_t, uint64_t, LARGER, SMALLER)
REDUCER(reduce_u64, uint64_t, uint64_t, LARGER, SMALLER)
#undef LOAD
#undef STORE

// Signed integers are added and multiplied without sign, compared and divided with it.
#define LOAD(x) ((uint64_t)(int64_t)(x))
#define STORE SAME
#define SIGNED_LARGER ((int64_t)a > (int64_t)b ? a : b)
#define SIGNED_SMALLER ((int64_t)a < (int64_t)b ? a : b)
REDUCER(reduce_i8, int8_t, uint64_t, SIGNED_LARGER, SIGNED_SMALLER)
REDUCER(reduce_i32, int32_t, uint64_t, SIGNED_LARGER, SIGNED_SMALLER)
REDUCER(reduce_i64, int64_t, uint64_t, SIGNED_LARGER, SIGNED_SMALLER)
#undef LOAD
#undef STORE

#define LOAD soft_from_f16
#define STORE soft_to_f16
REDUCER(reduce_f16, uint16_t, float, fmaxf(a, b), fminf(a, b))
#undef LOAD
#undef STORE

#define LOAD soft_from_bf16
#define STORE soft_to_bf16
REDUCER(reduce_bf16, uint16_t, float, fmaxf(a, b), fminf(a, b))
#undef LOAD
#undef STORE

static void (*const reducers[NCCL_TYPES])(void *, void *const *, int, size_t, int) = {
    [NCCL_I8] = reduce_i8,   [NCCL_U8] = reduce_u8,   [NCCL_I32] = reduce_i32,
    [NCCL_U32] = reduce_u32, [NCCL_I64] = reduce_i64, [NCCL_U64] = reduce_u64,
    [NCCL_F16] = reduce_f16, [NCCL_F32] = reduce_f32, [NCCL_F64] = reduce_f64,
    [NCCL_BF16] = reduce_bf16,
};

void nccl_reduce(void *result, void *const *parts, int ranks, size_t count, int type, int op) {
  if (!reducers[type]) sg_fail("NCCL reduction of %s", types[type].name);
  if (op == NCCL_AVG && type < NCCL_F16) sg_fail("NCCL avg of %s", types[type].name);
  reducers[type](result, parts, ranks, count, op);
}
