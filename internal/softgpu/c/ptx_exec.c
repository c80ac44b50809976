// Runs the blocks of a grid. A warp's lanes that stand at the same instruction run together; of
// several groups the one with the lowest program counter runs first, so that lanes that took
// different ways meet again where the ways do. Lanes that wait, for other lanes or for the block,
// are passed over; when nothing can run and something waits, the launch fails and says where.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "ptx_impl.h"

// --- Lanes of operands ---

uint64_t ptx_read(const struct warp *w, const struct ins *i, int n, int l) {
    switch (i->width[n]) {
    case 0: return BITS(n) >> l & 1;
    case 1: return LANE8(n)[l];
    case 2: return LANE16(n)[l];
    case 4: return LANE32(n)[l];
    default: return LANE64(n)[l];
    }
}

void ptx_write(struct warp *w, const struct ins *i, int n, int l, uint64_t v) {
    switch (i->width[n]) {
    case 0: BITS(n) = (BITS(n) & ~(1u << l)) | (uint32_t)(v & 1) << l; break;
    case 1: LANE8(n)[l] = (uint8_t)v; break;
    case 2: LANE16(n)[l] = (uint16_t)v; break;
    case 4: LANE32(n)[l] = (uint32_t)v; break;
    default: LANE64(n)[l] = v; break;
    }
}

void ptx_fail(struct warp *w, const struct ins *i, const char *format, ...) {
    struct block *b = w->block;
    if (b->error) return;
    char what[300];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    b->error = ptx_text("kernel %s, line %d, %s, block %u,%u,%u, warp %u: %s", b->kernel->name,
                        i->line, i->spelling, b->at[0], b->at[1], b->at[2], w->index, what);
}

// --- One instruction ---

#define RESTORE(type)                                                          \
    {                                                                          \
        type *d = (type *)(w->file + i->op[n]);                                \
        const type *old = (const type *)saved[n];                              \
        EACH_LANE d[l] = active >> l & 1 ? d[l] : old[l];                      \
    }

// run_partly computes all lanes, and gives those that are not active their old values back.
static void run_partly(struct warp *w, const struct ins *i, uint32_t active) {
    uint64_t saved[2][LANES];
    for (int n = 0; n < i->outputs && n < 2; n++)
        memcpy(saved[n], w->file + i->op[n], i->width[n] ? (size_t)i->width[n] * LANES : 4);
    i->run(w, i);
    for (int n = 0; n < i->outputs && n < 2; n++)
        switch (i->width[n]) {
        case 0: {
            uint32_t old;
            memcpy(&old, saved[n], 4);
            BITS(n) = (BITS(n) & active) | (old & ~active);
            break;
        }
        case 1: RESTORE(lane8) break;
        case 2: RESTORE(lane16) break;
        case 4: RESTORE(lane32) break;
        default: RESTORE(lane64) break;
        }
}

// run_vector does the same for mov with more than two results.
static void run_lanes(struct warp *w, const struct ins *i, uint32_t active) {
    w->active = active;
    if (active == w->live) {
        i->run(w, i);
        return;
    }
    if (i->outputs <= 2) {
        run_partly(w, i, active);
        return;
    }
    uint64_t saved[MAX_OPERANDS][LANES];
    for (int n = 0; n < i->outputs; n++)
        for (int l = 0; l < LANES; l++) saved[n][l] = ptx_read(w, i, n, l);
    i->run(w, i);
    for (int n = 0; n < i->outputs; n++)
        for (int l = 0; l < LANES; l++)
            if (!(active >> l & 1)) ptx_write(w, i, n, l, saved[n][l]);
}

// --- Groups of lanes ---

static void set_pc(struct warp *w, uint32_t lanes, uint32_t pc) {
    for (; lanes; lanes &= lanes - 1) w->pc[__builtin_ctz(lanes)] = pc;
}

struct group {
    uint32_t lanes, pc;
    uint32_t meet; // the lowest program counter of other lanes that can run
};

// next_group picks the lanes with the lowest program counter among those that can run.
static bool next_group(const struct warp *w, struct group *g) {
    uint32_t ready = w->live & ~w->syncing & ~w->barred;
    g->lanes = 0;
    g->pc = g->meet = UINT32_MAX;
    for (uint32_t m = ready; m; m &= m - 1) {
        uint32_t pc = w->pc[__builtin_ctz(m)];
        if (pc < g->pc) g->pc = pc;
    }
    for (uint32_t m = ready; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        if (w->pc[l] == g->pc) g->lanes |= 1u << l;
        else if (w->pc[l] < g->meet) g->meet = w->pc[l];
    }
    return g->lanes != 0;
}

// complete runs a KIND_SYNC instruction for every set of lanes that has arrived as a whole, and
// returns the lanes that it ran for.
static uint32_t complete(struct warp *w, const struct ins *i, uint32_t arrived) {
    uint32_t done = 0, left = arrived;
    while (left && !w->block->error) {
        int first = __builtin_ctz(left);
        uint32_t member = w->live, same = left;
        if (i->member >= 0) {
            member = LANE32(i->member)[first];
            const lane32 *members = LANE32(i->member);
            uint32_t apart = 0;
            for (int l = 0; l < LANES; l++) apart |= (uint32_t)(members[l] != member) << l;
            same &= ~apart;
            if (same & ~member) {
                ptx_fail(w, i, "lanes %#x are not in their own member mask %#x", same & ~member,
                         member);
                return 0;
            }
        }
        if ((member & w->live) == same) {
            w->active = same;
            i->run(w, i);
            done |= same;
        }
        left &= ~same;
    }
    return done;
}

// --- Barriers ---

static void barrier_results(struct warp *w, uint32_t released, unsigned ones, unsigned arrived) {
    for (uint32_t m = released; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        const struct ins *i = &w->block->kernel->code[w->pc[l] - 1];
        if (!i->outputs) continue;
        uint64_t r = i->sub == SUB_POPC ? ones : i->sub == SUB_AND ? ones == arrived : ones != 0;
        ptx_write(w, i, 0, l, r);
    }
}

// check_aligned holds the lanes that pass a barrier against the rule of aligned ones: all lanes of
// the warp that have not exited came to it by the same instruction.
static void check_aligned(struct warp *w, uint32_t released) {
    if (!released) return;
    uint32_t first = w->pc[__builtin_ctz(released)], apart = w->live & ~released;
    const struct ins *i = &w->block->kernel->code[first - 1];
    for (uint32_t m = released; m; m &= m - 1)
        if (w->pc[__builtin_ctz(m)] != first) apart |= m & -m;
    if (apart && i->flags & FLAG_ALIGNED)
        ptx_fail(w, i, "lanes %#x of the warp are not at this barrier, but elsewhere", apart);
}

// release_barriers lets threads pass the barriers that are complete. Threads that have exited do
// not count where all threads are waited for.
static bool release_barriers(struct block *b) {
    bool any = false;
    for (int id = 0; id < BARRIERS; id++) {
        struct barrier *r = &b->barriers[id];
        unsigned needed = r->needed ? r->needed : b->live_threads;
        if (!r->arrived || r->arrived < needed) continue;
        for (unsigned n = 0; n < b->warp_count; n++) {
            struct warp *w = &b->warps[n];
            uint32_t released = 0;
            for (uint32_t m = w->barred; m; m &= m - 1)
                if (w->barrier[__builtin_ctz(m)] == id) released |= m & -m;
            check_aligned(w, released);
            barrier_results(w, released, r->ones, r->arrived);
            w->barred &= ~released;
        }
        *r = (struct barrier){0};
        any = true;
    }
    return any;
}

// arrive counts the active lanes at a barrier; they wait behind the instruction.
static void arrive(struct warp *w, const struct ins *i, uint32_t active) {
    struct block *b = w->block;
    int n = i->outputs;
    bool reduces = i->outputs > 0;
    int counts = i->count - n - reduces - 1;
    for (uint32_t m = active; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        uint64_t id = ptx_read(w, i, n, l), needed = counts ? ptx_read(w, i, n + 1, l) : 0;
        if (id >= BARRIERS || (counts && (needed == 0 || needed % LANES))) {
            ptx_fail(w, i, "barrier %llu of %llu threads", (unsigned long long)id,
                     (unsigned long long)needed);
            return;
        }
        struct barrier *r = &b->barriers[id];
        if (r->arrived && r->needed != needed) {
            ptx_fail(w, i, "barrier %llu is used with %u and with %llu threads",
                     (unsigned long long)id, r->needed, (unsigned long long)needed);
            return;
        }
        r->needed = (unsigned)needed;
        r->arrived++;
        if (reduces) r->ones += ptx_read(w, i, i->count - 1, l) ^ i->not_source;
        w->barrier[l] = (uint8_t)id;
        if (!(i->flags & FLAG_ARRIVE)) w->barred |= 1u << l;
    }
}

// --- Warps ---

static void leave(struct warp *w, uint32_t lanes) {
    w->live &= ~lanes;
    w->block->live_threads -= (unsigned)__builtin_popcount(lanes);
}

// step_sync lets the group's active lanes arrive at an instruction that waits for others.
static void step_sync(struct warp *w, const struct ins *i, struct group *g, uint32_t active) {
    uint32_t waiting = 0;
    for (uint32_t m = w->syncing; m; m &= m - 1)
        if (w->pc[__builtin_ctz(m)] == g->pc) waiting |= m & -m;
    uint32_t arrived = active | waiting, done = complete(w, i, arrived);
    set_pc(w, g->lanes & ~active, g->pc + 1);
    set_pc(w, active & ~done, g->pc);
    set_pc(w, done, g->pc + 1);
    w->syncing = (w->syncing & ~done) | (arrived & ~done);
}

// run_group runs lanes that stand at one instruction, until they part, wait, or reach others.
static void run_group(struct warp *w, struct group *g) {
    const struct ptx_kernel *k = w->block->kernel;
    for (;;) {
        if (g->pc >= k->code_count) { // behind the last instruction
            leave(w, g->lanes);
            return;
        }
        const struct ins *i = &k->code[g->pc];
        uint32_t active = g->lanes;
        if (i->guard >= 0) {
            uint32_t p = *(lane32 *)(w->file + i->guard);
            active &= i->negated ? ~p : p;
        }
        switch ((ptx_kind)i->kind) {
        case KIND_LANES:
            if (active) run_lanes(w, i, active);
            break;
        case KIND_MASKED:
            w->active = active;
            if (active) i->run(w, i);
            if (w->block->error) return;
            break;
        case KIND_NOP: break;
        case KIND_BRANCH:
            if (active == g->lanes) {
                g->pc = (uint32_t)i->target;
                if (g->pc >= g->meet) goto part;
                continue;
            }
            if (!active) break;
            set_pc(w, active, (uint32_t)i->target);
            set_pc(w, g->lanes & ~active, g->pc + 1);
            return;
        case KIND_EXIT:
            leave(w, active);
            set_pc(w, g->lanes & ~active, g->pc + 1);
            return;
        case KIND_SYNC:
            if (!active) break;
            if (active == w->live && complete(w, i, active) == active) break; // all are here
            if (w->block->error) return;
            step_sync(w, i, g, active);
            return;
        case KIND_BARRIER:
            arrive(w, i, active);
            set_pc(w, g->lanes, g->pc + 1);
            return;
        }
        if (++g->pc >= g->meet) {
        part:
            set_pc(w, g->lanes, g->pc);
            return;
        }
    }
}

// retry completes instructions whose missing lanes have exited since.
static bool retry(struct warp *w) {
    for (uint32_t m = w->syncing; m && !w->block->error; m &= m - 1) {
        uint32_t pc = w->pc[__builtin_ctz(m)], arrived = 0;
        for (uint32_t n = w->syncing; n; n &= n - 1)
            if (w->pc[__builtin_ctz(n)] == pc) arrived |= n & -n;
        uint32_t done = complete(w, &w->block->kernel->code[pc], arrived);
        set_pc(w, done, pc + 1);
        w->syncing &= ~done;
        if (done) return true;
    }
    return false;
}

// run_warp runs until all lanes wait or have exited, and says whether any ran.
static bool run_warp(struct warp *w) {
    bool ran = false;
    struct group g;
    do {
        while (!w->block->error && next_group(w, &g)) {
            run_group(w, &g);
            ran = true;
        }
    } while (!w->block->error && retry(w));
    return ran;
}

// --- Blocks ---

// deadlock names what the first waiting lanes wait for.
static void deadlock(struct block *b) {
    for (unsigned n = 0; n < b->warp_count; n++) {
        struct warp *w = &b->warps[n];
        if (!w->live) continue;
        int l = __builtin_ctz(w->live);
        bool barred = w->barred >> l & 1;
        const struct ins *i = &b->kernel->code[w->pc[l] - barred];
        if (barred) {
            const struct barrier *r = &b->barriers[w->barrier[l]];
            ptx_fail(w, i, "deadlock: %u of %u threads are at barrier %u", r->arrived,
                     r->needed ? r->needed : b->live_threads, w->barrier[l]);
        } else {
            ptx_fail(w, i, "deadlock: lanes %#x wait for others of the live lanes %#x", w->syncing,
                     w->live);
        }
        return;
    }
}

// start_block sets what differs between blocks.
static void start_block(struct block *b) {
    const int32_t *special = b->kernel->special;
    b->live_threads = b->threads;
    memset(b->barriers, 0, sizeof b->barriers);
    for (unsigned n = 0; n < b->warp_count; n++) {
        struct warp *w = &b->warps[n];
        unsigned left = b->threads - n * LANES;
        w->live = left >= LANES ? ~0u : (1u << left) - 1;
        w->syncing = w->barred = 0;
        w->copy_count = 0; // nobody reads what they would write
        memset(w->group, 0, sizeof w->group);
        memset(w->pc, 0, sizeof w->pc);
        for (int axis = 0; axis < 3; axis++) ptx_fill(w, special[6 + axis], b->at[axis]);
    }
}

// shuffle draws the order in which warps run up to the next barrier.
static void shuffle(struct block *b) {
    for (unsigned n = b->warp_count; n > 1; n--) {
        unsigned other = (unsigned)(ptx_random(&b->random) % n), last = b->order[n - 1];
        b->order[n - 1] = b->order[other];
        b->order[other] = last;
    }
}

void ptx_run_block(struct block *b) {
    start_block(b);
    while (b->live_threads && !b->error) {
        bool moved = false;
        if (b->shuffled) shuffle(b);
        for (unsigned n = 0; n < b->warp_count && !b->error; n++)
            moved |= run_warp(&b->warps[b->order[n]]);
        moved |= release_barriers(b);
        if (!moved && b->live_threads && !b->error) deadlock(b);
    }
}
