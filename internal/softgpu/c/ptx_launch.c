// Launches: what a block needs is made once, then the blocks of the grid run in it one by one.
#include <stdlib.h>

#include "ptx_impl.h"

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
};

static void free_room(struct room *r) {
    free(r->warps), free(r->files), free(r->shared), free(r->local);
}

static bool make_room(struct block *b, struct room *r, size_t dynamic) {
    const struct ptx_kernel *k = b->kernel;
    size_t file = ((size_t)k->file_bytes + 127) / 64 * 64;
    size_t local = (k->local_bytes + 15) / 16 * 16 * LANES;
    b->shared_bytes = k->shared_bytes + dynamic;
    r->warps = calloc(b->warp_count, sizeof *r->warps);
    r->files = aligned_alloc(64, file * b->warp_count);
    r->shared = aligned_alloc(1024, (b->shared_bytes + 1024) / 1024 * 1024);
    r->local = local ? calloc(b->warp_count, local) : NULL;
    if (!r->warps || !r->files || !r->shared || (local && !r->local)) return false;
    memset(r->files, 0, file * b->warp_count);
    memset(r->shared, 0, b->shared_bytes);
    b->warps = r->warps;
    b->shared = r->shared;
    for (unsigned n = 0; n < b->warp_count; n++) {
        struct warp *w = &b->warps[n];
        *w = (struct warp){.file = r->files + n * file, .block = b, .index = n,
                           .local = local ? r->local + n * local : NULL};
        start_warp(b, w, dynamic);
    }
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
    for (uint64_t n = 0; !why && n < blocks; n++) {
        b.at[0] = (unsigned)(n % grid[0]);
        b.at[1] = (unsigned)(n / grid[0] % grid[1]);
        b.at[2] = (unsigned)(n / grid[0] / grid[1]);
        ptx_run_block(&b);
        why = b.error;
    }
    free_room(&room);
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
