// Matrices spread over a warp: ldmatrix, stmatrix, and mma.sync of 16 x 8 results.
//
// Lane l has of an 8 x 8 matrix of 16-bit elements row l/4, columns 2*(l%4) and the next. mma adds
// the products in double precision and rounds once; a GPU's tensor cores round more often.
#include "ptx_check.h"
#include "ptx_impl.h"

// row_of gives the shared memory of a matrix's row, whose address lane 8*matrix + row has.
static uint8_t *row_of(struct warp *w, const struct ins *i, int lane, bool *ok) {
    uint64_t a = ptx_read(w, i, i->address, lane) + (uint64_t)i->offset;
    size_t limit = w->block->shared_bytes;
    if (i->space == SPACE_GENERIC) a -= (uint64_t)(uintptr_t)w->block->shared;
    *ok = a <= limit && limit - a >= 16 && a % 16 == 0;
    return w->block->shared + (*ok ? a : 0);
}

static bool rows(struct warp *w, const struct ins *i, int matrices, uint8_t *row[LANES]) {
    for (int l = 0; l < 8 * matrices; l++) {
        bool ok;
        row[l] = row_of(w, i, l, &ok);
        if (ok) continue;
        ptx_fail(w, i, "row of lane %d is misaligned or outside the %zu bytes of shared memory", l,
                 w->block->shared_bytes);
        return false;
    }
    return true;
}

static bool whole_warp(struct warp *w, const struct ins *i) {
    if (w->active == ~0u) return true;
    ptx_fail(w, i, "lanes are missing: active are %#x", w->active);
    return false;
}

static void ldmatrix(struct warp *w, const struct ins *i) {
    uint8_t *row[LANES];
    if (!whole_warp(w, i) || !rows(w, i, i->outputs, row)) return;
    for (int m = 0; m < i->outputs; m++)
        for (int l = 0; l < LANES; l++) {
            uint32_t value = 0;
            for (int h = 0; h < 2; h++) {
                int r = l / 4, c = 2 * (l % 4) + h;
                uint16_t e;
                if (i->flags & FLAG_TRANS) memcpy(&e, row[8 * m + c] + 2 * r, 2);
                else memcpy(&e, row[8 * m + r] + 2 * c, 2);
                value |= (uint32_t)e << (16 * h);
            }
            LANE32(m)[l] = value;
        }
}

static void stmatrix(struct warp *w, const struct ins *i) {
    uint8_t *row[LANES];
    int first = i->address + 1, matrices = i->count - first;
    if (!whole_warp(w, i) || !rows(w, i, matrices, row)) return;
    for (int m = 0; m < matrices; m++)
        for (int l = 0; l < LANES; l++)
            for (int h = 0; h < 2; h++) {
                int r = l / 4, c = 2 * (l % 4) + h;
                uint16_t e = (uint16_t)(LANE32(first + m)[l] >> (16 * h));
                if (i->flags & FLAG_TRANS) memcpy(row[8 * m + c] + 2 * r, &e, 2);
                else memcpy(row[8 * m + r] + 2 * c, &e, 2);
            }
}

static const char *prepare_matrix(struct ins *i) {
    bool load = i->address != 0;
    int have = load ? i->outputs : i->count - 1;
    const char *x = strstr(i->spelling, ".x");
    return x && x[2] - '0' == have ? NULL : "number of registers";
}

// element gives A[m][k] or B[k][n] from the registers of a fragment: `at` is m or n. Registers come
// in pairs of rows for A (m, m + 8), then blocks of k.
static double element(const struct warp *w, const struct ins *i, int first, bool is_a, int at,
                      int k) {
    bool tf32 = i->type[1] == TF32;
    int per = tf32 ? 4 : 8; // k in one register of all lanes
    int lane = 4 * (at % 8) + (tf32 ? k % 4 : k % 8 / 2);
    int reg = is_a ? at / 8 + 2 * (k / per) : k / per;
    uint32_t bits = LANE32(first + reg)[lane];
    if (tf32) return float_of(bits & 0xffffe000);
    uint16_t half = (uint16_t)(bits >> (16 * (k & 1)));
    return i->type[1] == BF16 ? float_of_bf16(half) : ptx_decode_float(half, &format_f16);
}

static void mma(struct warp *w, const struct ins *i) {
    if (!whole_warp(w, i)) return;
    int depth = strstr(i->spelling, "k16") ? 16 : strstr(i->spelling, "k8") ? 8 : 4;
    int a = 4, b = a + (i->count - 8) * 2 / 3, c = i->count - 4;
    float out[16][8];
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 8; n++) {
            int lane = 4 * (m % 8) + n / 2, reg = 2 * (m / 8) + n % 2;
            double sum = LANEF(c + reg)[lane];
            for (int k = 0; k < depth; k++)
                sum += element(w, i, a, true, m, k) * element(w, i, b, false, n, k);
            out[m][n] = (float)sum;
        }
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 8; n++)
            LANEF(2 * (m / 8) + n % 2)[4 * (m % 8) + n / 2] = out[m][n];
}

static const char *prepare_mma(struct ins *i) {
    if (i->type[1] != i->type[2]) return "A and B of different types";
    int depth = strstr(i->spelling, "k16") ? 16 : strstr(i->spelling, "k8") ? 8 : 4;
    int a = depth * (i->type[1] == TF32 ? 32 : 16) / 64; // 16 x depth elements over 32 lanes
    return i->outputs == 4 && i->count == 4 + a + a / 2 + 4 ? NULL : "number of registers";
}

#define SHARED "{.shared|.shared::cta}"

const struct row ptx_matrix_rows[] = {
    {"ldmatrix.sync.aligned.m8n8(.x1|.x2|.x4){.trans}" SHARED ".b16", "Tm", ldmatrix, KIND_SYNC,
     prepare_matrix},
    {"stmatrix.sync.aligned.m8n8(.x1|.x2|.x4){.trans}" SHARED ".b16", "mt", stmatrix, KIND_SYNC,
     prepare_matrix},
    {"mma.sync.aligned(.m16n8k8|.m16n8k16).row.col.f32(.bf16|.f16)(.bf16|.f16).f32", "Tttt", mma,
     KIND_SYNC, prepare_mma},
    {"mma.sync.aligned(.m16n8k4|.m16n8k8).row.col.f32.tf32.tf32.f32", "Tttt", mma, KIND_SYNC,
     prepare_mma},
    {0}};
