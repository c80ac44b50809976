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

// gemms are those of a linear layer.
var gemms = []string{precision.Fprop, precision.Dgrad, precision.Wgrad}

// format gives that of a product of a linear layer.
func (b *builder) format(linear, product string) dtype.Format {
	return b.in.Of(linear, product)
}

// A kind is layers that cost the same.
type kind struct {
	windowed bool // attention sees a window
	sparse   bool // the MLP is experts
	in       precision.Layer
}

func (k *kind) equal(o *kind) bool {
	return k.windowed == o.windowed && k.sparse == o.sparse && maps.Equal(k.in, o.in)
}

// classify finds the policy of what is priced and sorts the layers by kind.
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

// ruled gives the policy that our own programs compute by, if there is one for the options. Other
// stacks are priced by one word, which their constants were fitted with.
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

// describe says in a line which layers have products in blocks.
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

// A quantBytes is what weights in blocks take more than bf16, or less where it is negative: bytes
// of all copies that are kept, of those that the forward and the backward pass take, and the
// seconds in which an update makes them. All are of whole weights, before fsdp cuts them.
type quantBytes struct{ own, forward, backward, made float64 }

func (s *quantBytes) add(t *quantBytes, n float64) {
	s.own += n * t.own
	s.forward += n * t.forward
	s.backward += n * t.backward
	s.made += n * t.made
}

// An out is a linear layer by its name in a policy and the elements of its result.
type out struct {
	name  string
	width float64
}

// A source is what some linear layers multiply: elements of one token, and the tokens of a
// microbatch that a device has when it writes them in blocks, which is before they are gathered.
type source struct{ width, tokens float64 }

// join prices linear layers with one input of m tokens, whose widths so many devices share. Back is
// the tokens of their gradients that a device has when it writes them in blocks. In bf16 XLA makes
// one product of them all, while each has its own in blocks.
func (b *builder) join(m float64, x source, cut, back float64, outs ...out) {
	all := lists.Sum(outs, func(o out) float64 { return o.width })
	if b.in == nil {
		b.linear(b.e.precision(b.c), m, x.width, all/cut)
		return
	}
	b.gemms(m, x.width, cut, outs)
	b.quantizeCost(x, cut, back, outs)
	for _, o := range outs {
		b.weights(o.name, x.width*o.width/cut)
	}
	b.dense += x.width * all / cut
	b.shape(x.width, all/cut)
}

// gemms adds the three products of linear layers with one input of k elements.
func (b *builder) gemms(m, k, cut float64, outs []out) {
	for _, product := range gemms {
		wide := 0.0 // width of what stays in bf16
		for _, o := range outs {
			if f := b.format(o.name, product); f == dtype.FormatBF16 {
				wide += o.width / cut
			} else {
				b.gemm(product, f, m, k, o.width/cut)
			}
		}
		if wide > 0 {
			b.gemm(product, dtype.FormatBF16, m, k, wide)
		}
	}
}

// gemm adds one of the products of a layer [m,k]·[k,n].
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

// quantizeCost adds what it costs to write the input and the gradients of linear layers in blocks:
// each tensor once for an orientation, with the tokens that a device has of it.
func (b *builder) quantizeCost(x source, cut, back float64, outs []out) {
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
			b.input.quantize += b.quantized(f, back*o.width/cut, 2, sides)
			b.operations += sides / 2 * b.quantizing(f).Count
			gradients += sides
		}
		both := b.quantized(f, x.tokens*x.width, 2, rows+cols)
		b.forward.quantize += both
		if rows+cols > 0 {
			b.forward.data += b.agree(f)
		}
		if gradients > 0 {
			b.input.data += b.agree(f)
		}
		b.operations += (rows + cols) / 2 * b.quantizing(f).Count
		// What is computed again needs no copy for the gradient of the weights the first time.
		b.later += both - b.quantized(f, x.tokens*x.width, 2, rows)
	}
}

// quantizing is the work of our own kernels that write a format.
func (b *builder) quantizing(f dtype.Format) kernels.Quantizing {
	return b.e.set.Quantizing(f)
}

// quantized is the time in which they write elements of wide bytes in so many orientations.
func (b *builder) quantized(f dtype.Format, elements, wide, sides float64) float64 {
	return b.p.QuantizeBytes(b.quantizing(f).Bytes(elements, wide, sides))
}

// agree is the time in which devices agree on the largest magnitudes of an input, or of the
// gradients of all that take it, as NVFP4 asks all that have a piece of them to: XLA joins those
// that are there at once, four of a layer in either pass, and waits for them (8b compiled for 8
// B200). It is counted with the data axes, which most of them are along.
func (b *builder) agree(f dtype.Format) float64 {
	if !f.TensorScale() {
		return 0
	}
	return b.p.Agree(b.c.everyone())
}

// weights counts what the copies of a weight take: bf16 as long as one product is in it, and a copy
// for each orientation that is in blocks. The update writes them from masters in f32.
func (b *builder) weights(name string, elements float64) {
	s := b.stocked(name, elements)
	b.quantWeights.add(&s, 1)
}

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
		s.made += b.quantized(f, elements, 4, sides)
	}
	return s
}

// sent is the bytes of an element of something that linear layers multiply and devices gather
// first: a copy for each format that its products want, each orientation by itself.
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

// latent is what attention keeps of the results of its projections to few elements.
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

// wgradBytes is the bytes of n elements that linear layers keep of what they multiply with, for the
// gradients of their weights.
func (b *builder) wgradBytes(n float64, names ...string) float64 {
	if b.in == nil {
		return b.residualBytes(n)
	}
	return n * b.sent(names, precision.Wgrad)
}
