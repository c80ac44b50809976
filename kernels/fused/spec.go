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
//	nvfp4 1x8192x4096 along across stochastic=0,1 tensors=6,7: bf16 -> 0
type Spec struct {
	Format dtype.Format
	Matrix
	NVFP4Form
	Amax bool // of NVFP4: the kernel finds the largest magnitudes that scales come from
	Expr expr.Expr
}

// Kernel prints the kernel.
func (s Spec) Kernel() (*tt.Kernel, error) {
	switch {
	case s.Format == dtype.MXFP8:
		return MXFP8(s.Matrix, Of(&s.Expr), s.Form)
	case s.Format == dtype.NVFP4 && s.Amax:
		return Amax(s.Matrix, Of(&s.Expr), s.Form)
	case s.Format == dtype.NVFP4:
		return NVFP4(s.Matrix, Of(&s.Expr), s.NVFP4Form)
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
func (s *Spec) flags() []struct {
	name string
	is   *bool
} {
	return []struct {
		name string
		is   *bool
	}{{"along", &s.Along}, {"across", &s.Across}, {"swizzled", &s.Swizzled}, {"keep", &s.Keep},
		{"amax", &s.Amax}, {"tile", &s.Tile}, {"added", &s.Added}}
}

// numbers are the words of a form that have values.
func (s *Spec) numbers() (list []number) {
	list = append(list, number{"rounds", []int{s.Rounds}[:min(s.Rounds, 1)], func(n []int) bool {
		s.Rounds = n[0]
		return len(n) == 1
	}})
	for _, l := range append(s.lists(), words{"columns", &s.Columns}) {
		list = append(list, number{l.name, *l.of, func(n []int) bool {
			*l.of = n
			return true
		}})
	}
	var stochastic, tensors []int
	for i, is := range s.Stochastic {
		if is {
			stochastic = append(stochastic, i)
		}
	}
	for _, pair := range s.Tensors {
		tensors = append(tensors, pair[:]...)
	}
	return append(list, number{"layers", []int{s.Layers}[:min(s.Layers, 1)], func(n []int) bool {
		s.Layers = n[0]
		return len(n) == 1
	}}, number{"stochastic", stochastic, func(n []int) bool {
		for _, i := range n {
			if i > 1 {
				return false
			}
			s.Stochastic[i] = true
		}
		return true
	}}, number{"tensors", tensors, func(n []int) bool {
		for i := 0; i+1 < len(n); i += 2 {
			s.Tensors = append(s.Tensors, [2]int{n[i], n[i+1]})
		}
		return len(n)%2 == 0
	}})
}

// A number is a word with values, as it is and how it is set.
type number struct {
	name string
	is   []int
	set  func(list []int) bool
}

// String prints the specification.
func (s Spec) String() string {
	words := []string{string(s.Format), fmt.Sprintf("%dx%dx%d", s.Batch, s.Rows, s.Cols)}
	for _, f := range s.flags() {
		if *f.is {
			words = append(words, f.name)
		}
	}
	for _, n := range s.numbers() {
		if len(n.is) > 0 {
			list := strings.Trim(strings.ReplaceAll(fmt.Sprint(n.is), " ", ","), "[]")
			words = append(words, n.name+"="+list)
		}
	}
	return strings.Join(words, " ") + ": " + s.Expr.String()
}

// words are a name and the numbers after it.
type words struct {
	name string
	of   *[]int
}

// lists are the words of stacks.
func (s *Stacks) lists() []words {
	return []words{{"from", &s.From}, {"into", &s.Into}, {"saved", &s.Saved}}
}

// parseNumbers reads a word such as from=0,1, and tells whether it is one.
func (s *Spec) parseNumbers(word string) bool {
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
	for _, n := range s.numbers() {
		if n.name == name {
			return n.set(list)
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
		known := s.parseNumbers(word)
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
	if s.Format != dtype.NVFP4 && (s.Amax || s.Tile || s.Layers > 0 || s.Stochastic != [2]bool{}) {
		return s, fmt.Errorf("%s has no form %q", s.Format, head)
	}
	for _, part := range s.Columns {
		if part >= len(e.Out) || !s.Across || s.Format != dtype.MXFP8 {
			return s, fmt.Errorf("%s has no part %d along columns alone", text, part)
		}
	}
	return s, s.Stacks.check(e)
}

// Operands is how many operands the kernel has before the round and the stacks.
func (s Spec) Operands() int {
	n := len(s.Expr.In)
	if s.Format.TensorScale() && !s.Amax {
		n += len(s.operands(s.Matrix, len(s.Expr.Out)))
	}
	return n
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
	if s.Stochastic != [2]bool{} {
		bytes += 4 * (rows + cols)
	}
	programs := int64(s.Batch * ceil(s.Rows, tileRows) * ceil(s.Cols, tileCols(s.Matrix)))
	for part := range s.Expr.Out {
		if s.Keep {
			bytes += 2 * n
		}
		for _, way := range []bool{s.AlongOf(part), s.Across} {
			switch {
			case way && s.Amax:
				bytes += 4 * programs
			case way:
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
