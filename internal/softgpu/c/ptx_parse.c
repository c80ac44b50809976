// Reads PTX text: modules, kernels, and the statements of their bodies, which ptx_decode.c turns
// into instructions.
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>

#include "ptx_lex.h"



// --- Operands ---

static int operand(struct cursor *c, struct statement *s, int depth);

static int new_operand(struct cursor *c, struct statement *s) {
    if (s->used == MAX_PARSED) {
        ptx_wrong(c, "too many operands");
        return -1;
    }
    memset(&s->operands[s->used], 0, sizeof s->operands[0]);
    return s->used++;
}

// list reads operands up to the closing character. Members must be neighbours, so lists do not nest
// in lists.
static int list(struct cursor *c, struct statement *s, char close, int depth) {
    int at = new_operand(c, s);
    if (at < 0) return at;
    s->operands[at].kind = OPERAND_LIST;
    s->operands[at].first = s->used;
    if (!ptx_accept(c, close)) {
        do {
            int member = operand(c, s, depth + 1);
            if (member < 0) return -1;
            s->operands[at].count++;
        } while (ptx_accept(c, ','));
        ptx_expect(c, close);
    }
    return at;
}

static int address(struct cursor *c, struct statement *s, int depth) {
    int at = new_operand(c, s);
    if (at < 0) return at;
    int base = operand(c, s, depth + 1);
    if (base < 0) return -1;
    s->operands[at].kind = OPERAND_ADDRESS;
    s->operands[at].first = base;
    s->operands[at].count = 1;
    ptx_add_offset(c, &s->operands[at]);
    ptx_expect(c, ']');
    return at;
}

static int operand(struct cursor *c, struct statement *s, int depth) {
    if (depth > 2) {
        ptx_wrong(c, "operands nest too deeply");
        return -1;
    }
    if (ptx_accept(c, '{')) return list(c, s, '}', depth);
    if (ptx_accept(c, '[')) return address(c, s, depth);
    if (ptx_accept(c, '(')) return list(c, s, ')', depth);
    int at = new_operand(c, s);
    if (at < 0) return at;
    struct operand *o = &s->operands[at];
    o->negated = ptx_accept(c, '!');
    if (ptx_number(c, o)) return at;
    o->kind = OPERAND_WORD;
    ptx_word(c, o->word, sizeof o->word);
    if (!o->word[0]) {
        ptx_wrong(c, "expected an operand");
        return -1;
    }
    if (depth == 0) ptx_add_offset(c, o);
    return at;
}

// statement reads what follows an opcode, up to the semicolon. `p|q` are two operands.
static void operands(struct cursor *c, struct statement *s) {
    if (ptx_accept(c, ';')) return;
    do {
        int at = operand(c, s, 0);
        if (at < 0) return;
        s->top[s->top_count++] = at;
        bool bar = s->top_count == 1 && ptx_accept(c, '|');
        s->paired |= bar;
        if (!bar && !ptx_accept(c, ',')) break;
    } while (true);
    ptx_expect(c, ';');
}

// --- Bodies ---

// close_scope resolves branches to the labels of the scope that ends, and forgets its names.
static void close_scope(struct reader *r) {
    for (size_t f = 0; f < r->fixup_count; f++) {
        struct fixup *x = &r->fixups[f];
        if (!x->name || x->scope_from < r->scope) continue;
        for (size_t n = 0; n < r->label_count; n++)
            if (r->labels[n].scope == r->scope && !strcmp(r->labels[n].name, x->name)) {
                r->kernel->code[x->ins].target = (int32_t)r->labels[n].at;
                free(x->name);
                x->name = NULL;
                break;
            }
        if (x->name && x->scope_from == r->scope) x->scope_from--;
    }
    while (r->label_count && r->labels[r->label_count - 1].scope == r->scope)
        free(r->labels[--r->label_count].name);
    while (r->name_count && r->names[r->name_count - 1].scope == r->scope) {
        free(r->names[--r->name_count].name);
        free(r->names[r->name_count].slots);
    }
    r->scope--;
}

static void label(struct cursor *c, struct reader *r, const char *name) {
    for (size_t n = 0; n < r->label_count; n++)
        if (r->labels[n].scope == r->scope && !strcmp(r->labels[n].name, name))
            return ptx_wrong(c, "label appears twice");
    struct label *l = APPEND(r->labels, r->label_count);
    l->name = ptx_copy(name);
    l->scope = r->scope;
    l->at = (uint32_t)r->kernel->code_count;
}

static void statement(struct cursor *c, struct reader *r) {
    struct statement *s = &r->statement;
    s->guarded = s->guard_negated = s->paired = false;
    s->used = s->top_count = 0;
    if (ptx_accept(c, '@')) {
        s->guarded = true;
        s->guard_negated = ptx_accept(c, '!');
        ptx_word(c, s->guard, sizeof s->guard);
    }
    ptx_word(c, s->spelling, sizeof s->spelling);
    s->line = c->line;
    if (c->error) return;
    if (!s->spelling[0]) {
        ptx_wrong(c, "expected an instruction");
        return;
    }
    if (!s->guarded && *c->p == ':') {
        c->p++;
        label(c, r, s->spelling);
        return;
    }
    const char *start = c->p;
    operands(c, s);
    if (c->error) { // operands of a kind that no known instruction has, such as those of TMA
        ptx_problem(r, s->line, "%s: operands are not known", s->spelling);
        free(c->error);
        c->error = NULL;
        c->p = start;
        c->line = s->line;
        ptx_skip_to(c, ';');
    } else if (!r->kernel->problem) {
        ptx_decode(r, s);
    }
}

static void body_directive(struct cursor *c, struct reader *r) {
    char w[256];
    ptx_word(c, w, sizeof w);
    if (!strcmp(w, ".reg")) ptx_registers(c, r);
    else if (!strcmp(w, ".loc")) ptx_skip_line(c);
    else if (!strcmp(w, ".pragma")) ptx_skip_to(c, ';');
    else ptx_declaration(c, r, w);
}

static void body(struct cursor *c, struct reader *r) {
    r->scope = 1;
    while (!c->error && r->scope) {
        ptx_skip_space(c);
        if (!*c->p) return ptx_wrong(c, "text ends inside a kernel");
        if (ptx_accept(c, ';')) continue;
        if (ptx_accept(c, '{')) {
            if (++r->scope > 64) ptx_wrong(c, "scopes nest too deeply");
        } else if (ptx_accept(c, '}')) close_scope(r);
        else if (*c->p == '.') body_directive(c, r);
        else statement(c, r);
    }
    for (size_t f = 0; f < r->fixup_count && !c->error; f++)
        if (r->fixups[f].name)
            ptx_problem(r, r->kernel->code[r->fixups[f].ins].line, "label %s is not there",
                        r->fixups[f].name);
}

static void free_reader(struct reader *r) {
    for (size_t n = 0; n < r->name_count; n++) free(r->names[n].name), free(r->names[n].slots);
    for (size_t n = 0; n < r->label_count; n++) free(r->labels[n].name);
    for (size_t n = 0; n < r->fixup_count; n++) free(r->fixups[n].name);
    for (size_t n = 0; n < r->local_count; n++) free(r->locals[n].name);
    free(r->names), free(r->labels), free(r->fixups), free(r->locals);
}

// entry reads a kernel; its name comes next.
static void entry(struct cursor *c) {
    char w[256];
    ptx_word(c, w, sizeof w);
    if (!w[0]) return ptx_wrong(c, "entry without a name");
    struct ptx_module *m = c->module;
    struct ptx_kernel *k = calloc(1, sizeof *k);
    *APPEND(m->kernels, m->kernel_count) = k;
    k->name = ptx_copy(w);
    k->module = m;
    memset(k->special, 0xff, sizeof k->special);
    k->carry = ptx_new_slot(k, 0);
    ptx_parameters(c, k);
    struct reader r = {.module = m, .kernel = k};
    for (ptx_skip_space(c); *c->p == '.' && !c->error; ptx_skip_space(c)) {
        ptx_word(c, w, sizeof w);
        unsigned sizes[3] = {1, 1, 1};
        static const char *known[] = {".reqntid", ".maxntid", ".minnctapersm", ".maxnreg",
                                      ".maxclusterrank", ".noreturn", ".maxnctapersm"};
        bool is_known = false;
        for (size_t n = 0; n < sizeof known / sizeof *known; n++)
            is_known |= !strcmp(w, known[n]);
        if (!strcmp(w, ".pragma")) { ptx_skip_to(c, ';'); continue; }
        if (!is_known) ptx_problem(&r, c->line, "directive %s is not known", w);
        ptx_skip_space(c);
        for (int n = 0; isdigit((unsigned char)*c->p) && !c->error; n++) {
            uint64_t v = ptx_integer(c);
            if (n < 3) sizes[n] = (unsigned)v;
            if (!ptx_accept(c, ',')) break;
            ptx_skip_space(c);
        }
        if (!strcmp(w, ".reqntid")) memcpy(k->required, sizes, sizeof sizes);
    }
    k->shared_bytes = m->shared_bytes;
    ptx_expect(c, '{');
    if (!c->error) body(c, &r);
    // Dynamic shared memory lies behind all that is declared.
    k->shared_bytes = ptx_aligned(k->shared_bytes, 16);
    for (size_t n = 0; n < k->constant_count; n++)
        if (k->constants[n].dynamic) k->constants[n].value += k->shared_bytes;
    free_reader(&r);
}

// --- Modules ---

// linked reads what starts with linkage words: an entry, a function, or a variable.
static void top_level(struct cursor *c) {
    char w[256];
    const char *start = c->p;
    int line = c->line;
    for (;;) {
        ptx_word(c, w, sizeof w);
        if (strcmp(w, ".visible") && strcmp(w, ".weak") && strcmp(w, ".extern") &&
            strcmp(w, ".common"))
            break;
    }
    if (!strcmp(w, ".entry")) return entry(c);
    if (!strcmp(w, ".func")) { // calls are refused by name, so what is called is not needed
        for (ptx_skip_space(c); *c->p && *c->p != ';' && *c->p != '{'; ptx_skip_space(c)) c->p++;
        if (*c->p == '{') ptx_skip_braces(c);
        else ptx_skip_to(c, ';');
        return;
    }
    c->p = start;
    c->line = line;
    ptx_word(c, w, sizeof w);
    if (w[0] != '.') return ptx_wrong(c, "expected a directive");
    ptx_declaration(c, NULL, w);
}

static void module_text(struct cursor *c) {
    static const char *lines[] = {".version", ".target", ".address_size", ".file", ".loc"};
    for (ptx_skip_space(c); *c->p && !c->error; ptx_skip_space(c)) {
        if (ptx_accept(c, ';')) continue;
        const char *start = c->p;
        char w[256];
        ptx_word(c, w, sizeof w);
        bool skipped = false;
        for (size_t n = 0; n < sizeof lines / sizeof *lines && !skipped; n++)
            if (!strcmp(w, lines[n])) ptx_skip_line(c), skipped = true;
        if (!strcmp(w, ".pragma")) ptx_skip_to(c, ';'), skipped = true;
        if (!strcmp(w, ".section")) {
            ptx_word(c, w, sizeof w);
            ptx_skip_braces(c);
            skipped = true;
        }
        if (skipped) continue;
        c->p = start;
        top_level(c);
    }
}

struct ptx_module *ptx_load(const char *text, char **error) {
    struct ptx_module *m = calloc(1, sizeof *m);
    struct cursor c = {.p = text, .line = 1, .module = m};
    module_text(&c);
    if (error) *error = c.error;
    else free(c.error);
    if (!c.error) return m;
    ptx_unload(m);
    return NULL;
}

void ptx_unload(struct ptx_module *m) {
    if (!m) return;
    for (size_t n = 0; n < m->kernel_count; n++) {
        struct ptx_kernel *k = m->kernels[n];
        for (size_t p = 0; p < k->param_count; p++) free(k->params[p].name);
        free(k->params), free(k->code), free(k->constants), free(k->problem), free(k->name);
        free(k);
    }
    for (size_t n = 0; n < m->variable_count; n++) {
        free(m->variables[n].name);
        free(m->variables[n].memory);
    }
    for (size_t n = 0; n < m->text_count; n++) free(m->texts[n]);
    free(m->texts), free(m->kernels), free(m->variables), free(m);
}

struct ptx_kernel *ptx_kernel(struct ptx_module *m, const char *name) {
    for (size_t n = 0; n < m->kernel_count; n++)
        if (!strcmp(m->kernels[n]->name, name)) return m->kernels[n];
    return NULL;
}

void *ptx_global(struct ptx_module *m, const char *name, size_t *bytes) {
    struct variable *v = ptx_find(m->variables, m->variable_count, name);
    if (!v || v->space != SPACE_GLOBAL) return NULL;
    if (bytes) *bytes = v->bytes;
    return v->memory;
}
