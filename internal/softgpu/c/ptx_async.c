// Copies to shared memory that a lane waits for later: cp.async.
//
// A GPU may copy at any time between the instruction and the wait for its group. Here that is the
// latest, so that who forgets to wait reads what was there before; with a seed it is the earliest
// for half of the copies, so that it shows, too, who copies over what others still read.
#include <stdlib.h>

#include "ptx_impl.h"

static void copy(const struct copy *c) {
    memcpy(c->to, c->from, c->valid);
    memset(c->to + c->valid, 0, (size_t)(c->bytes - c->valid));
}

static void keep(struct warp *w, struct copy c) {
    if (w->copy_count == w->copy_room) {
        w->copy_room = w->copy_room ? 2 * w->copy_room : 64;
        w->copies = realloc(w->copies, w->copy_room * sizeof c);
        if (!w->copies) abort();
    }
    w->copies[w->copy_count++] = c;
}

// A source size below the copy's size fills the rest with zeros.
static void cp_async(struct warp *w, const struct ins *i) {
    uint8_t *to[LANES], *from[LANES];
    uint64_t bytes = ptx_read(w, i, 2, __builtin_ctz(w->active));
    if (bytes != 4 && bytes != 8 && bytes != 16) {
        ptx_fail(w, i, "copy of %llu bytes", (unsigned long long)bytes);
        return;
    }
    if (!ptx_locate(w, i, i->address, SPACE_SHARED, i->offset, bytes, true, to) ||
        !ptx_locate(w, i, i->address2, SPACE_GLOBAL, i->offset2, bytes, false, from))
        return;
    bool at_once = w->block->shuffled && ptx_random(&w->block->random) & 1;
    for (uint32_t m = w->active; m; m &= m - 1) {
        int l = __builtin_ctz(m);
        uint64_t valid = i->count > 3 ? ptx_read(w, i, 3, l) : bytes;
        if (valid > bytes) valid = bytes;
        struct copy c = {to[l], from[l], w->group[l], (uint8_t)l, (uint8_t)bytes, (uint8_t)valid};
        if (at_once) copy(&c);
        else keep(w, c);
    }
}

static void commit_group(struct warp *w, const struct ins *i) {
    (void)i;
    for (uint32_t m = w->active; m; m &= m - 1) w->group[__builtin_ctz(m)]++;
}

// finish makes the copies of the active lanes, but for those of each lane's newest groups.
static void finish(struct warp *w, const uint32_t end[LANES]) {
    size_t left = 0;
    for (size_t n = 0; n < w->copy_count; n++) {
        const struct copy c = w->copies[n];
        if (w->active >> c.lane & 1 && c.group < end[c.lane]) copy(&c);
        else w->copies[left++] = c;
    }
    w->copy_count = left;
}

static void wait_group(struct warp *w, const struct ins *i) {
    uint32_t end[LANES];
    for (int l = 0; l < LANES; l++) {
        uint32_t newest = LANE32(0)[l];
        end[l] = w->group[l] > newest ? w->group[l] - newest : 0;
    }
    finish(w, end);
}

static void wait_all(struct warp *w, const struct ins *i) {
    (void)i;
    uint32_t end[LANES];
    memset(end, 0xff, sizeof end);
    finish(w, end);
}

const struct row ptx_async_rows[] = {
    {"cp.async(.ca|.cg)(.shared|.shared::cta).global{.L2::64B|.L2::128B|.L2::256B}", "mm4 mm44",
     cp_async, KIND_MASKED},
    {"cp.async.commit_group", "", commit_group, KIND_MASKED},
    {"cp.async.wait_all", "", wait_all, KIND_MASKED},
    {"cp.async.wait_group", "4", wait_group, KIND_MASKED},
    {0}};
