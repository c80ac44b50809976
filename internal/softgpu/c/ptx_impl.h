// What the files of the PTX interpreter share. Only ptx.h is for others.
//
// A warp's registers are arrays over its 32 lanes: uint8_t[32] to uint64_t[32] by the register's
// size, and one uint32_t with a bit per lane for a predicate. Constants and special registers live
// in the same file of registers, so that every operand of a decoded instruction is an offset into
// it, and an instruction's function is a loop over lanes that the C compiler vectorizes.
#ifndef SOFTGPU_PTX_IMPL_H
#define SOFTGPU_PTX_IMPL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "ptx.h"

enum { LANES = 32, MAX_OPERANDS = 16, MAX_TYPES = 4, BARRIERS = 16 };

typedef enum {
    NO_TYPE, B8, B16, B32, B64, U8, U16, U32, U64, S8, S16, S32, S64, F16, BF16, TF32, F32, F64,
    F16X2, BF16X2, F32X2, E4M3X2, E5M2X2, E2M1X2, E2M1X4, UE8M0X2, PRED
} ptx_type;

// ptx_size gives a type's bytes; a predicate has 0.
unsigned ptx_size(ptx_type type);
const char *ptx_type_name(ptx_type type);
bool ptx_signed(ptx_type type);

typedef enum { SPACE_GENERIC, SPACE_GLOBAL, SPACE_SHARED, SPACE_LOCAL, SPACE_PARAM } ptx_space;

// Rounding modes of arithmetic, and of conversions.
enum { ROUND_NEAREST, ROUND_ZERO, ROUND_DOWN, ROUND_UP, ROUND_NEAREST_AWAY };

enum {
    FLAG_FTZ = 1,        // subnormal inputs and results are zeros of the same sign
    FLAG_SAT = 2,        // floats are clamped to [0, 1] with NaN as 0, integers to their range
    FLAG_NAN = 4,        // min and max give NaN when an input is NaN
    FLAG_RELU = 8,       // negative results are 0
    FLAG_SATFINITE = 16, // values beyond the largest finite one become it
    FLAG_CC = 32,        // the carry is written
    FLAG_INTEGER = 64,   // cvt rounds to an integer (rni, rzi, rmi, rpi)
    FLAG_TRANS = 128,    // ldmatrix and stmatrix transpose
    FLAG_ABS = 256,      // min and max compare magnitudes
    FLAG_ARRIVE = 512,   // a barrier is not waited for
    FLAG_ALIGNED = 1024, // all lanes of a warp must be at the same barrier instruction
};

// Words that select what one function does: comparisons, reductions, modes of shuffles.
typedef enum {
    SUB_NONE, SUB_EQ, SUB_NE, SUB_LT, SUB_LE, SUB_GT, SUB_GE, SUB_LO, SUB_LS, SUB_HI, SUB_HS,
    SUB_EQU, SUB_NEU, SUB_LTU, SUB_LEU, SUB_GTU, SUB_GEU, SUB_NUM, SUB_NAN, SUB_ADD, SUB_MIN,
    SUB_MAX, SUB_AND, SUB_OR, SUB_XOR, SUB_EXCH, SUB_CAS, SUB_INC, SUB_DEC, SUB_POPC, SUB_UP,
    SUB_DOWN, SUB_BFLY, SUB_IDX, SUB_ALL, SUB_ANY, SUB_UNI, SUB_BALLOT, SUB_FINITE, SUB_INFINITE,
    SUB_NUMBER, SUB_NOTANUMBER, SUB_NORMAL, SUB_SUBNORMAL
} ptx_sub;

// How the block's loop treats an instruction.
typedef enum {
    KIND_LANES,   // computes all lanes; lanes that are not active get their old values back
    KIND_MASKED,  // looks at the active lanes itself: memory and carries
    KIND_SYNC,    // waits for the lanes of its member mask
    KIND_BARRIER, // waits for the block
    KIND_BRANCH,
    KIND_EXIT,
    KIND_NOP
} ptx_kind;

struct warp;
struct ins;
typedef void (*ptx_function)(struct warp *w, const struct ins *i);

struct ins {
    ptx_function run;
    uint32_t op[MAX_OPERANDS];   // offsets of operands in the file of registers
    uint8_t width[MAX_OPERANDS]; // bytes of a lane of that register, 0 for a predicate
    uint8_t count;               // operands
    uint8_t outputs;             // of which the first are written
    uint8_t kind;
    uint8_t type[MAX_TYPES];
    uint8_t round;
    uint8_t sub, sub2;           // ptx_sub: comparison and its boolean operator, atomic operation
    uint8_t space;               // ptx_space of the address
    uint8_t vector;              // elements per lane of a load or store
    uint8_t address;             // operand that has the address
    uint8_t address2;            // and the second one of cp.async
    int8_t member;               // operand that has the member mask, -1 for all live lanes
    bool negated;                // @!p
    bool not_source;             // the predicate that is read is negated
    uint16_t flags;
    int32_t guard;               // offset of the predicate, -1 for none
    int32_t target;              // index of the branch's target
    int64_t offset, offset2;     // added to the address
    int line;                    // in the module's text
    const char *spelling;        // as written, for messages
    ptx_function inner;          // what a wrapper of run calls
};

struct variable {
    char *name;
    ptx_space space;
    size_t bytes, align;
    uint64_t at;     // offset in its space; of a global variable the address of memory
    uint8_t *memory; // owned, of a global variable
    bool dynamic;    // names the start of dynamic shared memory
};

struct param {
    char *name;
    size_t bytes, offset;
};

// A value that is the same for all lanes and blocks: a number or the address of a variable.
struct constant {
    uint32_t slot;
    uint8_t width;
    bool dynamic; // an offset from the start of dynamic shared memory
    uint64_t value;
};

enum { SPECIALS = 28 };

struct ptx_kernel {
    char *name;
    struct ptx_module *module;
    char *problem; // why it cannot be run
    struct param *params;
    size_t param_count, param_bytes;
    struct ins *code;
    size_t code_count;
    struct constant *constants;
    size_t constant_count;
    int32_t special[SPECIALS]; // slots of the special registers that are read, -1 for the others
    uint32_t file_bytes;       // of a warp's registers
    uint32_t carry;            // slot of the carry, a predicate
    size_t shared_bytes, local_bytes;
    unsigned required[3];      // .reqntid, 0 for any
    bool ordered;              // has atomics or volatile accesses: blocks run one after another
    uint64_t launches;         // so far, for the random order of each
};

struct ptx_module {
    struct ptx_kernel **kernels;
    size_t kernel_count;
    struct variable *variables;
    size_t variable_count;
    size_t shared_bytes; // of variables outside kernels
    char **texts;        // spellings that instructions point to
    size_t text_count;
};

struct barrier {
    unsigned arrived, needed; // threads; needed is 0 when all threads of the block are
    unsigned ones;            // threads that came with a true predicate (barrier.red)
};

struct block {
    const struct ptx_kernel *kernel;
    const uint8_t *params;
    uint8_t *shared;
    size_t shared_bytes;
    struct warp *warps;
    unsigned warp_count, threads, live_threads;
    unsigned grid[3], size[3], at[3];
    struct barrier barriers[BARRIERS];
    unsigned *order;  // of warps, between barriers
    bool shuffled;    // the order is random, by the state
    uint64_t random;
    char *error;
};

// A cp.async of one lane that has not happened yet.
struct copy {
    uint8_t *to;
    const uint8_t *from;
    uint32_t group;
    uint8_t lane, bytes, valid; // what is not valid becomes 0
};

struct warp {
    uint8_t *file;
    struct block *block;
    uint8_t *local; // of lane 0; the lanes follow one another
    uint32_t live;    // lanes that have not exited
    uint32_t active;  // lanes that execute the current instruction
    uint32_t syncing; // lanes that wait at a KIND_SYNC instruction
    uint32_t barred;  // lanes that wait at a barrier
    uint32_t pc[LANES];
    uint8_t barrier[LANES];
    uint32_t group[LANES]; // groups of copies that a lane has committed
    struct copy *copies;   // pending
    size_t copy_count, copy_room;
    unsigned index;
};

// A row of the table of opcodes. The pattern is the spelling as the PTX manual gives it: `{.a|.b}`
// may be missing, `(.a|.b)` may not. The form has one letter per operand, see ptx_decode.c.
struct row {
    const char *pattern, *form;
    ptx_function run;
    ptx_kind kind;
    // prepare, if any, finishes a decoded instruction, and returns what is wrong with it or NULL.
    const char *(*prepare)(struct ins *i);
};

extern const struct row ptx_integer_rows[], ptx_compare_rows[], ptx_float_rows[], ptx_half_rows[],
    ptx_convert_rows[], ptx_memory_rows[], ptx_async_rows[], ptx_warp_rows[], ptx_matrix_rows[],
    ptx_control_rows[];

// Operands as pointers to lanes. A register is read as any type of its size, so these may alias.
typedef uint8_t __attribute__((may_alias)) lane8;
typedef uint16_t __attribute__((may_alias)) lane16;
typedef uint32_t __attribute__((may_alias)) lane32;
typedef uint64_t __attribute__((may_alias)) lane64;
typedef float __attribute__((may_alias)) lane_float;
typedef double __attribute__((may_alias)) lane_double;
#define LANE8(n) ((lane8 *)(w->file + i->op[n]))
#define LANE16(n) ((lane16 *)(w->file + i->op[n]))
#define LANE32(n) ((lane32 *)(w->file + i->op[n]))
#define LANE64(n) ((lane64 *)(w->file + i->op[n]))
#define LANEF(n) ((lane_float *)(w->file + i->op[n]))
#define LANED(n) ((lane_double *)(w->file + i->op[n]))
#define BITS(n) (*(lane32 *)(w->file + i->op[n]))

// Two registers are the same or do not overlap, so a loop over lanes has no dependencies.
#define EACH_LANE _Pragma("GCC ivdep") for (int l = 0; l < LANES; l++)

static inline float float_of(uint32_t bits) { float f; memcpy(&f, &bits, 4); return f; }
static inline uint32_t bits_of(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
static inline double double_of(uint64_t bits) { double d; memcpy(&d, &bits, 8); return d; }
static inline uint64_t bits_of_double(double d) { uint64_t u; memcpy(&u, &d, 8); return u; }

// ptx_read and ptx_write move one lane of an operand of any width.
uint64_t ptx_read(const struct warp *w, const struct ins *i, int operand, int lane);
void ptx_write(struct warp *w, const struct ins *i, int operand, int lane, uint64_t value);

// ptx_fill sets all lanes of a 32-bit slot, unless it is -1.
void ptx_fill(struct warp *w, int32_t slot, uint32_t value);
void ptx_run_block(struct block *b);

// ptx_random is the next number of a generator.
uint64_t ptx_random(uint64_t *state);

// ptx_locate gives the memory that each active lane accesses, or false after ptx_fail.
bool ptx_locate(struct warp *w, const struct ins *i, int operand, int space, int64_t offset,
                size_t bytes, bool write, uint8_t *at[LANES]);

// ptx_fail ends the launch: the message names kernel, line and instruction.
void ptx_fail(struct warp *w, const struct ins *i, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

// ptx_text formats into memory that the caller frees.
char *ptx_text(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Small float formats; see ptx_formats.c.
struct format {
    int mantissa, exponent, bias;
    uint32_t largest, infinity, nan; // codes without a sign; infinity is 0 for none
    bool has_nan;
};
extern const struct format format_f32, format_f16, format_bf16, format_e4m3, format_e5m2,
    format_e2m1;
uint32_t ptx_encode(double x, const struct format *f, int round, int flags);
double ptx_decode_float(uint32_t code, const struct format *f);
double ptx_fma_odd(double a, double b, double c);

static inline float float_of_bf16(uint16_t b) { return float_of((uint32_t)b << 16); }

// bf16_of rounds to nearest even; NaN becomes the canonical 0x7fff.
static inline uint16_t bf16_of(float f) {
    uint32_t u = bits_of(f);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fff : (uint16_t)rounded;
}

// Parsed text, between ptx_parse.c and ptx_decode.c.
typedef enum { OPERAND_WORD, OPERAND_NUMBER, OPERAND_LIST, OPERAND_ADDRESS } operand_kind;
typedef enum { NUMBER_INTEGER, NUMBER_F32, NUMBER_F64 } number_kind;

struct operand {
    operand_kind kind;
    char word[128];          // register, variable, label, or _
    uint64_t number;         // bits
    number_kind number_kind;
    bool negated;            // !p
    int64_t offset;          // of a word or an address
    int first, count;        // of a list or an address: its members among the operands
};

enum { MAX_PARSED = 64 };

struct statement {
    char spelling[192]; // the opcode with its modifiers
    char guard[128];
    bool guarded, guard_negated;
    bool paired; // results are `p|q`
    struct operand operands[MAX_PARSED];
    int top[MAX_PARSED]; // the operands that are no members of others
    int top_count, used;
    int line;
};

struct scope_name { char *name; ptx_type type; int scope; uint32_t count; int32_t *slots; };
struct label { char *name; int scope; uint32_t at; };
struct fixup { char *name; uint32_t ins; int scope_from; };

// What is known while a kernel's body is read.
struct reader {
    struct ptx_module *module;
    struct ptx_kernel *kernel;
    struct scope_name *names;
    size_t name_count;
    struct label *labels;
    size_t label_count;
    struct fixup *fixups;
    size_t fixup_count;
    struct variable *locals; // variables inside the kernel
    size_t local_count;
    int scope;
    uint64_t registers;      // declared, to bound memory
    struct statement statement;
};

enum { MAX_TOKENS = 16, TOKEN_ROOM = 40 };

// A spelling, cut at its dots.
struct tokens {
    char word[MAX_TOKENS][TOKEN_ROOM];
    int count;
};

bool ptx_split(const char *spelling, struct tokens *t);
// ptx_find_row gives the row of a spelling or NULL, and says whether any row has its mnemonic.
const struct row *ptx_find_row(const struct tokens *t, bool *mnemonic);
// ptx_apply sets what one token says.
void ptx_apply(struct ptx_kernel *k, struct ins *i, const char *token);

// ptx_decode appends an instruction to the kernel, or sets the kernel's problem.
void ptx_decode(struct reader *r, const struct statement *s);
void ptx_problem(struct reader *r, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
uint32_t ptx_new_slot(struct ptx_kernel *k, unsigned width);
void *ptx_grow(void *items, size_t count, size_t bytes);

#endif
