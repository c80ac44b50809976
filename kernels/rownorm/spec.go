package rownorm

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	tt "github.com/deepwell/deepwell/kernels/triton"
)

// The first words of specifications, and the keys of the kernels: what a GPU refuses of one shape
// it refuses of all.
const (
	forward  = "rms_norm"
	backward = "rms_norm_grad"
)

// Key names the kernel whatever its sizes are.
func (n Norm) Key() string {
	if n.Grads > 0 {
		return backward
	}
	return forward
}

// name is the kernel's.
func (n Norm) name() string {
	name := n.Key()
	if n.Grads == 0 && n.Added {
		name = "add_" + name
	}
	if n.Codes {
		name += "_mxfp8"
	}
	return name
}

// Is tells whether a specification is of a norm.
func Is(text string) bool {
	return strings.HasPrefix(text, forward+" ") || strings.HasPrefix(text, backward+" ")
}

// String specifies the kernel in its call, for whoever reads the program:
//
//	rms_norm 8192x4096 eps=1e-05 shift=0 added normed rounds=32 saved=0 kept=1
//	rms_norm 8192x4096 eps=1e-05 shift=0 added codes stats rounds=32 into=0
//	rms_norm_grad 8192x4096 eps=1e-05 shift=0 grads=2 residual rounds=32 from=0
func (n Norm) String() string {
	words := []string{n.Key(), fmt.Sprintf("%dx%d", n.Rows, n.Cols),
		"eps=" + number(n.Eps), "shift=" + number(n.Shift)}
	if n.Grads > 0 {
		words = append(words, fmt.Sprintf("grads=%d", n.Grads))
	}
	for _, f := range n.flags() {
		if *f.is {
			words = append(words, f.name)
		}
	}
	if n.Rounds > 0 {
		words = append(words, fmt.Sprintf("rounds=%d", n.Rounds))
	}
	for _, l := range n.lists() {
		if len(*l.of) > 0 {
			text := strings.Trim(strings.ReplaceAll(fmt.Sprint(*l.of), " ", ","), "[]")
			words = append(words, l.name+"="+text)
		}
	}
	return strings.Join(words, " ")
}

func number(f float64) string { return strconv.FormatFloat(f, 'g', -1, 64) }

// A flag is a word of a specification; a list is a word with numbers.
type flag struct {
	name string
	is   *bool
}

type list struct {
	name string
	of   *[]int
}

func (n *Norm) flags() []flag {
	return []flag{{"added", &n.Added}, {"normed", &n.Normed}, {"codes", &n.Codes}, {"stats", &n.Stats},
		{"residual", &n.Residual}}
}

func (n *Norm) lists() []list {
	return []list{{"from", &n.From}, {"into", &n.Into}, {"saved", &n.Saved}, {"kept", &n.Kept}}
}

// Parse reads what String prints.
func Parse(text string) (n Norm, err error) {
	bad := fmt.Errorf("no norm is specified by %q", text)
	words := strings.Split(text, " ")
	if len(words) < 4 || words[0] != forward && words[0] != backward {
		return n, bad
	}
	_, err = fmt.Sscanf(strings.Join(words[1:4], " "), "%dx%d eps=%g shift=%g", &n.Rows, &n.Cols,
		&n.Eps, &n.Shift)
	if err != nil {
		return n, bad
	}
	for _, word := range words[4:] {
		if !n.read(word) {
			return n, bad
		}
	}
	if err := n.check(); err != nil {
		return n, err
	}
	if n.String() != text {
		return n, bad
	}
	return n, nil
}

// read takes one word.
func (n *Norm) read(word string) bool {
	for _, f := range n.flags() {
		if f.name == word {
			*f.is = true
			return true
		}
	}
	name, value, _ := strings.Cut(word, "=")
	var numbers []int
	for text := range strings.SplitSeq(value, ",") {
		v, err := strconv.Atoi(text)
		if err != nil || v < 0 || v > 1<<20 || len(numbers) > 16 {
			return false
		}
		numbers = append(numbers, v)
	}
	switch {
	case name == "grads" && len(numbers) == 1:
		n.Grads = numbers[0]
		return true
	case name == "rounds" && len(numbers) == 1:
		n.Rounds = numbers[0]
		return true
	}
	for _, l := range n.lists() {
		if l.name == name {
			*l.of = numbers
			return true
		}
	}
	return false
}

// most is the dy of one kernel: with more, registers are short.
const most = 3

// mostRows is how many rows can be counted by 32 bits: a last block may lie partly outside.
const mostRows = math.MaxInt32 - blockSize

// leastEps is the least ε, the smallest normal number of float32: what is less may be taken for 0,
// and then a row of zeros is divided by 0.
const leastEps = 0x1p-126

// Sized tells what is wrong with the sizes of a norm or with its numbers; nil if nothing is.
func (n Norm) Sized() error {
	const most = math.MaxFloat32
	switch {
	case n.Rows < 1 || n.Cols < 1 || n.Rows > mostRows || n.Cols > Widest(n.Grads > 0):
		return fmt.Errorf("a norm of %d rows of %d", n.Rows, n.Cols)
	case !(n.Eps >= leastEps && n.Eps <= most && math.Abs(n.Shift) <= most):
		return fmt.Errorf("a norm with ε of %v and a shift of %v", n.Eps, n.Shift)
	}
	return nil
}

// check tells what is wrong with a specification.
func (n Norm) check() error {
	if err := n.Sized(); err != nil {
		return err
	}
	grad := n.Grads > 0
	switch {
	case n.Grads > most || grad && (n.Added || n.Normed || n.Codes || n.Stats) ||
		!grad && n.Residual || n.Normed && n.Codes || n.Codes && n.Cols%block != 0:
		return fmt.Errorf("no norm is %q", n)
	case !grad && !n.Normed && !n.Codes && !n.Stats:
		return fmt.Errorf("a norm without results")
	case n.Rounds == 0 && len(n.From)+len(n.Into)+len(n.Saved)+len(n.Kept) > 0:
		return fmt.Errorf("stacks of no rounds")
	}
	matrices, results := n.Matrices(), n.results()
	for _, i := range slices.Concat(n.From, n.Saved) {
		if !slices.Contains(matrices, i) {
			return fmt.Errorf("operand %d is no matrix", i)
		}
	}
	for _, i := range slices.Concat(n.Into, n.Kept) {
		if i >= len(results) || results[i].Shape[0] != n.Rows || results[i].Elem != tt.BF16 ||
			grad && i > 0 {
			return fmt.Errorf("result %d is no matrix", i)
		}
	}
	if len(n.Kept) > 0 && grad {
		return fmt.Errorf("a gradient is not kept")
	}
	for _, l := range n.lists() {
		if !slices.IsSorted(*l.of) || len(slices.Compact(slices.Clone(*l.of))) != len(*l.of) {
			return fmt.Errorf("numbers that do not rise: %v", *l.of)
		}
	}
	if slices.ContainsFunc(n.Kept, func(i int) bool { return slices.Contains(n.Into, i) }) {
		return fmt.Errorf("a result is kept in the stack that it is written into")
	}
	return nil
}

// Bytes is what the kernel reads and writes, each once; of stacks, one round's part.
func (n Norm) Bytes() (bytes int64) {
	for _, a := range append(n.operands(), n.results()...) {
		size := int64(a.Elem.Bits() / 8)
		for _, d := range a.Shape {
			size *= int64(d)
		}
		bytes += size
	}
	return bytes + int64(len(n.Saved)+len(n.Kept))*2*int64(n.Rows)*int64(n.Cols)
}
