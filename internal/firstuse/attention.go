package firstuse

import (
	"context"
	"encoding/binary"
	"math"
	"math/rand/v2"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/kernels/flash"
	"github.com/deepwell/deepwell/kernels/triton"
)

// SmallAttention gives a smaller attention, whose last tiles are as full: of one sequence of up to
// three tiles, and of one key head. Windows are shorter than that. Where a query sees one key, the
// gradient of its score is 0 and a difference has no measure: then there is one more to see.
func SmallAttention(a flash.Attention) flash.Attention {
	shrunk := func(n int) int {
		switch {
		case n > 384:
			return 256 + n%128
		case n == 1:
			return 129
		}
		return n
	}
	a.Batch, a.Heads, a.KVHeads = 1, min(a.Heads/a.KVHeads, 2), 1
	a.Seq, a.Keys = shrunk(a.Seq), shrunk(a.Keys)
	if a.Window > 100 {
		a.Window = 100
	}
	if a.Window == 1 {
		a.Window = 2
	}
	return a
}

// compareAttention is [Compare] of an attention.
func compareAttention(ctx context.Context, e *engine.Engine, a flash.Attention, seed uint64) (
	apart float64, err error) {
	k, err := a.Kernel()
	if err != nil {
		return 0, err
	}
	d := drawAttention(a, rand.New(rand.NewPCG(seed, 22)))
	got, err := run(ctx, e, k, d.operands(a))
	if err != nil {
		return 0, err
	}
	return d.apart(k, got), nil
}

// A drawnAttention is an attention with operands and what must come of them, in float64.
type drawnAttention struct {
	flash.Attention
	q, k, v, do   []float32
	documents     []int32
	o, lse, delta []float32
	dq, dk, dv    []float32
}

func drawAttention(a flash.Attention, r *rand.Rand) *drawnAttention {
	numbers := func(n int) []float32 {
		list := make([]float32, n)
		for i := range list {
			list[i] = dtype.F32FromBF16(dtype.BF16FromF32(float32(r.NormFloat64())))
		}
		return list
	}
	d := &drawnAttention{Attention: a, q: numbers(a.Seq * a.Heads * a.Head),
		k: numbers(a.Keys * a.Head), v: numbers(a.Keys * a.Value),
		do: numbers(a.Seq * a.Heads * a.Value)}
	// Scores of size 4 without the scale of the model, so that the cap and the maximum count. They are
	// at most 4 caps, or nothing would be left of the cap's slope.
	size := 4.0
	if a.SoftCap > 0 {
		size = min(size, 4*a.SoftCap)
	}
	for i := range d.q {
		d.q[i] = dtype.F32FromBF16(dtype.BF16FromF32(d.q[i] *
			float32(size/(a.Scale*math.Sqrt(float64(a.Head))))))
	}
	for i := range a.Seq {
		d.documents = append(d.documents, int32(i/90))
	}
	zeros := func(n int) []float32 { return make([]float32, n) }
	d.o, d.lse, d.delta = zeros(len(d.do)), zeros(a.Seq*a.Heads), zeros(a.Seq*a.Heads)
	d.dq, d.dk, d.dv = zeros(len(d.q)), zeros(len(d.k)), zeros(len(d.v))
	for i := range a.Seq {
		for h := range a.Heads {
			d.query(i, h)
		}
	}
	return d
}

// sees tells whether a query sees a key.
func (d *drawnAttention) sees(i, j int) bool {
	later := d.Causal && j > i
	far := d.Window > 0 && i-j >= d.Window
	foreign := d.Documents && d.documents[i] != d.documents[j]
	return !later && !far && !foreign
}

func dot(x, y []float32) (sum float64) {
	for i := range x {
		sum += float64(x[i]) * float64(y[i])
	}
	return sum
}

// query computes what comes of one query of a head. All key heads are one.
func (d *drawnAttention) query(i, h int) {
	at := i*d.Heads + h
	q, do := d.q[at*d.Head:][:d.Head], d.do[at*d.Value:][:d.Value]
	score, slope := make([]float64, d.Keys), make([]float64, d.Keys)
	top, sum := math.Inf(-1), 0.0
	for j := range d.Keys {
		if score[j], slope[j] = math.Inf(-1), d.Scale; !d.sees(i, j) {
			continue
		}
		score[j] = d.Scale * dot(q, d.k[j*d.Head:][:d.Head])
		if d.SoftCap > 0 {
			t := math.Tanh(score[j] / d.SoftCap)
			score[j], slope[j] = d.SoftCap*t, d.Scale*(1-t*t)
		}
		top = max(top, score[j])
	}
	for j := range score {
		sum += math.Exp(score[j] - top)
	}
	d.lse[at] = float32(top + math.Log(sum))
	o := make([]float64, d.Value)
	for j := range score {
		score[j] = math.Exp(score[j]-top) / sum
		for c := range o {
			o[c] += score[j] * float64(d.v[j*d.Value+c])
		}
	}
	delta := 0.0
	for c, f := range o {
		d.o[at*d.Value+c] = float32(f)
		delta += f * float64(do[c])
	}
	d.delta[at] = float32(delta)
	for j, p := range score {
		if p == 0 {
			continue
		}
		ds := p * (dot(do, d.v[j*d.Value:][:d.Value]) - delta) * slope[j]
		for c := range d.Head {
			d.dq[at*d.Head+c] += float32(ds * float64(d.k[j*d.Head+c]))
			d.dk[j*d.Head+c] += float32(ds * float64(q[c]))
		}
		for c := range do {
			d.dv[j*d.Value+c] += float32(p * float64(do[c]))
		}
	}
}

// operands are the arrays of the kernel, in its order.
func (d *drawnAttention) operands(a flash.Attention) (list [][]byte) {
	short := func(x []float32) (b []byte) {
		for _, f := range x {
			b = binary.LittleEndian.AppendUint16(b, dtype.BF16FromF32(f))
		}
		return b
	}
	long := func(x []float32) (b []byte) {
		for _, f := range x {
			b = binary.LittleEndian.AppendUint32(b, math.Float32bits(f))
		}
		return b
	}
	list = [][]byte{short(d.q), short(d.k), short(d.v)}
	if a.Part != flash.Forward {
		list = append(list, long(d.lse), long(d.delta), short(d.do))
	}
	if a.Documents {
		var b []byte
		for _, n := range d.documents {
			b = binary.LittleEndian.AppendUint32(b, uint32(n))
		}
		list = append(list, b, b)
	}
	return list
}

// apart gives how far results are from the plain form.
func (d *drawnAttention) apart(k *triton.Kernel, got [][]byte) (worst float64) {
	want := map[flash.Part][][]float32{flash.Forward: {d.o, d.lse}, flash.DQ: {d.dq},
		flash.DKV: {d.dk, d.dv}}[d.Part]
	for i, w := range want {
		if i >= len(got) {
			return wholly
		}
		elem := k.Args[len(k.Args)-len(want)+i].Elem
		worst = max(worst, distance(numbersOf(elem, got[i]), w))
	}
	return worst
}

// numbersOf reads an array of float32 or bfloat16.
func numbersOf(elem triton.Elem, b []byte) (list []float32) {
	for at := 0; at < len(b); at += elem.Bits() / 8 {
		if elem == triton.F32 {
			list = append(list, math.Float32frombits(binary.LittleEndian.Uint32(b[at:])))
		} else {
			list = append(list, dtype.F32FromBF16(binary.LittleEndian.Uint16(b[at:])))
		}
	}
	return list
}
