package expr

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/dtype"
)

// An Over says which elements of a matrix share an element of an operand.
type Over string

// An operand has an element for each element of the matrix, for each row, for each column, or one.
const (
	Matrix Over = ""
	Rows   Over = "rows"
	Cols   Over = "cols"
	Scalar Over = "scalar"
)

// An Operand is what a kernel reads.
type Operand struct {
	Elem dtype.DType // bf16 or f32
	Over Over
}

// A Step computes one value from values before it.
type Step struct {
	Op   string
	Args []int
	By   float64 // of scale, shift and fill
}

// An Expr is what is computed for each element of a matrix.
type Expr struct {
	In    []Operand
	Steps []Step
	Out   []int // the values that are results
}

// maxSteps bounds what [Parse] takes; a kernel has registers for fewer.
const maxSteps = 256

// Ops has the number of arguments of each step, and whether a number comes with them. Comparisons
// give booleans, which only select takes, as its first argument.
var Ops = map[string]struct {
	Args   int
	Number bool
}{
	"add": {2, false}, "sub": {2, false}, "mul": {2, false}, "div": {2, false},
	"neg": {1, false}, "scale": {1, true}, "shift": {1, true}, "fill": {0, true},
	"exp": {1, false}, "log": {1, false}, "sqrt": {1, false}, "rsqrt": {1, false},
	"tanh": {1, false}, "sigmoid": {1, false}, "relu": {1, false},
	"eq": {2, false}, "ne": {2, false}, "lt": {2, false}, "le": {2, false}, "gt": {2, false},
	"ge": {2, false}, "select": {3, false},
}

// Compares tells whether a step gives booleans.
func Compares(op string) bool {
	return slices.Contains([]string{"eq", "ne", "lt", "le", "gt", "ge"}, op)
}

// String prints the expression.
func (e *Expr) String() string {
	parts := make([]string, 0, 1+len(e.Steps))
	var in []string
	for _, o := range e.In {
		in = append(in, strings.TrimSpace(o.Elem.String()+" "+string(o.Over)))
	}
	parts = append(parts, strings.Join(in, ", "))
	for _, s := range e.Steps {
		words := []string{s.Op}
		for _, a := range s.Args {
			words = append(words, strconv.Itoa(a))
		}
		if Ops[s.Op].Number {
			words = append(words, strconv.FormatFloat(s.By, 'g', -1, 64))
		}
		parts = append(parts, strings.Join(words, " "))
	}
	out := make([]string, len(e.Out))
	for i, o := range e.Out {
		out[i] = strconv.Itoa(o)
	}
	return strings.Join(parts, "; ") + " -> " + strings.Join(out, " ")
}

// Parse reads what String prints.
func Parse(text string) (*Expr, error) {
	body, results, ok := strings.Cut(text, " -> ")
	if !ok {
		return nil, fmt.Errorf("an expression without results: %q", text)
	}
	parts := strings.Split(body, "; ")
	if len(parts) > maxSteps {
		return nil, fmt.Errorf("an expression of %d steps", len(parts))
	}
	e := &Expr{}
	for word := range strings.SplitSeq(parts[0], ", ") {
		elem, over, _ := strings.Cut(word, " ")
		d, err := dtype.Parse(elem)
		if err != nil {
			return nil, err
		}
		e.In = append(e.In, Operand{d, Over(over)})
	}
	for _, part := range parts[1:] {
		s, err := parseStep(part)
		if err != nil {
			return nil, err
		}
		e.Steps = append(e.Steps, s)
	}
	for word := range strings.SplitSeq(results, " ") {
		n, err := strconv.Atoi(word)
		if err != nil {
			return nil, fmt.Errorf("a result is %q", word)
		}
		e.Out = append(e.Out, n)
	}
	return e, e.Check()
}

func parseStep(text string) (s Step, err error) {
	words := strings.Split(text, " ")
	s.Op, words = words[0], words[1:]
	op, ok := Ops[s.Op]
	n := op.Args
	if op.Number {
		n++
	}
	if !ok || len(words) != n {
		return s, fmt.Errorf("no step is %q", text)
	}
	for _, word := range words[:op.Args] {
		at, err := strconv.Atoi(word)
		if err != nil {
			return s, fmt.Errorf("an argument is %q", word)
		}
		s.Args = append(s.Args, at)
	}
	if op.Number {
		if s.By, err = strconv.ParseFloat(words[op.Args], 64); err != nil {
			return s, fmt.Errorf("a number is %q", words[op.Args])
		}
	}
	return s, nil
}

// Check tells what is wrong with an expression.
func (e *Expr) Check() error {
	if len(e.In) == 0 || len(e.Out) == 0 {
		return fmt.Errorf("%d operands, %d results", len(e.In), len(e.Out))
	}
	for _, o := range e.In {
		if o.Elem != dtype.BF16 && o.Elem != dtype.F32 ||
			!slices.Contains([]Over{Matrix, Rows, Cols, Scalar}, o.Over) {
			return fmt.Errorf("an operand is %s %s", o.Elem, o.Over)
		}
	}
	boolean := make([]bool, len(e.In), len(e.In)+len(e.Steps))
	for i, s := range e.Steps {
		op, ok := Ops[s.Op]
		if !ok || len(s.Args) != op.Args || math.IsNaN(s.By) || math.IsInf(s.By, 0) {
			return fmt.Errorf("step %d is %s of %d arguments and %v", i, s.Op, len(s.Args), s.By)
		}
		for k, a := range s.Args {
			if a < 0 || a >= len(boolean) {
				return fmt.Errorf("step %d reads the value %d", i, a)
			}
			if boolean[a] != (s.Op == "select" && k == 0) {
				return fmt.Errorf("step %d takes the value %d, which is of another type", i, a)
			}
		}
		boolean = append(boolean, Compares(s.Op))
	}
	for _, o := range e.Out {
		if o < 0 || o >= len(boolean) || boolean[o] {
			return fmt.Errorf("the value %d is a result", o)
		}
	}
	return nil
}

// Matrices counts the operands that have an element for each of the matrix.
func (e *Expr) Matrices() (n int) {
	for _, o := range e.In {
		if o.Over == Matrix {
			n++
		}
	}
	return n
}

// Do computes the results by the functions of whoever has the values: step is called for every
// step, in order, with the values of its arguments.
func Do[T any](e *Expr, in []T, step func(s Step, args []T) T) []T {
	all := slices.Clone(in)
	for _, s := range e.Steps {
		args := make([]T, len(s.Args))
		for i, a := range s.Args {
			args[i] = all[a]
		}
		all = append(all, step(s, args))
	}
	out := make([]T, len(e.Out))
	for i, o := range e.Out {
		out[i] = all[o]
	}
	return out
}
