package run

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// A rule computes one operation.
type rule func(m *machine, o *op, in []*block) ([]*block, error)

// table gives the rules of all operations that kernels use.
func table() map[string]rule {
	rules := map[string]rule{
		"arith.constant": constant,
		"scf.for":        (*machine).loop,
		"scf.if":         (*machine).branch,
		"tt.reduce":      (*machine).reduce,
		"arith.cmpi":     compareInts,
		"arith.cmpf":     compareFloats,
		"arith.select":   choose,
		"arith.extf":     convert, "arith.truncf": convert, "tt.fp_to_fp": convert,
		"arith.extsi": convert, "arith.trunci": convert, "arith.extui": extendUnsigned,
		"arith.sitofp": convert, "arith.fptosi": convert,
		"tt.bitcast": bitcast,
	}
	for name, f := range integers {
		rules[name] = func(_ *machine, _ *op, in []*block) ([]*block, error) {
			out := in[0].block()
			for i, x := range in[0].ints {
				out.ints[i] = wrap(f(x, in[1].ints[i], in[0].elem), in[0].elem)
			}
			return []*block{out}, nil
		}
	}
	for name, f := range floats {
		rules[name] = func(_ *machine, _ *op, in []*block) ([]*block, error) {
			out := in[0].block()
			for i, x := range in[0].floats {
				y := f(x, in[1].floats[i])
				if y != y {
					y = canonical
				}
				out.floats[i] = round(y, in[0].elem)
			}
			return []*block{out}, nil
		}
	}
	for name, f := range functions {
		rules[name] = func(_ *machine, _ *op, in []*block) ([]*block, error) {
			out := in[0].block()
			for i, x := range in[0].floats {
				out.floats[i] = round(float32(f(float64(x))), in[0].elem)
			}
			return []*block{out}, nil
		}
	}
	maps.Copy(rules, shapeRules)
	maps.Copy(rules, productRules)
	return rules
}

// canonical is the NaN that arithmetic gives on a GPU, whichever NaN it was given (PTX ISA, 9.7.3).
var canonical = math.Float32frombits(0x7fffffff)

var integers = map[string]func(x, y int64, elem string) int64{
	"arith.addi":  func(x, y int64, _ string) int64 { return x + y },
	"arith.subi":  func(x, y int64, _ string) int64 { return x - y },
	"arith.muli":  func(x, y int64, _ string) int64 { return x * y },
	"arith.andi":  func(x, y int64, _ string) int64 { return x & y },
	"arith.ori":   func(x, y int64, _ string) int64 { return x | y },
	"arith.xori":  func(x, y int64, _ string) int64 { return x ^ y },
	"arith.shli":  func(x, y int64, _ string) int64 { return x << uint64(y) },
	"arith.shrsi": func(x, y int64, _ string) int64 { return x >> uint64(y) },
	"arith.shrui": func(x, y int64, elem string) int64 {
		return int64(uint64(x) & (1<<bits(elem) - 1) >> uint64(y))
	},
	"arith.maxsi": func(x, y int64, _ string) int64 { return max(x, y) },
	"arith.minsi": func(x, y int64, _ string) int64 { return min(x, y) },
	"arith.divsi": func(x, y int64, _ string) int64 {
		if y == 0 {
			return 0 // undefined
		}
		return x / y
	},
	"arith.remsi": func(x, y int64, _ string) int64 {
		if y == 0 {
			return 0
		}
		return x % y
	},
	"tt.mulhiui": func(x, y int64, _ string) int64 {
		return int64(uint64(uint32(x)) * uint64(uint32(y)) >> 32)
	},
}

var floats = map[string]func(x, y float32) float32{
	"arith.addf":      func(x, y float32) float32 { return x + y },
	"arith.subf":      func(x, y float32) float32 { return x - y },
	"arith.mulf":      func(x, y float32) float32 { return x * y },
	"arith.divf":      func(x, y float32) float32 { return x / y },
	"tt.precise_divf": func(x, y float32) float32 { return x / y },
	"arith.maxnumf": func(x, y float32) float32 {
		if x != x || y > x {
			return y
		}
		return x
	},
	"arith.minnumf": func(x, y float32) float32 {
		if x != x || y < x {
			return y
		}
		return x
	},
}

var functions = map[string]func(x float64) float64{
	"math.exp2": math.Exp2, "math.log2": math.Log2, "math.absf": math.Abs, "math.sqrt": math.Sqrt,
	"math.rsqrt": func(x float64) float64 { return 1 / math.Sqrt(x) },
}

// constant reads dense<1.0e+00> : tensor<32xf32>, 12 : i32, or true.
func constant(_ *machine, o *op, _ []*block) ([]*block, error) {
	text, _, typed := strings.Cut(strings.TrimSpace(o.text), " : ")
	t := typ{elem: "i1"}
	if typed {
		t = o.out[0]
	}
	text = strings.TrimSuffix(strings.TrimPrefix(text, "dense<"), ">")
	out := t.block()
	switch {
	case text == "true" || text == "false":
		n := int64(0)
		if text == "true" {
			n = 1
		}
		fill(out.ints, n)
	case t.float() && strings.HasPrefix(text, "0x"):
		u, err := strconv.ParseUint(text[2:], 16, 64)
		if err != nil {
			return nil, err
		}
		for i := range out.floats {
			out.decode(i, u)
		}
	case t.float():
		f, err := strconv.ParseFloat(text, 32)
		if err != nil {
			return nil, err
		}
		fill(out.floats, round(float32(f), t.elem))
	default:
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || wrap(n, t.elem) != n && n >= 1<<bits(t.elem) {
			return nil, fmt.Errorf("%s is no %s", text, t.elem)
		}
		fill(out.ints, wrap(n, t.elem))
	}
	return []*block{out}, nil
}

func fill[T any](list []T, v T) {
	for i := range list {
		list[i] = v
	}
}

// predicates compare by the sign of a difference: −1, 0 and 1.
var predicates = map[string][]int{"eq": {0}, "ne": {-1, 1}, "lt": {-1}, "le": {-1, 0}, "gt": {1},
	"ge": {0, 1}}

// predicate reads the word behind the operation's name.
func predicate(o *op, prefix string) ([]int, error) {
	word, _, _ := strings.Cut(strings.TrimSpace(o.text), ",")
	holds := predicates[strings.TrimPrefix(word, prefix)]
	if holds == nil {
		return nil, fmt.Errorf("unknown predicate %q", word)
	}
	return holds, nil
}

func compareInts(_ *machine, o *op, in []*block) ([]*block, error) {
	holds, err := predicate(o, "s")
	out := typ{"i1", "", in[0].shape}.block()
	for i, x := range in[0].ints {
		y, sign := in[1].ints[i], 0
		if x < y {
			sign = -1
		} else if x > y {
			sign = 1
		}
		if slices.Contains(holds, sign) {
			out.ints[i] = 1
		}
	}
	return []*block{out}, err
}

func compareFloats(_ *machine, o *op, in []*block) ([]*block, error) {
	word := strings.TrimSpace(o.text)[:1] // o is false for NaN, u is true
	holds, err := predicate(o, word)
	out := typ{"i1", "", in[0].shape}.block()
	for i, x := range in[0].floats {
		y, sign := in[1].floats[i], 0
		if x < y {
			sign = -1
		} else if x > y {
			sign = 1
		}
		if nan := x != x || y != y; nan && word == "u" || !nan && slices.Contains(holds, sign) {
			out.ints[i] = 1
		}
	}
	return []*block{out}, err
}

func choose(_ *machine, _ *op, in []*block) ([]*block, error) {
	out := in[1].block()
	for i := range out.count() {
		from, c := in[2], in[0].ints[0]
		if in[0].shape != nil {
			c = in[0].ints[i]
		}
		if c != 0 {
			from = in[1]
		}
		out.decode(i, from.encode(i))
	}
	return []*block{out}, nil
}

// convert changes the type of elements. Floats of 8 bits saturate, as the GPU's conversions do.
func convert(_ *machine, o *op, in []*block) ([]*block, error) {
	out := typ{o.out[0].elem, "", in[0].shape}.block()
	for i := range out.count() {
		switch {
		case in[0].floats != nil && out.floats != nil:
			out.floats[i] = round(in[0].floats[i], out.elem)
		case out.floats != nil:
			out.floats[i] = round(float32(in[0].ints[i]), out.elem)
		case in[0].floats != nil:
			out.ints[i] = wrap(int64(in[0].floats[i]), out.elem)
		default:
			out.ints[i] = wrap(in[0].ints[i], out.elem)
		}
	}
	return []*block{out}, nil
}

func extendUnsigned(_ *machine, o *op, in []*block) ([]*block, error) {
	out := typ{o.out[0].elem, "", in[0].shape}.block()
	for i := range out.ints {
		out.ints[i] = int64(in[0].encode(i))
	}
	return []*block{out}, nil
}

func bitcast(_ *machine, o *op, in []*block) ([]*block, error) {
	out := typ{o.out[0].elem, "", in[0].shape}.block()
	for i := range out.count() {
		out.decode(i, in[0].encode(i))
	}
	return []*block{out}, nil
}
