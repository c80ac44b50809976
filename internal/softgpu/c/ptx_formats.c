// Float formats of up to 32 bits, and the exact steps that arithmetic in them needs.
#include <math.h>

#include "ptx_impl.h"

const struct format format_f32 = {23, 8, 127, 0x7f7fffff, 0x7f800000, 0x7fffffff, true};
const struct format format_f16 = {10, 5, 15, 0x7bff, 0x7c00, 0x7fff, true};
const struct format format_bf16 = {7, 8, 127, 0x7f7f, 0x7f80, 0x7fff, true};
const struct format format_e4m3 = {3, 4, 7, 0x7e, 0, 0x7f, true};
const struct format format_e5m2 = {2, 5, 15, 0x7b, 0x7c, 0x7f, true};
const struct format format_e2m1 = {1, 2, 1, 0x7, 0, 0, false};

// up says whether a magnitude between whole and whole + 1 is rounded up.
static bool up(double fraction, bool odd, bool negative, int round) {
    switch (round) {
    case ROUND_ZERO: return false;
    case ROUND_DOWN: return negative && fraction > 0;
    case ROUND_UP: return !negative && fraction > 0;
    case ROUND_NEAREST_AWAY: return fraction >= 0.5;
    default: return fraction > 0.5 || (fraction == 0.5 && odd);
    }
}

// overflow gives the code for a magnitude above the largest finite one.
static uint32_t overflow(const struct format *f, bool exact_infinity, bool negative, int round,
                         int flags) {
    if (flags & FLAG_SATFINITE) return f->largest;
    bool toward_zero = round == ROUND_ZERO || (round == ROUND_DOWN && !negative) ||
                       (round == ROUND_UP && negative);
    if (toward_zero && !exact_infinity) return f->largest;
    return f->infinity ? f->infinity : f->nan;
}

// ptx_encode rounds a double once. NaN becomes the canonical NaN, or the largest finite number of a
// format that has no NaN.
uint32_t ptx_encode(double x, const struct format *f, int round, int flags) {
    if (x != x) return f->has_nan ? f->nan : f->largest;
    bool negative = signbit(x);
    if (negative && (flags & FLAG_RELU)) return 0;
    uint32_t sign = negative ? 1u << (f->mantissa + f->exponent) : 0;
    double a = fabs(x);
    if (isinf(a)) return sign | overflow(f, true, negative, round, flags);
    int e;
    frexp(a, &e);
    int least = 1 - f->bias;
    e = a == 0 || e - 1 < least ? least : e - 1;
    double scaled = ldexp(a, f->mantissa - e), whole = floor(scaled);
    uint64_t n = (uint64_t)whole, one = 1ull << f->mantissa;
    if (up(scaled - whole, n & 1, negative, round)) n++;
    uint64_t code = n < one ? n : ((uint64_t)(e + f->bias) << f->mantissa) + (n - one);
    if (code > f->largest) return sign | overflow(f, false, negative, round, flags);
    if ((flags & FLAG_FTZ) && code < one) code = 0;
    return sign | (uint32_t)code;
}

double ptx_decode_float(uint32_t code, const struct format *f) {
    uint32_t sign = 1u << (f->mantissa + f->exponent), magnitude = code & (sign - 1);
    double value;
    if (magnitude > f->largest)
        value = f->infinity && magnitude == f->infinity ? INFINITY : NAN;
    else {
        int e = (int)(magnitude >> f->mantissa);
        uint32_t m = magnitude & ((1u << f->mantissa) - 1);
        value = e ? ldexp(m | 1u << f->mantissa, e - f->bias - f->mantissa)
                  : ldexp(m, 1 - f->bias - f->mantissa);
    }
    return code & sign ? -value : value;
}

// ptx_fma_odd gives a*b + c rounded to odd, so that a second rounding to 24 bits or fewer is that
// of the exact value. The product must be exact in a double.
double ptx_fma_odd(double a, double b, double c) {
    double p = a * b, s = p + c;
    if (!isfinite(s)) return s;
    double t = s - p, error = (p - (s - t)) + (c - t);
    if (error == 0) return s;
    uint64_t u = bits_of_double(s);
    if ((error < 0) != (s < 0)) u--;
    return double_of(u | 1);
}
