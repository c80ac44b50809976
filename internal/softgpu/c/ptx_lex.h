// What reads PTX text: ptx_lex.c its words, ptx_declare.c declarations, ptx_parse.c the rest. After
// an error nothing is read.
#ifndef SOFTGPU_PTX_LEX_H
#define SOFTGPU_PTX_LEX_H

#include "ptx_impl.h"

struct cursor {
    const char *p;
    int line;
    char *error; // the first one; nothing is read behind it
    struct ptx_module *module;
};

#define APPEND(items, count) \
    ((items) = ptx_grow((items), (count), sizeof *(items)), memset(&(items)[count], 0, \
     sizeof *(items)), &(items)[(count)++])

static inline size_t ptx_aligned(size_t n, size_t align) {
    return (n + align - 1) / align * align;
}

void ptx_wrong(struct cursor *c, const char *what);
void ptx_skip_space(struct cursor *c); // and comments
void ptx_skip_line(struct cursor *c);
void ptx_skip_to(struct cursor *c, char end);
void ptx_skip_braces(struct cursor *c);
bool ptx_accept(struct cursor *c, char want);
void ptx_expect(struct cursor *c, char want);
void ptx_word(struct cursor *c, char *to, size_t room);
bool ptx_number(struct cursor *c, struct operand *o);
uint64_t ptx_integer(struct cursor *c);
void ptx_add_offset(struct cursor *c, struct operand *o); // `+ 4` or `- 4`, if there
char *ptx_copy(const char *text);

// ptx_declaration reads the rest of a variable's declaration; r is NULL outside a kernel.
void ptx_declaration(struct cursor *c, struct reader *r, const char *first);
void ptx_registers(struct cursor *c, struct reader *r);
void ptx_parameters(struct cursor *c, struct ptx_kernel *k);
struct variable *ptx_find(struct variable *v, size_t count, const char *name);

#endif
