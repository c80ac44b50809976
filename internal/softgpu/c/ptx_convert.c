// cvt between integers, floats and the packed small formats.
#include <fenv.h>
#include <math.h>

#include "ptx_impl.h"

static bool is_float(int t) { return t == F16 || t == BF16 || t == F32 || t == F64; }

static uint64_t low_bytes(uint64_t v, unsigned bytes) {
    return bytes >= 8 ? v : v & ((1ull << (8 * bytes)) - 1);
}
static int64_t extended(uint64_t v, unsigned bytes) {
    switch (bytes) {
    case 1: return (int8_t)v;
    case 2: return (int16_t)v;
    case 4: return (int32_t)v;
    default: return (int64_t)v;
    }
}

static const struct format *scalar_format(int t) {
    return t == F16 ? &format_f16 : t == BF16 ? &format_bf16 : &format_f32;
}

static double float_value(uint64_t bits, int t, int flags) {
    if (t == F64) return double_of(bits);
    if (t == F32 && (flags & FLAG_FTZ) && !(bits & 0x7f800000)) bits &= 0x80000000;
    if (t == F32) return float_of((uint32_t)bits);
    return ptx_decode_float((uint32_t)bits & 0xffff, scalar_format(t));
}

static double whole(double x, int round) {
    switch (round) {
    case ROUND_ZERO: return trunc(x);
    case ROUND_DOWN: return floor(x);
    case ROUND_UP: return ceil(x);
    default: return rint(x);
    }
}

static uint64_t float_bits(double x, const struct ins *i) {
    int t = i->type[0];
    if (i->flags & FLAG_SAT) x = x > 0 ? (x < 1 ? x : 1) : 0;
    if (t == F64) return bits_of_double(x);
    int flags = i->flags & (FLAG_RELU | FLAG_SATFINITE);
    if (t == F32) flags |= i->flags & FLAG_FTZ;
    int round = i->flags & FLAG_INTEGER ? ROUND_NEAREST : i->round;
    return ptx_encode(x, scalar_format(t), round, flags);
}

static uint64_t from_float_to_float(uint64_t bits, const struct ins *i) {
    double x = float_value(bits, i->type[1], i->flags);
    if (i->flags & FLAG_INTEGER) x = whole(x, i->round);
    return float_bits(x, i);
}

// Integers are clamped. NaN is 0, except that conversions of f64 or to 64 bits give the top bit.
static uint64_t from_float_to_integer(uint64_t bits, const struct ins *i) {
    int to = i->type[0], from = i->type[1];
    int size = 8 * (int)ptx_size(to);
    double x = float_value(bits, from, i->flags);
    if (x != x) return from == F64 || size == 64 ? 1ull << (size - 1) : 0;
    x = whole(x, i->round);
    if (ptx_signed(to)) {
        double limit = ldexp(1, size - 1);
        if (x >= limit) return (1ull << (size - 1)) - 1;
        return x < -limit ? -(1ull << (size - 1)) : (uint64_t)(int64_t)x;
    }
    if (x <= 0) return 0;
    return x >= ldexp(1, size) ? low_bytes(~0ull, (unsigned)size / 8) : (uint64_t)x;
}

// sticky gives an integer as a double rounded to odd, so that one rounding is left to do.
static double sticky(uint64_t magnitude) {
    if (magnitude >> 53 == 0) return (double)magnitude;
    uint64_t lost = magnitude & 0x7ff;
    return ldexp((double)(magnitude >> 11 | (lost != 0)), 11);
}

static uint64_t from_integer_to_float(uint64_t bits, const struct ins *i) {
    int from = i->type[1];
    unsigned bytes = ptx_size(from);
    int64_t s = extended(bits, bytes);
    uint64_t u = low_bytes(bits, bytes);
    bool negative = ptx_signed(from) && s < 0;
    uint64_t magnitude = ptx_signed(from) && negative ? -(uint64_t)s : u;
    if (i->type[0] == F64 && !(i->flags & FLAG_SAT)) {
        static const int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
        fesetround(modes[i->round & 3]);
        volatile double d = negative ? (double)s : (double)u;
        fesetround(FE_TONEAREST);
        return bits_of_double(d);
    }
    double x = sticky(magnitude);
    return float_bits(negative ? -x : x, i);
}

static uint64_t from_integer_to_integer(uint64_t bits, const struct ins *i) {
    int to = i->type[0], from = i->type[1];
    unsigned bytes = ptx_size(from), size = 8 * ptx_size(to);
    bool is_signed = ptx_signed(from);
    uint64_t v = is_signed ? (uint64_t)extended(bits, bytes) : low_bytes(bits, bytes);
    if (!(i->flags & FLAG_SAT)) return v;
    __int128 x = is_signed ? (__int128)(int64_t)v : (__int128)v;
    __int128 most = ptx_signed(to) ? ((__int128)1 << (size - 1)) - 1 : ((__int128)1 << size) - 1;
    __int128 least = ptx_signed(to) ? -most - 1 : 0;
    return (uint64_t)(x < least ? least : x > most ? most : x);
}

// A result narrower than its register is extended by its sign or by zeros.
static void scalar(struct warp *w, const struct ins *i) {
    int to = i->type[0], from = i->type[1];
    uint64_t (*f)(uint64_t, const struct ins *) =
        is_float(to) ? is_float(from) ? from_float_to_float : from_integer_to_float
                     : is_float(from) ? from_float_to_integer : from_integer_to_integer;
    unsigned bytes = ptx_size(to);
    for (int l = 0; l < LANES; l++) {
        uint64_t v = f(ptx_read(w, i, 1, l), i);
        ptx_write(w, i, 0, l, ptx_signed(to) ? (uint64_t)extended(v, bytes) : low_bytes(v, bytes));
    }
}

// --- The frequent ones, as loops that vectorize ---

#define FAST(name, to, from, expression)                                \
    static void name(struct warp *w, const struct ins *i) {             \
        to *d = (to *)LANE8(0);                                         \
        const from *x = (from *)LANE8(1);                               \
        EACH_LANE { from a = x[l]; d[l] = expression; }                 \
    }
typedef int32_t __attribute__((may_alias)) lane_s32;
typedef int64_t __attribute__((may_alias)) lane_s64;
FAST(f32_of_bf16, lane32, lane16, (uint32_t)a << 16)
FAST(bf16_of_f32, lane16, lane_float, bf16_of(a))
FAST(u64_of_u32, lane64, lane32, a)
FAST(s64_of_s32, lane_s64, lane_s32, a)
FAST(u32_of_u64, lane32, lane64, (uint32_t)a)
FAST(u32_of_u16, lane32, lane16, a)
FAST(u16_of_u32, lane16, lane32, (uint16_t)a)
FAST(u64_of_u16, lane64, lane16, a)
FAST(f32_of_s32, lane_float, lane_s32, (float)a)
FAST(f32_of_u32, lane_float, lane32, (float)a)
FAST(f32_saturated, lane_float, lane_float, a > 0 ? (a < 1 ? a : 1) : 0)

static const struct { uint8_t to, from; uint16_t flags; ptx_function run; } fast[] = {
    {F32, BF16, 0, f32_of_bf16}, {BF16, F32, 0, bf16_of_f32}, {U64, U32, 0, u64_of_u32},
    {S64, S32, 0, s64_of_s32}, {U32, U64, 0, u32_of_u64}, {U32, U16, 0, u32_of_u16},
    {U16, U32, 0, u16_of_u32}, {U64, U16, 0, u64_of_u16}, {F32, S32, 0, f32_of_s32},
    {F32, U32, 0, f32_of_u32}, {F32, F32, FLAG_SAT, f32_saturated}};

static const char *prepare_scalar(struct ins *i) {
    bool floats = is_float(i->type[0]) && is_float(i->type[1]);
    if (floats && !(i->flags & FLAG_INTEGER) && ptx_size(i->type[0]) < ptx_size(i->type[1]) &&
        !strstr(i->spelling, ".r"))
        return "a rounding mode is missing";
    if (i->round == ROUND_NEAREST_AWAY) return "this rounding mode is for tf32";
    if (i->width[0] != ptx_size(i->type[0]) || i->width[1] != ptx_size(i->type[1])) return NULL;
    for (size_t n = 0; n < sizeof fast / sizeof *fast; n++)
        if (i->type[0] == fast[n].to && i->type[1] == fast[n].from && i->flags == fast[n].flags &&
            i->round == ROUND_NEAREST)
            i->run = fast[n].run;
    return NULL;
}

// --- Pairs: operand a is the upper half ---

static const struct format *pair_format(int t) {
    switch (t) {
    case F16X2: return &format_f16;
    case BF16X2: return &format_bf16;
    case E4M3X2: return &format_e4m3;
    case E5M2X2: return &format_e5m2;
    default: return &format_e2m1;
    }
}
static int code_bits(int pair) { return pair == E2M1X2 ? 4 : 4 * (int)ptx_size(pair); }

static void bf16x2_of_f32(struct warp *w, const struct ins *i) {
    lane32 *d = LANE32(0);
    const lane_float *x = LANEF(1), *y = LANEF(2);
    EACH_LANE d[l] = (uint32_t)bf16_of(x[l]) << 16 | bf16_of(y[l]);
}

static void pair_of_f32(struct warp *w, const struct ins *i) {
    const struct format *f = pair_format(i->type[0]);
    int bits = code_bits(i->type[0]);
    for (int l = 0; l < LANES; l++) {
        uint32_t high = ptx_encode(LANEF(1)[l], f, i->round, i->flags);
        uint32_t low = ptx_encode(LANEF(2)[l], f, i->round, i->flags);
        ptx_write(w, i, 0, l, high << bits | low);
    }
}

static void pair_of_pair(struct warp *w, const struct ins *i) {
    const struct format *to = pair_format(i->type[0]), *from = pair_format(i->type[1]);
    int bits = code_bits(i->type[0]), source = code_bits(i->type[1]);
    for (int l = 0; l < LANES; l++) {
        uint32_t x = (uint32_t)ptx_read(w, i, 1, l), mask = (1u << source) - 1;
        double high = ptx_decode_float(x >> source & mask, from);
        double low = ptx_decode_float(x & mask, from);
        uint32_t r = ptx_encode(high, to, i->round, i->flags) << bits;
        ptx_write(w, i, 0, l, r | ptx_encode(low, to, i->round, i->flags));
    }
}

// Four numbers by random bits, the first in the upper bits: 8 bits each are added to what is left
// over of a step of the grid. The PTX ISA names the bytes of each pair; that the upper half is for
// the first of a pair is read from its conversions to two 16-bit numbers.
static uint32_t e2m1_randomly(float x, uint32_t random) {
    if (isnan(x)) return 7;
    double a = fmin(fabs((double)x), 6), step = a < 2 ? 0.5 : a < 4 ? 1 : 2;
    double up = floor(a / step + (random & 255) / 256.0) * step;
    return ptx_encode(copysign(up, x), &format_e2m1, ROUND_NEAREST, FLAG_SATFINITE);
}
static void four_of_f32(struct warp *w, const struct ins *i) {
    static const int byte[4] = {24, 8, 16, 0};
    for (int l = 0; l < LANES; l++) {
        uint32_t random = LANE32(5)[l], word = 0;
        for (int n = 0; n < 4; n++)
            word = word << 4 | e2m1_randomly(LANEF(1 + n)[l], random >> byte[n]);
        LANE16(0)[l] = (uint16_t)word;
    }
}

// ue8m0 is the exponent of a magnitude, biased by 127; 255 is NaN. The sign is dropped.
static uint32_t exponent_code(float x, const struct ins *i) {
    uint32_t u = bits_of(x) & 0x7fffffff, e = u >> 23, m = u & 0x7fffff;
    if (u > 0x7f800000) return 255;
    if (u == 0x7f800000) return i->flags & FLAG_SATFINITE ? 254 : 255;
    if (i->round == ROUND_UP) e += e ? m != 0 : m > 0x400000; // 0x400000 below e = 1 is 2^-127
    return e == 255 && (i->flags & FLAG_SATFINITE) ? 254 : e;
}
static void exponents_of_f32(struct warp *w, const struct ins *i) {
    for (int l = 0; l < LANES; l++) {
        uint32_t high = exponent_code(LANEF(1)[l], i);
        LANE16(0)[l] = (uint16_t)(high << 8 | exponent_code(LANEF(2)[l], i));
    }
}
static void exponents_of_bf16(struct warp *w, const struct ins *i) {
    for (int l = 0; l < LANES; l++) {
        uint32_t x = LANE32(1)[l];
        LANE16(0)[l] = (uint16_t)(exponent_code(float_of(x & 0xffff0000), i) << 8 |
                                  exponent_code(float_of(x << 16), i));
    }
}
static uint32_t bf16_of_exponent(uint32_t e) { return e == 255 ? 0x7fff : e ? e << 7 : 0x40; }
static void bf16_of_exponents(struct warp *w, const struct ins *i) {
    for (int l = 0; l < LANES; l++) {
        uint32_t x = LANE16(1)[l];
        LANE32(0)[l] = bf16_of_exponent(x >> 8) << 16 | bf16_of_exponent(x & 255);
    }
}

static void tf32_of_f32(struct warp *w, const struct ins *i) {
    static const struct format tf32 = {10, 8, 127, 0x3fbff, 0x3fc00, 0x3ffff, true};
    for (int l = 0; l < LANES; l++) {
        uint32_t code = ptx_encode(LANEF(1)[l], &tf32, i->round, i->flags) << 13;
        LANE32(0)[l] = (code & 0x7fffffff) > 0x7f800000 ? 0x7fffffff : code;
    }
}

#define INTEGER "(.u8|.u16|.u32|.u64|.s8|.s16|.s32|.s64)"
#define FLOAT "(.f16|.bf16|.f32|.f64)"

const struct row ptx_convert_rows[] = {
    {"cvt{.sat}" INTEGER INTEGER, "CE", scalar, 0, prepare_scalar},
    {"cvt(.rni|.rzi|.rmi|.rpi){.ftz}{.sat}" INTEGER FLOAT, "CE", scalar, 0, prepare_scalar},
    {"cvt(.rn|.rz|.rm|.rp){.ftz}{.sat}" FLOAT INTEGER, "CE", scalar, 0, prepare_scalar},
    {"cvt{.rn|.rz|.rm|.rp|.rni|.rzi|.rmi|.rpi}{.ftz}{.sat}{.relu}{.satfinite}" FLOAT FLOAT, "CE",
     scalar, 0, prepare_scalar},
    {"cvt.rn.bf16x2.f32", "dbb", bf16x2_of_f32},
    {"cvt(.rn|.rz){.relu}{.satfinite}(.f16x2|.bf16x2).f32", "dbb", pair_of_f32},
    {"cvt.rn.satfinite{.relu}(.e4m3x2|.e5m2x2).f32", "dbb", pair_of_f32},
    {"cvt.rn.satfinite{.relu}.e2m1x2.f32", "Cbb", pair_of_f32},
    {"cvt.rs.satfinite.e2m1x4.f32", "dt4", four_of_f32},
    {"cvt.rn.satfinite{.relu}(.e4m3x2|.e5m2x2)(.f16x2|.bf16x2)", "db", pair_of_pair},
    {"cvt.rn.satfinite{.relu}.e2m1x2(.f16x2|.bf16x2)", "Cb", pair_of_pair},
    {"cvt.rn{.relu}.f16x2(.e4m3x2|.e5m2x2)", "db", pair_of_pair},
    {"cvt.rn{.relu}.f16x2.e2m1x2", "dE", pair_of_pair},
    {"cvt(.rz|.rp){.satfinite}.ue8m0x2.f32", "dbb", exponents_of_f32},
    {"cvt(.rz|.rp){.satfinite}.ue8m0x2.bf16x2", "db", exponents_of_bf16},
    {"cvt.rn.bf16x2.ue8m0x2", "db", bf16_of_exponents},
    {"cvt(.rn|.rz|.rna){.satfinite}{.relu}.tf32.f32", "db", tf32_of_f32},
    {0}};
