// Turns a parsed statement into an instruction: finds the row whose pattern matches the spelling,
// and makes operands offsets into the file of registers.
//
// A row's form is a list of alternatives, separated by spaces, with one letter per operand:
//
//     d D j   registers written, of type 1, of twice its size, of 32 bits
//     a A b   sources of type 1, of twice its size, of type 2
//     2 4 8   sources of 16, 32 and 64 bits
//     P Q     a predicate written, and one that follows another result as in `p|q`
//     p n     a predicate read, and one that may have a `!`
//     C E     the registers of cvt, which may be wider than types 1 and 2
//     V U     what ld writes and st reads: wider registers and vectors too
//     k K     what mov writes and reads: vectors are packed
//     T t     lists of 32-bit registers of matrix instructions, written and read
//     m l     an address, a label
#include <stdio.h>
#include <stdlib.h>

#include "ptx_impl.h"

// --- Registers, constants, variables ---

uint32_t ptx_new_slot(struct ptx_kernel *k, unsigned width) {
    uint32_t bytes = width ? width * LANES : 4, align = width ? 32 : 4;
    uint32_t at = (k->file_bytes + align - 1) / align * align;
    k->file_bytes = at + bytes;
    return at;
}

static const struct { const char *name; uint8_t width; } specials[SPECIALS] = {
    {"%tid.x", 4}, {"%tid.y", 4}, {"%tid.z", 4}, {"%ntid.x", 4}, {"%ntid.y", 4}, {"%ntid.z", 4},
    {"%ctaid.x", 4}, {"%ctaid.y", 4}, {"%ctaid.z", 4}, {"%nctaid.x", 4}, {"%nctaid.y", 4},
    {"%nctaid.z", 4}, {"%laneid", 4}, {"%warpid", 4}, {"%nwarpid", 4}, {"%lanemask_eq", 4},
    {"%lanemask_lt", 4}, {"%lanemask_le", 4}, {"%lanemask_gt", 4}, {"%lanemask_ge", 4},
    {"%smid", 4}, {"%nsmid", 4}, {"%dynamic_smem_size", 4}, {"%total_smem_size", 4},
    {"%cluster_ctarank", 4}, {"%cluster_nctarank", 4}, {"%is_explicit_cluster", 0},
    {"%gridid", 8}};

static int32_t special(struct ptx_kernel *k, const char *name, unsigned *width) {
    for (int n = 0; n < SPECIALS; n++)
        if (!strcmp(name, specials[n].name)) {
            *width = specials[n].width;
            if (k->special[n] < 0) k->special[n] = (int32_t)ptx_new_slot(k, *width);
            return k->special[n];
        }
    return -1;
}

// find_register gives the slot of a declared register, innermost scope first, or -1.
static int32_t find_register(struct reader *r, const char *name, unsigned *width) {
    size_t length = strlen(name), digits = length;
    while (digits && name[digits - 1] >= '0' && name[digits - 1] <= '9') digits--;
    uint64_t number = digits < length && length - digits < 10 ? strtoull(name + digits, NULL, 10)
                                                              : UINT64_MAX;
    for (size_t at = r->name_count; at-- > 0;) {
        struct scope_name *n = &r->names[at];
        bool range = n->count && strlen(n->name) == digits && !memcmp(n->name, name, digits) &&
                     number < n->count;
        if (!range && (n->count || strcmp(n->name, name))) continue;
        int32_t *slot = &n->slots[range ? number : 0];
        *width = ptx_size(n->type);
        if (*slot < 0) *slot = (int32_t)ptx_new_slot(r->kernel, *width);
        return *slot;
    }
    return special(r->kernel, name, width);
}

static uint32_t constant(struct ptx_kernel *k, unsigned width, uint64_t value, bool dynamic) {
    if (width < 8) value &= width ? (1ull << (8 * width)) - 1 : 1;
    for (size_t n = 0; n < k->constant_count; n++) {
        struct constant *c = &k->constants[n];
        if (c->width == width && c->value == value && c->dynamic == dynamic) return c->slot;
    }
    k->constants = ptx_grow(k->constants, k->constant_count, sizeof *k->constants);
    struct constant *c = &k->constants[k->constant_count++];
    *c = (struct constant){ptx_new_slot(k, width), (uint8_t)width, dynamic, value};
    return c->slot;
}

static const struct variable *find_variable(struct reader *r, const char *name) {
    for (size_t n = r->local_count; n-- > 0;)
        if (!strcmp(r->locals[n].name, name)) return &r->locals[n];
    for (size_t n = 0; n < r->module->variable_count; n++)
        if (!strcmp(r->module->variables[n].name, name)) return &r->module->variables[n];
    return NULL;
}

// symbol gives a constant with the address of a variable or parameter, and its space.
static bool symbol(struct reader *r, const struct operand *o, unsigned width, uint32_t *slot,
                   ptx_space *space) {
    uint64_t add = (uint64_t)o->offset;
    for (size_t n = 0; n < r->kernel->param_count; n++)
        if (!strcmp(r->kernel->params[n].name, o->word)) {
            *space = SPACE_PARAM;
            *slot = constant(r->kernel, width, r->kernel->params[n].offset + add, false);
            return true;
        }
    const struct variable *v = find_variable(r, o->word);
    if (!v || (v->space == SPACE_GLOBAL && width != 8)) return false;
    *space = v->space;
    *slot = constant(r->kernel, width, v->at + add, v->dynamic);
    return true;
}

// --- Operands ---

struct decoder {
    struct reader *reader;
    const struct statement *s;
    struct ins *i;
    bool failed;
};

static bool reject(struct decoder *d, const char *why, const char *what) {
    if (!d->failed) ptx_problem(d->reader, d->s->line, "%s: %s %s", d->s->spelling, why, what);
    d->failed = true;
    return false;
}

static bool push(struct decoder *d, uint32_t slot, unsigned width) {
    if (d->i->count == MAX_OPERANDS) return reject(d, "too many", "operands");
    d->i->op[d->i->count] = slot;
    d->i->width[d->i->count++] = (uint8_t)width;
    return true;
}

// number gives a constant for a literal of the operand's type.
static bool number(struct decoder *d, const struct operand *o, unsigned width, ptx_type type) {
    uint64_t v = o->number;
    bool is_float = type == F32 || type == F64 || type == F16 || type == BF16;
    if (o->number_kind == NUMBER_INTEGER && is_float && (type == F32 || type == F64))
        return reject(d, "an integer stands for", ptx_type_name(type));
    if (o->number_kind == NUMBER_F64 && width == 4) v = bits_of((float)double_of(v));
    if (o->number_kind == NUMBER_F32 && width == 8) v = bits_of_double(float_of((uint32_t)v));
    if (o->number_kind != NUMBER_INTEGER && width < 4)
        return reject(d, "a float stands for", ptx_type_name(type));
    return push(d, constant(d->reader->kernel, width, v, false), width);
}

// source adds an operand that is read. With wider, registers may have more bytes than the type.
static bool source(struct decoder *d, const struct operand *o, ptx_type type, bool wider) {
    unsigned width = ptx_size(type), have;
    if (o->kind == OPERAND_NUMBER) return number(d, o, width, type);
    if (o->kind != OPERAND_WORD) return reject(d, "operand is no", "register");
    if (o->negated && type != PRED) return reject(d, "negated operand", o->word);
    int32_t slot = find_register(d->reader, o->word, &have);
    if (slot >= 0) {
        if (o->offset) return reject(d, "offset of register", o->word);
        bool fits = type == PRED || have == 0 ? type == PRED && have == 0
                                              : have == width || (wider && have > width);
        if (!fits) return reject(d, "size of operand", o->word);
        if (o->negated) d->i->not_source = true;
        return push(d, (uint32_t)slot, have);
    }
    if (!strcmp(o->word, "WARP_SZ"))
        return push(d, constant(d->reader->kernel, width, LANES, false), width);
    uint32_t at;
    ptx_space space;
    if (width < 4 || !symbol(d->reader, o, width, &at, &space))
        return reject(d, "no register or variable", o->word);
    return push(d, at, width);
}

static bool output(struct decoder *d, const struct operand *o, ptx_type type, bool wider) {
    unsigned width = ptx_size(type), have;
    if (o->kind != OPERAND_WORD) return reject(d, "result is no", "register");
    if (!strcmp(o->word, "_")) { // a sink
        bool ok = push(d, ptx_new_slot(d->reader->kernel, width), width);
        d->i->outputs = d->i->count;
        return ok;
    }
    if (o->negated || o->offset) return reject(d, "result", o->word);
    int32_t slot = find_register(d->reader, o->word, &have);
    if (slot < 0) return reject(d, "no register", o->word);
    for (int n = 0; n < SPECIALS; n++)
        if (slot == d->reader->kernel->special[n]) return reject(d, "cannot write", o->word);
    bool fits = type == PRED || have == 0 ? type == PRED && have == 0
                                          : have == width || (wider && have > width);
    if (!fits) return reject(d, "size of result", o->word);
    bool ok = push(d, (uint32_t)slot, have);
    d->i->outputs = d->i->count;
    return ok;
}

// each applies source or output to an operand or to the members of a list of given length.
static bool each(struct decoder *d, const struct operand *o, ptx_type type, bool wider, int length,
                 bool (*add)(struct decoder *, const struct operand *, ptx_type, bool)) {
    if (o->kind != OPERAND_LIST) {
        if (length > 1) return reject(d, "expected a", "vector");
        return add(d, o, type, wider);
    }
    if (length && o->count != length) return reject(d, "length of a", "vector");
    for (int n = 0; n < o->count; n++)
        if (!add(d, &d->s->operands[o->first + n], type, wider)) return false;
    return true;
}

// packed adds what mov moves: a register, or a list whose sizes add up to the type's.
static bool packed(struct decoder *d, const struct operand *o, ptx_type type,
                   bool (*add)(struct decoder *, const struct operand *, ptx_type, bool)) {
    if (o->kind != OPERAND_LIST) return add(d, o, type, false);
    unsigned size = ptx_size(type);
    if ((o->count != 2 && o->count != 4) || size / (unsigned)o->count < 1)
        return reject(d, "length of a", "vector");
    ptx_type part = size / (unsigned)o->count == 1   ? B8
                    : size / (unsigned)o->count == 2 ? B16
                                                     : B32;
    d->i->vector = (uint8_t)o->count;
    return each(d, o, part, false, o->count, add);
}

static bool address(struct decoder *d, const struct operand *o) {
    if (o->kind != OPERAND_ADDRESS) return reject(d, "expected an", "address");
    const struct operand *base = &d->s->operands[o->first];
    bool second = d->i->address != UINT8_MAX;
    int64_t offset = o->offset;
    unsigned width;
    uint32_t slot;
    ptx_space space;
    if (base->kind == OPERAND_NUMBER) {
        slot = constant(d->reader->kernel, 8, base->number, false);
        width = 8;
    } else if (base->kind != OPERAND_WORD || base->negated) {
        return reject(d, "expected an", "address");
    } else {
        int32_t reg = find_register(d->reader, base->word, &width);
        slot = (uint32_t)reg;
        if (reg >= 0 && width != 4 && width != 8) return reject(d, "size of address", base->word);
        if (reg < 0) {
            width = 8;
            if (!symbol(d->reader, base, 8, &slot, &space))
                return reject(d, "no register or variable", base->word);
            if (d->i->space == SPACE_GENERIC) d->i->space = (uint8_t)space;
            if (d->i->space != space && !second)
                return reject(d, "another state space than that of", base->word);
        }
    }
    if (second) d->i->address2 = d->i->count, d->i->offset2 = offset;
    else d->i->address = d->i->count, d->i->offset = offset;
    return push(d, slot, width);
}

static bool label(struct decoder *d, const struct operand *o) {
    if (o->kind != OPERAND_WORD || o->offset || o->negated) return reject(d, "expected a", "label");
    struct reader *r = d->reader;
    r->fixups = ptx_grow(r->fixups, r->fixup_count, sizeof *r->fixups);
    r->fixups[r->fixup_count++] =
        (struct fixup){ptx_text("%s", o->word), (uint32_t)r->kernel->code_count, r->scope};
    return true;
}

static ptx_type doubled(ptx_type t) {
    switch (ptx_size(t)) {
    case 2: return B32;
    case 4: return B64;
    default: return NO_TYPE; // of size 0, which fits no register
    }
}

static bool one_operand(struct decoder *d, char letter, const struct operand *o) {
    struct ins *i = d->i;
    ptx_type t = i->type[0], t2 = i->type[1];
    if (strchr("aAb248pnCEdDjPQ", letter) && o->kind == OPERAND_LIST)
        return reject(d, "unexpected", "vector");
    switch (letter) {
    case 'd': return output(d, o, t, false);
    case 'D': return output(d, o, doubled(t), false);
    case 'j': return output(d, o, B32, false);
    case 'P': case 'Q': return output(d, o, PRED, false);
    case 'C': return output(d, o, t, true);
    case 'a': return source(d, o, t, false);
    case 'A': return source(d, o, doubled(t), false);
    case 'b': return source(d, o, t2, false);
    case '2': return source(d, o, B16, false);
    case '4': return source(d, o, B32, false);
    case '8': return source(d, o, B64, false);
    case 'p': return !o->negated ? source(d, o, PRED, false) : reject(d, "negated", o->word);
    case 'n': return source(d, o, PRED, false);
    case 'E': return source(d, o, t2, true);
    case 'V': return each(d, o, t, true, i->vector, output);
    case 'U': return each(d, o, t, true, i->vector, source);
    case 'T': return each(d, o, B32, false, 0, output);
    case 't': return each(d, o, B32, false, 0, source);
    case 'k': return packed(d, o, t, output);
    case 'K': return packed(d, o, t, source);
    case 'm': return address(d, o);
    case 'l': return label(d, o);
    default: return reject(d, "form of the row", "is not known");
    }
}

static bool all_operands(struct decoder *d, const char *form) {
    for (const char *f = form;; f++) {
        size_t n = strcspn(f, " ");
        bool pair = memchr(f, 'Q', n) != NULL;
        if ((int)n == d->s->top_count && pair == d->s->paired) {
            for (size_t k = 0; k < n; k++)
                if (!one_operand(d, f[k], &d->s->operands[d->s->top[k]])) return false;
            return true;
        }
        f += n;
        if (!*f) return reject(d, "number of", "operands");
    }
}

static bool guard(struct decoder *d) {
    unsigned width = 4;
    d->i->guard = -1;
    if (!d->s->guarded) return true;
    d->i->guard = find_register(d->reader, d->s->guard, &width);
    if (d->i->guard < 0 || width) return reject(d, "no predicate", d->s->guard);
    d->i->negated = d->s->guard_negated;
    return true;
}

const char *ptx_spelling(const struct ptx_module *m, size_t n) {
    return n < m->text_count ? m->texts[n] : NULL;
}

static const char *keep_spelling(struct ptx_module *m, const char *spelling) {
    for (size_t n = m->text_count; n-- > 0 && m->text_count - n < 400;)
        if (!strcmp(m->texts[n], spelling)) return m->texts[n];
    m->texts = ptx_grow(m->texts, m->text_count, sizeof *m->texts);
    return m->texts[m->text_count++] = ptx_text("%s", spelling);
}

void ptx_decode(struct reader *r, const struct statement *s) {
    struct tokens t;
    bool mnemonic = false;
    const struct row *row = ptx_split(s->spelling, &t) ? ptx_find_row(&t, &mnemonic) : NULL;
    if (!row) {
        ptx_problem(r, s->line, mnemonic ? "%s: a type or modifier is not known"
                                         : "opcode %s is not known", s->spelling);
        return;
    }
    struct ins i = {.run = row->run, .kind = (uint8_t)row->kind, .line = s->line, .vector = 1,
                    .address = UINT8_MAX, .address2 = UINT8_MAX, .member = -1,
                    .target = -1};
    for (int n = 1; n < t.count; n++) ptx_apply(r->kernel, &i, t.word[n]);
    struct decoder d = {r, s, &i, false};
    if (!guard(&d) || !all_operands(&d, row->form)) return;
    i.spelling = keep_spelling(r->module, s->spelling);
    const char *why = row->prepare ? row->prepare(&i) : NULL;
    if (why) {
        reject(&d, why, "");
        return;
    }
    if (!strcmp(t.word[0], "atom") || !strcmp(t.word[0], "red")) r->kernel->ordered = true;
    struct ptx_kernel *k = r->kernel;
    k->code = ptx_grow(k->code, k->code_count, sizeof *k->code);
    k->code[k->code_count++] = i;
}
