// Comparisons, predicates, selection and moves.
#include "ptx_impl.h"

typedef int16_t __attribute__((may_alias)) lane_s16;
typedef int32_t __attribute__((may_alias)) lane_s32;
typedef int64_t __attribute__((may_alias)) lane_s64;

static uint32_t pack(const uint8_t t[LANES]) {
    uint32_t r = 0;
    for (int n = 0; n < 4; n++) {
        uint64_t eight = 0;
        for (int k = 0; k < 8; k++) eight |= (uint64_t)t[8 * n + k] << (8 * k);
        r |= (uint32_t)((eight * 0x0102040810204080ull) >> 56) << (8 * n);
    }
    return r;
}

static uint32_t joined(uint32_t r, uint32_t other, int sub) {
    return sub == SUB_AND ? r & other : sub == SUB_OR ? r | other : sub == SUB_XOR ? r ^ other : r;
}

// finish_setp applies the boolean operator, and writes p and, of `p|q`, the other result.
static void finish_setp(struct warp *w, const struct ins *i, uint32_t r) {
    uint32_t other = ~r, c = 0;
    if (i->sub2) {
        c = BITS(i->count - 1) ^ (i->not_source ? ~0u : 0);
        r = joined(r, c, i->sub2);
        other = joined(other, c, i->sub2);
    }
    BITS(0) = r;
    if (i->outputs > 1) BITS(1) = other;
}

#define COMPARE(name, type)                                                    \
    static void name(struct warp *w, const struct ins *i) {                    \
        const type *x = (type *)LANE8(i->outputs), *y = (type *)LANE8(i->outputs + 1); \
        uint8_t t[LANES];                                                      \
        switch (i->sub) {                                                      \
        case SUB_EQ: EACH_LANE t[l] = x[l] == y[l]; break;                     \
        case SUB_NE: EACH_LANE t[l] = x[l] != y[l]; break;                     \
        case SUB_LT: case SUB_LO: EACH_LANE t[l] = x[l] < y[l]; break;         \
        case SUB_LE: case SUB_LS: EACH_LANE t[l] = x[l] <= y[l]; break;        \
        case SUB_GT: case SUB_HI: EACH_LANE t[l] = x[l] > y[l]; break;         \
        default: EACH_LANE t[l] = x[l] >= y[l]; break;                         \
        }                                                                      \
        finish_setp(w, i, pack(t));                                            \
    }
COMPARE(setp_16, lane16)
COMPARE(setp_32, lane32)
COMPARE(setp_64, lane64)
COMPARE(setp_s16, lane_s16)
COMPARE(setp_s32, lane_s32)
COMPARE(setp_s64, lane_s64)

// compare gives one comparison of floats: ordered ones are false with a NaN, ...u ones true.
static inline bool compare(double x, double y, int sub) {
    bool nan = x != x || y != y;
    switch (sub) {
    case SUB_EQ: return x == y;
    case SUB_NE: return !nan && x != y;
    case SUB_LT: return x < y;
    case SUB_LE: return x <= y;
    case SUB_GT: return x > y;
    case SUB_GE: return x >= y;
    case SUB_EQU: return nan || x == y;
    case SUB_NEU: return nan || x != y;
    case SUB_LTU: return nan || x < y;
    case SUB_LEU: return nan || x <= y;
    case SUB_GTU: return nan || x > y;
    case SUB_GEU: return nan || x >= y;
    case SUB_NUM: return !nan;
    default: return nan;
    }
}
static float flushed(float f) {
    return (bits_of(f) & 0x7f800000) ? f : float_of(bits_of(f) & 0x80000000);
}
#define COMPARE_FLOAT(name, type, value)                                                   \
    static void name(struct warp *w, const struct ins *i) {                                \
        const type *x = (type *)LANE8(i->outputs), *y = (type *)LANE8(i->outputs + 1);     \
        uint8_t t[LANES];                                                                  \
        bool ftz = i->flags & FLAG_FTZ;                                                    \
        (void)ftz;                                                                         \
        for (int l = 0; l < LANES; l++) {                                                  \
            double a, b;                                                                   \
            { type v = x[l]; a = value; }                                                  \
            { type v = y[l]; b = value; }                                                  \
            t[l] = compare(a, b, i->sub);                                                  \
        }                                                                                  \
        finish_setp(w, i, pack(t));                                                        \
    }
COMPARE_FLOAT(setp_f32, lane_float, ftz ? flushed(v) : v)
COMPARE_FLOAT(setp_f64, lane_double, v)
COMPARE_FLOAT(setp_bf16, lane16, float_of_bf16(v))
COMPARE_FLOAT(setp_f16, lane16, ptx_decode_float(v, &format_f16))

static void and_pred(struct warp *w, const struct ins *i) { BITS(0) = BITS(1) & BITS(2); }
static void or_pred(struct warp *w, const struct ins *i) { BITS(0) = BITS(1) | BITS(2); }
static void xor_pred(struct warp *w, const struct ins *i) { BITS(0) = BITS(1) ^ BITS(2); }
static void not_pred(struct warp *w, const struct ins *i) { BITS(0) = ~BITS(1); }
static void mov_pred(struct warp *w, const struct ins *i) {
    BITS(0) = BITS(1);
}

#define SELECT(name, type)                                              \
    static void name(struct warp *w, const struct ins *i) {             \
        type *d = (type *)LANE8(0);                                     \
        const type *x = (type *)LANE8(1), *y = (type *)LANE8(2);        \
        uint32_t p = BITS(3);              \
        EACH_LANE d[l] = p >> l & 1 ? x[l] : y[l];                      \
    }
SELECT(selp_16, lane16)
SELECT(selp_32, lane32)
SELECT(selp_64, lane64)

// --- Moves ---

#define COPY(name, type)                                            \
    static void name(struct warp *w, const struct ins *i) {         \
        type *d = (type *)LANE8(0);                                 \
        const type *x = (type *)LANE8(1);                           \
        EACH_LANE d[l] = x[l];                                      \
    }
COPY(mov_16, lane16)
COPY(mov_32, lane32)
COPY(mov_64, lane64)

// unpack cuts a register into a vector of smaller ones, pack_vector is its inverse.
static void unpack(struct warp *w, const struct ins *i) {
    int n = i->vector, bits = 8 * i->width[0];
    if (n == 2 && bits == 16) {
        lane16 *d = LANE16(0), *e = LANE16(1);
        const lane32 *x = LANE32(2);
        uint16_t low[LANES];
        EACH_LANE low[l] = (uint16_t)x[l];
        EACH_LANE e[l] = (uint16_t)(x[l] >> 16);
        EACH_LANE d[l] = low[l];
        return;
    }
    uint64_t v[LANES];
    for (int l = 0; l < LANES; l++) v[l] = ptx_read(w, i, n, l);
    for (int k = 0; k < n; k++)
        for (int l = 0; l < LANES; l++) ptx_write(w, i, k, l, v[l] >> (bits * k));
}
static void pack_vector(struct warp *w, const struct ins *i) {
    int n = i->vector, bits = 8 * i->width[1];
    if (n == 2 && bits == 16) {
        lane32 *d = LANE32(0);
        const lane16 *x = LANE16(1), *y = LANE16(2);
        EACH_LANE d[l] = (uint32_t)y[l] << 16 | x[l];
        return;
    }
    uint64_t v[LANES] = {0};
    for (int k = 0; k < n; k++)
        for (int l = 0; l < LANES; l++) v[l] |= ptx_read(w, i, k + 1, l) << (bits * k);
    for (int l = 0; l < LANES; l++) ptx_write(w, i, 0, l, v[l]);
}
static const char *prepare_mov(struct ins *i) {
    if (i->vector == 1) return NULL;
    if (i->outputs > 1 && i->count != i->outputs + 1) return "vectors on both sides";
    i->run = i->outputs > 1 ? unpack : pack_vector;
    return NULL;
}

#define SETP "setp(.eq|.ne|.lt|.le|.gt|.ge)"
#define BOOL "{.and|.or|.xor}"
#define PREDICATES "Paa PQaa Paan PQaan"
#define FLOAT_SETP \
    "setp(.eq|.ne|.lt|.le|.gt|.ge|.equ|.neu|.ltu|.leu|.gtu|.geu|.num|.nan)" BOOL

const struct row ptx_compare_rows[] = {
    {SETP BOOL "(.b16|.u16)", PREDICATES, setp_16}, {SETP BOOL ".s16", PREDICATES, setp_s16},
    {SETP BOOL "(.b32|.u32)", PREDICATES, setp_32}, {SETP BOOL ".s32", PREDICATES, setp_s32},
    {SETP BOOL "(.b64|.u64)", PREDICATES, setp_64}, {SETP BOOL ".s64", PREDICATES, setp_s64},
    {"setp(.lo|.ls|.hi|.hs)" BOOL ".u16", PREDICATES, setp_16},
    {"setp(.lo|.ls|.hi|.hs)" BOOL ".u32", PREDICATES, setp_32},
    {"setp(.lo|.ls|.hi|.hs)" BOOL ".u64", PREDICATES, setp_64},
    {FLOAT_SETP "{.ftz}.f32", PREDICATES, setp_f32}, {FLOAT_SETP ".f64", PREDICATES, setp_f64},
    {FLOAT_SETP ".bf16", PREDICATES, setp_bf16}, {FLOAT_SETP ".f16", PREDICATES, setp_f16},
    {"and.pred", "Ppp", and_pred}, {"or.pred", "Ppp", or_pred}, {"xor.pred", "Ppp", xor_pred},
    {"not.pred", "Pp", not_pred}, {"mov.pred", "Pp", mov_pred},
    {"selp(.b16|.u16|.s16)", "daap", selp_16}, {"selp(.b32|.u32|.s32|.f32)", "daap", selp_32},
    {"selp(.b64|.u64|.s64|.f64)", "daap", selp_64},
    {"mov(.b16|.u16|.s16)", "kK", mov_16, 0, prepare_mov},
    {"mov(.b32|.u32|.s32|.f32)", "kK", mov_32, 0, prepare_mov},
    {"mov(.b64|.u64|.s64|.f64)", "kK", mov_64, 0, prepare_mov},
    {0}};
