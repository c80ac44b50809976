// Runs PTX for ptx_test.go: reads cases from standard input, writes their results to standard
// output. Numbers are 32-bit and little endian; texts and buffers have their length in front.
//
//     case:   text, kernel, grid[3], block[3], dynamic shared memory, check, buffers, buffer...
//     result: 0 and the buffers, or 1 and a message
//
// Every buffer is an argument, in order. An empty kernel name only loads the text. With check,
// accesses outside the buffers are errors. SOFTGPU_ORDER_SEED is the seed of orders.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../c/ptx.h"
#include "../c/ptx_check.h"

enum { MAX_BUFFERS = 8 };

static void *buffers[MAX_BUFFERS];
static uint32_t sizes[MAX_BUFFERS], count;

static uint32_t number(void) {
    uint32_t n;
    if (fread(&n, 4, 1, stdin) != 1) exit(feof(stdin) ? 0 : 3);
    return n;
}

static char *bytes(uint32_t *size) {
    *size = number();
    char *p = malloc((size_t)*size + 1);
    if (*size && fread(p, *size, 1, stdin) != 1) exit(3);
    p[*size] = 0;
    return p;
}

static void answer(const char *error) {
    uint32_t status = error != NULL, length = error ? (uint32_t)strlen(error) : 0;
    fwrite(&status, 4, 1, stdout);
    if (error) {
        fwrite(&length, 4, 1, stdout);
        fwrite(error, length, 1, stdout);
    } else
        for (uint32_t n = 0; n < count; n++) fwrite(buffers[n], sizes[n], 1, stdout);
    fflush(stdout);
}

static int inside(const void *at, size_t n, int write) {
    (void)write;
    for (uint32_t k = 0; k < count; k++)
        if ((char *)at >= (char *)buffers[k] && (char *)at + n <= (char *)buffers[k] + sizes[k])
            return 1;
    return 0;
}

static char *copy(const char *text) { return strcpy(malloc(strlen(text) + 1), text); }

static char *run(struct ptx_module *m, const char *name, unsigned shape[6], uint32_t dynamic) {
    char *error = NULL;
    void *args[MAX_BUFFERS];
    for (uint32_t n = 0; n < count; n++) args[n] = &buffers[n];
    struct ptx_kernel *k = ptx_kernel(m, name);
    if (!k) return copy("no such kernel");
    if (ptx_kernel_params(k) != count) return copy("number of parameters");
    ptx_launch(k, shape, shape + 3, dynamic, args, &error);
    return error;
}

int main(void) {
    const char *seed = getenv("SOFTGPU_ORDER_SEED");
    ptx_seed = seed ? strtoull(seed, NULL, 0) : 0;
    for (;;) {
        uint32_t length, named;
        unsigned shape[6];
        char *text = bytes(&length), *name = bytes(&named), *error = NULL;
        for (int n = 0; n < 6; n++) shape[n] = number();
        uint32_t dynamic = number();
        ptx_check = number() ? inside : NULL;
        count = number();
        if (count > MAX_BUFFERS) return 3;
        for (uint32_t n = 0; n < count; n++) buffers[n] = bytes(&sizes[n]);
        struct ptx_module *m = ptx_load(text, &error);
        if (m && named) error = run(m, name, shape, dynamic);
        answer(error);
        ptx_unload(m);
        for (uint32_t n = 0; n < count; n++) free(buffers[n]);
        free(error), free(text), free(name);
    }
}
