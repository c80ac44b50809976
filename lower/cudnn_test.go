package lower_test

import (
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/program"
)

// attentionGraph has heads of queries and keys, and of values, of two sizes, and documents of some
// number.
func attentionGraph(t *testing.T, elem dtype.DType, head, value int64, how ir.Attention) *ir.Graph {
	t.Helper()
	b := ir.NewBuilder("attention")
	d := func(name string, n int64) ir.Dim { return ir.Dim{Name: name, Size: n} }
	q := b.Input("q", ir.Param, ir.Type{Elem: elem, Dims: []ir.Dim{d("batch", 2), d(ir.Seq, 1024), d(ir.Heads, 16), d(ir.HeadDim, head)}}, "")
	kt := ir.Type{Elem: elem, Dims: []ir.Dim{d("batch", 2), d(ir.Keys, 1024), d(ir.KVHeads, 4), d(ir.HeadDim, head)}}
	vt := ir.Type{Elem: elem, Dims: append(kt.Dims[:3:3], d(ir.HeadDim, value))}
	k, v := b.Input("k", ir.Param, kt, ""), b.Input("v", ir.Param, vt, "")
	if how.Sinks != nil {
		how.Sinks = b.Input("sinks", ir.Param, ir.Type{Elem: elem, Dims: q.Type.Dims[2:3]}, "")
	}
	if how.Documents > 0 {
		st := ir.Type{Elem: dtype.S32, Dims: q.Type.Dims[:2]}
		how.Segments = b.Input("segments", ir.Data, st, "")
		how.KeySegments = b.Rename(how.Segments, ir.Seq, ir.Keys)
	}
	g, err := b.Graph(b.Attend(q, k, v, how))
	if err != nil {
		t.Fatal(err)
	}
	return g
}

// On Blackwell attention and its gradient become calls of cuDNN, with real plans; what cuDNN lacks
// does not, and the reason is recorded.
func TestAttentionIsCuDNNsOnBlackwell(t *testing.T) {
	c := enginetest.GPUCompiler(t, false)
	for _, row := range []struct {
		name, cluster string
		elem          dtype.DType
		head, value   int64
		how           ir.Attention
		calls         int
		why           string
	}{
		{"causal", "1xb200", dtype.BF16, 128, 128, ir.Attention{Scale: 0.088, Causal: true}, 2, "cuDNN supports this shape"},
		{"window", "1xgb300", dtype.BF16, 128, 128, ir.Attention{Scale: 0.088, Causal: true, Window: 256}, 2, "cuDNN supports this shape"},
		{"full", "1xrtx6000pro", dtype.BF16, 128, 128, ir.Attention{Scale: 0.088}, 2, "cuDNN supports this shape"},
		{"f32", "1xb200", dtype.F32, 128, 128, ir.Attention{Scale: 0.088, Causal: true}, 0, "bf16 or f16, not f32"},
		{"soft cap", "1xb200", dtype.BF16, 128, 128, ir.Attention{Scale: 0.088, Causal: true, SoftCap: 50}, 0, "soft cap"},
		{"latent", "1xb200", dtype.BF16, 192, 128, ir.Attention{Scale: 0.07, Causal: true}, 2, "cuDNN supports this shape"},
		{"latent on gb300", "1xgb300", dtype.BF16, 192, 128, ir.Attention{Scale: 0.07, Causal: true}, 2, "cuDNN supports this shape"},
		{"small latent", "1xb200", dtype.BF16, 96, 64, ir.Attention{Scale: 0.07, Causal: true}, 2, "cuDNN supports this shape"},
		{"small latent documents", "1xb200", dtype.BF16, 96, 64, ir.Attention{Scale: 0.07, Causal: true, Documents: 4}, 2, "cuDNN supports this shape"},
		{"head 256", "1xgb300", dtype.BF16, 256, 256, ir.Attention{Scale: 0.07, Causal: true}, 2, "cuDNN supports this shape"},
		{"latent documents", "1xb200", dtype.BF16, 192, 128, ir.Attention{Scale: 0.07, Causal: true, Documents: 4}, 2, "cuDNN supports this shape"},
		{"latent documents on gb300", "1xgb300", dtype.BF16, 192, 128, ir.Attention{Scale: 0.07, Causal: true, Documents: 64}, 6, "cuDNN supports this shape"},
		{"documents of heads of 256", "1xb200", dtype.BF16, 256, 256, ir.Attention{Scale: 0.07, Causal: true, Documents: 4}, 2, "cuDNN supports this shape"},
		{"head 160", "1xb200", dtype.BF16, 160, 160, ir.Attention{Scale: 0.07, Causal: true}, 0, "at most 128"},
		{"latent on rtx6000pro", "1xrtx6000pro", dtype.BF16, 192, 128, ir.Attention{Scale: 0.07, Causal: true}, 0, "at most 128"},
		{"sinks", "1xb200", dtype.BF16, 64, 64, ir.Attention{Scale: 0.125, Causal: true, Window: 128, Sinks: &ir.Value{}}, 2, "cuDNN supports this shape"},
		{"small latent on rtx6000pro", "1xrtx6000pro", dtype.BF16, 96, 64, ir.Attention{Scale: 0.07, Causal: true}, 2, "cuDNN supports this shape"},
	} {
		t.Run(row.name, func(t *testing.T) {
			cluster, err := machine.ParseCluster(row.cluster)
			if err != nil {
				t.Fatal(err)
			}
			if row.name != "causal" {
				slowtest.Only(t)
			}
			gr, err := ir.Grad(attentionGraph(t, row.elem, row.head, row.value, row.how), ir.GradPlan{})
			if err != nil {
				t.Fatal(err)
			}
			set := kernels.For(cluster.GPU.Arch)
			calls := 0
			for _, g := range []*ir.Graph{gr.Forward, gr.Backward} {
				text, err := lower.StableHLO(g, lower.Options{Kernels: set})
				if err != nil {
					t.Fatal(err)
				}
				r, err := c.Compile(t.Context(), &program.FromText("attention", text, 1).Modules[0], cluster)
				if err != nil {
					t.Fatalf("%v\n%s", err, text)
				}
				for _, call := range r.CustomCalls {
					if strings.HasPrefix(call.Target, "__cudnn$fmha") && call.Plan == hlo.PlanCompiled {
						calls++
					}
				}
			}
			if calls != row.calls {
				t.Errorf("%d calls of cuDNN, want %d", calls, row.calls)
			}
			for _, choice := range set.Choices() {
				if !strings.Contains(choice.Why, row.why) {
					t.Errorf("%+v does not say %q", choice, row.why)
				}
			}
		})
	}
}
