// Launches: what a block needs is made once, then the blocks of the grid run in it one by one.
#include <stdlib.h>

#include "ptx_impl.h"

uint64_t ptx_seed;

// What nobody has written: all bits are ones. That is NaN in every float format, and as an address
// or an index far outside.
enum { POISON = 0xff };

// ptx_random is the generator splitmix64.
uint64_t ptx_random(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

void ptx_fill(struct warp *w, int32_t slot, uint32_t value) {
    if (slot < 0) return;
    lane32 *d = (lane32 *)(w->file + slot);
    EACH_LANE d[l] = value;
}

static void fill_threads(struct block *b, struct warp *w) {
    const int32_t *special = b->kernel->special;
    uint32_t at[5];
    for (unsigned l = 0; l < LANES; l++) {
        unsigned t = w->index * LANES + l;
        uint32_t values[] = {t % b->size[0], t / b->size[0] % b->size[1],
                             t / b->size[0] / b->size[1]};
        for (int axis = 0; axis < 3; axis++)
            if (special[axis] >= 0) ((lane32 *)(w->file + special[axis]))[l] = values[axis];
        at[0] = 1u << l, at[1] = (1u << l) - 1, at[2] = at[1] | at[0], at[3] = ~at[2],
        at[4] = ~at[1];
        if (special[12] >= 0) ((lane32 *)(w->file + special[12]))[l] = l;
        for (int n = 0; n < 5; n++)
            if (special[15 + n] >= 0) ((lane32 *)(w->file + special[15 + n]))[l] = at[n];
    }
}

// start_warp sets what stays the same for all blocks: constants and most special registers.
static void start_warp(struct block *b, struct warp *w, size_t dynamic) {
    const struct ptx_kernel *k = b->kernel;
    for (size_t n = 0; n < k->constant_count; n++) {
        const struct constant *c = &k->constants[n];
        struct ins i = {.op = {c->slot}, .width = {c->width}};
        for (int l = 0; l < LANES; l++) ptx_write(w, &i, 0, l, c->value);
    }
    fill_threads(b, w);
    for (int axis = 0; axis < 3; axis++) {
        ptx_fill(w, k->special[3 + axis], b->size[axis]);
        ptx_fill(w, k->special[9 + axis], b->grid[axis]);
    }
    ptx_fill(w, k->special[13], w->index);
    ptx_fill(w, k->special[14], b->warp_count);
    ptx_fill(w, k->special[20], 0); // one multiprocessor
    ptx_fill(w, k->special[21], 1);
    ptx_fill(w, k->special[22], (uint32_t)dynamic);
    ptx_fill(w, k->special[23], (uint32_t)b->shared_bytes);
    ptx_fill(w, k->special[24], 0); // clusters of one block
    ptx_fill(w, k->special[25], 1);
}

struct room { // memory of one block, used for all blocks of a launch
    struct warp *warps;
    uint8_t *files, *shared, *local;
    uint8_t *fresh; // registers as a block finds them: constants, special registers, poison
    size_t file_bytes, local_bytes;
    unsigned *order;
};

static void free_room(struct block *b, struct room *r) {
    for (unsigned n = 0; r->warps && n < b->warp_count; n++) free(r->warps[n].copies);
    free(r->warps), free(r->files), free(r->shared), free(r->local), free(r->fresh), free(r->order);
}

// clean gives a block memory that nobody has written. Without a seed the registers of a block but
// the first have what the one before left there, as on a GPU: it would take a fifth of the time of
// a short kernel.
static void clean(const struct block *b, const struct room *r) {
    if (b->shuffled) memcpy(r->files, r->fresh, r->file_bytes);
    memset(r->shared, POISON, b->shared_bytes);
    if (r->local) memset(r->local, POISON, r->local_bytes);
}

static bool make_room(struct block *b, struct room *r, size_t dynamic) {
    const struct ptx_kernel *k = b->kernel;
    size_t file = ((size_t)k->file_bytes + 127) / 64 * 64;
    size_t local = (k->local_bytes + 15) / 16 * 16 * LANES;
    b->shared_bytes = k->shared_bytes + dynamic;
    r->warps = calloc(b->warp_count, sizeof *r->warps);
    r->files = aligned_alloc(64, file * b->warp_count);
    r->shared = aligned_alloc(1024, (b->shared_bytes + 1024) / 1024 * 1024);
    r->file_bytes = file * b->warp_count, r->local_bytes = local * b->warp_count;
    r->fresh = aligned_alloc(64, r->file_bytes);
    r->local = local ? malloc(r->local_bytes) : NULL;
    r->order = calloc(b->warp_count, sizeof *r->order);
    if (!r->warps || !r->files || !r->shared || !r->fresh || !r->order || (local && !r->local))
        return false;
    memset(r->files, POISON, r->file_bytes);
    b->order = r->order;
    b->warps = r->warps;
    b->shared = r->shared;
    for (unsigned n = 0; n < b->warp_count; n++) {
        struct warp *w = &b->warps[n];
        *w = (struct warp){.file = r->files + n * file, .block = b, .index = n,
                           .local = local ? r->local + n * local : NULL};
        start_warp(b, w, dynamic);
        r->order[n] = n;
    }
    memcpy(r->fresh, r->files, r->file_bytes);
    return true;
}

static char *refuse(const struct ptx_kernel *k, const unsigned grid[3], const unsigned block[3],
                    size_t dynamic) {
    if (k->problem) return ptx_text("%s", k->problem);
    uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
    for (int n = 0; n < 3; n++) {
        if (!grid[n] || !block[n] || block[n] > 1024)
            return ptx_text("kernel %s: empty grid or block", k->name);
        if (k->required[0] && block[n] != k->required[n])
            return ptx_text("kernel %s: blocks of %ux%ux%u threads, .reqntid says %ux%ux%u",
                            k->name, block[0], block[1], block[2], k->required[0],
                            k->required[1], k->required[2]);
    }
    if (threads > 1024) return ptx_text("kernel %s: more than 1024 threads in a block", k->name);
    if (k->shared_bytes + dynamic > 228 * 1024)
        return ptx_text("kernel %s: %zu bytes of shared memory in a block", k->name,
                        k->shared_bytes + dynamic);
    return NULL;
}

static uint8_t *pack_params(const struct ptx_kernel *k, void **args) {
    uint8_t *p = calloc(1, k->param_bytes + 16);
    for (size_t n = 0; p && n < k->param_count; n++)
        memcpy(p + k->params[n].offset, args[n], k->params[n].bytes);
    return p;
}

// start_order seeds the random orders of a launch.
static void start_order(struct block *b, struct ptx_kernel *k) {
    b->shuffled = ptx_seed != 0;
    b->random = ptx_seed + __atomic_fetch_add(&k->launches, 1, __ATOMIC_RELAXED);
    for (const char *p = k->name; *p; p++) b->random = b->random * 31 + (uint8_t)*p;
}

// A permutation of a grid's blocks: the nth is (n * step + first) % blocks.
struct tour {
    uint64_t step, first;
};

static struct tour tour_of(struct block *b, uint64_t blocks) {
    struct tour t = {1, 0};
    if (!b->shuffled || blocks < 2) return t;
    t.first = ptx_random(&b->random) % blocks;
    for (;;) {
        t.step = 1 + ptx_random(&b->random) % (blocks - 1);
        uint64_t x = blocks, y = t.step; // which have no common divisor
        while (y) {
            uint64_t rest = x % y;
            x = y, y = rest;
        }
        if (x == 1) return t;
    }
}

int ptx_launch(struct ptx_kernel *k, const unsigned grid[3], const unsigned size[3],
               size_t dynamic, void **args, char **error) {
    char *why = refuse(k, grid, size, dynamic);
    struct room room = {0};
    uint8_t *params = why ? NULL : pack_params(k, args);
    struct block b = {.kernel = k, .params = params};
    if (!why) {
        memcpy(b.grid, grid, sizeof b.grid);
        memcpy(b.size, size, sizeof b.size);
        b.threads = size[0] * size[1] * size[2];
        b.warp_count = (b.threads + LANES - 1) / LANES;
        if (!params || !make_room(&b, &room, dynamic))
            why = ptx_text("kernel %s: no memory for a block", k->name);
    }
    uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    if (!why) start_order(&b, k);
    struct tour tour = tour_of(&b, blocks);
    for (uint64_t turn = 0; !why && turn < blocks; turn++) {
        uint64_t n = (uint64_t)(((unsigned __int128)turn * tour.step + tour.first) % blocks);
        b.at[0] = (unsigned)(n % grid[0]);
        b.at[1] = (unsigned)(n / grid[0] % grid[1]);
        b.at[2] = (unsigned)(n / grid[0] / grid[1]);
        clean(&b, &room);
        ptx_run_block(&b);
        why = b.error;
    }
    free_room(&b, &room);
    free(params);
    if (error) *error = why;
    else free(why);
    return why != NULL;
}

const char *ptx_kernel_problem(const struct ptx_kernel *k) { return k->problem; }
unsigned ptx_kernel_params(const struct ptx_kernel *k) { return (unsigned)k->param_count; }
size_t ptx_kernel_param_bytes(const struct ptx_kernel *k, unsigned at) {
    return at < k->param_count ? k->params[at].bytes : 0;
}
size_t ptx_kernel_shared(const struct ptx_kernel *k) { return k->shared_bytes; }
