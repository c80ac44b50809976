// Integer arithmetic, bits, comparisons and selection.
#include "ptx_impl.h"

#define UNARY(name, type, expression)                              \
    static void name(struct warp *w, const struct ins *i) {        \
        type *d = (type *)LANE8(0);                                \
        const type *x = (type *)LANE8(1);                          \
        EACH_LANE { type a = x[l]; d[l] = (type)(expression); }    \
    }
#define BINARY(name, type, expression)                                         \
    static void name(struct warp *w, const struct ins *i) {                    \
        type *d = (type *)LANE8(0);                                            \
        const type *x = (type *)LANE8(1), *y = (type *)LANE8(2);               \
        EACH_LANE { type a = x[l], b = y[l]; d[l] = (type)(expression); }      \
    }
#define TERNARY(name, type, expression)                                                   \
    static void name(struct warp *w, const struct ins *i) {                               \
        type *d = (type *)LANE8(0);                                                       \
        const type *x = (type *)LANE8(1), *y = (type *)LANE8(2), *z = (type *)LANE8(3);   \
        EACH_LANE { type a = x[l], b = y[l], c = z[l]; d[l] = (type)(expression); }       \
    }
// A shift's amount has 32 bits whatever the type.
#define SHIFT(name, type, expression)                                              \
    static void name(struct warp *w, const struct ins *i) {                        \
        type *d = (type *)LANE8(0);                                                \
        const type *x = (type *)LANE8(1);                                          \
        const lane32 *y = LANE32(2);                                               \
        EACH_LANE { type a = x[l]; uint32_t b = y[l]; d[l] = (type)(expression); } \
    }
// A wide product has twice the bits of its factors.
#define WIDE(name, type, wide)                                             \
    static void name(struct warp *w, const struct ins *i) {                \
        wide *d = (wide *)LANE8(0);                                        \
        const type *x = (type *)LANE8(1), *y = (type *)LANE8(2);           \
        EACH_LANE d[l] = (wide)x[l] * (wide)y[l];                          \
    }                                                                      \
    static void mad_##name(struct warp *w, const struct ins *i) {          \
        lane64 *d8 = LANE64(0);                                            \
        lane32 *d4 = LANE32(0);                                            \
        const type *x = (type *)LANE8(1), *y = (type *)LANE8(2);           \
        if (sizeof(wide) == 8) {                                           \
            const lane64 *z = LANE64(3);                                   \
            EACH_LANE d8[l] = (uint64_t)((wide)x[l] * (wide)y[l]) + z[l];  \
        } else {                                                           \
            const lane32 *z = LANE32(3);                                   \
            EACH_LANE d4[l] = (uint32_t)((wide)x[l] * (wide)y[l]) + z[l];  \
        }                                                                  \
    }

typedef int8_t __attribute__((may_alias)) lane_s8;
typedef int16_t __attribute__((may_alias)) lane_s16;
typedef int32_t __attribute__((may_alias)) lane_s32;
typedef int64_t __attribute__((may_alias)) lane_s64;

#define ALL_WIDTHS(M, name, expression)   \
    M(name##_16, lane16, expression)      \
    M(name##_32, lane32, expression)      \
    M(name##_64, lane64, expression)
#define ALL_SIGNED(M, name, expression)   \
    M(name##_s16, lane_s16, expression)   \
    M(name##_s32, lane_s32, expression)   \
    M(name##_s64, lane_s64, expression)

ALL_WIDTHS(BINARY, add, a + b)
ALL_WIDTHS(BINARY, sub, a - b)
// 0u makes the arithmetic of 16-bit lanes unsigned, and leaves the others as they are.
ALL_WIDTHS(BINARY, mul, (a + 0u) * b)
ALL_WIDTHS(TERNARY, mad, (a + 0u) * b + c)
ALL_WIDTHS(BINARY, and, a & b)
ALL_WIDTHS(BINARY, or, a | b)
ALL_WIDTHS(BINARY, xor, a ^ b)
ALL_WIDTHS(UNARY, not, ~a)
ALL_WIDTHS(UNARY, neg, 0u - a)
ALL_WIDTHS(UNARY, cnot, a == 0)
ALL_WIDTHS(BINARY, min, a < b ? a : b)
ALL_WIDTHS(BINARY, max, a > b ? a : b)
ALL_SIGNED(BINARY, min, a < b ? a : b)
ALL_SIGNED(BINARY, max, a > b ? a : b)
ALL_SIGNED(UNARY, abs, a < 0 ? -(uint64_t)a : (uint64_t)a)
ALL_WIDTHS(SHIFT, shl, b < 8 * sizeof a ? (a + 0u) << (b & (8 * sizeof a - 1)) : 0)
ALL_WIDTHS(SHIFT, shr, b < 8 * sizeof a ? (a + 0u) >> (b & (8 * sizeof a - 1)) : 0)
ALL_SIGNED(SHIFT, shr, a >> (b < 8 * sizeof a ? b : 8 * (uint32_t)sizeof a - 1))

WIDE(wide_u16, lane16, uint32_t)
WIDE(wide_u32, lane32, uint64_t)
WIDE(wide_s16, lane_s16, int32_t)
WIDE(wide_s32, lane_s32, int64_t)

// Division by zero gives all ones on the GPU; the most negative number by -1 wraps.
#define QUOTIENT(name, type)                                            \
    BINARY(div_##name, type, b ? a / b : (type)-1)                            \
    BINARY(rem_##name, type, b ? a % b : a)
#define SIGNED_QUOTIENT(name, type)                                           \
    BINARY(div_##name, type, b == 0 ? -1 : b == -1 ? (type)(-(uint64_t)a) : a / b) \
    BINARY(rem_##name, type, b == 0 ? a : b == -1 ? 0 : a % b)
QUOTIENT(16, lane16)
QUOTIENT(32, lane32)
QUOTIENT(64, lane64)
SIGNED_QUOTIENT(s16, lane_s16)
SIGNED_QUOTIENT(s32, lane_s32)
SIGNED_QUOTIENT(s64, lane_s64)

#define HIGH(name, type, wide, bits)                                          \
    BINARY(mulhi_##name, type, (wide)((wide)a * (wide)b) >> bits)             \
    TERNARY(madhi_##name, type, (type)((wide)((wide)a * (wide)b) >> bits) + (uint64_t)c)
HIGH(u16, lane16, uint32_t, 16)
HIGH(u32, lane32, uint64_t, 32)
HIGH(u64, lane64, unsigned __int128, 64)
HIGH(s16, lane_s16, int32_t, 16)
HIGH(s32, lane_s32, int64_t, 32)
HIGH(s64, lane_s64, __int128, 64)

static int32_t clamp32(int64_t x) {
    return (int32_t)(x < INT32_MIN ? INT32_MIN : x > INT32_MAX ? INT32_MAX : x);
}
BINARY(addsat_s32, lane_s32, clamp32((int64_t)a + b))
BINARY(subsat_s32, lane_s32, clamp32((int64_t)a - b))
TERNARY(sad_s32, lane_s32, (uint32_t)c + (a < b ? (uint32_t)b - (uint32_t)a
                                                : (uint32_t)a - (uint32_t)b))
TERNARY(sad_32, lane32, c + (a < b ? b - a : a - b))

// --- Bits ---

static uint32_t reversed(uint32_t x) {
    x = (x >> 1 & 0x55555555) | (x & 0x55555555) << 1;
    x = (x >> 2 & 0x33333333) | (x & 0x33333333) << 2;
    x = (x >> 4 & 0x0f0f0f0f) | (x & 0x0f0f0f0f) << 4;
    return __builtin_bswap32(x);
}
static uint64_t reversed64(uint64_t x) {
    return (uint64_t)reversed((uint32_t)x) << 32 | reversed((uint32_t)(x >> 32));
}
UNARY(brev_32, lane32, reversed(a))
UNARY(brev_64, lane64, reversed64(a))

#define COUNT(name, type, expression)                          \
    static void name(struct warp *w, const struct ins *i) {    \
        lane32 *d = LANE32(0);                                 \
        const type *x = (type *)LANE8(1);                      \
        EACH_LANE { type a = x[l]; d[l] = (uint32_t)(expression); } \
    }
COUNT(popc_32, lane32, __builtin_popcount(a))
COUNT(popc_64, lane64, __builtin_popcountll(a))
COUNT(clz_32, lane32, a ? __builtin_clz(a) : 32)
COUNT(clz_64, lane64, a ? __builtin_clzll(a) : 64)
COUNT(bfind_32, lane32, a ? 31 - __builtin_clz(a) : -1)
COUNT(bfind_64, lane64, a ? 63 - __builtin_clzll(a) : -1)
COUNT(bfind_s32, lane_s32,
      (a < 0 ? ~a : a) ? 31 - __builtin_clz((uint32_t)(a < 0 ? ~a : a)) : -1)
COUNT(bfind_s64, lane_s64,
      (a < 0 ? ~a : a) ? 63 - __builtin_clzll((uint64_t)(a < 0 ? ~a : a)) : -1)

// field takes length bits from position on; a signed field copies its top bit upwards, and where it
// reaches beyond the value that is the value's own sign.
static uint64_t field(uint64_t a, uint32_t position, uint32_t length, int bits, bool is_signed) {
    position &= 255, length &= 255;
    if (!length) return 0;
    uint64_t top = (uint64_t)bits - 1;
    uint64_t at = position + length - 1 < top ? position + length - 1 : top;
    bool sign = is_signed && (a >> at & 1);
    uint64_t v = position <= top ? a >> position : 0;
    if (position + length <= top + 1 && length < 64) v &= (1ull << length) - 1;
    else if (position <= top && top + 1 - position < 64) v &= (1ull << (top + 1 - position)) - 1;
    uint64_t taken = position > top ? 0 : at - position + 1;
    if (sign && taken < 64) v |= ~0ull << taken;
    return v;
}
#define FIELD(name, type, bits, is_signed)                                        \
    static void name(struct warp *w, const struct ins *i) {                       \
        type *d = (type *)LANE8(0);                                               \
        const type *x = (type *)LANE8(1);                                         \
        const lane32 *p = LANE32(2), *n = LANE32(3);                              \
        EACH_LANE d[l] = (type)field(x[l], p[l], n[l], bits, is_signed);          \
    }
FIELD(bfe_u32, lane32, 32, false)
FIELD(bfe_s32, lane32, 32, true)
FIELD(bfe_u64, lane64, 64, false)
FIELD(bfe_s64, lane64, 64, true)

static uint64_t inserted(uint64_t a, uint64_t b, uint32_t position, uint32_t length,
                         unsigned bits) {
    position &= 255, length &= 255;
    if (position >= bits || !length) return b;
    uint64_t mask = (length >= 64 ? ~0ull : (1ull << length) - 1) << position;
    return (b & ~mask) | (a << position & mask);
}
#define INSERT(name, type, bits)                                                  \
    static void name(struct warp *w, const struct ins *i) {                       \
        type *d = (type *)LANE8(0);                                               \
        const type *x = (type *)LANE8(1), *y = (type *)LANE8(2);                  \
        const lane32 *p = LANE32(3), *n = LANE32(4);                              \
        EACH_LANE d[l] = (type)inserted(x[l], y[l], p[l], n[l], bits);            \
    }
INSERT(bfi_32, lane32, 32)
INSERT(bfi_64, lane64, 64)

static uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
    uint64_t bytes = (uint64_t)b << 32 | a;
    uint32_t r = 0;
    for (int n = 0; n < 4; n++) {
        uint32_t s = selector >> (4 * n), byte = (uint32_t)(bytes >> (8 * (s & 7))) & 255;
        if (s & 8) byte = byte & 128 ? 255 : 0;
        r |= byte << (8 * n);
    }
    return r;
}
TERNARY(prmt_32, lane32, permuted(a, b, c))

// shf joins b:a to 64 bits and shifts; clamp stops at 32, wrap takes the amount modulo 32.
TERNARY(shf_l_wrap, lane32, (((uint64_t)b << 32 | a) << (c & 31)) >> 32)
TERNARY(shf_r_wrap, lane32, ((uint64_t)b << 32 | a) >> (c & 31))
TERNARY(shf_l_clamp, lane32, (((uint64_t)b << 32 | a) << (c < 32 ? c : 32)) >> 32)
TERNARY(shf_r_clamp, lane32, ((uint64_t)b << 32 | a) >> (c < 32 ? c : 32))

static void lop3(struct warp *w, const struct ins *i) {
    lane32 *d = LANE32(0);
    const lane32 *x = LANE32(1), *y = LANE32(2), *z = LANE32(3), *table = LANE32(4);
    EACH_LANE {
        uint32_t r = 0, t = table[l];
        for (int n = 0; n < 8; n++) {
            uint32_t term = n & 4 ? x[l] : ~x[l];
            term &= n & 2 ? y[l] : ~y[l];
            term &= n & 1 ? z[l] : ~z[l];
            r |= t >> n & 1 ? term : 0;
        }
        d[l] = r;
    }
}

// dp4a adds the products of four bytes; the types say which of a and b are signed.
static void dp4a(struct warp *w, const struct ins *i) {
    lane32 *d = LANE32(0);
    const lane32 *x = LANE32(1), *y = LANE32(2), *z = LANE32(3);
    bool sx = i->type[0] == S32, sy = i->type[1] == S32;
    EACH_LANE {
        uint32_t sum = z[l];
        for (int n = 0; n < 32; n += 8) {
            int a = sx ? (int8_t)(x[l] >> n) : (uint8_t)(x[l] >> n);
            int b = sy ? (int8_t)(y[l] >> n) : (uint8_t)(y[l] >> n);
            sum += (uint32_t)(a * b);
        }
        d[l] = sum;
    }
}

// --- Carries: one bit per lane, beside the registers ---

static lane32 *carry_of(struct warp *w) { return (lane32 *)(w->file + w->block->kernel->carry); }

// carried writes sum and, with .cc, the carry for the active lanes.
static void carried(struct warp *w, const struct ins *i, const unsigned __int128 *sums) {
    lane32 *carry = carry_of(w);
    for (int l = 0; l < LANES; l++) {
        if (!(w->active >> l & 1)) continue;
        int bits = 8 * i->width[0];
        ptx_write(w, i, 0, l, (uint64_t)sums[l]);
        if (!(i->flags & FLAG_CC)) continue;
        uint32_t out = (uint32_t)(sums[l] >> bits) & 1;
        *carry = (*carry & ~(1u << l)) | out << l;
    }
}

#define CARRY(name, uses, expression)                                          \
    static void name(struct warp *w, const struct ins *i) {                    \
        unsigned __int128 sums[LANES];                                         \
        for (int l = 0; l < LANES; l++) {                                      \
            unsigned __int128 a = ptx_read(w, i, 1, l), b = ptx_read(w, i, 2, l); \
            unsigned __int128 in = uses ? *carry_of(w) >> l & 1 : 0;           \
            (void)in;                                                          \
            sums[l] = expression;                                              \
        }                                                                      \
        carried(w, i, sums);                                                   \
    }
CARRY(add_carry, false, a + b)
CARRY(addc_carry, true, a + b + in)
// The carry of a subtraction is its borrow.
CARRY(sub_carry, false, a - b)
CARRY(subc_carry, true, a - b - in)

static void mad_carry(struct warp *w, const struct ins *i) {
    unsigned __int128 sums[LANES];
    bool high = i->sub == SUB_HI, uses = !strncmp(i->spelling, "madc", 4);
    int bits = 8 * i->width[0];
    for (int l = 0; l < LANES; l++) {
        uint64_t a = ptx_read(w, i, 1, l), b = ptx_read(w, i, 2, l), c = ptx_read(w, i, 3, l);
        unsigned __int128 p = (unsigned __int128)a * b;
        if (ptx_signed(i->type[0]))
            p = bits == 32 ? (unsigned __int128)((__int128)(int32_t)a * (int32_t)b)
                           : (unsigned __int128)((__int128)(int64_t)a * (int64_t)b);
        uint64_t part = (uint64_t)(high ? p >> bits : p);
        if (bits == 32) part = (uint32_t)part;
        sums[l] = (unsigned __int128)part + c + (uses ? *carry_of(w) >> l & 1 : 0);
    }
    carried(w, i, sums);
}

const struct row ptx_integer_rows[] = {
    {"add(.u16|.s16)", "daa", add_16}, {"add(.u32|.s32)", "daa", add_32},
    {"add(.u64|.s64)", "daa", add_64}, {"add.sat.s32", "daa", addsat_s32},
    {"sub(.u16|.s16)", "daa", sub_16}, {"sub(.u32|.s32)", "daa", sub_32},
    {"sub(.u64|.s64)", "daa", sub_64}, {"sub.sat.s32", "daa", subsat_s32},
    {"add.cc(.u32|.s32|.u64|.s64)", "daa", add_carry, KIND_MASKED},
    {"addc{.cc}(.u32|.s32|.u64|.s64)", "daa", addc_carry, KIND_MASKED},
    {"sub.cc(.u32|.s32|.u64|.s64)", "daa", sub_carry, KIND_MASKED},
    {"subc{.cc}(.u32|.s32|.u64|.s64)", "daa", subc_carry, KIND_MASKED},
    {"mad(.lo|.hi).cc(.u32|.s32|.u64|.s64)", "daaa", mad_carry, KIND_MASKED},
    {"madc(.lo|.hi){.cc}(.u32|.s32|.u64|.s64)", "daaa", mad_carry, KIND_MASKED},
    {"mul.lo(.u16|.s16)", "daa", mul_16}, {"mul.lo(.u32|.s32)", "daa", mul_32},
    {"mul.lo(.u64|.s64)", "daa", mul_64},
    {"mul.hi.u16", "daa", mulhi_u16}, {"mul.hi.u32", "daa", mulhi_u32},
    {"mul.hi.u64", "daa", mulhi_u64}, {"mul.hi.s16", "daa", mulhi_s16},
    {"mul.hi.s32", "daa", mulhi_s32}, {"mul.hi.s64", "daa", mulhi_s64},
    {"mul.wide.u16", "Daa", wide_u16}, {"mul.wide.u32", "Daa", wide_u32},
    {"mul.wide.s16", "Daa", wide_s16}, {"mul.wide.s32", "Daa", wide_s32},
    {"mad.lo(.u16|.s16)", "daaa", mad_16}, {"mad.lo(.u32|.s32)", "daaa", mad_32},
    {"mad.lo(.u64|.s64)", "daaa", mad_64},
    {"mad.hi.u16", "daaa", madhi_u16}, {"mad.hi.u32", "daaa", madhi_u32},
    {"mad.hi.u64", "daaa", madhi_u64}, {"mad.hi.s16", "daaa", madhi_s16},
    {"mad.hi.s32", "daaa", madhi_s32}, {"mad.hi.s64", "daaa", madhi_s64},
    {"mad.wide.u16", "DaaA", mad_wide_u16}, {"mad.wide.u32", "DaaA", mad_wide_u32},
    {"mad.wide.s16", "DaaA", mad_wide_s16}, {"mad.wide.s32", "DaaA", mad_wide_s32},
    {"div.u16", "daa", div_16}, {"div.u32", "daa", div_32}, {"div.u64", "daa", div_64},
    {"div.s16", "daa", div_s16}, {"div.s32", "daa", div_s32}, {"div.s64", "daa", div_s64},
    {"rem.u16", "daa", rem_16}, {"rem.u32", "daa", rem_32}, {"rem.u64", "daa", rem_64},
    {"rem.s16", "daa", rem_s16}, {"rem.s32", "daa", rem_s32}, {"rem.s64", "daa", rem_s64},
    {"sad.u32", "daaa", sad_32}, {"sad.s32", "daaa", sad_s32},
    {"neg.s16", "da", neg_16}, {"neg.s32", "da", neg_32}, {"neg.s64", "da", neg_64},
    {"abs.s16", "da", abs_s16}, {"abs.s32", "da", abs_s32}, {"abs.s64", "da", abs_s64},
    {"min.u16", "daa", min_16}, {"min.u32", "daa", min_32}, {"min.u64", "daa", min_64},
    {"min.s16", "daa", min_s16}, {"min.s32", "daa", min_s32}, {"min.s64", "daa", min_s64},
    {"max.u16", "daa", max_16}, {"max.u32", "daa", max_32}, {"max.u64", "daa", max_64},
    {"max.s16", "daa", max_s16}, {"max.s32", "daa", max_s32}, {"max.s64", "daa", max_s64},
    {"and.b16", "daa", and_16}, {"and.b32", "daa", and_32}, {"and.b64", "daa", and_64},
    {"or.b16", "daa", or_16}, {"or.b32", "daa", or_32}, {"or.b64", "daa", or_64},
    {"xor.b16", "daa", xor_16}, {"xor.b32", "daa", xor_32}, {"xor.b64", "daa", xor_64},
    {"not.b16", "da", not_16}, {"not.b32", "da", not_32}, {"not.b64", "da", not_64},
    {"cnot.b16", "da", cnot_16}, {"cnot.b32", "da", cnot_32}, {"cnot.b64", "da", cnot_64},
    {"shl.b16", "da4", shl_16}, {"shl.b32", "da4", shl_32}, {"shl.b64", "da4", shl_64},
    {"shr(.u16|.b16)", "da4", shr_16}, {"shr(.u32|.b32)", "da4", shr_32},
    {"shr(.u64|.b64)", "da4", shr_64},
    {"shr.s16", "da4", shr_s16}, {"shr.s32", "da4", shr_s32}, {"shr.s64", "da4", shr_s64},
    {"shf.l.wrap.b32", "daaa", shf_l_wrap}, {"shf.r.wrap.b32", "daaa", shf_r_wrap},
    {"shf.l.clamp.b32", "daaa", shf_l_clamp}, {"shf.r.clamp.b32", "daaa", shf_r_clamp},
    {"brev.b32", "da", brev_32}, {"brev.b64", "da", brev_64},
    {"popc.b32", "ja", popc_32}, {"popc.b64", "ja", popc_64},
    {"clz.b32", "ja", clz_32}, {"clz.b64", "ja", clz_64},
    {"bfind.u32", "ja", bfind_32}, {"bfind.u64", "ja", bfind_64},
    {"bfind.s32", "ja", bfind_s32}, {"bfind.s64", "ja", bfind_s64},
    {"bfe.u32", "da44", bfe_u32}, {"bfe.s32", "da44", bfe_s32},
    {"bfe.u64", "da44", bfe_u64}, {"bfe.s64", "da44", bfe_s64},
    {"bfi.b32", "daa44", bfi_32}, {"bfi.b64", "daa44", bfi_64},
    {"prmt.b32", "daaa", prmt_32}, {"lop3.b32", "daaaa", lop3},
    {"dp4a(.u32|.s32)(.u32|.s32)", "j444", dp4a},
    {0}};
