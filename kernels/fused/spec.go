package fused

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/kernels/expr"
)

// A Spec says what a quantizing kernel computes. Its text is part of the call in the program, for
// whoever reads that:
//
//	mxfp8 1x8192x14336 along across: bf16, bf16; sigmoid 0; mul 0 2; mul 3 1 -> 4
type Spec struct {
	Format dtype.Format
	Matrix
	Form
	Expr expr.Expr
}

// flags are the words of a form.
func (f *Form) flags() []struct {
	name string
	is   *bool
} {
	return []struct {
		name string
		is   *bool
	}{{"along", &f.Along}, {"across", &f.Across}, {"swizzled", &f.Swizzled}, {"keep", &f.Keep}}
}

// String prints the specification.
func (s Spec) String() string {
	text := fmt.Sprintf("%s %dx%dx%d", s.Format, s.Batch, s.Rows, s.Cols)
	for _, f := range s.flags() {
		if *f.is {
			text += " " + f.name
		}
	}
	return text + ": " + s.Expr.String()
}

// ParseSpec reads what String prints.
func ParseSpec(text string) (s Spec, err error) {
	head, body, ok := strings.Cut(text, ": ")
	words := strings.Split(head, " ")
	if !ok || len(words) < 2 {
		return s, fmt.Errorf("no kernel is specified by %q", text)
	}
	s.Format = dtype.Format(words[0])
	sizes := strings.Split(words[1], "x")
	if len(sizes) != 3 {
		return s, fmt.Errorf("a matrix is %q", words[1])
	}
	for i, to := range []*int{&s.Batch, &s.Rows, &s.Cols} {
		if *to, err = strconv.Atoi(sizes[i]); err != nil || *to < 1 || *to > 1<<40 {
			return s, fmt.Errorf("a matrix is %q", words[1])
		}
	}
	for _, word := range words[2:] {
		known := false
		for _, f := range s.flags() {
			if f.name == word {
				*f.is, known = true, true
			}
		}
		if !known {
			return s, fmt.Errorf("a kernel's form is %q", word)
		}
	}
	e, err := expr.Parse(body)
	if err != nil {
		return s, err
	}
	s.Expr = *e
	return s, nil
}
