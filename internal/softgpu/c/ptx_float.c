// Arithmetic of f32, f32x2 and f64.
//
// Results that are NaN become the GPU's canonical NaN, 0x7fffffff. Instructions that a GPU
// approximates (ex2.approx, lg2.approx, rsqrt.approx, rcp.approx, sqrt.approx, sin, cos, tanh, and
// div.approx and div.full) give the float nearest to the result in double precision: an error of at
// most half a unit in the last place, where a GPU has up to two.
#include <fenv.h>
#include <math.h>

#include "ptx_impl.h"

static inline float flush(float x, int flags) {
    uint32_t u = bits_of(x);
    return (flags & FLAG_FTZ) && !(u & 0x7f800000) ? float_of(u & 0x80000000) : x;
}

static inline float finish(float r, int flags) {
    r = flush(r, flags);
    if (flags & FLAG_SAT) return r > 0 ? (r < 1 ? r : 1) : 0;
    return r != r ? float_of(0x7fffffff) : r;
}

// An f32 instruction has three functions: without modifiers, with .ftz and .sat, and for pairs.
#define FLOAT_FUNCTIONS(name)                                                               \
    static void name##_f32(struct warp *w, const struct ins *i) { name##_body(w, i, 0, 32); }
#define FLOAT_MODIFIED(name)                                                                \
    static void name##_f32m(struct warp *w, const struct ins *i) {                          \
        name##_body(w, i, i->flags, 32);                                                    \
    }
#define FLOAT_PAIRS(name)                                                                   \
    static void name##_f32x2(struct warp *w, const struct ins *i) { name##_body(w, i, 0, 64); } \
    static void name##_f32x2m(struct warp *w, const struct ins *i) {                        \
        name##_body(w, i, i->flags, 64);                                                    \
    }

#define INLINE static inline __attribute__((always_inline))
#define FLOAT2(name, expression)                                                            \
    INLINE void name##_body(struct warp *w, const struct ins *i, const int flags, int lanes) { \
        lane_float *d = LANEF(0);                                                           \
        const lane_float *x = LANEF(1), *y = LANEF(2);                                      \
        _Pragma("GCC ivdep") for (int l = 0; l < lanes; l++) {                              \
            float a = flush(x[l], flags), b = flush(y[l], flags);                           \
            d[l] = finish(expression, flags);                                               \
        }                                                                                   \
    }                                                                                       \
    FLOAT_FUNCTIONS(name)
#define FLOAT3(name, expression)                                                            \
    INLINE void name##_body(struct warp *w, const struct ins *i, const int flags, int lanes) { \
        lane_float *d = LANEF(0);                                                           \
        const lane_float *x = LANEF(1), *y = LANEF(2), *z = LANEF(3);                       \
        _Pragma("GCC ivdep") for (int l = 0; l < lanes; l++) {                              \
            float a = flush(x[l], flags), b = flush(y[l], flags), c = flush(z[l], flags);   \
            d[l] = finish(expression, flags);                                               \
        }                                                                                   \
    }                                                                                       \
    FLOAT_FUNCTIONS(name)
#define FLOAT1(name, expression)                                                            \
    INLINE void name##_body(struct warp *w, const struct ins *i, const int flags, int lanes) { \
        lane_float *d = LANEF(0);                                                           \
        const lane_float *x = LANEF(1);                                                     \
        _Pragma("GCC ivdep") for (int l = 0; l < lanes; l++) {                              \
            float a = flush(x[l], flags);                                                   \
            d[l] = finish(expression, flags);                                               \
        }                                                                                   \
    }                                                                                       \
    FLOAT_FUNCTIONS(name)

FLOAT2(add, a + b) FLOAT_MODIFIED(add) FLOAT_PAIRS(add)
FLOAT2(sub, a - b) FLOAT_MODIFIED(sub) FLOAT_PAIRS(sub)
FLOAT2(mul, a * b) FLOAT_MODIFIED(mul) FLOAT_PAIRS(mul)
FLOAT3(fma, fmaf(a, b, c)) FLOAT_MODIFIED(fma) FLOAT_PAIRS(fma)
FLOAT2(div, a / b) FLOAT_MODIFIED(div)
FLOAT1(sqrt, sqrtf(a)) FLOAT_MODIFIED(sqrt)
FLOAT1(rcp, 1 / a) FLOAT_MODIFIED(rcp)
FLOAT1(rsqrt, (float)(1 / sqrt((double)a))) FLOAT_MODIFIED(rsqrt)
FLOAT1(ex2, (float)exp2((double)a)) FLOAT_MODIFIED(ex2)
FLOAT1(lg2, (float)log2((double)a)) FLOAT_MODIFIED(lg2)
FLOAT1(sin, (float)sin((double)a)) FLOAT_MODIFIED(sin)
FLOAT1(cos, (float)cos((double)a)) FLOAT_MODIFIED(cos)
FLOAT1(tanh, (float)tanh((double)a))

// Signs are bits: a NaN's payload stays.
static void neg_f32(struct warp *w, const struct ins *i) {
    lane_float *d = LANEF(0);
    const lane_float *x = LANEF(1);
    const int flags = i->flags;
    EACH_LANE d[l] = float_of(bits_of(flush(x[l], flags)) ^ 0x80000000);
}
static void abs_f32(struct warp *w, const struct ins *i) {
    lane_float *d = LANEF(0);
    const lane_float *x = LANEF(1);
    const int flags = i->flags;
    EACH_LANE d[l] = float_of(bits_of(flush(x[l], flags)) & 0x7fffffff);
}
static void copysign_f32(struct warp *w, const struct ins *i) {
    lane32 *d = LANE32(0);
    const lane32 *x = LANE32(1), *y = LANE32(2);
    EACH_LANE d[l] = (x[l] & 0x80000000) | (y[l] & 0x7fffffff);
}

// A NaN loses against a number, or wins with .NaN; -0 is less than +0.
INLINE float lesser(float a, float b, int flags) {
    float r = a < b ? a : b < a ? b : float_of(bits_of(a) | bits_of(b));
    float nan = flags & FLAG_NAN ? float_of(0x7fffffff) : a != a ? b : a;
    return a != a || b != b ? nan : r;
}
INLINE float greater(float a, float b, int flags) {
    float r = a > b ? a : b > a ? b : float_of(bits_of(a) & bits_of(b));
    float nan = flags & FLAG_NAN ? float_of(0x7fffffff) : a != a ? b : a;
    return a != a || b != b ? nan : r;
}
INLINE float magnitude(float a, int flags) {
    return flags & FLAG_ABS ? float_of(bits_of(a) & 0x7fffffff) : a;
}

// choose is min or max of two or three operands.
#define CHOOSE(name, function)                                                         \
    INLINE void name##_body(struct warp *w, const struct ins *i, const int flags) {    \
        lane_float *d = LANEF(0);                                                      \
        const lane_float *x = LANEF(1), *y = LANEF(2), *z = LANEF(i->count - 1);       \
        bool three = i->count == 4;                                                    \
        EACH_LANE {                                                                    \
            float a = magnitude(flush(x[l], flags), flags);                            \
            float b = magnitude(flush(y[l], flags), flags);                            \
            float c = magnitude(flush(z[l], flags), flags);                            \
            float r = function(a, b, flags);                                           \
            d[l] = finish(three ? function(r, c, flags) : r, 0);                       \
        }                                                                              \
    }                                                                                  \
    static void name##_f32(struct warp *w, const struct ins *i) { name##_body(w, i, 0); } \
    static void name##_f32n(struct warp *w, const struct ins *i) {                     \
        name##_body(w, i, FLAG_NAN);                                                   \
    }                                                                                  \
    static void name##_f32m(struct warp *w, const struct ins *i) { name##_body(w, i, i->flags); }
CHOOSE(min, lesser)
CHOOSE(max, greater)

// --- Doubles ---

#define DOUBLE1(name, expression)                                           \
    static void name(struct warp *w, const struct ins *i) {                 \
        lane_double *d = LANED(0);                                          \
        const lane_double *x = LANED(1);                                    \
        EACH_LANE { double a = x[l]; d[l] = expression; }                   \
    }
#define DOUBLE2(name, expression)                                           \
    static void name(struct warp *w, const struct ins *i) {                 \
        lane_double *d = LANED(0);                                          \
        const lane_double *x = LANED(1), *y = LANED(2);                     \
        EACH_LANE { double a = x[l], b = y[l]; d[l] = expression; }         \
    }
DOUBLE2(add_f64, a + b)
DOUBLE2(sub_f64, a - b)
DOUBLE2(mul_f64, a * b)
DOUBLE2(div_f64, a / b)
DOUBLE1(sqrt_f64, sqrt(a))
DOUBLE1(rcp_f64, 1 / a)
DOUBLE1(rsqrt_f64, 1 / sqrt(a))
DOUBLE1(neg_f64, double_of(bits_of_double(a) ^ 1ull << 63))
DOUBLE1(abs_f64, double_of(bits_of_double(a) & ~(1ull << 63)))
DOUBLE2(copysign_f64, double_of((bits_of_double(a) & 1ull << 63) |
                                (bits_of_double(b) & ~(1ull << 63))))
DOUBLE2(min_f64, a != a ? b : b != b ? a : a < b ? a : b < a ? b
                 : double_of(bits_of_double(a) | bits_of_double(b)))
DOUBLE2(max_f64, a != a ? b : b != b ? a : a > b ? a : b > a ? b
                 : double_of(bits_of_double(a) & bits_of_double(b)))
static void fma_f64(struct warp *w, const struct ins *i) {
    lane_double *d = LANED(0);
    const lane_double *x = LANED(1), *y = LANED(2), *z = LANED(3);
    EACH_LANE d[l] = fma(x[l], y[l], z[l]);
}

// --- f32 with one operand of 16 bits: d = a op c with a in bf16 or f16 ---

INLINE float widened(uint16_t bits, int type) {
    return type == BF16 ? float_of_bf16(bits) : (float)ptx_decode_float(bits, &format_f16);
}
#define MIXED(name, expression)                                                          \
    static void name(struct warp *w, const struct ins *i) {                              \
        lane_float *d = LANEF(0);                                                        \
        const lane16 *x = LANE16(1);                                                     \
        const lane_float *y = LANEF(2);                                                  \
        const int type = i->type[1], flags = i->flags;                                   \
        EACH_LANE { float a = widened(x[l], type), b = y[l]; d[l] = finish(expression, flags); } \
    }
MIXED(add_mixed, a + b)
MIXED(sub_mixed, a - b)
static void fma_mixed(struct warp *w, const struct ins *i) {
    lane_float *d = LANEF(0);
    const lane16 *x = LANE16(1), *y = LANE16(2);
    const lane_float *z = LANEF(3);
    const int type = i->type[1], flags = i->flags;
    EACH_LANE d[l] = finish(fmaf(widened(x[l], type), widened(y[l], type), z[l]), flags);
}

// --- Classes ---

static bool in_class(uint64_t bits, int mantissa, uint64_t infinity, int sub) {
    uint64_t m = bits & (infinity | ((1ull << mantissa) - 1));
    switch (sub) {
    case SUB_FINITE: return m < infinity;
    case SUB_INFINITE: return m == infinity;
    case SUB_NUMBER: return m <= infinity;
    case SUB_NOTANUMBER: return m > infinity;
    case SUB_NORMAL: return m < infinity && m >> mantissa;
    default: return m && !(m >> mantissa);
    }
}
static void testp(struct warp *w, const struct ins *i) {
    uint32_t r = 0;
    bool wide = i->type[0] == F64;
    for (int l = 0; l < LANES; l++)
        r |= (uint32_t)in_class(ptx_read(w, i, 1, l), wide ? 52 : 23,
                                wide ? 0x7ffull << 52 : 0x7f800000, i->sub) << l;
    BITS(0) = r;
}

// --- Rounding ---

static void rounded(struct warp *w, const struct ins *i) {
    static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
    fesetround(modes[i->round]);
    i->inner(w, i);
    fesetround(FE_TONEAREST);
}
static const char *prepare_rounding(struct ins *i) {
    if (i->round == ROUND_NEAREST) return NULL;
    i->inner = i->run;
    i->run = rounded;
    return NULL;
}

#define RND "{.rn|.rz|.rm|.rp}"
#define RND1 "(.rn|.rz|.rm|.rp)"
#define R prepare_rounding

const struct row ptx_float_rows[] = {
    {"add" RND ".f32", "daa", add_f32, 0, R}, {"add" RND "{.ftz}{.sat}.f32", "daa", add_f32m, 0, R},
    {"sub" RND ".f32", "daa", sub_f32, 0, R}, {"sub" RND "{.ftz}{.sat}.f32", "daa", sub_f32m, 0, R},
    {"mul" RND ".f32", "daa", mul_f32, 0, R}, {"mul" RND "{.ftz}{.sat}.f32", "daa", mul_f32m, 0, R},
    {"fma" RND1 ".f32", "daaa", fma_f32, 0, R},
    {"fma" RND1 "{.ftz}{.sat}.f32", "daaa", fma_f32m, 0, R},
    {"mad" RND1 "{.ftz}{.sat}.f32", "daaa", fma_f32m, 0, R},
    {"add" RND ".f32x2", "daa", add_f32x2, 0, R}, {"add" RND ".ftz.f32x2", "daa", add_f32x2m, 0, R},
    {"sub" RND ".f32x2", "daa", sub_f32x2, 0, R}, {"sub" RND ".ftz.f32x2", "daa", sub_f32x2m, 0, R},
    {"mul" RND ".f32x2", "daa", mul_f32x2, 0, R}, {"mul" RND ".ftz.f32x2", "daa", mul_f32x2m, 0, R},
    {"fma" RND1 ".f32x2", "daaa", fma_f32x2, 0, R},
    {"fma" RND1 ".ftz.f32x2", "daaa", fma_f32x2m, 0, R},
    {"add" RND "{.sat}.f32(.bf16|.f16)", "dba", add_mixed, 0, R},
    {"sub" RND "{.sat}.f32(.bf16|.f16)", "dba", sub_mixed, 0, R},
    {"fma" RND1 "{.sat}.f32(.bf16|.f16)", "dbba", fma_mixed, 0, R},
    {"div(.approx|.full).f32", "daa", div_f32}, {"div(.approx|.full).ftz.f32", "daa", div_f32m},
    {"div" RND1 ".f32", "daa", div_f32, 0, R}, {"div" RND1 ".ftz.f32", "daa", div_f32m, 0, R},
    {"sqrt.approx.f32", "da", sqrt_f32}, {"sqrt.approx.ftz.f32", "da", sqrt_f32m},
    {"sqrt" RND1 ".f32", "da", sqrt_f32, 0, R}, {"sqrt" RND1 ".ftz.f32", "da", sqrt_f32m, 0, R},
    {"rcp.approx.f32", "da", rcp_f32}, {"rcp.approx.ftz.f32", "da", rcp_f32m},
    {"rcp" RND1 ".f32", "da", rcp_f32, 0, R}, {"rcp" RND1 ".ftz.f32", "da", rcp_f32m, 0, R},
    {"rsqrt.approx.f32", "da", rsqrt_f32}, {"rsqrt.approx.ftz.f32", "da", rsqrt_f32m},
    {"ex2.approx.f32", "da", ex2_f32}, {"ex2.approx.ftz.f32", "da", ex2_f32m},
    {"lg2.approx.f32", "da", lg2_f32}, {"lg2.approx.ftz.f32", "da", lg2_f32m},
    {"sin.approx.f32", "da", sin_f32}, {"sin.approx.ftz.f32", "da", sin_f32m},
    {"cos.approx.f32", "da", cos_f32}, {"cos.approx.ftz.f32", "da", cos_f32m},
    {"tanh.approx.f32", "da", tanh_f32},
    {"neg{.ftz}.f32", "da", neg_f32}, {"abs{.ftz}.f32", "da", abs_f32},
    {"copysign.f32", "daa", copysign_f32}, {"copysign.f64", "daa", copysign_f64},
    {"min.f32", "daa daaa", min_f32}, {"min.NaN.f32", "daa daaa", min_f32n},
    {"min{.ftz}{.NaN}{.abs}.f32", "daa daaa", min_f32m},
    {"max.f32", "daa daaa", max_f32}, {"max.NaN.f32", "daa daaa", max_f32n},
    {"max{.ftz}{.NaN}{.abs}.f32", "daa daaa", max_f32m},
    {"add" RND ".f64", "daa", add_f64, 0, R}, {"sub" RND ".f64", "daa", sub_f64, 0, R},
    {"mul" RND ".f64", "daa", mul_f64, 0, R}, {"fma" RND1 ".f64", "daaa", fma_f64, 0, R},
    {"mad" RND1 ".f64", "daaa", fma_f64, 0, R}, {"div" RND1 ".f64", "daa", div_f64, 0, R},
    {"sqrt" RND1 ".f64", "da", sqrt_f64, 0, R}, {"rcp" RND1 ".f64", "da", rcp_f64, 0, R},
    {"rcp.approx.ftz.f64", "da", rcp_f64}, {"rsqrt.approx{.ftz}.f64", "da", rsqrt_f64},
    {"neg.f64", "da", neg_f64}, {"abs.f64", "da", abs_f64},
    {"min.f64", "daa", min_f64}, {"max.f64", "daa", max_f64},
    {"testp(.finite|.infinite|.number|.notanumber|.normal|.subnormal)(.f32|.f64)", "Pa", testp},
    {0}};
