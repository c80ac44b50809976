package pt2

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"math/bits"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/internal/lists"
)

// An Expr is an integer, or an expression in the symbols of sizes, as sympy's srepr writes it.
type Expr struct {
	// Op is sympy's name: Integer, Symbol, Add, Mul, Min, Max, FloorDiv, Mod, Pow and others.
	Op   string
	Int  int64  // of an Integer
	Name string // of a Symbol, such as s72; the digits of a Float
	Args []Expr
}

// The operations that have no arguments.
const (
	opInteger = "Integer"
	opSymbol  = "Symbol"
)

func integer(n int64) Expr { return Expr{Op: opInteger, Int: n} }

// Const gives the integer that the expression is, if it is one.
func (e Expr) Const() (int64, bool) { return e.Int, e.Op == opInteger }

// Symbols lists the symbols of the expression, sorted.
func (e Expr) Symbols() []string {
	seen := map[string]bool{}
	e.collect(seen)
	return slices.Sorted(maps.Keys(seen))
}

func (e Expr) collect(seen map[string]bool) {
	if e.Op == opSymbol {
		seen[e.Name] = true
	}
	for _, a := range e.Args {
		a.collect(seen)
	}
}

// String writes the expression as Python does: 64*s72, min(s27, 8).
func (e Expr) String() string {
	args := lists.Map(e.Args, Expr.String)
	switch e.Op {
	case opInteger:
		return strconv.FormatInt(e.Int, 10)
	case opSymbol, opFloat:
		return e.Name
	case "Add":
		return "(" + strings.Join(args, " + ") + ")"
	case "Mul":
		return strings.Join(args, "*")
	case "Min", "Max":
		return strings.ToLower(e.Op) + "(" + strings.Join(args, ", ") + ")"
	}
	if len(args) == 0 {
		return e.Op
	}
	return e.Op + "(" + strings.Join(args, ", ") + ")"
}

// Eval computes the expression for given values of the symbols. A comparison is 1 or 0. Overflow
// of int64, division by zero, a symbol without a value and an operation that does not give integers
// are errors.
func (e Expr) Eval(symbols map[string]int64) (int64, error) {
	switch e.Op {
	case opInteger:
		return e.Int, nil
	case opSymbol:
		v, ok := symbols[e.Name]
		if !ok {
			return 0, fmt.Errorf("the symbol %s has no value", e.Name)
		}
		return v, nil
	case "true", "false":
		return flag(e.Op == "true"), nil
	}
	f, ok := operations[e.Op]
	if !ok {
		return 0, fmt.Errorf("%s gives no integer", e.Op)
	}
	if len(e.Args) < f.least || len(e.Args) > f.most {
		return 0, fmt.Errorf("%s has %d arguments", e.Op, len(e.Args))
	}
	args := make([]int64, len(e.Args))
	for i, a := range e.Args {
		var err error
		if args[i], err = a.Eval(symbols); err != nil {
			return 0, err
		}
	}
	v, ok := f.of(args)
	if !ok {
		return 0, fmt.Errorf("%s of %s overflows or is not defined", e.Op,
			strings.Trim(fmt.Sprint(args), "[]"))
	}
	return v, nil
}

// An operation computes with integers; false where the result is not an integer of 64 bits.
type operation struct {
	least, most int // arguments
	of          func(args []int64) (int64, bool)
}

var operations = map[string]operation{
	"Add":               fold(add),
	"Mul":               fold(mul),
	"Min":               fold(func(a, b int64) (int64, bool) { return min(a, b), true }),
	"Max":               fold(func(a, b int64) (int64, bool) { return max(a, b), true }),
	"And":               fold(func(a, b int64) (int64, bool) { return flag(a != 0 && b != 0), true }),
	"Or":                fold(func(a, b int64) (int64, bool) { return flag(a != 0 || b != 0), true }),
	"FloorDiv":          pair(floorDiv),
	"CleanDiv":          pair(floorDiv),
	"CeilDiv":           pair(ceilDiv),
	"Mod":               pair(mod),
	"PythonMod":         pair(mod),
	"Pow":               pair(pow),
	"PowByNatural":      pair(pow),
	"LShift":            pair(shiftLeft),
	"RShift":            pair(shiftRight),
	"Equality":          compare(func(c int) bool { return c == 0 }),
	"Unequality":        compare(func(c int) bool { return c != 0 }),
	"StrictLessThan":    compare(func(c int) bool { return c < 0 }),
	"LessThan":          compare(func(c int) bool { return c <= 0 }),
	"StrictGreaterThan": compare(func(c int) bool { return c > 0 }),
	"GreaterThan":       compare(func(c int) bool { return c >= 0 }),
	"Not":               {1, 1, func(a []int64) (int64, bool) { return flag(a[0] == 0), true }},
	"Identity":          {1, 1, func(a []int64) (int64, bool) { return a[0], true }},
	"Where": {3, 3, func(a []int64) (int64, bool) {
		if a[0] != 0 {
			return a[1], true
		}
		return a[2], true
	}},
	"ModularIndexing": {3, 3, func(a []int64) (int64, bool) { // (a / b) % c
		q, ok := floorDiv(a[0], a[1])
		if !ok {
			return 0, false
		}
		return mod(q, a[2])
	}},
}

func fold(f func(a, b int64) (int64, bool)) operation {
	return operation{1, math.MaxInt, func(args []int64) (int64, bool) {
		v := args[0]
		for _, a := range args[1:] {
			next, ok := f(v, a)
			if !ok {
				return 0, false
			}
			v = next
		}
		return v, true
	}}
}

func pair(f func(a, b int64) (int64, bool)) operation {
	return operation{2, 2, func(args []int64) (int64, bool) { return f(args[0], args[1]) }}
}

func compare(holds func(c int) bool) operation {
	return pair(func(a, b int64) (int64, bool) { return flag(holds(cmp.Compare(a, b))), true })
}

func flag(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

func add(a, b int64) (int64, bool) {
	s := a + b
	return s, (s > a) == (b > 0)
}

func mul(a, b int64) (int64, bool) {
	high, low := bits.Mul64(magnitude(a), magnitude(b))
	if (a < 0) != (b < 0) {
		return -int64(low), high == 0 && low <= 1<<63
	}
	return int64(low), high == 0 && low < 1<<63
}

// magnitude is the absolute value, which for -2⁶³ fits no int64.
func magnitude(a int64) uint64 {
	if a < 0 {
		return -uint64(a)
	}
	return uint64(a)
}

func floorDiv(a, b int64) (int64, bool) {
	if b == 0 || a == math.MinInt64 && b == -1 {
		return 0, false
	}
	q := a / b
	if a%b != 0 && (a < 0) != (b < 0) {
		q--
	}
	return q, true
}

func ceilDiv(a, b int64) (int64, bool) {
	q, ok := floorDiv(a, b)
	if ok && q*b != a {
		q++
	}
	return q, ok
}

// mod has the sign of b, as in Python.
func mod(a, b int64) (int64, bool) {
	if b == 0 {
		return 0, false
	}
	if b == -1 {
		return 0, true
	}
	m := a % b
	if m != 0 && (m < 0) != (b < 0) {
		m += b
	}
	return m, true
}

func pow(a, b int64) (v int64, ok bool) {
	if b < 0 {
		return 0, false
	}
	if a == 0 || a == 1 || a == -1 { // these never overflow, however large the exponent
		b = min(b, 2+b%2)
	}
	v = 1
	for ; b > 0; b-- { // at most 63 times: a larger power overflows
		if v, ok = mul(v, a); !ok {
			return 0, false
		}
	}
	return v, true
}

func shiftLeft(a, b int64) (int64, bool) {
	if b < 0 || b > 62 {
		return 0, false
	}
	return mul(a, 1<<b)
}

func shiftRight(a, b int64) (int64, bool) {
	if b < 0 {
		return 0, false
	}
	return a >> min(b, 63), true
}
