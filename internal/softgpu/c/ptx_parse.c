// Reads PTX text: directives, variables with initializers, entries with parameters, and the
// statements of their bodies, which ptx_decode.c turns into instructions.
#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "ptx_impl.h"

// Limits of what one module may ask for, so that a damaged text cannot exhaust memory.
enum { MAX_REGISTERS = 1 << 21, MAX_SHARED = 1 << 20, MAX_LOCAL = 1 << 20, MAX_SCOPES = 64 };
static const uint64_t max_global = 1ull << 32;

struct cursor {
    const char *p;
    int line;
    char *error; // the first one; nothing is read behind it
    struct ptx_module *module;
};

char *ptx_text(const char *format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    char *text = malloc((size_t)n + 1);
    if (text) vsnprintf(text, (size_t)n + 1, format, again);
    va_end(args);
    va_end(again);
    return text;
}

void *ptx_grow(void *items, size_t count, size_t bytes) {
    if (count & (count - 1)) return items; // capacity is the next power of two
    void *grown = realloc(items, (count ? count * 2 : 1) * bytes);
    if (!grown) abort();
    return grown;
}

#define APPEND(items, count) \
    ((items) = ptx_grow((items), (count), sizeof *(items)), memset(&(items)[count], 0, \
     sizeof *(items)), &(items)[(count)++])

static void wrong(struct cursor *c, const char *what) {
    if (!c->error) c->error = ptx_text("PTX line %d: %s near \"%.24s\"", c->line, what, c->p);
}

void ptx_problem(struct reader *r, int line, const char *format, ...) {
    if (r->kernel->problem) return;
    char what[400];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    r->kernel->problem = ptx_text("kernel %s, line %d: %s", r->kernel->name, line, what);
}

static void space(struct cursor *c) {
    for (;;) {
        if (*c->p == '\n') c->line++, c->p++;
        else if (isspace((unsigned char)*c->p)) c->p++;
        else if (c->p[0] == '/' && c->p[1] == '/') while (*c->p && *c->p != '\n') c->p++;
        else if (c->p[0] == '/' && c->p[1] == '*') {
            c->p += 2;
            while (*c->p && !(c->p[0] == '*' && c->p[1] == '/')) c->line += *c->p++ == '\n';
            if (*c->p) c->p += 2;
        } else return;
    }
}

static bool accept(struct cursor *c, char want) {
    space(c);
    if (*c->p != want) return false;
    c->p++;
    return true;
}

static void expect(struct cursor *c, char want) {
    char what[] = "expected ' '";
    what[10] = want;
    if (!accept(c, want)) wrong(c, what);
}

static bool word_char(char x) {
    return isalnum((unsigned char)x) || x == '_' || x == '$' || x == '%' || x == '.';
}

// word reads a name, an opcode with modifiers or a directive; "" where there is none.
static void word(struct cursor *c, char *to, size_t room) {
    space(c);
    size_t n = 0;
    for (;;) {
        bool colons = n && c->p[0] == ':' && c->p[1] == ':';
        if (!colons && !word_char(*c->p)) break;
        for (int k = 0; k <= colons; k++, c->p++) {
            if (n + 1 < room) to[n++] = *c->p;
            else wrong(c, "name too long");
        }
        if (c->error) break;
    }
    to[n] = 0;
}

// number reads an integer, 0f and 8 hexadecimal digits, 0d and 16, or a decimal fraction.
static bool number(struct cursor *c, struct operand *o) {
    space(c);
    const char *p = c->p;
    bool minus = *p == '-';
    if (minus) p++;
    if (!isdigit((unsigned char)*p)) return false;
    char *end;
    o->kind = OPERAND_NUMBER;
    o->number_kind = NUMBER_INTEGER;
    if (p[0] == '0' && (p[1] == 'f' || p[1] == 'F')) {
        o->number_kind = NUMBER_F32;
        o->number = strtoull(p + 2, &end, 16);
        if (minus) o->number ^= 0x80000000u;
    } else if (p[0] == '0' && (p[1] == 'd' || p[1] == 'D')) {
        o->number_kind = NUMBER_F64;
        o->number = strtoull(p + 2, &end, 16);
        if (minus) o->number ^= 1ull << 63;
    } else if (p[0] == '0' && (p[1] == 'b' || p[1] == 'B')) {
        o->number = strtoull(p + 2, &end, 2);
        if (minus) o->number = -o->number;
    } else {
        o->number = strtoull(p, &end, 0);
        if (*end == '.' || ((*end == 'e' || *end == 'E') && !(p[0] == '0' && p[1] == 'x'))) {
            double d = strtod(p, &end);
            o->number_kind = NUMBER_F64;
            o->number = bits_of_double(minus ? -d : d);
        } else if (minus) {
            o->number = -o->number;
        }
    }
    if (*end == 'U') end++;
    c->p = end;
    return true;
}

static uint64_t integer(struct cursor *c) {
    struct operand o = {0};
    if (!number(c, &o) || o.number_kind != NUMBER_INTEGER) wrong(c, "expected an integer");
    return o.number;
}

static char *copy(const char *text) { return ptx_text("%s", text); }

// --- Operands ---

static int operand(struct cursor *c, struct statement *s, int depth);

static int new_operand(struct cursor *c, struct statement *s) {
    if (s->used == MAX_PARSED) {
        wrong(c, "too many operands");
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
    if (!accept(c, close)) {
        do {
            int member = operand(c, s, depth + 1);
            if (member < 0) return -1;
            s->operands[at].count++;
        } while (accept(c, ','));
        expect(c, close);
    }
    return at;
}

static void add_offset(struct cursor *c, struct operand *o) {
    for (;;) {
        space(c);
        bool plus = *c->p == '+';
        if (!plus && *c->p != '-') return;
        if (plus) c->p++;
        o->offset = (int64_t)((uint64_t)o->offset + integer(c));
        if (c->error) return;
    }
}

static int address(struct cursor *c, struct statement *s, int depth) {
    int at = new_operand(c, s);
    if (at < 0) return at;
    int base = operand(c, s, depth + 1);
    if (base < 0) return -1;
    s->operands[at].kind = OPERAND_ADDRESS;
    s->operands[at].first = base;
    s->operands[at].count = 1;
    add_offset(c, &s->operands[at]);
    expect(c, ']');
    return at;
}

static int operand(struct cursor *c, struct statement *s, int depth) {
    if (depth > 2) {
        wrong(c, "operands nest too deeply");
        return -1;
    }
    if (accept(c, '{')) return list(c, s, '}', depth);
    if (accept(c, '[')) return address(c, s, depth);
    if (accept(c, '(')) return list(c, s, ')', depth);
    int at = new_operand(c, s);
    if (at < 0) return at;
    struct operand *o = &s->operands[at];
    o->negated = accept(c, '!');
    if (number(c, o)) return at;
    o->kind = OPERAND_WORD;
    word(c, o->word, sizeof o->word);
    if (!o->word[0]) {
        wrong(c, "expected an operand");
        return -1;
    }
    if (depth == 0) add_offset(c, o);
    return at;
}

// statement reads what follows an opcode, up to the semicolon. `p|q` are two operands.
static void operands(struct cursor *c, struct statement *s) {
    if (accept(c, ';')) return;
    do {
        int at = operand(c, s, 0);
        if (at < 0) return;
        s->top[s->top_count++] = at;
        bool bar = s->top_count == 1 && accept(c, '|');
        s->paired |= bar;
        if (!bar && !accept(c, ',')) break;
    } while (true);
    expect(c, ';');
}

// --- Variables ---

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
        d->align = integer(c);
        if (!d->align || d->align > 4096 || (d->align & (d->align - 1))) wrong(c, "bad alignment");
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
    while (accept(c, '[')) {
        d->array = true;
        space(c);
        uint64_t n = *c->p == ']' ? 0 : integer(c);
        if (n > max_global || d->count * n > max_global) wrong(c, "array too large");
        d->count *= n;
        expect(c, ']');
        if (c->error) return;
    }
}

static size_t aligned(size_t n, size_t align) { return (n + align - 1) / align * align; }

static struct variable *find(struct variable *v, size_t count, const char *name) {
    for (size_t n = 0; n < count; n++)
        if (!strcmp(v[n].name, name)) return &v[n];
    return NULL;
}

// one_value writes an element of an initializer: a number, or the address of a global variable.
static void one_value(struct cursor *c, struct ptx_module *m, ptx_type type, uint8_t *to) {
    struct operand o = {0};
    uint64_t value = 0;
    if (number(c, &o)) {
        value = o.number;
        if (o.number_kind == NUMBER_F64 && type == F32)
            value = bits_of((float)double_of(o.number));
    } else {
        word(c, o.word, sizeof o.word);
        bool generic = !strcmp(o.word, "generic") && accept(c, '(');
        if (generic) word(c, o.word, sizeof o.word);
        struct variable *v = find(m->variables, m->variable_count, o.word);
        if (!v || v->space != SPACE_GLOBAL || (type != U64 && type != B64))
            wrong(c, "initializer is no number and no address");
        else value = v->at;
        if (generic) expect(c, ')');
        add_offset(c, &o);
        value += (uint64_t)o.offset;
    }
    memcpy(to, &value, ptx_size(type));
}

static void initializer(struct cursor *c, const struct declaration *d, struct variable *v) {
    size_t size = ptx_size(d->type), n = 0;
    struct ptx_module *m = c->module;
    int depth = 0;
    do {
        while (accept(c, '{')) depth++;
        if (depth && accept(c, '}')) { depth--; continue; }
        if (n == d->count) wrong(c, "too many values");
        if (c->error) return;
        one_value(c, m, d->type, v->memory + n++ * size);
        while (depth && accept(c, '}')) depth--;
    } while (!c->error && depth && accept(c, ','));
    if (depth) wrong(c, "expected '}'");
}

// variable declares one outside a kernel (r is NULL) or inside.
static void variable(struct cursor *c, struct reader *r, struct declaration *d) {
    if (!d->type || d->type == PRED) return wrong(c, "variable without a type");
    struct ptx_module *m = c->module;
    struct variable v = {.space = d->space, .align = d->align ? d->align : ptx_size(d->type)};
    v.bytes = d->count * ptx_size(d->type);
    if (d->space == SPACE_GLOBAL) {
        if (v.bytes > max_global) return wrong(c, "variable too large");
        size_t align = v.align < 256 ? 256 : v.align;
        v.memory = aligned_alloc(align, aligned(v.bytes + 1, align));
        if (!v.memory) return wrong(c, "no memory for a variable");
        memset(v.memory, 0, v.bytes);
        v.at = (uint64_t)(uintptr_t)v.memory;
    } else {
        bool local = d->space == SPACE_LOCAL;
        if (local && !r) return wrong(c, "local variable outside a kernel");
        if (d->space == SPACE_PARAM) return wrong(c, "variable in the space of parameters");
        size_t *used = local ? &r->kernel->local_bytes : r ? &r->kernel->shared_bytes
                                                             : &m->shared_bytes;
        v.at = aligned(*used, v.align);
        v.dynamic = d->external;
        if (v.bytes > MAX_SHARED || v.at + v.bytes > (local ? MAX_LOCAL : MAX_SHARED))
            return wrong(c, "variable too large");
        if (d->external && local) return wrong(c, "local variable that is external");
        if (d->external) v.at = 0;
        else *used = v.at + v.bytes;
    }
    v.name = copy(d->name);
    struct variable *kept = d->space == SPACE_GLOBAL || !r
                                ? APPEND(m->variables, m->variable_count)
                                : APPEND(r->locals, r->local_count);
    *kept = v;
    if (accept(c, '=')) {
        if (v.memory) initializer(c, d, kept);
        else wrong(c, "initializer of a variable that has none");
    }
}

static void registers(struct cursor *c, struct reader *r) {
    char w[256];
    ptx_type type = NO_TYPE;
    for (word(c, w, sizeof w); w[0] == '.'; word(c, w, sizeof w)) {
        type = type_of(w + 1);
        if (!type) ptx_problem(r, c->line, "register type %s is not known", w);
        if (c->error) return;
    }
    do {
        if (!w[0]) word(c, w, sizeof w);
        if (!w[0] || !type) {
            if (!r->kernel->problem) wrong(c, "expected the name of a register");
            if (c->error) return;
        }
        uint64_t count = 0;
        if (accept(c, '<')) {
            count = integer(c);
            expect(c, '>');
        }
        r->registers += count ? count : 1;
        if (count > MAX_REGISTERS || r->registers > MAX_REGISTERS)
            return wrong(c, "too many registers");
        struct scope_name *n = APPEND(r->names, r->name_count);
        n->name = copy(w);
        n->type = type;
        n->scope = r->scope;
        n->count = (uint32_t)count;
        n->slots = malloc((count ? count : 1) * sizeof *n->slots);
        memset(n->slots, 0xff, (count ? count : 1) * sizeof *n->slots);
        w[0] = 0;
    } while (!c->error && accept(c, ','));
    expect(c, ';');
}

// declaration reads a variable of any space; the first word has been read.
static void declaration(struct cursor *c, struct reader *r, const char *first) {
    struct declaration d = {0};
    char w[256];
    snprintf(w, sizeof w, "%s", first);
    while (w[0] == '.') {
        if (!directive(c, &d, w)) {
            if (r) ptx_problem(r, c->line, "directive %s is not known", w);
            else wrong(c, "directive is not known");
        }
        if (c->error) return;
        word(c, w, sizeof w);
    }
    for (;;) {
        if (!w[0]) wrong(c, "expected the name of a variable");
        if (!d.has_space) wrong(c, "variable without a state space");
        snprintf(d.name, sizeof d.name, "%s", w);
        shape(c, &d);
        if (c->error) return;
        variable(c, r, &d);
        if (c->error || !accept(c, ',')) break;
        word(c, w, sizeof w);
    }
    expect(c, ';');
}

// --- Bodies ---

static void skip_line(struct cursor *c) { while (*c->p && *c->p != '\n') c->p++; }

static void skip_to(struct cursor *c, char end) {
    for (space(c); *c->p && *c->p != end; space(c)) c->p++;
    if (*c->p) c->p++;
    else wrong(c, "text ends too early");
}

static void skip_braces(struct cursor *c) {
    int depth = 0;
    do {
        space(c);
        if (*c->p == '{') depth++;
        if (*c->p == '}') depth--;
        if (!*c->p) return wrong(c, "text ends too early");
        c->p++;
    } while (depth);
}

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
            return wrong(c, "label appears twice");
    struct label *l = APPEND(r->labels, r->label_count);
    l->name = copy(name);
    l->scope = r->scope;
    l->at = (uint32_t)r->kernel->code_count;
}

static void statement(struct cursor *c, struct reader *r) {
    static _Thread_local struct statement s;
    s.guarded = s.guard_negated = s.paired = false;
    s.used = s.top_count = 0;
    if (accept(c, '@')) {
        s.guarded = true;
        s.guard_negated = accept(c, '!');
        word(c, s.guard, sizeof s.guard);
    }
    word(c, s.spelling, sizeof s.spelling);
    s.line = c->line;
    if (c->error) return;
    if (!s.spelling[0]) return wrong(c, "expected an instruction");
    if (!s.guarded && *c->p == ':') {
        c->p++;
        return label(c, r, s.spelling);
    }
    const char *start = c->p;
    operands(c, &s);
    if (c->error) { // operands of a kind that no known instruction has, such as those of TMA
        ptx_problem(r, s.line, "%s: operands are not known", s.spelling);
        free(c->error);
        c->error = NULL;
        c->p = start;
        c->line = s.line;
        return skip_to(c, ';');
    }
    if (!r->kernel->problem) ptx_decode(r, &s);
}

static void body_directive(struct cursor *c, struct reader *r) {
    char w[256];
    word(c, w, sizeof w);
    if (!strcmp(w, ".reg")) registers(c, r);
    else if (!strcmp(w, ".loc")) skip_line(c);
    else if (!strcmp(w, ".pragma")) skip_to(c, ';');
    else declaration(c, r, w);
}

static void body(struct cursor *c, struct reader *r) {
    r->scope = 1;
    while (!c->error && r->scope) {
        space(c);
        if (!*c->p) return wrong(c, "text ends inside a kernel");
        if (accept(c, ';')) continue;
        if (accept(c, '{')) {
            if (++r->scope > MAX_SCOPES) wrong(c, "scopes nest too deeply");
        } else if (accept(c, '}')) close_scope(r);
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

static void parameters(struct cursor *c, struct ptx_kernel *k) {
    if (!accept(c, '(') || accept(c, ')')) return;
    do {
        struct declaration d = {0};
        char w[256];
        for (word(c, w, sizeof w); w[0] == '.'; word(c, w, sizeof w)) {
            // `.ptr .global .align 16` says what a pointer points to
            bool ptr = !strcmp(w, ".ptr");
            ptx_type type = d.type;
            size_t align = d.align;
            if (!directive(c, &d, w)) wrong(c, "directive is not known");
            while (ptr && !c->error) {
                word(c, w, sizeof w);
                if (w[0] != '.') break;
                if (!directive(c, &d, w)) wrong(c, "directive is not known");
            }
            if (ptr) d.type = type, d.align = align;
            if (c->error || ptr) break;
        }
        if (!w[0] || !d.type || d.type == PRED) wrong(c, "expected a parameter");
        shape(c, &d);
        if (c->error) return;
        size_t align = d.align ? d.align : ptx_size(d.type);
        struct param *p = APPEND(k->params, k->param_count);
        p->name = copy(w);
        p->bytes = d.count * ptx_size(d.type);
        p->offset = aligned(k->param_bytes, align);
        k->param_bytes = p->offset + p->bytes;
        if (p->bytes > MAX_SHARED || k->param_bytes > MAX_SHARED) wrong(c, "parameter too large");
    } while (!c->error && accept(c, ','));
    expect(c, ')');
}

// entry reads a kernel; its name comes next.
static void entry(struct cursor *c) {
    char w[256];
    word(c, w, sizeof w);
    if (!w[0]) return wrong(c, "entry without a name");
    struct ptx_module *m = c->module;
    struct ptx_kernel *k = calloc(1, sizeof *k);
    *APPEND(m->kernels, m->kernel_count) = k;
    k->name = copy(w);
    k->module = m;
    memset(k->special, 0xff, sizeof k->special);
    k->carry = ptx_new_slot(k, 0);
    parameters(c, k);
    struct reader r = {.module = m, .kernel = k};
    for (space(c); *c->p == '.' && !c->error; space(c)) {
        word(c, w, sizeof w);
        unsigned sizes[3] = {1, 1, 1};
        static const char *known[] = {".reqntid", ".maxntid", ".minnctapersm", ".maxnreg",
                                      ".maxclusterrank", ".noreturn", ".maxnctapersm"};
        bool is_known = false;
        for (size_t n = 0; n < sizeof known / sizeof *known; n++)
            is_known |= !strcmp(w, known[n]);
        if (!strcmp(w, ".pragma")) { skip_to(c, ';'); continue; }
        if (!is_known) ptx_problem(&r, c->line, "directive %s is not known", w);
        space(c);
        for (int n = 0; isdigit((unsigned char)*c->p) && !c->error; n++) {
            uint64_t v = integer(c);
            if (n < 3) sizes[n] = (unsigned)v;
            if (!accept(c, ',')) break;
            space(c);
        }
        if (!strcmp(w, ".reqntid")) memcpy(k->required, sizes, sizeof sizes);
    }
    k->shared_bytes = m->shared_bytes;
    expect(c, '{');
    if (!c->error) body(c, &r);
    // Dynamic shared memory lies behind all that is declared.
    k->shared_bytes = aligned(k->shared_bytes, 16);
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
        word(c, w, sizeof w);
        if (strcmp(w, ".visible") && strcmp(w, ".weak") && strcmp(w, ".extern") &&
            strcmp(w, ".common"))
            break;
    }
    if (!strcmp(w, ".entry")) return entry(c);
    if (!strcmp(w, ".func")) { // calls are refused by name, so what is called is not needed
        for (space(c); *c->p && *c->p != ';' && *c->p != '{'; space(c)) c->p++;
        if (*c->p == '{') skip_braces(c);
        else skip_to(c, ';');
        return;
    }
    c->p = start;
    c->line = line;
    word(c, w, sizeof w);
    if (w[0] != '.') return wrong(c, "expected a directive");
    declaration(c, NULL, w);
}

static void module_text(struct cursor *c) {
    static const char *lines[] = {".version", ".target", ".address_size", ".file", ".loc"};
    for (space(c); *c->p && !c->error; space(c)) {
        if (accept(c, ';')) continue;
        const char *start = c->p;
        char w[256];
        word(c, w, sizeof w);
        bool skipped = false;
        for (size_t n = 0; n < sizeof lines / sizeof *lines && !skipped; n++)
            if (!strcmp(w, lines[n])) skip_line(c), skipped = true;
        if (!strcmp(w, ".pragma")) skip_to(c, ';'), skipped = true;
        if (!strcmp(w, ".section")) {
            word(c, w, sizeof w);
            skip_braces(c);
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
    struct variable *v = find(m->variables, m->variable_count, name);
    if (!v || v->space != SPACE_GLOBAL) return NULL;
    if (bytes) *bytes = v->bytes;
    return v->memory;
}
