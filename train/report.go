package train

import (
	"context"
	"encoding/binary"
	"math"
	"slices"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/spmd"
	"github.com/deepwell/deepwell/watch"
)

// A report is what the programs of a step told of their products in few bits.
type report struct {
	scales  []int32   // ir.StatScales, of all parts of the step
	amaxes  []float32 // ir.StatAmax, likewise
	made    []int32   // spmd.Made, of the copies that the products read
	squares []float32 // optim.Watch: square and zeros of each

	// errors are the sums of ir.StatErrors over all parts of the step, parts of them; none in a step
	// that is not inspected.
	errors []float64
	parts  int
	copies []float64 // spmd.CopyErrors, likewise

	next []int32 // spmd.Made, of the copies that the products of the next step read
}

// begin turns to the next step.
func (r *report) begin() {
	if r.next != nil {
		r.made, r.next = r.next, nil
	}
	r.errors, r.parts, r.copies = nil, 0, nil
}

// read takes the reports among the results of a program. Of several parts of a step the largest
// figures count, and sums are added up.
func (r *report) read(ctx context.Context, run *engine.Run, s *program.Stage, first bool) error {
	for i, a := range run.Results {
		if s.Results[i].Role != program.Stat {
			continue
		}
		b, err := a.Read(ctx, 0)
		if err != nil {
			return err
		}
		switch s.Results[i].Name {
		case ir.StatScales:
			r.scales = merged(r.scales, ints(b), first)
		case ir.StatAmax:
			r.amaxes = merged(r.amaxes, floats(b), first)
		case ir.StatErrors:
			r.add(doubles(b))
		case spmd.CopyErrors:
			r.copies = doubles(b)
		case spmd.Made:
			r.next = ints(b)
		case optim.Watch:
			r.squares = floats(b)
		}
	}
	return nil
}

// add adds the sums of another part of the step.
func (r *report) add(sums []float64) {
	if r.parts++; r.errors == nil {
		r.errors = sums
		return
	}
	for i, x := range sums {
		r.errors[i] += x
	}
}

// merged keeps the larger of two lists of numbers; what is no number stays.
func merged[E int32 | float32](old, now []E, first bool) []E {
	if first || len(old) != len(now) {
		return now
	}
	for i, x := range now {
		if x > old[i] || x != x {
			old[i] = x
		}
	}
	return old
}

func ints(b []byte) []int32 {
	list := make([]int32, len(b)/4)
	for i := range list {
		list[i] = int32(binary.LittleEndian.Uint32(b[4*i:]))
	}
	return list
}

func floats(b []byte) []float32 {
	list := make([]float32, len(b)/4)
	for i := range list {
		list[i] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
	}
	return list
}

func doubles(b []byte) []float64 {
	list := make([]float64, len(b)/8)
	for i := range list {
		list[i] = math.Float64frombits(binary.LittleEndian.Uint64(b[8*i:]))
	}
	return list
}

// A reader makes samples of reports: it knows what stands where.
type reader struct {
	p    *Programs
	made map[string]int64 // the place of the scales of a copy's first layer in what is made
	all  int64            // scales that are made

	looks *spmd.Step // of the programs that inspect
}

func newReader(p *Programs) *reader {
	r := &reader{p: p, made: map[string]int64{}}
	for _, name := range p.Step.Made() {
		if _, ok := r.made[name]; !ok {
			r.made[name] = r.all
		}
		r.all++
	}
	return r
}

// A site is one linear layer of one layer of the model.
type site struct {
	layer int64
	slot  int
}

// sample tells what a step came to, linear layers in the order in which the forward pass runs them.
func (r *reader) sample(step int, loss, norm float64, told *report) *watch.Sample {
	s := &watch.Sample{Step: step, Loss: loss, GradNorm: norm, Finite: finite(loss) && finite(norm)}
	found := map[site]*watch.Linear{}
	r.norms(found, told.squares)
	stats := r.p.Step.Stats
	if told.parts > 0 {
		stats = r.looks.Stats // the same, and where errors stand
	}
	for i := range stats {
		one := &stats[i]
		for k := range one.Layers {
			l := found[site{one.Layer + k, int(one.Slot)}]
			// What a backward pass computes again is told twice.
			if l != nil && len(told.scales) > 0 && !slices.ContainsFunc(l.Operands,
				func(o watch.Operand) bool { return o.Name == one.Operand }) {
				l.Operands = append(l.Operands, r.operand(one, k, told))
			}
		}
	}
	if told.parts > 0 {
		r.noises(found, told)
	}
	for layer := range int64(r.p.Policy.Layers) {
		for slot := range precision.Slots() {
			if l := found[site{layer, slot}]; l != nil {
				s.Linears = append(s.Linears, *l)
			}
		}
	}
	return s
}

// norms lists the linear layers with the norms of their gradients.
func (r *reader) norms(found map[site]*watch.Linear, squares []float32) {
	at := 0
	for i, p := range r.p.Step.Params {
		if !p.Watched {
			continue
		}
		one := &r.p.Params[i]
		layers := int64(1)
		if one.Stacked() {
			layers = one.Dims[0].Size
		}
		for k := range layers {
			if at+1 < len(squares) {
				r.norm(found, one, one.First+k*one.Step, squares[at:at+2], one.Size()/layers)
			}
			at += 2
		}
	}
}

// norm notes the square of the norm of a gradient of some size, and how much of it is zero.
func (r *reader) norm(found map[site]*watch.Linear, p *model.Param, layer int64, told []float32,
	size int64) {
	slot := precision.Slot(p.Stem())
	if slot < 0 {
		return
	}
	name := precision.Slots()[slot]
	l := watch.Unmeasured(int(layer), name)
	of := func(product string) string { return string(r.p.Policy.Of(int(layer), name, product)) }
	l.Fprop, l.Dgrad, l.Wgrad = of(precision.Fprop), of(precision.Dgrad), of(precision.Wgrad)
	if x := float64(told[0]); finite(x) {
		l.Norm = math.Sqrt(x)
		l.Zeros, l.Count = int64(told[1]), size
	} else {
		l.NonFinite = 1
	}
	found[site{layer, slot}] = &l
}

// operand reads what was told of one copy of a tensor. A scale of MXFP8 is a power of two at or
// above amax/448, so amax is known to a factor of two, of which the middle is taken. That is enough
// to see it grow; weights grow by less before it matters, so theirs is left out.
func (r *reader) operand(s *ir.Stat, k int64, told *report) watch.Operand {
	l := watch.Unmeasured(0, "", s.Operand)
	o := l.Operands[0]
	top := float64(told.scales[s.Top+k*s.Stride])
	sum, some := told.scales[s.Sum+k*s.Stride], told.scales[s.Some+k*s.Stride]
	mean := float64(uint32(sum)) / float64(some)
	weight := s.Operand == "w" || s.Operand == "wT"
	switch {
	case s.Format == ir.MXFP8 && top >= 0xfe:
		o.NonFinite = 1
	case s.Format == ir.MXFP8:
		if !weight {
			o.Amax = 448 * math.Exp2(top-127.5)
		}
		o.Spread = top - mean
	default:
		if amax := float64(told.amaxes[s.Amax+k*s.AmaxStride]); finite(amax) {
			o.Amax = amax
		} else {
			o.NonFinite = 1
		}
		o.Spread = (top - mean) / 8 // eight codes of E4M3 to a power of two
	}
	if some == 0 {
		o.Spread = math.NaN()
	}
	if made, used, ok := r.sums(s, k, told); ok {
		o.Made, o.Used = checked(made), checked(used)
	}
	if e, ok := r.roundingOf(s, k, told); ok {
		o.Underflow, o.Saturated = e.lost/e.elements, e.clamped/e.elements
		if e.blocks > 0 {
			o.Range = e.span / e.blocks
		}
		if e.power > 0 && e.noise > 0 {
			o.SNR = 10 * math.Log10(e.power/e.noise)
		}
	}
	return o
}

// A rounding is what that did to one operand in all parts of a step.
type rounding struct{ elements, lost, clamped, power, noise, span, blocks, length float64 }

// roundingOf finds that of a layer, if it was measured and is made of numbers.
func (r *reader) roundingOf(s *ir.Stat, k int64, told *report) (e rounding, ok bool) {
	list, elements, length := make([]float64, ir.ErrorSums), int64(0), int64(0)
	switch {
	case told.parts == 0:
		return e, false
	case s.Errors >= 0: // less what devices have copies of
		for i := range list {
			list[i] = told.errors[s.Errors+k*s.ErrorStride+int64(i)] / float64(s.Copies)
		}
		elements, length = int64(told.parts)*s.Elements/s.Copies, int64(told.parts)*s.Length
	case told.copies != nil:
		m, found := r.looks.Measured[s.Copy]
		if !found {
			return e, false
		}
		for i := range list {
			list[i] = told.copies[m.At+int64(i)*m.Layers+k]
		}
		elements = m.Elements
	}
	e = rounding{float64(elements), list[0], list[1], list[2], list[3], list[4], list[5],
		float64(length)}
	return e, elements > 0 && finite(e.power) && finite(e.noise)
}

// noises sets the gradients of weights against the errors that rounding adds to them.
//
// The gradient is xᵀ·dy over the T tokens of the step, and with errors e of x and d of dy its own
// is about eᵀ·dy + xᵀ·d. Errors of different tokens are independent, so that the expected square of
// the first term is the sum over tokens of ‖e‖²‖dy‖², which is taken as the product of the two
// sums over T: as if large errors did not go with large gradients. Of the second it is the same.
// Where layers compute halves of a batch apart, one is measured, and stands for both.
func (r *reader) noises(found map[site]*watch.Linear, told *report) {
	arguments := map[site]*[2]rounding{} // xT and dyT
	for i := range r.looks.Stats {
		s := &r.looks.Stats[i]
		which := slices.Index([]string{"xT", "dyT"}, s.Operand)
		for k := range s.Layers {
			e, ok := r.roundingOf(s, k, told)
			if which < 0 || !ok {
				continue
			}
			at := site{s.Layer + k, int(s.Slot)}
			if arguments[at] == nil {
				arguments[at] = &[2]rounding{}
			}
			arguments[at][which] = e
		}
	}
	tokens := float64(told.parts) * float64(r.p.Shape.Batch*r.p.Shape.Seq)
	for at, of := range arguments {
		l := found[at]
		if l == nil || of[0].length == 0 || of[1].length == 0 {
			continue
		}
		if n := noise(&of[0], &of[1]) * math.Sqrt(tokens/of[0].length); n > 0 {
			l.GradToNoise = l.Norm / n
		}
	}
}

// noise is the norm of the error that is expected of a weight's gradient, by the tokens that were
// measured.
func noise(x, dy *rounding) float64 {
	return math.Sqrt((x.noise*dy.power + x.power*dy.noise) / x.length)
}

// sums gives those of the scales of a copy where they were made and where they are read.
func (r *reader) sums(s *ir.Stat, k int64, told *report) (made, used int32, ok bool) {
	i, ok := r.made[s.Copy]
	if !ok || len(told.made) == 0 || len(told.scales) == 0 {
		return 0, 0, false
	}
	// Of the sums over devices, those behind the largest bytes.
	return told.made[3*r.all+r.all+i+k], told.scales[s.Sum+k*s.Stride], true
}

// sound tells whether all scales of copies that are read are those that were made.
func (r *reader) sound(told *report) bool {
	for i := range r.p.Step.Stats {
		s := &r.p.Step.Stats[i]
		for k := range s.Layers {
			if made, used, ok := r.sums(s, k, told); ok && made != used {
				return false
			}
		}
	}
	return true
}

// checked marks a sum of bytes as taken: 0 says that it was not.
func checked(sum int32) uint64 { return 1<<32 | uint64(uint32(sum)) }

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }
