package train

import (
	"context"
	"encoding/binary"
	"math"
	"slices"
	"strings"

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

// A report is the statistics that the programs of one rank return about their quantized GEMMs in a
// step. Processes exchange reports in the bytes of package flat.
type report struct {
	Programs map[string]*counts // by name: those that give gradients

	// Checksums and maxima of scale bytes: Made of the copies that this step's GEMMs read, Next of the
	// copies that its update made.
	Made, Next []int32 // spmd.CopyStats
	// Squares has two numbers for each layer of a weight gradient: the square of its norm, and how
	// many of its elements are zero.
	Squares []float32 // optim.GradStats
	// Copies has the rounding errors of quantized weights; empty in a step that is not inspected.
	Copies []float64 // spmd.CopyErrors
	// Loads are what experts had to do, by program and loop, summed over microbatches.
	Loads map[string][]float32
}

// counts are the statistics of one program over all microbatches of a step: maxima of scales and
// amaxes, sums of errors.
type counts struct {
	Scales []int32   // ir.StatScales
	Amaxes []float32 // ir.StatAmax
	// Errors are the sums of ir.StatErrors over Parts microbatches; empty in a step that is not
	// inspected.
	Errors []float64
	Parts  int
}

// begin starts the next step: the copies that the last update quantized are those that its GEMMs
// read.
func (r *report) begin() {
	if r.Next != nil {
		r.Made, r.Next = r.Next, nil
	}
	r.Programs, r.Copies, r.Loads = nil, nil, nil
}

// read reads the statistics among the results of a program.
func (r *report) read(ctx context.Context, name string, results []*engine.Array,
	m *program.Module) error {
	for i, a := range results {
		if m.Results[i].Role != program.Stat {
			continue
		}
		if err := r.readOne(ctx, name, a, m.Results[i]); err != nil {
			return err
		}
	}
	return nil
}

// readOne reads one array of statistics.
func (r *report) readOne(ctx context.Context, name string, a *engine.Array,
	spec program.Array) error {
	b, err := a.Read(ctx, 0)
	if err != nil {
		return err
	}
	if strings.HasPrefix(spec.Name, model.LoadPrefix) {
		r.addLoad(name, spec.Name, b)
		return nil
	}
	switch spec.Name {
	case spmd.CopyErrors:
		r.Copies = decode[float64](b)
	case spmd.CopyStats:
		r.Next = decode[int32](b)
	case optim.GradStats:
		r.Squares = decode[float32](b)
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

// add merges the statistics of a microbatch.
func (c *counts) add(name string, b []byte) {
	switch name {
	case ir.StatScales:
		c.Scales = merged(c.Scales, decode[int32](b))
	case ir.StatAmax:
		c.Amaxes = merged(c.Amaxes, decode[float32](b))
	case ir.StatErrors:
		sums := decode[float64](b)
		if c.Parts++; c.Errors == nil {
			c.Errors = sums
			return
		}
		for i, x := range sums {
			c.Errors[i] += x
		}
	}
}

// merged is the elementwise maximum of two lists; NaN wins.
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

// decode reads little-endian numbers, as engines return them.
func decode[E int32 | float32 | float64](b []byte) []E {
	var one E
	list := make([]E, len(b)/binary.Size(one))
	_, _ = binary.Decode(b, binary.LittleEndian, list) // the size fits
	return list
}

// A statsReader turns reports into monitor samples: it knows the layout of the statistics arrays.
type statsReader struct {
	p      *step.Programs
	probes *step.Programs // the inspecting programs; nil before the first inspection
	// made has, by rank, the index in report.Made of a copy's first layer, and all the number of
	// layers of all copies.
	made []map[string]int64
	all  []int64
}

// newReader finds where the scale statistics of each quantized copy begin.
func newReader(p *step.Programs) *statsReader {
	r := &statsReader{p: p}
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

// A statRow is one operand that a program reports on, and where its statistics are.
type statRow struct {
	*ir.Stat
	rank   int
	report *report
	counts *counts
}

// statRows lists the operands that a step reported on, in the order of the programs. inspected says
// that rounding errors were measured.
func (r *statsReader) statRows(reports []*report) (list []statRow, inspected bool) {
	for _, one := range reports {
		for _, c := range one.Programs {
			inspected = inspected || c.Parts > 0
		}
	}
	// Inspecting programs have the same statistics in other places, and errors after them.
	programs := r.p
	if inspected {
		programs = r.probes
	}
	for _, row := range programs.List {
		c := reports[row.Rank].Programs[row.Module.Name]
		if c == nil {
			continue
		}
		for i := range row.Stats {
			list = append(list, statRow{&row.Stats[i], row.Rank, reports[row.Rank], c})
		}
	}
	return list, inspected
}

// sample is what the monitor observes of a step, linear layers in the order of the forward pass.
func (r *statsReader) sample(step int, loss, norm float64, reports []*report) *monitor.Sample {
	s := &monitor.Sample{Step: step, Loss: loss, GradNorm: norm, Finite: finite(loss) && finite(norm)}
	found := map[site]*monitor.Linear{}
	for rank := range r.p.Ranks {
		r.norms(found, rank, reports[rank].Squares)
	}
	list, inspected := r.statRows(reports)
	for _, one := range list {
		for k := range one.Layers {
			l := found[site{one.Layer + k, int(one.Slot)}]
			// An operand that the backward pass recomputes is reported twice.
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

// norms adds the linear layers of a rank, with the norms of their weight gradients.
func (r *statsReader) norms(found map[site]*monitor.Linear, rank int, squares []float32) {
	// squares has two numbers per layer of each parameter that reports, in the order of the rank's
	// parameters.
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

// norm adds one linear layer: the square of its weight gradient's norm and how many of its elements
// are zero.
func (r *statsReader) norm(found map[site]*monitor.Linear, p *model.Param, layer int64,
	stats []float32, size int64) {
	slot := precision.Slot(p.Stem())
	if slot < 0 {
		return
	}
	name := precision.Slots()[slot]
	l := monitor.Unmeasured(int(layer), name)
	of := func(product string) string { return string(r.p.Policy.Of(int(layer), name, product)) }
	l.Fprop, l.Dgrad, l.Wgrad = of(precision.Fprop), of(precision.Dgrad), of(precision.Wgrad)
	if x := float64(stats[0]); finite(x) {
		l.Norm = math.Sqrt(x)
		l.Zeros, l.Count = int64(stats[1]), size
	} else {
		l.NonFinite = 1
	}
	found[site{layer, slot}] = &l
}

// operand reads the statistics of one quantized copy of a tensor. An MXFP8 scale is the power of
// two at or above amax/448, so amax is known to a factor of two, of which the middle is taken. That
// is enough to see it grow; weights change by less before it matters, so theirs is left out.
func (r *statsReader) operand(s statRow, k int64) monitor.Operand {
	c := s.counts
	l := monitor.Unmeasured(0, "", s.Operand)
	o := l.Operands[0]
	// Scales are bytes: E8M0 exponents for MXFP8, E4M3 for NVFP4, both monotonic in the scale. top is
	// the largest, sum and some give their mean over blocks that are not zero.
	top := float64(c.Scales[s.Top+k*s.Stride])
	sum, some := c.Scales[s.Sum+k*s.Stride], c.Scales[s.Some+k*s.Stride]
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
		if amax := float64(c.Amaxes[s.Amax+k*s.AmaxStride]); finite(amax) {
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

// rounding is the error that quantization added to one operand, summed over all microbatches of a
// step: elements, those flushed to zero and clamped, the sums of squares of values and of errors,
// the log2 range of blocks, and the tokens that were measured.
type rounding struct{ elements, lost, clamped, power, noise, span, blocks, length float64 }

// roundingOf returns the rounding error of one layer's operand, if it was measured and is finite.
func (r *statsReader) roundingOf(s statRow, k int64) (e rounding, ok bool) {
	c, copies := s.counts, s.report.Copies
	list, elements, length := make([]float64, ir.ErrorSums), int64(0), int64(0)
	switch {
	case c.Parts == 0:
		return e, false
	case s.Errors >= 0: // an activation or gradient; replicas were summed as well, and are divided out
		for i := range list {
			list[i] = c.Errors[s.Errors+k*s.ErrorStride+int64(i)] / float64(s.Copies)
		}
		elements, length = int64(c.Parts)*s.Elements/s.Copies, int64(c.Parts)*s.Length
	case copies != nil: // a weight: measured once per step, on the copy that the update made
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

// noises compares weight gradients with the error that quantization adds to them.
//
// The weight gradient is xᵀ·dy over the T tokens of the step. With errors e of x and d of dy, its
// error is about eᵀ·dy + xᵀ·d. Errors of different tokens are independent, so the expected square
// of the first term is the sum over tokens of ‖e‖²‖dy‖². That is approximated by the product of
// both sums over T, as if large errors did not go with large gradients; the second term likewise.
// Where a layer computes halves of a batch separately, one half is measured and stands for both.
func (r *statsReader) noises(found map[site]*monitor.Linear, list []statRow) {
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
	// length is the tokens that were measured, fewer than the step's where one half of a batch stands
	// for both. The norm of independent errors grows with the square root of the tokens.
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

// noise is the expected norm of a weight gradient's error, by the tokens that were measured.
func noise(x, dy *rounding) float64 {
	return math.Sqrt((x.noise*dy.power + x.power*dy.noise) / x.length)
}

// sums returns the checksums of a copy's scales where they were written and where a GEMM read them.
func (r *statsReader) sums(s statRow, k int64) (made, used int32, ok bool) {
	i, ok := r.made[s.rank][s.Copy]
	if !ok || len(s.report.Made) == 0 || len(s.counts.Scales) == 0 {
		return 0, 0, false
	}
	// Of the sums over devices, those behind the largest bytes.
	all := r.all[s.rank]
	return s.report.Made[3*all+all+i+k], s.counts.Scales[s.Sum+k*s.Stride], true
}

// sound reports whether every scale that was read is the one that was written.
func (r *statsReader) sound(reports []*report) bool {
	list, _ := r.statRows(reports)
	for _, s := range list {
		for k := range s.Layers {
			if made, used, ok := r.sums(s, k); ok && made != used {
				return false
			}
		}
	}
	return true
}

// checked marks a checksum as taken, since 0 means that it was not.
func checked(sum int32) uint64 { return 1<<32 | uint64(uint32(sum)) }

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }
