package fused

import (
	"slices"

	tt "github.com/deepwell/deepwell/kernels/triton"
)

// roundArg is the operand that numbers the round.
const roundArg = "round"

// from gives operands that are stacks their shape.
func (s Stacks) from(operands []tt.Arg) []tt.Arg {
	for _, i := range s.From {
		operands[i].Shape = s.stacked(operands[i].Shape)
	}
	return operands
}

func (s Stacks) stacked(shape []int) []int {
	shape = slices.Clone(shape)
	shape[0] *= s.Rounds
	return shape
}

// into lists all arguments: operands, the round, the stacks as they are before, results, and the
// stacks of saved operands as the last results.
func (s Stacks) into(operands, results []tt.Arg) []tt.Arg {
	if !s.any() {
		return append(operands, results...)
	}
	all := append(slices.Clone(operands), tt.Arg{Name: roundArg, Elem: tt.I32, Shape: []int{1}})
	for _, i := range s.Into {
		results[i].Shape = s.stacked(results[i].Shape)
		results[i].InPlace = results[i].Name + "_before"
	}
	for _, i := range s.Saved {
		o := operands[i]
		results = append(results, tt.Arg{Name: "saved_" + o.Name, Elem: o.Elem, Shape: s.stacked(o.Shape),
			Result: true, InPlace: "saved_" + o.Name + "_before"})
	}
	for _, r := range results {
		if r.InPlace != "" {
			all = append(all, tt.Arg{Name: r.InPlace, Elem: r.Elem, Shape: r.Shape})
		}
	}
	return append(all, results...)
}

// shift moves the pointers of stacks to the round's matrix, tells the tile what it saves as it
// reads, and gives the pointers of the results.
func (s Stacks) shift(t *tile, args []tt.Arg, v []tt.Value) (out []tt.Value) {
	first := slices.IndexFunc(args, func(a tt.Arg) bool { return a.Result })
	if !s.any() {
		return v[first:]
	}
	at := slices.IndexFunc(args, func(a tt.Arg) bool { return a.Name == roundArg })
	round := t.b.Load(v[at]).To(tt.I64)
	move := func(i int) {
		size := 1
		for _, n := range args[i].Shape {
			size *= n
		}
		v[i] = v[i].At(round.Mul(size / s.Rounds))
	}
	for _, i := range s.From {
		move(i)
	}
	for i := first; i < len(args); i++ {
		if args[i].InPlace != "" {
			move(i)
		}
	}
	t.saved = map[tt.Value]tt.Value{}
	for k, i := range s.Saved {
		t.saved[v[i]] = v[len(v)-len(s.Saved)+k]
	}
	return v[first:]
}
