package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"strings"

	"github.com/deepwell/deepwell/data"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/parity"
)

// A variant is a recipe, or one with a part of it switched off.
type variant struct {
	name       string
	nvfp4      bool
	floor      bool // scales rounded down
	e5m2       bool // gradients in E5M2
	hadamard   bool
	stochastic bool
	tiles      bool
}

var variants = []variant{
	{name: "MXFP8"},
	{name: "MXFP8, scale rounded down", floor: true},
	{name: "MXFP8, gradients in E5M2", e5m2: true},
	{name: "NVFP4", nvfp4: true, hadamard: true, stochastic: true, tiles: true},
	{name: "NVFP4, no stochastic rounding", nvfp4: true, hadamard: true, tiles: true},
	{name: "NVFP4, no Hadamard", nvfp4: true, stochastic: true, tiles: true},
	{name: "NVFP4, weights without tiles", nvfp4: true, hadamard: true, stochastic: true},
}

// A stat is what rounding did to an operand.
type stat struct {
	signal, noise          float64 // sums of squares
	saturated, lost, count float64 // elements beyond the largest, and those that became zero
}

func (s *stat) add(t stat) {
	s.saturated, s.lost, s.count = s.saturated+t.saturated, s.lost+t.lost, s.count+t.count
}

// snr is in decibels.
func (s stat) snr() float64 { return 10 * math.Log10(s.signal/s.noise) }

// An operand says what is rounded.
type operand struct {
	m          []float32
	rows, cols int
	weight     bool
	gradient   bool
	product    bool // of a weight's gradient, which Hadamard transforms are for
	key        block.Key
}

// rounded gives an operand as products see it, and what was lost.
func (v variant) rounded(o operand) ([]float32, stat) {
	src := o.m
	if v.nvfp4 && v.hadamard && o.product {
		src = spread(src)
	}
	if v.nvfp4 {
		return v.four(o, src)
	}
	return v.eight(o, src)
}

// spread is the Hadamard transform.
func spread(src []float32) []float32 {
	bits := make([]uint16, len(src))
	for i, x := range src {
		bits[i] = dtype.BF16FromF32(x)
	}
	if err := block.Hadamard(bits, bits); err != nil {
		panic(err) // captured tensors are whole blocks
	}
	out := make([]float32, len(src))
	for i, b := range bits {
		out[i] = dtype.F32FromBF16(b)
	}
	return out
}

// eight rounds to MXFP8 by the rules of dtype/block, which a test compares.
func (v variant) eight(o operand, src []float32) ([]float32, stat) {
	most, to, from := 448.0, dtype.E4M3FromF32, dtype.F32FromE4M3
	if v.e5m2 && o.gradient {
		most, to, from = 57344, dtype.E5M2FromF32, dtype.F32FromE5M2
	}
	out := make([]float32, len(src))
	var s stat
	for at := 0; at < len(src); at += block.MXFP8Size {
		one := src[at:][:block.MXFP8Size]
		amax := largest(one)
		exponent := math.Ceil(math.Log2(amax / most))
		if v.floor { // OCP: the exponent of amax less the exponent of the largest element
			exponent = math.Floor(math.Log2(amax)) - math.Floor(math.Log2(most))
		}
		scale := math.Ldexp(1, int(max(exponent, -127)))
		for i, x := range one {
			y := float64(x) / scale
			q := float64(from(to(float32(min(max(y, -most), most)))))
			out[at+i] = float32(q * scale)
			s.see(float64(x), q*scale, math.Abs(y) > most)
		}
	}
	return out, s
}

// four rounds to NVFP4.
func (v variant) four(o operand, src []float32) ([]float32, stat) {
	amax := float32(largest(src))
	q, scales := make([]byte, len(src)/2), make([]byte, len(src)/block.NVFP4Size)
	var err error
	switch {
	case o.weight && v.tiles:
		err = block.NVFP4Tiles(q, scales, src, o.rows, o.cols, amax)
	case o.gradient && v.stochastic:
		err = block.Stochastic(q, scales, src, amax, o.key, block.Window{Cols: o.cols})
	default:
		err = block.NVFP4(q, scales, src, amax)
	}
	out := make([]float32, len(src))
	_, back := block.Global(amax)
	if err == nil {
		err = block.FromNVFP4(out, q, scales, back)
	}
	if err != nil {
		panic(err) // captured tensors are whole blocks
	}
	var s stat
	for i, x := range src {
		scale := float64(dtype.F32FromE4M3(scales[i/block.NVFP4Size])) * float64(back)
		s.see(float64(x), float64(out[i]), math.Abs(float64(x)) > 6*scale*(1+1e-6))
	}
	return out, s
}

func (s *stat) see(x, q float64, saturated bool) {
	s.signal += x * x
	s.noise += (x - q) * (x - q)
	s.count++
	if saturated {
		s.saturated++
	}
	if x != 0 && q == 0 {
		s.lost++
	}
}

func largest(x []float32) float64 {
	m := 0.0
	for _, v := range x {
		m = max(m, math.Abs(float64(v)))
	}
	return m
}

// transposed transposes a matrix.
func transposed(m []float32, rows, cols int) []float32 {
	out := make([]float32, len(m))
	if err := block.Transpose(out, m, rows, cols); err != nil {
		panic(err)
	}
	return out
}

// product multiplies [m, k] by [n, k].
func product(a, b []float32, k int) []float64 {
	m, n := len(a)/k, len(b)/k
	out := make([]float64, m*n)
	for i := range m {
		x := a[i*k:][:k]
		for j := range n {
			y := b[j*k:][:k]
			s0, s1 := 0.0, 0.0
			for at := 0; at+1 < k; at += 2 {
				s0 += float64(x[at]) * float64(y[at])
				s1 += float64(x[at+1]) * float64(y[at+1])
			}
			out[i*n+j] = s0 + s1
		}
	}
	return out
}

// errors gives ‖error‖/‖exact‖ and ⟨error, exact⟩/‖exact‖², which is by how much the product
// shrinks or grows.
func errors(got, exact []float64) (rel, proj float64) {
	e, x, ex := 0.0, 0.0, 0.0
	for i, want := range exact {
		d := got[i] - want
		e, x, ex = e+d*d, x+want*want, ex+d*want
	}
	return math.Sqrt(e / x), ex / x
}

// draws is how often a gradient is rounded by chance, to see what remains in the mean.
const draws = 8

// A row of the table: sums over linear layers, divided when it is written.
type row struct {
	n                             float64
	relF, relD, relW, projW, mean float64
	downs, meanDown               float64 // of the down projections
	snrX, snrW, snrDY, snrDYT     float64
	x, w, dy, dyT                 stat
}

// measure adds one linear layer.
func (r *row) measure(v variant, l *linear, number uint32) {
	key := func(draw, which uint32) block.Key { return block.NewKey(draw, 1, 2*number+which) }
	xT, wT := transposed(l.x, l.t, l.in), transposed(l.w, l.out, l.in)
	dyT := transposed(l.dy, l.t, l.out)
	qx, sx := v.rounded(operand{m: l.x, rows: l.t, cols: l.in})
	qw, sw := v.rounded(operand{m: l.w, rows: l.out, cols: l.in, weight: true})
	qwT, _ := v.rounded(operand{m: wT, rows: l.in, cols: l.out, weight: true})
	qdy, sdy := v.rounded(operand{m: l.dy, rows: l.t, cols: l.out, gradient: true, key: key(0, 0)})
	qxT, _ := v.rounded(operand{m: xT, rows: l.in, cols: l.t, product: true})
	r.n++
	rel, _ := errors(product(qx, qw, l.in), product(l.x, l.w, l.in))
	r.relF += rel
	rel, _ = errors(product(qdy, qwT, l.out), product(l.dy, wT, l.out))
	r.relD += rel
	exact := product(dyT, xT, l.t)
	sum := make([]float64, len(exact))
	times := 1
	if v.stochastic {
		times = draws
	}
	for draw := range times {
		q, s := v.rounded(operand{m: dyT, rows: l.out, cols: l.t, gradient: true, product: true,
			key: key(uint32(draw), 1)})
		got := product(q, qxT, l.t)
		if draw == 0 {
			rel, proj := errors(got, exact)
			r.relW, r.projW = r.relW+rel, r.projW+proj
			r.dyT.add(s)
			r.snrDYT += s.snr()
		}
		for i, x := range got {
			sum[i] += x / float64(times)
		}
	}
	rel, _ = errors(sum, exact)
	r.mean += rel
	if strings.Contains(l.name, ".down") {
		r.downs++
		r.meanDown += rel
	}
	r.x.add(sx)
	r.w.add(sw)
	r.dy.add(sdy)
	r.snrX, r.snrW, r.snrDY = r.snrX+sx.snr(), r.snrW+sw.snr(), r.snrDY+sdy.snr()
}

// ablate writes the table of what each part of a recipe does to the tensors of a trained model.
func ablate(ctx context.Context, w io.Writer, job parity.Job) error {
	const batches = 2
	rows := make([]row, len(variants))
	at := data.Position{}
	for b := range batches {
		list, err := capture(ctx, job, at, job.Recipe.Batch)
		if err != nil {
			return err
		}
		at["data"] += int64(job.Recipe.Batch)
		for i := range list {
			for k, v := range variants {
				rows[k].measure(v, &list[i], uint32(b*len(list)+i))
			}
		}
	}
	fmt.Fprintln(w, "| Variant | rel F / D / W | bias W | persistent W (down) | saturated % x / w / "+
		"dy "+
		"| underflow % x / w / dy / dyᵀ | SNR dB x / w / dy / dyᵀ |\n|---|---|---|---|---|---|---|")
	for k, v := range variants {
		rows[k].write(w, v.name)
	}
	return nil
}

func (r *row) write(w io.Writer, name string) {
	part := func(s stat) string { return fmt.Sprintf("%.2f", 100*s.saturated/s.count) }
	lost := func(s stat) string { return fmt.Sprintf("%.2f", 100*s.lost/s.count) }
	fmt.Fprintf(w, "| %s | %.4f / %.4f / %.4f | %+.4f | %.4f (%.4f) | %s / %s / %s | %s / %s / "+
		"%s / %s | "+
		"%.1f / %.1f / %.1f / %.1f |\n", name, r.relF/r.n, r.relD/r.n, r.relW/r.n, r.projW/r.n,
		r.mean/r.n, r.meanDown/r.downs, part(r.x), part(r.w), part(r.dy), lost(r.x), lost(r.w),
		lost(r.dy), lost(r.dyT), r.snrX/r.n, r.snrW/r.n, r.snrDY/r.n, r.snrDYT/r.n)
}
