// Reads words, numbers and punctuation of PTX text.
#include <ctype.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "ptx_lex.h"

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

void ptx_wrong(struct cursor *c, const char *what) {
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

void ptx_skip_space(struct cursor *c) {
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

bool ptx_accept(struct cursor *c, char want) {
    ptx_skip_space(c);
    if (*c->p != want) return false;
    c->p++;
    return true;
}

void ptx_expect(struct cursor *c, char want) {
    char what[] = "expected ' '";
    what[10] = want;
    if (!ptx_accept(c, want)) ptx_wrong(c, what);
}

static bool word_char(char x) {
    return isalnum((unsigned char)x) || x == '_' || x == '$' || x == '%' || x == '.';
}

// word reads a name, an opcode with modifiers or a directive; "" where there is none.
void ptx_word(struct cursor *c, char *to, size_t room) {
    ptx_skip_space(c);
    size_t n = 0;
    for (;;) {
        bool colons = n && c->p[0] == ':' && c->p[1] == ':';
        if (!colons && !word_char(*c->p)) break;
        for (int k = 0; k <= colons; k++, c->p++) {
            if (n + 1 < room) to[n++] = *c->p;
            else ptx_wrong(c, "name too long");
        }
        if (c->error) break;
    }
    to[n] = 0;
}

// number reads an integer, 0f and 8 hexadecimal digits, 0d and 16, or a decimal fraction.
bool ptx_number(struct cursor *c, struct operand *o) {
    ptx_skip_space(c);
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

uint64_t ptx_integer(struct cursor *c) {
    struct operand o = {0};
    if (!ptx_number(c, &o) || o.number_kind != NUMBER_INTEGER) ptx_wrong(c, "expected an integer");
    return o.number;
}

char *ptx_copy(const char *text) { return ptx_text("%s", text); }

void ptx_add_offset(struct cursor *c, struct operand *o) {
    for (;;) {
        ptx_skip_space(c);
        bool plus = *c->p == '+';
        if (!plus && *c->p != '-') return;
        if (plus) c->p++;
        o->offset = (int64_t)((uint64_t)o->offset + ptx_integer(c));
        if (c->error) return;
    }
}

void ptx_skip_line(struct cursor *c) { while (*c->p && *c->p != '\n') c->p++; }

void ptx_skip_to(struct cursor *c, char end) {
    for (ptx_skip_space(c); *c->p && *c->p != end; ptx_skip_space(c)) c->p++;
    if (*c->p) c->p++;
    else ptx_wrong(c, "text ends too early");
}

void ptx_skip_braces(struct cursor *c) {
    int depth = 0;
    do {
        ptx_skip_space(c);
        if (*c->p == '{') depth++;
        if (*c->p == '}') depth--;
        if (!*c->p) return ptx_wrong(c, "text ends too early");
        c->p++;
    } while (depth);
}
