// Loads, stores, atomics, and address conversion.
//
// Addresses of the generic and global spaces are those of this process. Shared, local and parameter
// addresses are offsets, as on a GPU, and every access is held against the size of its space.
#include <stdlib.h>

#include "ptx_check.h"
#include "ptx_impl.h"

ptx_range_check ptx_check;

static size_t local_stride(const struct warp *w) {
    return (w->block->kernel->local_bytes + 15) / 16 * 16;
}

// own says whether an address lies in the block's shared or local memory, or in a variable.
static bool own(const struct warp *w, const uint8_t *at, size_t bytes) {
    const struct block *b = w->block;
    if (at >= b->shared && at + bytes <= b->shared + b->shared_bytes) return true;
    if (w->local && at >= w->local && at + bytes <= w->local + LANES * local_stride(w)) return true;
    if (at >= b->params && at + bytes <= b->params + b->kernel->param_bytes) return true;
    const struct ptx_module *m = b->kernel->module;
    for (size_t n = 0; n < m->variable_count; n++) {
        const struct variable *v = &m->variables[n];
        if (v->memory && at >= v->memory && at + bytes <= v->memory + v->bytes) return true;
    }
    return false;
}

// The lowest and the highest of the addresses; lanes that are not active have those of others.
struct span {
    uint64_t least, most;
};

static bool check_global(struct warp *w, const struct ins *i, uint8_t **at, struct span s,
                         size_t bytes, bool write) {
    bool low = s.least < 65536 || s.most + bytes < s.most;
    if (!low && (!ptx_check || ptx_check(at[0] + (s.least - (uintptr_t)at[0]),
                                         s.most - s.least + bytes, write)))
        return true;
    for (uint32_t m = w->active; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        uintptr_t a = (uintptr_t)at[l];
        if (a >= 65536 && a + bytes >= a && (!ptx_check || own(w, at[l], bytes) ||
                                             ptx_check(at[l], bytes, write)))
            continue;
        ptx_fail(w, i, "%s of %zu bytes at %p, outside memory, by lane %d",
                 write ? "write" : "read", bytes, (void *)at[l], l);
        return false;
    }
    return true;
}

// check_window holds offsets against the size of a space.
static bool check_window(struct warp *w, const struct ins *i, const uint64_t *offsets,
                         struct span s, size_t bytes, size_t limit, const char *space) {
    if (s.most <= limit && bytes <= limit - s.most) return true;
    for (uint32_t m = w->active; m; m &= m - 1) {
        uint64_t o = offsets[__builtin_ctz(m)];
        if (o <= limit && bytes <= limit - o) continue;
        ptx_fail(w, i, "%zu bytes at %#llx are outside the %zu bytes of %s memory, by lane %d",
                 bytes, (unsigned long long)o, limit, space, __builtin_ctz(m));
        break;
    }
    return false;
}

bool ptx_locate(struct warp *w, const struct ins *i, int operand, int space, int64_t offset,
                size_t bytes, bool write, uint8_t *at[LANES]) {
    uint64_t a[LANES], low = 0;
    if (i->width[operand] == 8) EACH_LANE a[l] = LANE64(operand)[l] + (uint64_t)offset;
    else EACH_LANE a[l] = LANE32(operand)[l] + (uint64_t)offset;
    if (w->active != ~0u) {
        uint64_t any = a[__builtin_ctz(w->active)];
        EACH_LANE a[l] = w->active >> l & 1 ? a[l] : any;
    }
    struct span s = {UINT64_MAX, 0};
    for (int l = 0; l < LANES; l++) {
        low |= a[l];
        s.least = a[l] < s.least ? a[l] : s.least;
        s.most = a[l] > s.most ? a[l] : s.most;
    }
    if (low & (bytes - 1)) {
        ptx_fail(w, i, "misaligned address");
        return false;
    }
    const struct block *b = w->block;
    switch (space) {
    case SPACE_SHARED:
        if (!check_window(w, i, a, s, bytes, b->shared_bytes, "shared")) return false;
        EACH_LANE at[l] = b->shared + a[l];
        return true;
    case SPACE_LOCAL:
        if (!check_window(w, i, a, s, bytes, b->kernel->local_bytes, "local")) return false;
        EACH_LANE at[l] = w->local + (size_t)l * local_stride(w) + a[l];
        return true;
    case SPACE_PARAM:
        if (!check_window(w, i, a, s, bytes, b->kernel->param_bytes, "parameter")) return false;
        EACH_LANE at[l] = (uint8_t *)(uintptr_t)b->params + a[l];
        return true;
    default:
        EACH_LANE at[l] = (uint8_t *)(uintptr_t)a[l];
        return check_global(w, i, at, s, bytes, write);
    }
}

// --- ld and st ---

// in_a_row says whether the lanes access neighbours, all of them.
static bool in_a_row(const struct warp *w, uint8_t *const *at, size_t bytes) {
    uintptr_t first = (uintptr_t)at[0], apart = 0;
    for (int l = 0; l < LANES; l++) apart |= (uintptr_t)at[l] ^ (first + (size_t)l * bytes);
    return w->active == ~0u && !apart;
}

#define MOVE_LANES(type, from, to)                                             \
    if (w->active == ~0u)                                                      \
        for (int l = 0; l < LANES; l++) memcpy(to, from, sizeof(type));        \
    else                                                                       \
        for (uint32_t m = w->active; m; m &= m - 1) {                          \
            int l = __builtin_ctz(m);                                          \
            memcpy(to, from, sizeof(type));                                    \
        }

static void load_element(struct warp *w, const struct ins *i, int n, uint8_t *const *at) {
    unsigned size = ptx_size(i->type[0]), width = i->width[n];
    size_t skip = (size_t)n * size;
    if (size == 4 && width == 4) { MOVE_LANES(uint32_t, at[l] + skip, &LANE32(n)[l]) }
    else if (size == 2 && width == 2) { MOVE_LANES(uint16_t, at[l] + skip, &LANE16(n)[l]) }
    else if (size == 8 && width == 8) { MOVE_LANES(uint64_t, at[l] + skip, &LANE64(n)[l]) }
    else
        for (uint32_t m = w->active; m; m &= m - 1) {
            int l = __builtin_ctz(m);
            uint64_t v = 0;
            memcpy(&v, at[l] + skip, size);
            if (ptx_signed(i->type[0]) && size < 8 && v >> (8 * size - 1))
                v |= ~0ull << (8 * size);
            ptx_write(w, i, n, l, v);
        }
}

static void ld(struct warp *w, const struct ins *i) {
    uint8_t *at[LANES];
    size_t bytes = (size_t)i->vector * ptx_size(i->type[0]);
    if (!ptx_locate(w, i, i->address, i->space, i->offset, bytes, false, at)) return;
    if (i->vector == 1 && i->width[0] == bytes && in_a_row(w, at, bytes)) {
        memcpy(w->file + i->op[0], at[0], LANES * bytes);
        return;
    }
    for (int n = 0; n < i->vector; n++) load_element(w, i, n, at);
}

static void st(struct warp *w, const struct ins *i) {
    uint8_t *at[LANES];
    unsigned size = ptx_size(i->type[0]);
    size_t bytes = (size_t)i->vector * size;
    if (!ptx_locate(w, i, i->address, i->space, i->offset, bytes, true, at)) return;
    if (i->vector == 1 && i->width[1] == size && in_a_row(w, at, size)) {
        memcpy(at[0], w->file + i->op[1], LANES * size);
        return;
    }
    for (int k = 0; k < i->vector; k++) {
        int n = i->address + 1 + k;
        size_t skip = (size_t)k * size;
        // The lowest bytes of a wider register are stored. Lanes in order: the last one wins.
        const uint8_t *from = w->file + i->op[n];
        unsigned width = i->width[n];
        if (size == 4 && width == 4) { MOVE_LANES(uint32_t, from + 4 * l, at[l] + skip) }
        else if (size == 2 && width == 2) { MOVE_LANES(uint16_t, from + 2 * l, at[l] + skip) }
        else
            for (uint32_t m = w->active; m; m &= m - 1) {
                int l = __builtin_ctz(m);
                memcpy(at[l] + skip, from + (size_t)l * width, size);
            }
    }
}

static const char *prepare_memory(struct ins *i) {
    if (i->vector * ptx_size(i->type[0]) > 32) return "vector longer than 32 bytes";
    return i->space == SPACE_PARAM && i->address == 0 ? "parameters cannot be written" : NULL;
}

// --- Atomics ---

// Sums of f32 in global memory flush subnormals, those in shared memory do not.
static uint32_t atomic_sum(uint32_t a, uint32_t b, bool flush) {
    if (flush && !(a & 0x7f800000)) a &= 0x80000000;
    if (flush && !(b & 0x7f800000)) b &= 0x80000000;
    float r = float_of(a) + float_of(b);
    uint32_t u = bits_of(r);
    if (flush && !(u & 0x7f800000)) u &= 0x80000000;
    return r != r ? 0x7fffffff : u;
}

static uint16_t half_atomic(uint16_t a, uint16_t b, int type, int sub) {
    bool brain = type == BF16 || type == BF16X2;
    const struct format *f = brain ? &format_bf16 : &format_f16;
    double x = ptx_decode_float(a, f), y = ptx_decode_float(b, f);
    if (sub == SUB_ADD) return (uint16_t)ptx_encode(x + y, f, ROUND_NEAREST, 0);
    if (x != x || y != y) return x == x ? a : y == y ? b : 0x7fff;
    bool first = x == y ? (a & 0x8000) != 0 : x < y;
    return (sub == SUB_MIN) == first ? a : b;
}

static uint64_t float_atomic(uint64_t old, uint64_t b, const struct ins *i) {
    switch (i->type[0]) {
    case F32: return atomic_sum((uint32_t)old, (uint32_t)b, i->space != SPACE_SHARED);
    case F64: return bits_of_double(double_of(old) + double_of(b));
    case F16: case BF16: return half_atomic((uint16_t)old, (uint16_t)b, i->type[0], i->sub);
    default:
        return half_atomic((uint16_t)old, (uint16_t)b, i->type[0], i->sub) |
               (uint64_t)half_atomic((uint16_t)(old >> 16), (uint16_t)(b >> 16), i->type[0],
                                     i->sub) << 16;
    }
}

static uint64_t integer_atomic(uint64_t old, uint64_t b, uint64_t c, const struct ins *i) {
    bool less = i->type[0] == S32   ? (int32_t)old < (int32_t)b
                : i->type[0] == S64 ? (int64_t)old < (int64_t)b
                                    : old < b;
    switch (i->sub) {
    case SUB_ADD: return old + b;
    case SUB_MIN: return less ? old : b;
    case SUB_MAX: return less ? b : old;
    case SUB_AND: return old & b;
    case SUB_OR: return old | b;
    case SUB_XOR: return old ^ b;
    case SUB_INC: return old >= b ? 0 : old + 1;
    case SUB_DEC: return old == 0 || old > b ? b : old - 1;
    case SUB_CAS: return old == b ? c : old;
    default: return b;
    }
}

static uint64_t combined(uint64_t old, uint64_t b, uint64_t c, const struct ins *i) {
    int t = i->type[0];
    return t == F16 || t == BF16 || t >= F32 ? float_atomic(old, b, i)
                                             : integer_atomic(old, b, c, i);
}

#define EXCHANGE(type)                                                                        \
    {                                                                                         \
        type old = __atomic_load_n((type *)at, __ATOMIC_RELAXED);                             \
        while (!__atomic_compare_exchange_n((type *)at, &old, (type)combined(old, b, c, i), false, \
                                            __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {}           \
        return old;                                                                           \
    }
static uint64_t exchange(uint8_t *at, uint64_t b, uint64_t c, const struct ins *i) {
    switch (ptx_size(i->type[0])) {
    case 2: EXCHANGE(uint16_t)
    case 4: EXCHANGE(uint32_t)
    default: EXCHANGE(uint64_t)
    }
}

// atom serves the lanes in order; red is atom without a result.
static void atom(struct warp *w, const struct ins *i) {
    uint8_t *at[LANES];
    size_t bytes = ptx_size(i->type[0]);
    if (!ptx_locate(w, i, i->address, i->space, i->offset, bytes, true, at)) return;
    for (uint32_t m = w->active; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        uint64_t b = ptx_read(w, i, i->address + 1, l);
        uint64_t c = i->count > i->address + 2 ? ptx_read(w, i, i->address + 2, l) : 0;
        uint64_t old = exchange(at[l], b, c, i);
        if (i->outputs) ptx_write(w, i, 0, l, old);
    }
}

// --- Addresses ---

// cvta adds or subtracts where the space lies in this process.
static void cvta(struct warp *w, const struct ins *i) {
    uint64_t base = i->space == SPACE_SHARED  ? (uint64_t)(uintptr_t)w->block->shared
                    : i->space == SPACE_PARAM ? (uint64_t)(uintptr_t)w->block->params
                    : i->space == SPACE_LOCAL ? (uint64_t)(uintptr_t)w->local
                                              : 0;
    uint64_t stride = i->space == SPACE_LOCAL ? local_stride(w) : 0;
    bool to = !strncmp(i->spelling, "cvta.to", 7);
    lane64 *d = LANE64(0);
    const lane64 *x = LANE64(1);
    EACH_LANE {
        uint64_t add = base + (uint64_t)l * stride;
        d[l] = to ? x[l] - add : x[l] + add;
    }
}

static void isspacep(struct warp *w, const struct ins *i) {
    const struct block *b = w->block;
    uint32_t r = 0;
    for (int l = 0; l < LANES; l++) {
        const uint8_t *a = (uint8_t *)(uintptr_t)LANE64(1)[l];
        bool shared = a >= b->shared && a < b->shared + b->shared_bytes;
        bool local = w->local && a >= w->local && a < w->local + LANES * local_stride(w);
        bool is = i->space == SPACE_SHARED ? shared
                  : i->space == SPACE_LOCAL ? local : !shared && !local;
        r |= (uint32_t)is << l;
    }
    BITS(0) = r;
}

#define ORDER "{.weak|.relaxed|.acquire|.release|.volatile}{.cta|.cluster|.gpu|.sys}"
#define SPACES "{.global|.shared|.shared::cta|.local|.param|.param::entry|.const}"
#define CACHE "{.ca|.cg|.cs|.lu|.cv|.wb|.wt}"
#define HINTS                                                                                  \
    "{.L1::evict_normal|.L1::evict_unchanged|.L1::evict_first|.L1::evict_last|.L1::no_allocate}" \
    "{.L2::evict_normal|.L2::evict_first|.L2::evict_last}{.L2::64B|.L2::128B|.L2::256B}"
#define TYPES "(.b8|.b16|.b32|.b64|.u8|.u16|.u32|.u64|.s8|.s16|.s32|.s64|.f32|.f64)"
#define ATOM "{.relaxed|.acquire|.release|.acq_rel}{.cta|.cluster|.gpu|.sys}" \
             "{.global|.shared|.shared::cta}"

const struct row ptx_memory_rows[] = {
    {"ld" ORDER SPACES CACHE "{.nc}" HINTS "{.v2|.v4|.v8}" TYPES, "Vm", ld, KIND_MASKED,
     prepare_memory},
    {"st" ORDER SPACES CACHE HINTS "{.v2|.v4|.v8}" TYPES, "mU", st, KIND_MASKED, prepare_memory},
    {"ldu{.global}" TYPES, "Vm", ld, KIND_MASKED, prepare_memory},
    {"atom" ATOM "(.add|.min|.max)(.u32|.s32|.u64|.s64)", "dma", atom, KIND_MASKED},
    {"atom" ATOM "(.and|.or|.xor|.exch)(.b32|.b64)", "dma", atom, KIND_MASKED},
    {"atom" ATOM "(.inc|.dec).u32", "dma", atom, KIND_MASKED},
    {"atom" ATOM ".cas(.b16|.b32|.b64)", "dmaa", atom, KIND_MASKED},
    {"atom" ATOM ".add(.f32|.f64)", "dma", atom, KIND_MASKED},
    {"atom" ATOM "(.add|.min|.max).noftz(.f16|.f16x2|.bf16|.bf16x2)", "dma", atom, KIND_MASKED},
    {"red" ATOM "(.add|.min|.max)(.u32|.s32|.u64|.s64)", "ma", atom, KIND_MASKED},
    {"red" ATOM "(.and|.or|.xor)(.b32|.b64)", "ma", atom, KIND_MASKED},
    {"red" ATOM "(.inc|.dec).u32", "ma", atom, KIND_MASKED},
    {"red" ATOM ".add(.f32|.f64)", "ma", atom, KIND_MASKED},
    {"red" ATOM "(.add|.min|.max).noftz(.f16|.f16x2|.bf16|.bf16x2)", "ma", atom, KIND_MASKED},
    {"cvta{.to}(.global|.shared|.shared::cta|.local|.param|.param::entry|.const).u64", "da", cvta},
    {"isspacep(.global|.shared|.shared::cta|.local)", "P8", isspacep},
    {"prefetch{.global|.local}(.L1|.L2)", "m", NULL, KIND_NOP},
    {0}};
