package firstuse

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/kernels/expr"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/triton"
	"github.com/deepwell/deepwell/program"
)

// Limit is how far a kernel that computes may be from its plain form: the norm of the difference
// over the plain form's norm. Approximate instructions are wrong by 2 units in the last place of
// float32, which moves a bfloat16 in about 10,000 to its neighbour, and one of 16 of those to
// another code, by up to an eighth: 3e-4. A wrong index, mask or scale is beyond 0.05.
const Limit = 2e-3

// attentionLimit is the limit of flash attention: probabilities and their gradients are rounded to
// bfloat16 before GEMMs, and the host's are other numbers, not divided by their sum or not
// rounded: 2e-3 to 4e-3 (kernels/flash has it by the interpreter). Planted errors are beyond 0.05.
const attentionLimit = 8e-3

// Small gives a specification of a smaller matrix, whose last tiles are as full: the kernel
// has the same text but for its sizes.
func Small(s fused.Spec) fused.Spec {
	// Tiles have at most 256 rows or columns.
	shrunk := func(n int) int {
		if n > 512 {
			return 256 + n%256
		}
		return n
	}
	s.Batch, s.Rows, s.Cols = min(s.Batch, 2), shrunk(s.Rows), shrunk(s.Cols)
	s.Layers = min(s.Layers, s.Batch)
	if s.Rounds > 0 { // a loop of one round has them, too: there is a slot before, and one after
		s.Rounds = 3
	}
	return s
}

// Compare runs a kernel on the first device of an engine and gives how far its results are from the
// plain form: 0 is equal bytes, and anything above [Limit] is wrong. A kernel that computes
// nothing, only quantizes, is wrong unless its bytes are equal.
func Compare(ctx context.Context, e *engine.Engine, text string, seed uint64) (apart float64,
	err error) {
	k, err := Find(text)
	if err != nil {
		return 0, err
	}
	return k.compare(ctx, e, seed)
}

// compareSpec is [Compare] of a quantization.
func compareSpec(ctx context.Context, e *engine.Engine, s fused.Spec, seed uint64) (apart float64,
	err error) {
	k, err := s.Kernel()
	if err != nil {
		return 0, err
	}
	return compare(ctx, e, s, k, seed)
}

// compare is Compare of a printed kernel.
func compare(ctx context.Context, e *engine.Engine, s fused.Spec, k *triton.Kernel, seed uint64) (
	apart float64, err error) {
	d := draw(s, k, rand.New(rand.NewPCG(seed, 22)))
	want, err := plain(s, k, d.values)
	if err != nil {
		return 0, err
	}
	got, err := run(ctx, e, k, d.operands)
	if err != nil {
		return 0, err
	}
	if len(got) != len(want)+len(s.Saved) {
		return 0, fmt.Errorf("%s has %d results, not %d", k.Name, len(got), len(want)+len(s.Saved))
	}
	for i, n := range s.Saved {
		want = append(want, result{bytes: d.slot(s, n)})
		s.Into = append(slices.Clone(s.Into), len(got)-len(s.Saved)+i)
	}
	for i := range got {
		if slices.Contains(s.Into, i) {
			rest := slices.Concat(slices.Clone(got[i][:round*len(want[i].bytes)]),
				got[i][(round+1)*len(want[i].bytes):])
			if slices.ContainsFunc(rest, func(b byte) bool { return b != untouched }) {
				return wholly, nil // it wrote into what is another round's
			}
			got[i] = got[i][round*len(want[i].bytes):][:len(want[i].bytes)]
		}
	}
	return judge(s, got, want), nil
}

// judge gives how far results are from what they must be.
func judge(s fused.Spec, got [][]byte, want []result) (apart float64) {
	for i, w := range want {
		var values []float32
		switch {
		case bytes.Equal(got[i], w.bytes):
			continue
		case len(s.Expr.Steps) == 0:
			return wholly
		case w.values == nil && i > 0 && want[i-1].values != nil: // scales, compared with their codes
			continue
		case w.values == nil:
			return wholly
		case len(w.bytes) == 4*len(w.values): // the largest magnitudes of tiles
			for at := 0; at < len(got[i]); at += 4 {
				values = append(values, math.Float32frombits(binary.LittleEndian.Uint32(got[i][at:])))
			}
		case len(w.bytes) == 2*len(w.values):
			for at := 0; at < len(got[i]); at += 2 {
				values = append(values, dtype.F32FromBF16(binary.LittleEndian.Uint16(got[i][at:])))
			}
		default:
			values = decoded(s.Format, got[i], got[i+1])
		}
		apart = max(apart, distance(values, w.values))
	}
	return apart
}

// distance is the norm of a difference over the norm of what is right.
func distance(got, want []float32) float64 {
	var sum, all float64
	if len(got) != len(want) {
		return wholly
	}
	for i, w := range want {
		d := float64(got[i]) - float64(w)
		sum, all = sum+d*d, all+float64(w)*float64(w)
	}
	if sum == 0 { // also of zeros
		return 0
	}
	if d := math.Sqrt(sum / all); !math.IsNaN(d) {
		return d
	}
	return wholly
}

// wholly is the distance of what differs in a way that has none: bytes that must be equal, a NaN.
const wholly = 1.0

const (
	round     = 1    // that a kernel in a loop is in: its stacks have a slot before it, and one after
	untouched = 0x3f // what is in stacks before; neither a NaN nor zero in any type
)

// drawn are operands of a kernel, as it takes them and as numbers of the round's matrix.
type drawn struct {
	operands [][]byte
	values   [][]float32
}

// draw makes random operands, in the order of the kernel's arguments.
func draw(s fused.Spec, k *triton.Kernel, r *rand.Rand) (d drawn) {
	rows, cols := s.Batch*s.Rows, s.Cols
	for i, o := range s.Expr.In {
		n := map[expr.Over]int{expr.Matrix: rows * cols, expr.Rows: rows, expr.Cols: cols,
			expr.Scalar: 1}[o.Over]
		var bits []byte
		short := make([]float32, n)
		for at := range short {
			v := float32(r.NormFloat64() * 2)
			if s.Format == dtype.NVFP4 { // sums of 16 are exact in any order
				v = float32(math.Round(max(min(float64(v), 4), -4)*32) / 32)
			}
			w := dtype.BF16FromF32(v)
			if short[at] = dtype.F32FromBF16(w); o.Elem == dtype.BF16 {
				bits = binary.LittleEndian.AppendUint16(bits, w)
			} else {
				bits = binary.LittleEndian.AppendUint32(bits, math.Float32bits(short[at]))
			}
		}
		if slices.Contains(s.From, i) {
			rest := bytes.Repeat([]byte{untouched}, len(bits)*(s.Rounds-1))
			bits = slices.Concat(rest[:round*len(bits)], bits, rest[round*len(bits):])
		}
		values := make([]float32, rows*cols)
		for at := range values {
			switch o.Over {
			case expr.Matrix:
				values[at] = short[at]
			case expr.Rows:
				values[at] = short[at/cols]
			case expr.Cols:
				values[at] = short[at%cols]
			default:
				values[at] = short[0]
			}
		}
		d.operands, d.values = append(d.operands, bits), append(d.values, values)
	}
	for _, a := range k.Args[len(d.operands):] {
		switch n := a.Elem.Bits() / 8 * elements(a.Shape); {
		case a.Result:
			return d
		case len(d.operands) < s.Operands():
			d.operands = append(d.operands, beside(a))
		case a.Elem == triton.I32 && n == 4:
			d.operands = append(d.operands, []byte{round, 0, 0, 0})
		default:
			d.operands = append(d.operands, bytes.Repeat([]byte{untouched}, n))
		}
	}
	return d
}

// slot gives the bytes of a matrix operand of the round.
func (d drawn) slot(s fused.Spec, n int) []byte {
	if !slices.Contains(s.From, n) {
		return d.operands[n]
	}
	size := len(d.operands[n]) / s.Rounds
	return d.operands[n][round*size:][:size]
}

func elements(shape []int) int {
	n := 1
	for _, d := range shape {
		n *= d
	}
	return n
}

// run runs a kernel alone.
func run(ctx context.Context, e *engine.Engine, k *triton.Kernel, in [][]byte) (out [][]byte,
	err error) {
	x, err := e.Compile(ctx, &program.FromText(k.Name, k.Module(), 1).Modules[0])
	if err != nil {
		return nil, err
	}
	defer x.Free()
	var args []*engine.Array
	for i, b := range in {
		a, err := e.Place(x.Module(), x.Module().Args[i], engine.Copied,
			func(int) ([]byte, error) { return bytes.Clone(b), nil })
		if err != nil {
			return nil, err
		}
		defer a.Free()
		args = append(args, a)
	}
	r, err := x.Run(ctx, args...)
	if err != nil {
		return nil, err
	}
	defer r.Free()
	if err := r.Wait(ctx); err != nil {
		return nil, err
	}
	for _, a := range r.Results {
		b, err := a.Read(ctx, 0)
		if err != nil {
			return nil, err
		}
		out = append(out, b)
	}
	return out, nil
}
