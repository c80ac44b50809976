package train

import (
	"context"
	"encoding/binary"
	"math"

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
	squares []float32 // optim.Watch

	next []int32 // spmd.Made, of the copies that the products of the next step read
}

// begin turns to the next step.
func (r *report) begin() {
	if r.next != nil {
		r.made, r.next = r.next, nil
	}
}

// read takes the reports among the results of a program. Of several parts of a step the largest
// figures count.
func (r *report) read(ctx context.Context, run *engine.Run, s *program.Stage, first bool) error {
	for i, a := range run.Results {
		name := s.Results[i].Name
		switch name {
		case ir.StatScales, ir.StatAmax, spmd.Made, optim.Watch:
		default:
			continue
		}
		b, err := a.Read(ctx, 0)
		if err != nil {
			return err
		}
		switch name {
		case ir.StatScales:
			r.scales = merged(r.scales, ints(b), first)
		case ir.StatAmax:
			r.amaxes = merged(r.amaxes, floats(b), first)
		case spmd.Made:
			r.next = ints(b)
		case optim.Watch:
			r.squares = floats(b)
		}
	}
	return nil
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

// isReport tells the results that report from those that a run keeps.
func isReport(name string) bool {
	return name == ir.StatScales || name == ir.StatAmax || name == spmd.Made || name == optim.Watch
}

// A reader makes samples of reports: it knows what stands where.
type reader struct {
	p    *Programs
	made map[string]int64 // the place of the scales of a copy's first layer in what is made
	all  int64            // scales that are made
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
	for i := range r.p.Step.Stats {
		one := &r.p.Step.Stats[i]
		for k := range one.Layers {
			l := found[site{one.Layer + k, int(one.Slot)}]
			if l != nil && len(told.scales) > 0 {
				l.Operands = append(l.Operands, r.operand(one, k, told))
			}
		}
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
			if at < len(squares) {
				r.norm(found, one, one.First+k*one.Step, squares[at])
			}
			at++
		}
	}
}

func (r *reader) norm(found map[site]*watch.Linear, p *model.Param, layer int64, square float32) {
	slot := precision.Slot(p.Stem())
	if slot < 0 {
		return
	}
	name := precision.Slots()[slot]
	l := watch.Unmeasured(int(layer), name)
	of := func(product string) string { return string(r.p.Policy.Of(int(layer), name, product)) }
	l.Fprop, l.Dgrad, l.Wgrad = of(precision.Fprop), of(precision.Dgrad), of(precision.Wgrad)
	switch x := float64(square); {
	case !finite(x):
		l.NonFinite = 1
	case x == 0:
		l.Norm, l.Count = 0, p.Size()
		l.Zeros = l.Count
	default:
		l.Norm = math.Sqrt(x)
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
	return o
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
