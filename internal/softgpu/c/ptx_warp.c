// Instructions that exchange values between the lanes of a warp. The block's loop calls them when
// all live lanes of the member mask have arrived; w->active are these lanes.
#include "ptx_impl.h"

// shfl reads another lane's value, or the own one where that lies outside the segment. A lane of
// the mask that has exited or is beyond the block has no value: what is read is NaN and the like.
// XLA's reductions of rows in small blocks read such lanes, and do not use what they read. To read
// a lane outside the mask is an error.
static void shfl(struct warp *w, const struct ins *i) {
    int first = i->outputs;
    uint32_t value[LANES], result[LANES], inside = 0, sources = 0;
    uint32_t members = LANE32(i->member)[__builtin_ctz(w->active)];
    for (int l = 0; l < LANES; l++) value[l] = w->active >> l & 1 ? LANE32(first)[l] : ~0u;
    for (int l = 0; l < LANES; l++) {
        int b = (int)(LANE32(first + 1)[l] & 31), c = (int)LANE32(first + 2)[l];
        int segment = c >> 8 & 31, clamp = c & 31;
        int most = (l & segment) | (clamp & ~segment), least = l & segment, j;
        bool in;
        switch (i->sub) {
        case SUB_UP: j = l - b, in = j >= most; break;
        case SUB_DOWN: j = l + b, in = j <= most; break;
        case SUB_BFLY: j = l ^ b, in = j <= most; break;
        default: j = least | (b & ~segment), in = j <= most; break;
        }
        result[l] = value[in ? j & 31 : l];
        inside |= (uint32_t)in << l;
        if (in && w->active >> l & 1) sources |= 1u << (j & 31);
    }
    if (sources & ~members) {
        ptx_fail(w, i, "lanes %#x are read, but only %#x take part", sources & ~members, members);
        return;
    }
    for (uint32_t m = w->active; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        LANE32(0)[l] = result[l];
    }
    if (first > 1) BITS(1) = (BITS(1) & ~w->active) | (inside & w->active);
}

static float choose_float(float a, float b, const struct ins *i) {
    if (i->flags & FLAG_ABS)
        a = float_of(bits_of(a) & 0x7fffffff), b = float_of(bits_of(b) & 0x7fffffff);
    if (a != a || b != b)
        return (i->flags & FLAG_NAN) || (a != a && b != b) ? float_of(0x7fffffff) : a != a ? b : a;
    bool less = a < b || (a == b && bits_of(a) >> 31);
    return (i->sub == SUB_MIN) == less ? a : b;
}

static uint32_t reduced(uint32_t a, uint32_t b, const struct ins *i) {
    if (i->type[0] == F32) return bits_of(choose_float(float_of(a), float_of(b), i));
    bool less = i->type[0] == S32 ? (int32_t)a < (int32_t)b : a < b;
    switch (i->sub) {
    case SUB_ADD: return a + b;
    case SUB_MIN: return less ? a : b;
    case SUB_MAX: return less ? b : a;
    case SUB_AND: return a & b;
    case SUB_OR: return a | b;
    default: return a ^ b;
    }
}

static void redux(struct warp *w, const struct ins *i) {
    uint32_t m = w->active, r = LANE32(1)[__builtin_ctz(m)];
    if (i->type[0] == F32) r = reduced(r, r, i); // the magnitude, and the canonical NaN
    for (m &= m - 1; m; m &= m - 1) r = reduced(r, LANE32(1)[__builtin_ctz(m)], i);
    for (m = w->active; m; m &= m - 1) LANE32(0)[__builtin_ctz(m)] = r;
}

static void vote(struct warp *w, const struct ins *i) {
    uint32_t p = (BITS(1) ^ (i->not_source ? ~0u : 0)) & w->active;
    if (i->sub == SUB_BALLOT) {
        for (uint32_t m = w->active; m; m &= m - 1) LANE32(0)[__builtin_ctz(m)] = p;
        return;
    }
    bool r = i->sub == SUB_ALL   ? p == w->active
             : i->sub == SUB_ANY ? p != 0
                                 : p == 0 || p == w->active;
    BITS(0) = (BITS(0) & ~w->active) | (r ? w->active : 0);
}

static void match(struct warp *w, const struct ins *i) {
    int source = i->outputs;
    uint32_t first = w->active & -w->active, same[LANES], all = 0;
    for (uint32_t m = w->active; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        same[l] = 0;
        for (uint32_t n = w->active; n; n &= n - 1) {
            int k = __builtin_ctz(n);
            if (ptx_read(w, i, source, l) == ptx_read(w, i, source, k)) same[l] |= 1u << k;
        }
    }
    if (i->sub == SUB_ALL && same[__builtin_ctz(first)] == w->active) all = w->active;
    for (uint32_t m = w->active; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        LANE32(0)[l] = i->sub == SUB_ANY ? same[l] : all;
    }
    if (i->outputs > 1) BITS(1) = (BITS(1) & ~w->active) | all;
}

// elect names the lowest lane as leader.
static void elect(struct warp *w, const struct ins *i) {
    uint32_t leader = (uint32_t)__builtin_ctz(w->active);
    for (uint32_t m = w->active; m; m &= m - 1) LANE32(0)[__builtin_ctz(m)] = leader;
    BITS(1) = (BITS(1) & ~w->active) | 1u << leader;
}

static void nothing(struct warp *w, const struct ins *i) { (void)w, (void)i; }

static void activemask(struct warp *w, const struct ins *i) {
    for (uint32_t m = w->active; m; m &= m - 1) LANE32(0)[__builtin_ctz(m)] = w->active;
}

static const char *prepare_member(struct ins *i) {
    i->member = (int8_t)(i->count - 1);
    return NULL;
}

#define S KIND_SYNC, prepare_member

const struct row ptx_warp_rows[] = {
    {"shfl.sync(.up|.down|.bfly|.idx).b32", "da444 dQa444", shfl, S},
    {"redux.sync(.add|.min|.max)(.u32|.s32)", "da4", redux, S},
    {"redux.sync(.and|.or|.xor).b32", "da4", redux, S},
    {"redux.sync(.min|.max){.abs}{.NaN}.f32", "da4", redux, S},
    {"vote.sync(.all|.any|.uni).pred", "Pn4", vote, S},
    {"vote.sync.ballot.b32", "dn4", vote, S},
    {"match.any.sync(.b32|.b64)", "ja4", match, S},
    {"match.all.sync(.b32|.b64)", "ja4 jQa4", match, S},
    {"elect.sync", "jQ4", elect, S},
    {"bar.warp.sync", "4", nothing, S},
    {"activemask.b32", "d", activemask, KIND_MASKED},
    {0}};
