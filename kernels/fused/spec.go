package fused

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/kernels/expr"
	tt "github.com/deepwell/deepwell/kernels/triton"
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

// Kernel prints the kernel.
func (s Spec) Kernel() (*tt.Kernel, error) {
	if s.Format == dtype.MXFP8 {
		return MXFP8(s.Matrix, Of(&s.Expr), s.Form)
	}
	return nil, fmt.Errorf("no kernel is specified by %s", s)
}

// Key names what a kernel computes, whatever the shape and the form: what a GPU refuses of one
// shape it refuses of all.
func (s Spec) Key() string { return string(s.Format) + ": " + s.Expr.String() }

// specText finds a specification in the configuration of a call, a dictionary of MLIR.
var specText = regexp.MustCompile(`\bspec = "([^"]*)"`)

// SpecsIn lists the specifications of the kernels that a program calls, each once, in order.
func SpecsIn(text string) (list []string) {
	for _, found := range specText.FindAllStringSubmatch(text, -1) {
		if !slices.Contains(list, found[1]) {
			list = append(list, found[1])
		}
	}
	return list
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
	words := []string{string(s.Format), fmt.Sprintf("%dx%dx%d", s.Batch, s.Rows, s.Cols)}
	for _, f := range s.flags() {
		if *f.is {
			words = append(words, f.name)
		}
	}
	if s.any() {
		words = append(words, fmt.Sprintf("rounds=%d", s.Rounds))
	}
	for _, l := range s.lists() {
		if len(*l.of) > 0 {
			list := strings.Trim(strings.ReplaceAll(fmt.Sprint(*l.of), " ", ","), "[]")
			words = append(words, l.name+"="+list)
		}
	}
	return strings.Join(words, " ") + ": " + s.Expr.String()
}

// lists are the words of stacks.
func (s *Stacks) lists() []struct {
	name string
	of   *[]int
} {
	return []struct {
		name string
		of   *[]int
	}{{"from", &s.From}, {"into", &s.Into}, {"saved", &s.Saved}}
}

// parseStacks reads a word such as from=0,1, and tells whether it is one.
func (s *Stacks) parseStacks(word string) bool {
	name, value, ok := strings.Cut(word, "=")
	if !ok {
		return false
	}
	var list []int
	for text := range strings.SplitSeq(value, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 0 || n > 1<<30 {
			return false
		}
		list = append(list, n)
	}
	if name == "rounds" && len(list) == 1 {
		s.Rounds = list[0]
		return true
	}
	for _, l := range s.lists() {
		if l.name == name {
			*l.of = list
			return true
		}
	}
	return false
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
		known := s.parseStacks(word)
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
	return s, s.check(e)
}

// Bytes is what the kernel reads and writes, each once; of stacks, one round's part.
func (s Spec) Bytes() int64 {
	rows, cols := int64(s.Batch)*int64(s.Rows), int64(s.Cols)
	n := rows * cols
	var bytes int64
	for _, o := range s.Expr.In {
		bytes += o.Elem.Bytes(map[expr.Over]int64{expr.Matrix: n, expr.Rows: rows, expr.Cols: cols,
			expr.Scalar: 1}[o.Over])
	}
	bytes += int64(len(s.Saved)) * 2 * n
	for range s.Expr.Out {
		if s.Keep {
			bytes += 2 * n
		}
		for _, way := range []bool{s.Along, s.Across} {
			if way {
				bytes += s.Format.Codes().Bytes(n) + s.Format.Scales().Bytes(n/s.Format.Block())
			}
		}
	}
	return bytes
}

// check tells what of the stacks is out of range.
func (s Stacks) check(e *expr.Expr) error {
	for _, i := range slices.Concat(s.From, s.Saved) {
		if i >= len(e.In) || e.In[i].Over != expr.Matrix {
			return fmt.Errorf("operand %d is no matrix", i)
		}
	}
	if !s.any() && len(s.From)+len(s.Into)+len(s.Saved) > 0 {
		return fmt.Errorf("stacks of no rounds")
	}
	return nil
}
