// Finds the row of an instruction's spelling, and what its types and modifiers say.
#include "ptx_impl.h"

static const struct row *const tables[] = {
    ptx_integer_rows, ptx_compare_rows, ptx_float_rows, ptx_half_rows, ptx_convert_rows,
    ptx_memory_rows, ptx_async_rows, ptx_warp_rows, ptx_matrix_rows, ptx_control_rows};

// --- Types ---

static const struct { const char *name; uint8_t size; } types[] = {
    [B8] = {"b8", 1}, [B16] = {"b16", 2}, [B32] = {"b32", 4}, [B64] = {"b64", 8},
    [U8] = {"u8", 1}, [U16] = {"u16", 2}, [U32] = {"u32", 4}, [U64] = {"u64", 8},
    [S8] = {"s8", 1}, [S16] = {"s16", 2}, [S32] = {"s32", 4}, [S64] = {"s64", 8},
    [F16] = {"f16", 2}, [BF16] = {"bf16", 2}, [TF32] = {"tf32", 4}, [F32] = {"f32", 4},
    [F64] = {"f64", 8}, [F16X2] = {"f16x2", 4}, [BF16X2] = {"bf16x2", 4}, [F32X2] = {"f32x2", 8},
    [E4M3X2] = {"e4m3x2", 2}, [E5M2X2] = {"e5m2x2", 2}, [E2M1X2] = {"e2m1x2", 1},
    [E2M1X4] = {"e2m1x4", 2}, [UE8M0X2] = {"ue8m0x2", 2}, [PRED] = {"pred", 0}};

unsigned ptx_size(ptx_type type) { return types[type].size; }
const char *ptx_type_name(ptx_type type) { return types[type].name; }
bool ptx_signed(ptx_type type) { return type >= S8 && type <= S64; }

// --- Spellings ---

typedef enum {
    SETS_ROUND, SETS_FLAG, SETS_SUB, SETS_SPACE, SETS_VECTOR, SETS_ORDERED, SETS_INTEGER_ROUND
} effect;

static const struct { const char *word; effect effect; int value; } effects[] = {
    {"rn", SETS_ROUND, ROUND_NEAREST}, {"rz", SETS_ROUND, ROUND_ZERO},
    {"rm", SETS_ROUND, ROUND_DOWN}, {"rp", SETS_ROUND, ROUND_UP},
    {"rna", SETS_ROUND, ROUND_NEAREST_AWAY},
    {"rni", SETS_INTEGER_ROUND, ROUND_NEAREST}, {"rzi", SETS_INTEGER_ROUND, ROUND_ZERO},
    {"rmi", SETS_INTEGER_ROUND, ROUND_DOWN}, {"rpi", SETS_INTEGER_ROUND, ROUND_UP},
    {"ftz", SETS_FLAG, FLAG_FTZ}, {"sat", SETS_FLAG, FLAG_SAT}, {"NaN", SETS_FLAG, FLAG_NAN},
    {"relu", SETS_FLAG, FLAG_RELU}, {"satfinite", SETS_FLAG, FLAG_SATFINITE},
    {"cc", SETS_FLAG, FLAG_CC}, {"trans", SETS_FLAG, FLAG_TRANS}, {"abs", SETS_FLAG, FLAG_ABS},
    {"global", SETS_SPACE, SPACE_GLOBAL}, {"const", SETS_SPACE, SPACE_GLOBAL},
    {"shared", SETS_SPACE, SPACE_SHARED}, {"shared::cta", SETS_SPACE, SPACE_SHARED},
    {"local", SETS_SPACE, SPACE_LOCAL}, {"param", SETS_SPACE, SPACE_PARAM},
    {"param::entry", SETS_SPACE, SPACE_PARAM},
    {"v2", SETS_VECTOR, 2}, {"v4", SETS_VECTOR, 4}, {"v8", SETS_VECTOR, 8},
    {"volatile", SETS_ORDERED, 0}, {"relaxed", SETS_ORDERED, 0}, {"acquire", SETS_ORDERED, 0},
    {"release", SETS_ORDERED, 0}, {"acq_rel", SETS_ORDERED, 0},
    {"eq", SETS_SUB, SUB_EQ}, {"ne", SETS_SUB, SUB_NE}, {"lt", SETS_SUB, SUB_LT},
    {"le", SETS_SUB, SUB_LE}, {"gt", SETS_SUB, SUB_GT}, {"ge", SETS_SUB, SUB_GE},
    {"lo", SETS_SUB, SUB_LO}, {"ls", SETS_SUB, SUB_LS}, {"hi", SETS_SUB, SUB_HI},
    {"hs", SETS_SUB, SUB_HS}, {"equ", SETS_SUB, SUB_EQU}, {"neu", SETS_SUB, SUB_NEU},
    {"ltu", SETS_SUB, SUB_LTU}, {"leu", SETS_SUB, SUB_LEU}, {"gtu", SETS_SUB, SUB_GTU},
    {"geu", SETS_SUB, SUB_GEU}, {"num", SETS_SUB, SUB_NUM}, {"nan", SETS_SUB, SUB_NAN},
    {"add", SETS_SUB, SUB_ADD}, {"min", SETS_SUB, SUB_MIN}, {"max", SETS_SUB, SUB_MAX},
    {"and", SETS_SUB, SUB_AND}, {"or", SETS_SUB, SUB_OR}, {"xor", SETS_SUB, SUB_XOR},
    {"exch", SETS_SUB, SUB_EXCH}, {"cas", SETS_SUB, SUB_CAS}, {"inc", SETS_SUB, SUB_INC},
    {"dec", SETS_SUB, SUB_DEC}, {"popc", SETS_SUB, SUB_POPC}, {"up", SETS_SUB, SUB_UP},
    {"down", SETS_SUB, SUB_DOWN}, {"bfly", SETS_SUB, SUB_BFLY}, {"idx", SETS_SUB, SUB_IDX},
    {"all", SETS_SUB, SUB_ALL}, {"any", SETS_SUB, SUB_ANY}, {"uni", SETS_SUB, SUB_UNI},
    {"ballot", SETS_SUB, SUB_BALLOT},
    {"finite", SETS_SUB, SUB_FINITE}, {"infinite", SETS_SUB, SUB_INFINITE},
    {"number", SETS_SUB, SUB_NUMBER}, {"notanumber", SETS_SUB, SUB_NOTANUMBER},
    {"normal", SETS_SUB, SUB_NORMAL}, {"subnormal", SETS_SUB, SUB_SUBNORMAL}};

// split cuts a spelling at its dots; false if it cannot be one of ours.
bool ptx_split(const char *spelling, struct tokens *t) {
    t->count = 0;
    for (const char *p = spelling;; p++) {
        size_t n = strcspn(p, ".");
        if (t->count == MAX_TOKENS || n >= TOKEN_ROOM) return false;
        memcpy(t->word[t->count], p, n);
        t->word[t->count++][n] = 0;
        p += n;
        if (!*p) return true;
    }
}

// chosen says whether a token is among the alternatives `.a|.b` up to the end character.
static bool chosen(const char *alternatives, const char *end, const char *token) {
    size_t n = strlen(token);
    for (const char *p = alternatives; p < end; p++) {
        const char *stop = p + strcspn(p, "|)}");
        if (p[0] == '.' && (size_t)(stop - p) == n + 1 && !memcmp(p + 1, token, n)) return true;
        p = stop;
    }
    return false;
}

// match compares a spelling with a row's pattern.
static bool match(const char *pattern, const struct tokens *t) {
    size_t n = strcspn(pattern, ".{(");
    if (strlen(t->word[0]) != n || memcmp(pattern, t->word[0], n)) return false;
    int at = 1;
    for (const char *p = pattern + n; *p;) {
        const char *token = at < t->count ? t->word[at] : "";
        if (*p == '{' || *p == '(') {
            const char *end = p + strcspn(p, *p == '{' ? "}" : ")");
            bool is = at < t->count && chosen(p + 1, end, token);
            if (!is && *p == '(') return false;
            at += is;
            p = end + 1;
        } else {
            n = strcspn(p + 1, ".{(");
            if (at == t->count || strlen(token) != n || memcmp(p + 1, token, n)) return false;
            at++;
            p += n + 1;
        }
    }
    return at == t->count;
}

const struct row *ptx_find_row(const struct tokens *t, bool *mnemonic) {
    for (size_t n = 0; n < sizeof tables / sizeof *tables; n++)
        for (const struct row *r = tables[n]; r->pattern; r++) {
            size_t length = strcspn(r->pattern, ".{(");
            if (strncmp(r->pattern, t->word[0], length) || t->word[0][length]) continue;
            *mnemonic = true;
            if (match(r->pattern, t)) return r;
        }
    return NULL;
}

static void set_sub(struct ins *i, int value) {
    if (i->sub) i->sub2 = (uint8_t)value;
    else i->sub = (uint8_t)value;
}

// apply sets what one token says.
void ptx_apply(struct ptx_kernel *k, struct ins *i, const char *token) {
    for (int t = 1; t <= PRED; t++)
        if (!strcmp(token, types[t].name)) {
            for (int n = 0; n < MAX_TYPES; n++)
                if (!i->type[n]) {
                    i->type[n] = (uint8_t)t;
                    return;
                }
        }
    for (size_t n = 0; n < sizeof effects / sizeof *effects; n++) {
        if (strcmp(token, effects[n].word)) continue;
        int v = effects[n].value;
        switch (effects[n].effect) {
        case SETS_ROUND: i->round = (uint8_t)v; break;
        case SETS_INTEGER_ROUND: i->round = (uint8_t)v, i->flags |= FLAG_INTEGER; break;
        case SETS_FLAG: i->flags |= (uint16_t)v; break;
        case SETS_SUB: set_sub(i, v); break;
        case SETS_SPACE: i->space = (uint8_t)v; break;
        case SETS_VECTOR: i->vector = (uint8_t)v; break;
        case SETS_ORDERED: k->ordered = true; break;
        }
    }
}
