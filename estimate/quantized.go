package estimate

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/cost"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/price"
)

// gemms are the three GEMMs of a linear layer.
var gemms = []string{precision.Fprop, precision.Dgrad, precision.Wgrad}

// format is the format of one of a linear layer's GEMMs.
func (b *builder) format(linear, product string) dtype.Format {
	return b.in.Of(linear, product)
}

// A kind identifies layers of equal cost.
type kind struct {
	windowed bool // sliding-window attention
	sparse   bool // mixture of experts
	in       precision.Layer
}

func (k *kind) equal(o *kind) bool {
	return k.windowed == o.windowed && k.sparse == o.sparse && maps.Equal(k.in, o.in)
}

// classify selects the policy to price and sorts the layers by kind.
func (e *Estimator) classify() {
	c := e.config
	e.policy, e.word, e.policyLine, e.agrees = nil, e.options.Precision, "", false
	if p, ok := e.ruled(); ok {
		e.word = ""
		if p.Quantizes() {
			e.policy, e.policyLine, e.agrees = p, describe(p, c.Layers), hasTensorScale(p)
		}
	}
	if e.billed() && (e.book == nil || !e.book.In(e.policy)) {
		e.book = cost.New(c, e.cluster.Arch(), e.policy)
	}
	e.kinds, e.below = nil, nil
	of := make([]int, c.Layers)
	for i := range c.Layers {
		k := kind{windowed: c.Windowed != nil && c.Windowed[i],
			sparse: c.MoE != nil && i >= c.MoE.Dense}
		if e.policy != nil {
			k.in = e.policy.Layer(int(i))
		}
		at := slices.IndexFunc(e.kinds, func(o kind) bool { return k.equal(&o) })
		if at < 0 {
			at = len(e.kinds)
			e.kinds = append(e.kinds, k)
		}
		of[i], e.lastKind = at, at
	}
	for k := range e.kinds {
		below := make([]int64, c.Layers+1)
		for i := range c.Layers {
			below[i+1] = below[i]
			if of[i] == k {
				below[i+1]++
			}
		}
		e.below = append(e.below, below)
	}
}

// ruled returns the policy of our own programs, if the options have one. Other stacks have one
// format for all layers, which their constants were fitted with.
func (e *Estimator) ruled() (*precision.Policy, bool) {
	if e.profile.Name != price.Own {
		return nil, false
	}
	if e.options.Policy != nil {
		return e.options.Policy, true
	}
	if e.options.Precision.Quantized() {
		p, err := precision.Default(e.config, string(e.options.Precision))
		return p, err == nil
	}
	return nil, false
}

// hasTensorScale tells policies with a format whose scales all devices agree on (NVFP4).
func hasTensorScale(p *precision.Policy) bool {
	return slices.ContainsFunc(dtype.Formats(), func(f dtype.Format) bool {
		return f.TensorScale() && p.Has(f)
	})
}

// describe lists in a line how many layers are quantized, by format.
func describe(p *precision.Policy, layers int64) string {
	var words []string
	some := map[int]bool{}
	for _, f := range slices.Backward(dtype.Formats()) {
		n := int64(0)
		for layer := range int(layers) {
			if p.Layer(layer).Has(f) {
				some[layer] = true
				n++
			}
		}
		switch n {
		case 0:
		case layers:
			words = append(words, fmt.Sprintf("%s in all %d layers", f, layers))
		default:
			words = append(words, fmt.Sprintf("%s in %d of %d layers", f, n, layers))
		}
	}
	if int64(len(some)) < layers {
		words = append(words, "the others")
	}
	return strings.Join(words, ", ") + ", embedding and head in bf16"
}

// A quantBytes is the cost of quantized weight copies relative to bf16 ones (negative if smaller):
// bytes stored, bytes gathered by forward and by backward, and seconds to make the copies in the
// update. It is of whole weights, before fsdp shards them.
type quantBytes struct{ own, forward, backward, made float64 }

func (s *quantBytes) add(t *quantBytes, n float64) {
	s.own += n * t.own
	s.forward += n * t.forward
	s.backward += n * t.backward
	s.made += n * t.made
}

// An out is a linear layer: its name in a policy and its output width.
type out struct {
	name  string
	width float64
}

// A source is the common input of some linear layers: elements per token, and the tokens on a
// device when it is quantized, which is before a gather.
type source struct{ width, tokens float64 }

// join prices linear layers that share an input of m tokens, with outputs sharded over sharding
// devices. back is the tokens of their output gradients on a device when they are quantized. XLA
// merges bf16 GEMMs that share an input into one; quantized ones stay separate.
func (b *builder) join(m float64, x source, ways, back float64, outs ...out) {
	all := lists.Sum(outs, func(o out) float64 { return o.width })
	if b.in == nil {
		b.linear(b.e.precision(b.c), m, x.width, all/ways)
		return
	}
	b.gemms(m, x.width, ways, outs)
	b.quantizeCost(x, ways, back, outs)
	for _, o := range outs {
		b.weights(o.name, x.width*o.width/ways, false)
	}
	b.dense += x.width * all / ways
	b.shape(x.width, all/ways)
}

// gemms adds fprop, dgrad and wgrad of linear layers with a common input of k elements.
func (b *builder) gemms(m, k, ways float64, outs []out) {
	for _, product := range gemms {
		wide := 0.0 // output width of bf16 GEMMs
		for _, o := range outs {
			if f := b.format(o.name, product); f == dtype.FormatBF16 {
				wide += o.width / ways
			} else {
				b.gemm(product, f, m, k, o.width/ways)
			}
		}
		if wide > 0 {
			b.gemm(product, dtype.FormatBF16, m, k, wide)
		}
	}
}

// gemm adds one GEMM of a layer [m,k]·[k,n].
func (b *builder) gemm(which string, f dtype.Format, m, k, n float64) {
	switch which {
	case precision.Fprop:
		b.forward.gemm += b.p.GEMM(f, m, k, n)
	case precision.Dgrad:
		b.input.gemm += b.p.GEMM(f, m, n, k)
	case precision.Wgrad:
		b.weight.gemm += b.p.GEMM(f, n, m, k)
	}
}

// quantizeCost adds the quantization of the input and the output gradients of linear layers: each
// tensor once per orientation, for the tokens that the device has of it.
func (b *builder) quantizeCost(x source, ways, back float64, outs []out) {
	for _, f := range dtype.Formats() {
		rows, cols, gradients := 0.0, 0.0, 0.0
		for _, o := range outs {
			if b.format(o.name, precision.Fprop) == f {
				rows = 1
			}
			if b.format(o.name, precision.Wgrad) == f {
				cols = 1
			}
			sides := 0.0
			for _, product := range gemms[1:] {
				if b.format(o.name, product) == f {
					sides++
				}
			}
			b.input.quantize += b.quantized(f, back*o.width/ways, 2, sides, false)
			b.operations += sides / 2 * b.quantizing(f).Count
			gradients += sides
		}
		both := b.quantized(f, x.tokens*x.width, 2, rows+cols, false)
		b.forward.quantize += both
		if rows+cols > 0 {
			b.forward.data += b.agree(f)
		}
		if gradients > 0 {
			b.input.data += b.agree(f)
		}
		b.operations += (rows + cols) / 2 * b.quantizing(f).Count
		// With recomputation the first forward pass needs no copy for wgrad.
		b.later += both - b.quantized(f, x.tokens*x.width, 2, rows, false)
	}
}

// quantizing is the work of our own quantization kernels for a format.
func (b *builder) quantizing(f dtype.Format) kernels.Quantizing {
	return b.e.set.Quantizing(f)
}

// quantized is the seconds to quantize elements of wide bytes each, in one or two orientations
// (sides), which the kernel may compute itself.
func (b *builder) quantized(f dtype.Format, elements, wide, sides float64, computed bool) float64 {
	return b.p.QuantizeBytes(b.quantizing(f).Bytes(elements, wide, sides, computed))
}

// agree is the seconds to all-reduce the amax of an input, or of the gradients of all layers that
// read it, as NVFP4's tensor scale needs on all ranks that share the tensor. XLA combines those
// that are ready together, four per layer and pass, and waits for them (llama3.1-8b compiled for 8
// B200). They are counted as FSDP communication, the axis that most of them span.
func (b *builder) agree(f dtype.Format) float64 {
	if !f.TensorScale() {
		return 0
	}
	return b.p.Agree(b.c.everyone())
}

// weights adds the copies of a weight: bf16 while one GEMM needs it, and a quantized copy per
// orientation. The update makes them from f32 masters.
func (b *builder) weights(name string, elements float64, experts bool) {
	s := b.stocked(name, elements)
	if experts {
		b.quantExperts.add(&s, 1)
	} else {
		b.quantWeights.add(&s, 1)
	}
}

// stocked returns the cost of the copies of a weight with that many elements, relative to one bf16
// copy.
func (b *builder) stocked(name string, elements float64) (s quantBytes) {
	forward, backward := b.format(name, precision.Fprop), b.format(name, precision.Dgrad)
	s.forward = elements * (forward.Bytes() - 2)
	s.backward = elements * (backward.Bytes() - 2)
	s.own = -2 * elements
	if forward == dtype.FormatBF16 || backward == dtype.FormatBF16 {
		s.own = 0
	}
	for _, f := range dtype.Formats() {
		sides := 0.0
		for _, other := range []dtype.Format{forward, backward} {
			if other == f {
				sides++
			}
		}
		s.own += elements * sides * f.Bytes()
		s.made += b.quantized(f, elements, 4, sides, false)
	}
	return s
}

// sent is the bytes per element of a gathered GEMM operand: one copy for each format that its
// GEMMs read, each orientation by itself.
func (b *builder) sent(names []string, gemms ...string) float64 {
	if b.in == nil {
		return 2
	}
	bytes := 0.0
	wide := false
	for _, product := range gemms {
		var seen []dtype.Format
		for _, name := range names {
			f := b.format(name, product)
			switch {
			case slices.Contains(seen, f):
			case f == dtype.FormatBF16:
				wide = true
			default:
				bytes += f.Bytes()
			}
			seen = append(seen, f)
		}
	}
	if wide {
		bytes += 2
	}
	return bytes
}

// latent is the bytes per token of MLA's saved low-rank projections.
func (b *builder) latent(q, k float64) float64 {
	if b.in == nil {
		return b.residualBytes(q + k)
	}
	return b.wgradBytes(q, "q_up") + b.wgradBytes(k, "kv_up")
}

// ups names the linear layers into an MLP.
func (b *builder) ups(prefix string) []string {
	if b.e.config.Gated {
		return []string{prefix + "gate", prefix + "up"}
	}
	return []string{prefix + "up"}
}

// wgradBytes is the bytes of n inputs saved for wgrad.
func (b *builder) wgradBytes(n float64, names ...string) float64 {
	if b.in == nil {
		return b.residualBytes(n)
	}
	return n * b.sent(names, precision.Wgrad)
}
