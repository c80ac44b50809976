// Arithmetic of bf16, f16 and their pairs. Every result is rounded once, to nearest even.
#include <math.h>

#include "ptx_impl.h"

// Elements of the instruction's registers: 32 of 16 bits, or 64 of pairs.
static int elements(const struct ins *i) { return i->width[0] == 4 ? 2 * LANES : LANES; }

static bool brain(const struct ins *i) { return i->type[0] == BF16 || i->type[0] == BF16X2; }
static const struct format *format_of(const struct ins *i) {
    return brain(i) ? &format_bf16 : &format_f16;
}

// Sums and differences of bf16 are right when rounded through f32, which has more than twice the
// bits. So are products above the subnormals of f32; the others take the long way.
#define BF16_SUM(name, operator)                                               \
    static void name(struct warp *w, const struct ins *i) {                    \
        lane16 *d = LANE16(0);                                                 \
        const lane16 *x = LANE16(1), *y = LANE16(2);                           \
        const int n = elements(i);                                             \
        _Pragma("GCC ivdep") for (int l = 0; l < n; l++)                       \
            d[l] = bf16_of(float_of_bf16(x[l]) operator float_of_bf16(y[l]));  \
    }
BF16_SUM(add_bf16, +)
BF16_SUM(sub_bf16, -)
static void mul_bf16(struct warp *w, const struct ins *i) {
    lane16 *d = LANE16(0);
    const lane16 *x = LANE16(1), *y = LANE16(2);
    const int n = elements(i);
    float products[2 * LANES];
    int small = 0;
    for (int l = 0; l < n; l++) {
        products[l] = float_of_bf16(x[l]) * float_of_bf16(y[l]);
        small |= !(bits_of(products[l]) & 0x7f800000);
    }
    if (!small) {
        for (int l = 0; l < n; l++) d[l] = bf16_of(products[l]);
        return;
    }
    for (int l = 0; l < n; l++)
        d[l] = (uint16_t)ptx_encode((double)float_of_bf16(x[l]) * float_of_bf16(y[l]), &format_bf16,
                                    ROUND_NEAREST, 0);
}

// general computes any of the rest; sums and products of f16 are exact in a double.
static double saturated(double r) { return r > 0 ? (r < 1 ? r : 1) : 0; }
static uint32_t finish(double r, const struct ins *i) {
    if (i->flags & FLAG_SAT) r = saturated(r);
    return ptx_encode(r, format_of(i), ROUND_NEAREST, i->flags & (FLAG_RELU | FLAG_FTZ));
}
#define GENERAL(name, count, expression)                                                     \
    static void name(struct warp *w, const struct ins *i) {                                  \
        const struct format *f = format_of(i);                                               \
        const int n = elements(i);                                                           \
        for (int l = 0; l < n; l++) {                                                        \
            double a = ptx_decode_float(LANE16(1)[l], f);                                    \
            double b = count > 1 ? ptx_decode_float(LANE16(2)[l], f) : 0;                    \
            double c = count > 2 ? ptx_decode_float(LANE16(3)[l], f) : 0;                    \
            (void)b, (void)c;                                                                \
            LANE16(0)[l] = (uint16_t)finish(expression, i);                                  \
        }                                                                                    \
    }
GENERAL(add_half, 2, a + b)
GENERAL(sub_half, 2, a - b)
GENERAL(mul_half, 2, a * b)
GENERAL(fma_half, 3, ptx_fma_odd(a, b, c))
GENERAL(ex2_half, 1, exp2(a))
GENERAL(tanh_half, 1, tanh(a))

// min and max work on codes: a NaN loses, or wins with .NaN; -0 is less than +0.
static int order(uint16_t code) { return code & 0x8000 ? -(code & 0x7fff) - 1 : code; }
static void choose(struct warp *w, const struct ins *i, bool least) {
    const struct format *f = format_of(i);
    const int n = elements(i);
    for (int l = 0; l < n; l++) {
        uint16_t a = LANE16(1)[l], b = LANE16(2)[l], r;
        bool nan_a = (a & 0x7fffu) > f->infinity, nan_b = (b & 0x7fffu) > f->infinity;
        if (nan_a || nan_b)
            r = (i->flags & FLAG_NAN) || (nan_a && nan_b) ? 0x7fff : nan_a ? b : a;
        else r = (order(a) < order(b)) == least ? a : b;
        LANE16(0)[l] = r;
    }
}
static void min_half(struct warp *w, const struct ins *i) { choose(w, i, true); }
static void max_half(struct warp *w, const struct ins *i) { choose(w, i, false); }

static void neg_half(struct warp *w, const struct ins *i) {
    for (int l = 0, n = elements(i); l < n; l++) LANE16(0)[l] = LANE16(1)[l] ^ 0x8000;
}
static void abs_half(struct warp *w, const struct ins *i) {
    for (int l = 0, n = elements(i); l < n; l++) LANE16(0)[l] = LANE16(1)[l] & 0x7fff;
}

#define BRAIN "(.bf16|.bf16x2)"
#define HALF "(.f16|.f16x2)"
#define BOTH "(.bf16|.bf16x2|.f16|.f16x2)"

const struct row ptx_half_rows[] = {
    {"add{.rn}" BRAIN, "daa", add_bf16}, {"add{.rn}{.sat}" HALF, "daa", add_half},
    {"sub{.rn}" BRAIN, "daa", sub_bf16}, {"sub{.rn}{.sat}" HALF, "daa", sub_half},
    {"mul{.rn}" BRAIN, "daa", mul_bf16}, {"mul{.rn}{.sat}" HALF, "daa", mul_half},
    {"fma.rn{.relu}" BRAIN, "daaa", fma_half},
    {"fma.rn{.sat|.relu}" HALF, "daaa", fma_half},
    {"min{.NaN}" BOTH, "daa", min_half}, {"max{.NaN}" BOTH, "daa", max_half},
    {"neg" BOTH, "da", neg_half}, {"abs" BOTH, "da", abs_half},
    {"ex2.approx.ftz" BRAIN, "da", ex2_half}, {"ex2.approx" HALF, "da", ex2_half},
    {"tanh.approx" BOTH, "da", tanh_half},
    {0}};
