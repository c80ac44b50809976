package rownorm

import (
	"math/bits"
	"slices"

	"github.com/deepwell/deepwell/kernels/fused"
	tt "github.com/deepwell/deepwell/kernels/triton"
)

// A Norm is what one kernel computes of a matrix [rows, cols] in bfloat16, r being
// 1/√(mean(s²) + ε) of a row. Operands and results, in their order:
//
//	x, y if added, the weight [cols] if normed → s = x + y if added, s·r·(weight + shift) if normed
//	or, rounded to bfloat16 first, its codes of MXFP8 and their scales [rows, cols/32],
//	r [rows] in float32 if stats are asked for
//
// The gradient sums gradients dy of the result, takes r from x, and adds the gradient that a
// residual brings:
//
//	x, the weight, dy…, the residual's if there is one → dx, and the weight's gradient in float32
//	in parts [programs, cols]
type Norm struct {
	Rows, Cols int
	Eps, Shift float64
	Added      bool // x is a sum, which is a result
	Normed     bool
	Codes      bool // the norm is quantized, along rows; it is not written itself
	Stats      bool
	Grads      int  // of a gradient: how many dy there are; 0 is the norm itself
	Residual   bool // of a gradient
	fused.Stacks
	// Kept are results that others read and that are written into stacks, too. Their stacks are the
	// last results.
	Kept []int
}

// The numbers of a row, or of some short ones, that a program has at a time; and how many a thread
// has. Registers are enough for twice as many in a norm, and for no more in a gradient.
const (
	blockSize = 4096
	perThread = 16
	mostWarps = 16
)

// Widest is how long rows can be: beyond it registers spill.
func Widest(grad bool) int {
	if grad {
		return mostWarps * 32 * perThread
	}
	return 2 * mostWarps * 32 * perThread
}

// block is how many codes have a scale.
const block = 32

// programs is how many programs share the rows of a gradient: four for each of 148 SMs, so that the
// weight's gradient has few parts and every SM has work.
const programs = 592

// wide is the columns of a block, and high its rows.
func (n Norm) wide() int { return 1 << bits.Len(uint(n.Cols-1)) }

func (n Norm) high() int {
	return max(min(blockSize/n.wide(), 1<<bits.Len(uint(n.Rows-1))), 1)
}

// Parts is how many parts the weight's gradient has.
func (n Norm) Parts() int { return min((n.Rows+n.high()-1)/n.high(), programs) }

// Matrices are the operands that have as many elements as the matrix, by their numbers.
func (n Norm) Matrices() (list []int) {
	for i, a := range n.operands() {
		if len(a.Shape) == 2 {
			list = append(list, i)
		}
	}
	return list
}

func (n Norm) matrix(name string) tt.Arg {
	return tt.Arg{Name: name, Elem: tt.BF16, Shape: []int{n.Rows, n.Cols}}
}

func (n Norm) operands() (list []tt.Arg) {
	weight := tt.Arg{Name: "w", Elem: tt.BF16, Shape: []int{n.Cols}}
	if n.Grads == 0 {
		list = append(list, n.matrix("x"))
		if n.Added {
			list = append(list, n.matrix("y"))
		}
		if n.Normed || n.Codes {
			list = append(list, weight)
		}
		return list
	}
	list = append(list, n.matrix("x"), weight)
	for i := range n.Grads {
		list = append(list, n.matrix("dy"+string(rune('0'+i))))
	}
	if n.Residual {
		list = append(list, n.matrix("residual"))
	}
	return list
}

func (n Norm) results() (list []tt.Arg) {
	switch {
	case n.Grads > 0:
		list = append(list, n.matrix("dx"),
			tt.Arg{Name: "dw", Elem: tt.F32, Shape: []int{n.Parts(), n.Cols}})
	default:
		if n.Added {
			list = append(list, n.matrix("s"))
		}
		if n.Normed {
			list = append(list, n.matrix("n"))
		}
		if n.Codes {
			list = append(list, tt.Arg{Name: "q", Elem: tt.E4M3, Shape: []int{n.Rows, n.Cols}},
				tt.Arg{Name: "qs", Elem: tt.I8, Shape: []int{n.Rows, n.Cols / block}})
		}
		if n.Stats {
			list = append(list, tt.Arg{Name: "r", Elem: tt.F32, Shape: []int{n.Rows}})
		}
	}
	for i := range list {
		list[i].Result = true
	}
	return list
}

// Operands is how many operands there are before the round and the stacks.
func (n Norm) Operands() int { return len(n.operands()) }

// args lists all arguments: operands, the round, stacks as they are before, results, and the stacks
// of saved operands and of kept results as the last results.
func (n Norm) args() []tt.Arg {
	operands, results := n.operands(), n.results()
	stacked := func(a tt.Arg) tt.Arg {
		a.Shape = slices.Clone(a.Shape)
		a.Shape[0] *= n.Rounds
		return a
	}
	into := func(a tt.Arg) tt.Arg {
		a = stacked(a)
		a.Result, a.InPlace = true, a.Name+"_before"
		return a
	}
	for _, list := range []struct {
		of   []tt.Arg
		some []int
	}{{operands, n.Saved}, {results, n.Kept}} {
		for _, i := range list.some {
			a := list.of[i]
			a.Name = "saved_" + a.Name
			results = append(results, into(a))
		}
	}
	for _, i := range n.From {
		operands[i] = stacked(operands[i])
	}
	for _, i := range n.Into {
		results[i] = into(results[i])
	}
	if n.Rounds > 0 {
		operands = append(operands, tt.Arg{Name: "round", Elem: tt.I32, Shape: []int{1}})
	}
	for _, r := range results {
		if r.InPlace != "" {
			operands = append(operands, tt.Arg{Name: r.InPlace, Elem: r.Elem, Shape: r.Shape})
		}
	}
	return append(operands, results...)
}

// A rows is the rows that a program has at a time.
type rows struct {
	Norm
	b            *tt.Builder
	row, col     tt.Value // [high] of the first rows, and [wide]
	at           []tt.Value
	first, saved int // the numbers of the first result, and of the first stack that is one more
}

// Kernel prints the kernel.
func (n Norm) Kernel() (*tt.Kernel, error) {
	if err := n.check(); err != nil {
		return nil, err
	}
	args := n.args()
	b, v := tt.New(n.name(), args...)
	r := &rows{Norm: n, b: b, at: v, row: b.Range(n.high()), col: b.Range(n.wide())}
	r.first = slices.IndexFunc(args, func(a tt.Arg) bool { return a.Result })
	r.saved = r.first + len(n.results())
	if n.Rounds > 0 {
		round := b.Load(v[n.Operands()]).To(tt.I64)
		for i, a := range args {
			if slices.Contains(n.From, i) || a.InPlace != "" {
				size := 1
				for _, d := range a.Shape {
					size *= d
				}
				v[i] = v[i].At(round.Mul(size / n.Rounds))
			}
		}
	}
	grid := (n.Rows + n.high() - 1) / n.high()
	if n.Grads > 0 {
		grid = n.Parts()
		r.gradient()
	} else {
		r.norm()
	}
	warps := min(max(n.high()*n.wide()/(perThread*32), 1), mostWarps)
	k, err := b.Kernel(tt.Launch{Grid: [3]int{grid}, Warps: warps})
	if err == nil {
		k.Spec = n.String()
	}
	return k, err
}

// norm prints the norm of the program's rows.
func (r *rows) norm() {
	row := r.b.Program(0).Mul(r.high()).Add(r.row)
	out := r.at[r.first:r.saved]
	give := func(number int, y tt.Value) {
		r.store(out[number], row, y)
		if k := slices.Index(r.Kept, number); k >= 0 {
			r.store(r.at[r.saved+len(r.Saved)+k], row, y)
		}
	}
	s, next := r.load(0, row), 0
	if r.Added {
		s = s.Add(r.load(1, row)).To(tt.BF16).To(tt.F32)
		give(next, s.To(tt.BF16))
		next++
	}
	inverse := r.inverse(s)
	if r.Normed || r.Codes {
		y := s.Mul(inverse.Expand(1)).Mul(r.weight(r.Operands() - 1)).To(tt.BF16)
		if r.Codes {
			r.codes(out[next:], row, y)
			next++
		} else {
			give(next, y)
		}
		next++
	}
	if r.Stats {
		to := out[next].At(row)
		if r.Rows%r.high() != 0 {
			r.b.StoreIf(row.Is("lt", r.Rows), to, inverse)
			return
		}
		r.b.Store(to, inverse)
	}
}

// codes writes the codes of rows and their scales.
func (r *rows) codes(to []tt.Value, row, y tt.Value) {
	codes, scales := fused.RowBlocks(y, r.high(), r.wide())
	r.store(to[0], row, codes)
	n := r.b.Range(r.wide() / block)
	first, each := row.Expand(1), n.Expand(0)
	if r.Rows*r.Cols/block >= 1<<31 {
		first, each = first.To(tt.I64), each.To(tt.I64)
	}
	at := to[1].At(first.Mul(r.Cols / block).Add(each))
	if r.Rows%r.high() == 0 && r.wide() == r.Cols {
		r.b.Store(at, scales)
		return
	}
	r.b.StoreIf(row.Is("lt", r.Rows).Expand(1).And(n.Is("lt", r.Cols/block).Expand(0)), at, scales)
}

// gradient prints the gradient of the rows that are the program's, some at a time.
func (r *rows) gradient() {
	b, me := r.b, r.b.Program(0)
	weight := r.weight(1)
	last := r.Operands()
	if r.Residual {
		last--
	}
	blocks := (r.Rows + r.high() - 1) / r.high()
	none := b.Full(0.0, tt.F32, r.high(), r.wide())
	sum := b.For(me, me.Const(blocks), me.Const(r.Parts()), []tt.Value{none},
		func(i tt.Value, sum []tt.Value) []tt.Value {
			row := i.Mul(r.high()).Add(r.row)
			x, dy := r.load(0, row), r.load(2, row)
			for k := 3; k < last; k++ {
				dy = dy.Add(r.load(k, row))
			}
			g := dy.Mul(weight)
			inverse := r.inverse(x)
			// r² mean(g·x): both sums of a row are under way together.
			mean := g.Mul(x).Sum(1).Mul(1 / float64(r.Cols)).Mul(inverse).Mul(inverse)
			each := inverse.Expand(1)
			dx := g.Sub(x.Mul(mean.Expand(1))).Mul(each)
			if r.Residual {
				dx = dx.Add(r.load(last, row))
			}
			r.store(r.at[r.first], row, dx.To(tt.BF16))
			return []tt.Value{sum[0].Add(dy.Mul(x.Mul(each)))}
		})
	to := r.at[r.first+1].At(me.Mul(r.Cols)).At(r.col)
	if r.wide() != r.Cols {
		b.StoreIf(r.col.Is("lt", r.Cols), to, sum[0].Sum(0))
		return
	}
	b.Store(to, sum[0].Sum(0))
}

// inverse is 1/√(mean(s²) + ε) of rows, [high].
func (r *rows) inverse(s tt.Value) tt.Value {
	return s.Mul(s).Sum(1).Mul(1 / float64(r.Cols)).Add(r.Eps).Rsqrt()
}

// weight reads the weight, [1, wide].
func (r *rows) weight(operand int) tt.Value {
	p := r.at[operand].At(r.col)
	w := r.b.Load
	if r.wide() != r.Cols {
		w = func(p tt.Value) tt.Value { return r.b.LoadIf(r.col.Is("lt", r.Cols), p, 0) }
	}
	v := w(p).To(tt.F32)
	if r.Shift != 0 {
		v = v.Add(r.Shift)
	}
	return v.Expand(0)
}

// place points to rows of a matrix, and mask tells which of their elements there are; nil if all.
func (r *rows) place(x, row tt.Value) (at, mask tt.Value) {
	n, c := row.Expand(1), r.col.Expand(0)
	if r.Rows%r.high() != 0 {
		mask = row.Is("lt", r.Rows).Expand(1).Broadcast(r.high(), r.wide())
	}
	if r.wide() != r.Cols {
		in := r.col.Is("lt", r.Cols).Expand(0).Broadcast(r.high(), r.wide())
		if mask != nil {
			in = in.And(mask)
		}
		mask = in
	}
	if r.Rows*r.Cols >= 1<<31 {
		n, c = n.To(tt.I64), c.To(tt.I64)
	}
	return x.At(n.Mul(r.Cols).Add(c)), mask
}

// load reads rows of an operand, in float32, and saves them where that is asked for.
func (r *rows) load(operand int, row tt.Value) tt.Value {
	at, mask := r.place(r.at[operand], row)
	var v tt.Value
	if mask != nil {
		v = r.b.LoadIf(mask, at, 0)
	} else {
		v = r.b.Load(at)
	}
	if k := slices.Index(r.Saved, operand); k >= 0 {
		r.store(r.at[r.saved+k], row, v)
	}
	return v.To(tt.F32)
}

func (r *rows) store(to, row, v tt.Value) {
	at, mask := r.place(to, row)
	if mask != nil {
		r.b.StoreIf(mask, at, v)
		return
	}
	r.b.Store(at, v)
}
