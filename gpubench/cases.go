package gpubench

import (
	"fmt"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/kernels/flash"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// A benchCase is one row before it is measured.
type benchCase struct {
	operation, shape string
	flops            float64
	// programs with kernels of our own and without; the second of a pair is timed less the first, and
	// the difference is of two layers.
	own, plain []*program.Module
	modelled   float64 // seconds; 0 if the cost model has no such row
	torch      torchCase
}

// gemms are the linear layers of the model's graph, each shape once: forward, in a format.
func (b *bench) gemms() (list []*benchCase, err error) {
	g, err := b.graph()
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, op := range allOps(g) {
		if op.Kind != "linear" || op.In[1].Type.Index(ir.ExpertDim) >= 0 {
			continue
		}
		k := summed(op.In[0].Type, op.In[1].Type, op.Out[0].Type)
		m, n := elements(op.In[0].Type)/k, elements(op.In[1].Type)/k
		shape := fmt.Sprintf("%d×%d×%d", m, n, k)
		if seen[shape] {
			continue
		}
		seen[shape] = true
		c := &benchCase{operation: "linear, " + weightName(op.In[1].Source), shape: shape,
			flops: 2 * float64(m) * float64(n) * float64(k),
			torch: torchCase{Kind: "gemm", M: m, N: n, K: k}}
		if b.prices != nil {
			c.modelled = b.prices.GEMM(b.format(), float64(m), float64(k), float64(n))
		}
		if err := b.programs(c, func(build *ir.Builder) []*ir.Value {
			return b.gemm(build, m, n, k)
		}); err != nil {
			return nil, err
		}
		list = append(list, c)
	}
	return list, nil
}

// gemm is a GEMM of bfloat16 operands, which are quantized first if the format is.
func (b *bench) gemm(build *ir.Builder, m, n, k int64) []*ir.Value {
	rows, cols := ir.Dim{Name: "rows", Size: m}, ir.Dim{Name: "out", Size: n}
	sum := ir.Dim{Name: "in", Size: k}
	x := activation(build, "x", ir.Type{Elem: dtype.BF16, Dims: []ir.Dim{rows, sum}})
	w := activation(build, "w", ir.Type{Elem: dtype.BF16, Dims: []ir.Dim{cols, sum}})
	if !b.o.Format.Quantized() {
		return []*ir.Value{build.Linear(x, w)}
	}
	q := ir.Quantize{Format: b.o.Format, Along: []string{"in"}}
	return []*ir.Value{build.BlockDot(b.o.Format, build.QuantizeAll(x, q), build.QuantizeAll(w, q),
		[]string{"in"}, dtype.BF16)}
}

// attentions are the forms of attention that the model has, forward and backward in one program.
func (b *bench) attentions() (list []*benchCase, err error) {
	g, err := b.graph()
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	for _, op := range allOps(g) {
		if op.Kind != "attention" || len(op.In) != 3 {
			continue
		}
		q, v := op.In[0].Type, op.In[2].Type
		shape := fmt.Sprintf("%d tokens, %d heads of %d, %d of keys", q.Size(ir.Seq), q.Size(ir.Heads),
			q.Size(ir.HeadDim), v.Size(ir.KVHeads))
		if w := op.Attrs.Int("window"); w > 0 {
			shape += fmt.Sprintf(", window %d", w)
		}
		if seen[shape] {
			continue
		}
		seen[shape] = true
		tokens, heads := float64(q.Size(ir.Seq)), float64(q.Size(ir.Heads))
		score, value := float64(q.Size(ir.HeadDim)), float64(v.Size(ir.HeadDim))
		keys := flash.MeanKeys(tokens, float64(op.Attrs.Int("window")))
		c := &benchCase{operation: "attention, forward and backward", shape: shape,
			flops: 3.5 * 2 * tokens * keys * heads * (score + value),
			torch: torchCase{Kind: "attention", Seq: q.Size(ir.Seq), Heads: q.Size(ir.Heads),
				KVHeads: v.Size(ir.KVHeads), Head: q.Size(ir.HeadDim)}}
		if b.prices != nil {
			c.modelled = b.prices.Attention(tokens, keys, heads, score, value, false) +
				b.prices.Attention(tokens, keys, heads, score, value, true)
		}
		if score != value || op.Attrs.Int("window") > 0 || op.Attrs.Float("softcap") > 0 {
			c.torch = torchCase{} // scaled_dot_product_attention has another form
		}
		build := func(build *ir.Builder) []*ir.Value {
			in := make([]*ir.Value, len(op.In))
			for i, v := range op.In {
				in[i] = activation(build, fmt.Sprintf("x%d", i), v.Type)
			}
			attrs := map[string]any{}
			for _, a := range op.Attrs {
				attrs[a.Key] = a.Value
			}
			return build.Op("attention", attrs, in...)[:1]
		}
		if err := b.programs(c, build); err != nil {
			return nil, err
		}
		list = append(list, c)
	}
	if len(list) == 0 {
		err = diag.New(diag.NotSupported, "the model has no attention that can be measured alone").
			Because("sinks and packed documents take more than queries, keys and values").
			Try("deepwell bench layer")
	}
	return list, err
}

// baseLayers is how many layers are in both programs. NVFP4's policy keeps one of four, and one of
// six, in bf16: the two that are measured are the others.
const baseLayers = 4

// layer is a layer of the model, forward and backward.
func (b *bench) layer() (list []*benchCase, err error) {
	f := b.o.Model.Facts()
	c := &benchCase{operation: "layer, forward and backward",
		shape: fmt.Sprintf("%d tokens of width %d", b.o.Seq, f.Hidden),
		torch: torchCase{Kind: "layer", Seq: b.o.Seq, Hidden: f.Hidden, Heads: f.Heads,
			KVHeads: f.KVHeads, Head: f.HeadDim, MLP: f.MLP}}
	if f.MoE != nil {
		c.torch.Kind, c.torch.Experts, c.torch.Top = "moe", f.MoE.Experts, f.MoE.TopK
		c.torch.MLP = f.MoE.MLP
	}
	if !f.Gated || f.MLA != nil || b.o.Model.QKNorm || b.o.Model.PostNorms {
		c.torch = torchCase{} // maxautotune.py's layer is Llama's
	}
	count := func(n int64) float64 {
		m := *b.o.Model
		m.Layers = n
		return m.Forward(b.o.Seq).Training().Sum() * float64(b.o.Seq)
	}
	c.flops = (count(baseLayers+2) - count(baseLayers)) / 2
	for _, n := range []int64{baseLayers, baseLayers + 2} {
		for without, to := range map[bool]*[]*program.Module{false: &c.own, true: &c.plain} {
			m, err := b.gradient(n, without)
			if err != nil {
				return nil, err
			}
			*to = append(*to, m)
		}
	}
	return []*benchCase{c}, nil
}

// gradient is the gradient program of the model with as many layers.
func (b *bench) gradient(layers int64, without bool) (*program.Module, error) {
	m := *b.o.Model
	m.Layers = layers
	if m.Windowed != nil {
		m.Windowed = slices.Repeat(m.Windowed[:1], int(layers))
	}
	how := plan.Default()
	how.Seq, how.Batch, how.Microbatches = b.o.Seq, 1, 1
	how.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	how.Precision = string(b.o.Format)
	p, err := step.Build(step.Spec{Model: &m, Recipe: step.RecipeOf(how), Arch: b.o.Arch,
		Kernels: kernels.Options{Without: without}})
	if err != nil {
		return nil, err
	}
	return p.Find(step.Gradient, 0).Module, nil
}

// programs builds an operation with kernels of our own and without. Attention has its gradient.
func (b *bench) programs(c *benchCase, build func(*ir.Builder) []*ir.Value) error {
	for without, to := range map[bool]*[]*program.Module{false: &c.own, true: &c.plain} {
		builder := ir.NewBuilder("operation")
		g, err := builder.Graph(build(builder)...)
		if err == nil && c.torch.Kind != "gemm" {
			var gr *ir.Gradient
			if gr, err = ir.Grad(g, ir.GradPlan{}); err == nil {
				g, err = gr.Joint()
			}
		}
		if err != nil {
			return err
		}
		m, err := lower.Module("operation", g, lower.Options{
			Kernels: kernels.For(b.o.Arch).With(kernels.Options{Without: without})})
		if err != nil {
			return err
		}
		for i, a := range m.Args { // the seed of a gradient is drawn, too
			if a.Role == program.Batch || a.Role == program.Residual || a.Role == "" {
				m.Args[i].Role = program.Activation
			}
		}
		*to = []*program.Module{m}
	}
	return nil
}

// graph is the loss of the model with one layer of each kind that it has at its beginning.
func (b *bench) graph() (*ir.Graph, error) {
	m := *b.o.Model
	layers := int64(2)
	if m.MoE != nil {
		layers = max(layers, m.MoE.Dense+1)
	}
	m.Layers = min(m.Layers, layers)
	if m.Windowed != nil {
		m.Windowed = m.Windowed[:m.Layers]
	}
	return m.Graph(model.Shape{Batch: 1, Seq: b.o.Seq, Elem: dtype.BF16})
}

func (b *bench) format() dtype.Format {
	if b.o.Format == "" {
		return dtype.FormatBF16
	}
	return b.o.Format
}

// activation is an input of random numbers.
func activation(b *ir.Builder, name string, t ir.Type) *ir.Value {
	return b.Input(name, ir.Param, t, "").As(program.Meaning{Role: program.Activation})
}

// allOps lists the operations of a graph and of the bodies of its loops.
func allOps(g *ir.Graph) (list []*ir.Op) {
	for _, op := range g.Ops {
		list = append(list, op)
		if op.Body != nil {
			list = append(list, allOps(op.Body)...)
		}
	}
	return list
}

func elements(t ir.Type) int64 {
	n := int64(1)
	for _, d := range t.Dims {
		n *= d.Size
	}
	return n
}

// summed is over how many elements a GEMM sums: of the dimensions that both operands have and its
// result lacks.
func summed(x, w, out ir.Type) int64 {
	k := int64(1)
	for _, d := range x.Dims {
		if w.Index(d.Name) >= 0 && out.Index(d.Name) < 0 {
			k *= d.Size
		}
	}
	return k
}
