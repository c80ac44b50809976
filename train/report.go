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
	"github.com/deepwell/deepwell/precision/monitor"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/spmd"
	"github.com/deepwell/deepwell/step"
)

// A report is what the programs of a rank told of their quantized GEMMs in a step.
type report struct {
	Programs map[string]*counts // by name: those that give gradients

	Made    []int32   // spmd.Made, of the copies that the GEMMs read
	Next    []int32   // spmd.Made, of the copies that the GEMMs of the next step read
	Squares []float32 // optim.Watch: square and zeros of each
	Copies  []float64 // spmd.CopyErrors; none in a step that is not inspected
}

// counts are what one program told of all microbatches of a step: of scales and amaxes the largest,
// of errors the sum.
type counts struct {
	Scales []int32   // ir.StatScales
	Amaxes []float32 // ir.StatAmax
	// Errors are the sums of ir.StatErrors over Parts microbatches; none in a step that is not
	// inspected.
	Errors []float64
	Parts  int
}

// begin turns to the next step.
func (r *report) begin() {
	if r.Next != nil {
		r.Made, r.Next = r.Next, nil
	}
	r.Programs, r.Copies = nil, nil
}

// read takes the reports among the results of a program.
func (r *report) read(ctx context.Context, name string, results []*engine.Array,
	s *program.Module) error {
	for i, a := range results {
		if s.Results[i].Role != program.Stat {
			continue
		}
		if err := r.readOne(ctx, name, a, s.Results[i]); err != nil {
			return err
		}
	}
	return nil
}

func (r *report) readOne(ctx context.Context, name string, a *engine.Array,
	spec program.Array) error {
	b, err := a.Read(ctx, 0)
	if err != nil {
		return err
	}
	switch spec.Name {
	case spmd.CopyErrors:
		r.Copies = doubles(b)
	case spmd.CopyStats:
		r.Next = ints(b)
	case optim.GradStats:
		r.Squares = floats(b)
	default:
		if r.Programs == nil {
			r.Programs = map[string]*counts{}
		}
		if r.Programs[name] == nil {
			r.Programs[name] = &counts{}
		}
		r.Programs[name].add(spec.Name, b)
	}
	return nil
}

// add adds what a microbatch told.
func (c *counts) add(name string, b []byte) {
	switch name {
	case ir.StatScales:
		c.Scales = merged(c.Scales, ints(b))
	case ir.StatAmax:
		c.Amaxes = merged(c.Amaxes, floats(b))
	case ir.StatErrors:
		sums := doubles(b)
		if c.Parts++; c.Errors == nil {
			c.Errors = sums
			return
		}
		for i, x := range sums {
			c.Errors[i] += x
		}
	}
}

// merged keeps the larger of two lists of numbers; what is no number stays.
func merged[E int32 | float32](old, now []E) []E {
	if len(old) != len(now) {
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
	p      *step.Programs
	probes *step.Programs     // that inspect
	made   []map[string]int64 // by rank: the place of the scales of a copy's first layer in Made
	all    []int64            // by rank: scales that are made
}

func newReader(p *step.Programs) *reader {
	r := &reader{p: p}
	for _, rank := range p.Ranks {
		made, all := map[string]int64{}, int64(0)
		for _, name := range rank.CopyStats() {
			if _, ok := made[name]; !ok {
				made[name] = all
			}
			all++
		}
		r.made, r.all = append(r.made, made), append(r.all, all)
	}
	return r
}

// A site is one linear layer of one layer of the model.
type site struct {
	layer int64
	slot  int
}

// A telling is one row of what a program reports on, and where it is told.
type telling struct {
	*ir.Stat
	rank   int
	report *report
	counts *counts
}

// tellings lists what a step was told of, in the order of programs. inspected tells that errors of
// rounding were measured.
func (r *reader) tellings(told []*report) (list []telling, inspected bool) {
	for _, one := range told {
		for _, c := range one.Programs {
			inspected = inspected || c.Parts > 0
		}
	}
	programs := r.p
	if inspected {
		programs = r.probes // the same, and where errors stand
	}
	for _, row := range programs.List {
		c := told[row.Rank].Programs[row.Module.Name]
		if c == nil {
			continue
		}
		for i := range row.Stats {
			list = append(list, telling{&row.Stats[i], row.Rank, told[row.Rank], c})
		}
	}
	return list, inspected
}

// sample tells what a step came to, linear layers in the order in which the forward pass runs them.
func (r *reader) sample(step int, loss, norm float64, told []*report) *monitor.Sample {
	s := &monitor.Sample{Step: step, Loss: loss, GradNorm: norm, Finite: finite(loss) && finite(norm)}
	found := map[site]*monitor.Linear{}
	for rank := range r.p.Ranks {
		r.norms(found, rank, told[rank].Squares)
	}
	list, inspected := r.tellings(told)
	for _, one := range list {
		for k := range one.Layers {
			l := found[site{one.Layer + k, int(one.Slot)}]
			// What a backward pass computes again is told twice.
			if l != nil && !slices.ContainsFunc(l.Operands,
				func(o monitor.Operand) bool { return o.Name == one.Operand }) {
				l.Operands = append(l.Operands, r.operand(one, k))
			}
		}
	}
	if inspected {
		r.noises(found, list)
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

// norms lists the linear layers of a rank with the norms of their gradients.
func (r *reader) norms(found map[site]*monitor.Linear, rank int, squares []float32) {
	at := 0
	for i, h := range r.p.Ranks[rank].RankParams {
		if !h.Stats || !h.Counts {
			continue
		}
		one := &r.p.Ranks[rank].Params[i]
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
func (r *reader) norm(found map[site]*monitor.Linear, p *model.Param, layer int64, told []float32,
	size int64) {
	slot := precision.Slot(p.Stem())
	if slot < 0 {
		return
	}
	name := precision.Slots()[slot]
	l := monitor.Unmeasured(int(layer), name)
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
func (r *reader) operand(s telling, k int64) monitor.Operand {
	told := s.counts
	l := monitor.Unmeasured(0, "", s.Operand)
	o := l.Operands[0]
	top := float64(told.Scales[s.Top+k*s.Stride])
	sum, some := told.Scales[s.Sum+k*s.Stride], told.Scales[s.Some+k*s.Stride]
	mean := float64(uint32(sum)) / float64(some)
	weight := s.Operand == "w" || s.Operand == "wT"
	switch {
	case !s.Format.TensorScale() && top >= 0xfe:
		o.NonFinite = 1
	case !s.Format.TensorScale(): // a power of two at or above amax over the largest element
		if !weight {
			most := s.Format.Codes()
			o.Amax = float64(most.FromCode(most.MaxCode())) * math.Exp2(top-127.5)
		}
		o.Spread = top - mean
	default:
		if amax := float64(told.Amaxes[s.Amax+k*s.AmaxStride]); finite(amax) {
			o.Amax = amax
		} else {
			o.NonFinite = 1
		}
		o.Spread = (top - mean) / 8 // eight codes of E4M3 to a power of two
	}
	if some == 0 {
		o.Spread = math.NaN()
	}
	if made, used, ok := r.sums(s, k); ok {
		o.Made, o.Used = checked(made), checked(used)
	}
	if e, ok := r.roundingOf(s, k); ok {
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
func (r *reader) roundingOf(s telling, k int64) (e rounding, ok bool) {
	told, copies := s.counts, s.report.Copies
	list, elements, length := make([]float64, ir.ErrorSums), int64(0), int64(0)
	switch {
	case told.Parts == 0:
		return e, false
	case s.Errors >= 0: // less what devices have copies of
		for i := range list {
			list[i] = told.Errors[s.Errors+k*s.ErrorStride+int64(i)] / float64(s.Copies)
		}
		elements, length = int64(told.Parts)*s.Elements/s.Copies, int64(told.Parts)*s.Length
	case copies != nil:
		m, found := r.probes.Ranks[s.rank].CopyErrors[s.Copy]
		if !found {
			return e, false
		}
		for i := range list {
			list[i] = copies[m.At+int64(i)*m.Layers+k]
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
func (r *reader) noises(found map[site]*monitor.Linear, list []telling) {
	arguments := map[site]*[2]rounding{} // xT and dyT
	parts := 0
	for _, s := range list {
		parts = max(parts, s.counts.Parts)
		which := slices.Index([]string{"xT", "dyT"}, s.Operand)
		for k := range s.Layers {
			e, ok := r.roundingOf(s, k)
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
	tokens := float64(parts) * float64(r.p.Shape.Batch*r.p.Shape.Seq)
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
func (r *reader) sums(s telling, k int64) (made, used int32, ok bool) {
	i, ok := r.made[s.rank][s.Copy]
	if !ok || len(s.report.Made) == 0 || len(s.counts.Scales) == 0 {
		return 0, 0, false
	}
	// Of the sums over devices, those behind the largest bytes.
	all := r.all[s.rank]
	return s.report.Made[3*all+all+i+k], s.counts.Scales[s.Sum+k*s.Stride], true
}

// sound tells whether all scales of copies that are read are those that were made.
func (r *reader) sound(told []*report) bool {
	list, _ := r.tellings(told)
	for _, s := range list {
		for k := range s.Layers {
			if made, used, ok := r.sums(s, k); ok && made != used {
				return false
			}
		}
	}
	return true
}

// checked marks a sum of bytes as taken: 0 says that it was not.
func checked(sum int32) uint64 { return 1<<32 | uint64(uint32(sum)) }

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }
