// Reads declarations: variables of all state spaces with their initializers, registers, and the
// parameters of kernels.
#include <stdio.h>
#include <stdlib.h>

#include "ptx_lex.h"

// Limits of what one module may ask for, so that a damaged text cannot exhaust memory.
enum { MAX_REGISTERS = 1 << 21, MAX_SHARED = 1 << 20, MAX_LOCAL = 1 << 20, MAX_SCOPES = 64 };
static const uint64_t max_global = 1ull << 32;

static ptx_type type_of(const char *name) {
    for (int t = 1; t <= PRED; t++)
        if (!strcmp(name, ptx_type_name((ptx_type)t))) return (ptx_type)t;
    return NO_TYPE;
}

struct declaration {
    ptx_type type;
    size_t align, count;
    int vector;
    bool external, array;
    ptx_space space;
    bool has_space;
    char name[256];
};

// directive takes one word of a declaration into account, and says whether it knows it.
static bool directive(struct cursor *c, struct declaration *d, const char *w) {
    static const struct { const char *name; ptx_space space; } spaces[] = {
        {".shared", SPACE_SHARED}, {".local", SPACE_LOCAL}, {".global", SPACE_GLOBAL},
        {".const", SPACE_GLOBAL}, {".param", SPACE_PARAM}};
    for (size_t n = 0; n < sizeof spaces / sizeof *spaces; n++)
        if (!strcmp(w, spaces[n].name)) {
            d->space = spaces[n].space;
            d->has_space = true;
            return true;
        }
    if (!strcmp(w, ".extern")) return d->external = true;
    if (!strcmp(w, ".visible") || !strcmp(w, ".weak") || !strcmp(w, ".common")) return true;
    if (!strcmp(w, ".ptr")) return true;
    if (!strcmp(w, ".align")) {
        d->align = ptx_integer(c);
        if (!d->align || d->align > 4096 || (d->align & (d->align - 1)))
            ptx_wrong(c, "bad alignment");
        return true;
    }
    if (!strcmp(w, ".v2") || !strcmp(w, ".v4")) {
        d->vector = w[2] - '0';
        return true;
    }
    ptx_type t = type_of(w + 1);
    if (w[0] == '.' && t) d->type = t;
    return w[0] == '.' && t;
}

// shape reads `name[2][3]`; the first extent may be missing.
static void shape(struct cursor *c, struct declaration *d) {
    d->count = d->vector ? (size_t)d->vector : 1;
    while (ptx_accept(c, '[')) {
        d->array = true;
        ptx_skip_space(c);
        uint64_t n = *c->p == ']' ? 0 : ptx_integer(c);
        if (n > max_global || d->count * n > max_global) ptx_wrong(c, "array too large");
        d->count *= n;
        ptx_expect(c, ']');
        if (c->error) return;
    }
}

struct variable *ptx_find(struct variable *v, size_t count, const char *name) {
    for (size_t n = 0; n < count; n++)
        if (!strcmp(v[n].name, name)) return &v[n];
    return NULL;
}

// one_value writes an element of an initializer: a number, or the address of a global variable.
static void one_value(struct cursor *c, struct ptx_module *m, ptx_type type, uint8_t *to) {
    struct operand o = {0};
    uint64_t value = 0;
    if (ptx_number(c, &o)) {
        value = o.number;
        if (o.number_kind == NUMBER_F64 && type == F32)
            value = bits_of((float)double_of(o.number));
    } else {
        ptx_word(c, o.word, sizeof o.word);
        bool generic = !strcmp(o.word, "generic") && ptx_accept(c, '(');
        if (generic) ptx_word(c, o.word, sizeof o.word);
        struct variable *v = ptx_find(m->variables, m->variable_count, o.word);
        if (!v || v->space != SPACE_GLOBAL || (type != U64 && type != B64))
            ptx_wrong(c, "initializer is no number and no address");
        else value = v->at;
        if (generic) ptx_expect(c, ')');
        ptx_add_offset(c, &o);
        value += (uint64_t)o.offset;
    }
    memcpy(to, &value, ptx_size(type));
}

static void initializer(struct cursor *c, const struct declaration *d, struct variable *v) {
    size_t size = ptx_size(d->type), n = 0;
    struct ptx_module *m = c->module;
    int depth = 0;
    do {
        while (ptx_accept(c, '{')) depth++;
        if (depth && ptx_accept(c, '}')) { depth--; continue; }
        if (n == d->count) ptx_wrong(c, "too many values");
        if (c->error) return;
        one_value(c, m, d->type, v->memory + n++ * size);
        while (depth && ptx_accept(c, '}')) depth--;
    } while (!c->error && depth && ptx_accept(c, ','));
    if (depth) ptx_wrong(c, "expected '}'");
}

// variable declares one outside a kernel (r is NULL) or inside.
static void variable(struct cursor *c, struct reader *r, struct declaration *d) {
    if (!d->type || d->type == PRED) return ptx_wrong(c, "variable without a type");
    struct ptx_module *m = c->module;
    struct variable v = {.space = d->space, .align = d->align ? d->align : ptx_size(d->type)};
    v.bytes = d->count * ptx_size(d->type);
    if (d->space == SPACE_GLOBAL) {
        if (v.bytes > max_global) return ptx_wrong(c, "variable too large");
        size_t align = v.align < 256 ? 256 : v.align;
        v.memory = aligned_alloc(align, ptx_aligned(v.bytes + 1, align));
        if (!v.memory) return ptx_wrong(c, "no memory for a variable");
        memset(v.memory, 0, v.bytes);
        v.at = (uint64_t)(uintptr_t)v.memory;
    } else {
        bool local = d->space == SPACE_LOCAL;
        if (local && !r) return ptx_wrong(c, "local variable outside a kernel");
        if (d->space == SPACE_PARAM) return ptx_wrong(c, "variable in the space of parameters");
        size_t *used = local ? &r->kernel->local_bytes : r ? &r->kernel->shared_bytes
                                                             : &m->shared_bytes;
        v.at = ptx_aligned(*used, v.align);
        v.dynamic = d->external;
        if (v.bytes > MAX_SHARED || v.at + v.bytes > (local ? MAX_LOCAL : MAX_SHARED))
            return ptx_wrong(c, "variable too large");
        if (d->external && local) return ptx_wrong(c, "local variable that is external");
        if (d->external) v.at = 0;
        else *used = v.at + v.bytes;
    }
    v.name = ptx_copy(d->name);
    struct variable *kept = d->space == SPACE_GLOBAL || !r
                                ? APPEND(m->variables, m->variable_count)
                                : APPEND(r->locals, r->local_count);
    *kept = v;
    if (ptx_accept(c, '=')) {
        if (v.memory) initializer(c, d, kept);
        else ptx_wrong(c, "initializer of a variable that has none");
    }
}

void ptx_registers(struct cursor *c, struct reader *r) {
    char w[256];
    ptx_type type = NO_TYPE;
    for (ptx_word(c, w, sizeof w); w[0] == '.'; ptx_word(c, w, sizeof w)) {
        type = type_of(w + 1);
        if (!type) ptx_problem(r, c->line, "register type %s is not known", w);
        if (c->error) return;
    }
    do {
        if (!w[0]) ptx_word(c, w, sizeof w);
        if (!w[0] || !type) {
            if (!r->kernel->problem) ptx_wrong(c, "expected the name of a register");
            if (c->error) return;
        }
        uint64_t count = 0;
        if (ptx_accept(c, '<')) {
            count = ptx_integer(c);
            ptx_expect(c, '>');
        }
        r->registers += count ? count : 1;
        if (count > MAX_REGISTERS || r->registers > MAX_REGISTERS)
            return ptx_wrong(c, "too many registers");
        struct scope_name *n = APPEND(r->names, r->name_count);
        n->name = ptx_copy(w);
        n->type = type;
        n->scope = r->scope;
        n->count = (uint32_t)count;
        n->slots = malloc((count ? count : 1) * sizeof *n->slots);
        memset(n->slots, 0xff, (count ? count : 1) * sizeof *n->slots);
        w[0] = 0;
    } while (!c->error && ptx_accept(c, ','));
    ptx_expect(c, ';');
}

// declaration reads a variable of any space; the first word has been read.
void ptx_declaration(struct cursor *c, struct reader *r, const char *first) {
    struct declaration d = {0};
    char w[256];
    snprintf(w, sizeof w, "%s", first);
    while (w[0] == '.') {
        if (!directive(c, &d, w)) {
            if (r) ptx_problem(r, c->line, "directive %s is not known", w);
            else ptx_wrong(c, "directive is not known");
        }
        if (c->error) return;
        ptx_word(c, w, sizeof w);
    }
    for (;;) {
        if (!w[0]) ptx_wrong(c, "expected the name of a variable");
        if (!d.has_space) ptx_wrong(c, "variable without a state space");
        snprintf(d.name, sizeof d.name, "%s", w);
        shape(c, &d);
        if (c->error) return;
        variable(c, r, &d);
        if (c->error || !ptx_accept(c, ',')) break;
        ptx_word(c, w, sizeof w);
    }
    ptx_expect(c, ';');
}

void ptx_parameters(struct cursor *c, struct ptx_kernel *k) {
    if (!ptx_accept(c, '(') || ptx_accept(c, ')')) return;
    do {
        struct declaration d = {0};
        char w[256];
        for (ptx_word(c, w, sizeof w); w[0] == '.'; ptx_word(c, w, sizeof w)) {
            // `.ptr .global .align 16` says what a pointer points to
            bool ptr = !strcmp(w, ".ptr");
            ptx_type type = d.type;
            size_t align = d.align;
            if (!directive(c, &d, w)) ptx_wrong(c, "directive is not known");
            while (ptr && !c->error) {
                ptx_word(c, w, sizeof w);
                if (w[0] != '.') break;
                if (!directive(c, &d, w)) ptx_wrong(c, "directive is not known");
            }
            if (ptr) d.type = type, d.align = align;
            if (c->error || ptr) break;
        }
        if (!w[0] || !d.type || d.type == PRED) ptx_wrong(c, "expected a parameter");
        shape(c, &d);
        if (c->error) return;
        size_t align = d.align ? d.align : ptx_size(d.type);
        struct param *p = APPEND(k->params, k->param_count);
        p->name = ptx_copy(w);
        p->bytes = d.count * ptx_size(d.type);
        p->offset = ptx_aligned(k->param_bytes, align);
        k->param_bytes = p->offset + p->bytes;
        if (p->bytes > MAX_SHARED || k->param_bytes > MAX_SHARED)
            ptx_wrong(c, "parameter too large");
    } while (!c->error && ptx_accept(c, ','));
    ptx_expect(c, ')');
}
