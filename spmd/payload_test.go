package spmd_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/ir/eval"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/spmd"
)

// rowsPlan computes everything again, with experts over two devices.
func rowsPlan(save bool) *plan.Plan {
	return quantizedPlan(mesh{Apply: func(p *plan.Plan) {
		p.EP, p.EPSave, p.Recompute = 2, save, ir.BlockTags
	}}, "mxfp8", plantest.Size{Batch: 4, Micros: 1, Seq: 32})
}

// rowsLoss is a model with experts in MXFP8, whose rows are sent in a format.
func rowsLoss(t *testing.T, elem dtype.DType, payload dtype.Format) (*model.Config, *ir.Graph) {
	t.Helper()
	c := blocky(32, 2)
	c.Arch = "mixtral"
	c.MoE = &model.MoE{Experts: 4, TopK: 2, MLP: 32, Score: "softmax", Normalize: true, Scale: 1}
	g, err := c.Graph(model.Shape{Batch: 4, Seq: 32, Elem: elem,
		Experts: model.ExpertShape{Blocks: true}})
	if err != nil {
		t.Fatal(err)
	}
	policy := &precision.Policy{Layers: 2, Payload: payload, Rules: []precision.Rule{{
		Linears: []string{"experts"}, To: 2, Format: ir.MXFP8}}}
	if err := policy.Mark(g, c.Params()); err != nil {
		t.Fatal(err)
	}
	return c, g
}

// rowsStep builds the step of a plan.
func rowsStep(t *testing.T, g *ir.Graph, p *plan.Plan) *graphs {
	t.Helper()
	sh, err := spmd.Shard(g, p)
	if err != nil {
		t.Fatal(err)
	}
	s, err := build(sh.Graph, spmd.Options{Optimizer: optim.SGD{}, Sharding: sh,
		Recompute: p.Recompute})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// exchanges counts the bytes of all-to-alls along ep, and how many there are.
func exchanges(g *ir.Graph) (count, bytes int64) {
	for _, row := range spmd.CensusOf(g) {
		if row.Kind == hlo.AllToAll {
			count, bytes = count+row.Count, bytes+row.Bytes
		}
	}
	return count, bytes
}

// In a layer rows of [experts, slots, embed] go to experts, and again for the gradient, and so do
// rows of gradients: 33 bytes for 32 elements where they have a payload. Results and their
// gradients go back in bf16. Weights of rows and their gradients go 3 times, or 2. Rows that are
// saved are not sent again.
func TestRowsAreSentAsBytes(t *testing.T) {
	const layers, rows, embed = 2, 4 * 64, 32 // rows of 4 experts, of 2 sequences
	const wide, codes = 2 * rows * embed, rows * embed * 33 / 32
	for _, row := range []struct {
		payload      dtype.Format
		save         bool
		count, bytes int64
	}{
		{dtype.FormatBF16, false, 5 + 3, 5*wide + 3*2*rows},
		{dtype.FormatBF16, true, 4 + 2, 4*wide + 2*2*rows},
		{"", false, 2*3 + 2 + 3, 3*codes + 2*wide + 3*2*rows},
		{"", true, 2*2 + 2 + 2, 2*codes + 2*wide + 2*2*rows},
	} {
		_, g := rowsLoss(t, dtype.BF16, row.payload)
		s := rowsStep(t, g, rowsPlan(row.save))
		count, bytes := exchanges(s.Gradient)
		if count != layers*row.count || bytes != layers*row.bytes {
			t.Errorf("payload %q, saved %v: %d all-to-alls of %d bytes, not %d of %d", row.payload,
				row.save, count, bytes, layers*row.count, layers*row.bytes)
		}
		kept := int64(0) // codes and scales of rows that the forward loop stacks
		for _, op := range s.Gradient.Ops {
			for _, v := range op.Out {
				if t := v.Type; op.Body != nil && t.Index(ir.Slots) == 2 && len(t.Dims) == 4 {
					kept += t.Shape().Bytes()
				}
			}
		}
		want := int64(0)
		switch {
		case row.save && row.payload == "":
			want = layers * codes
		case row.save:
			want = layers * wide
		}
		if kept != want {
			t.Errorf("payload %q, saved %v: %d bytes of rows are kept, not %d", row.payload, row.save,
				kept, want)
		}
	}
}

// Rows that are saved give the same bits as rows that are sent again.
func TestSavedRowsAreTheRows(t *testing.T) {
	c, g := rowsLoss(t, dtype.F32, "")
	whole := quantizedBatch(g, c)
	var want map[string][]float64
	for _, save := range []bool{false, true} {
		got, err := quantizedGradients(g, rowsPlan(save), whole)
		if err != nil {
			t.Fatal(err)
		}
		if want == nil {
			want = got
		}
		for name, list := range want {
			if !slices.Equal(got[name], list) {
				t.Errorf("%s differs", name)
			}
		}
	}
}

// Codes whose scales stay behind are an error of the verifier; scales of other rows change the
// loss.
func TestPlantedFaultsInPayloads(t *testing.T) {
	c, g := rowsLoss(t, dtype.F32, "")
	p := rowsPlan(false)
	whole := quantizedBatch(g, c)
	loss := func(fault func(op *ir.Op) bool) (float64, error) {
		r, err := newRig(g, p, optim.SGD{}, 1, whole, evalRunner)
		if err != nil {
			t.Fatal(err)
		}
		if err := r.copies(); err != nil {
			t.Fatal(err)
		}
		planted := 0
		for _, op := range opsOf(r.step.Gradient) {
			if fault(op) {
				planted++
			}
		}
		if planted == 0 {
			t.Fatal("there is nothing to plant the fault in")
		}
		if err := r.step.Gradient.Verify(); err != nil {
			return 0, err
		}
		return r.gradients([]map[string]*eval.Array{whole})
	}
	of := func(op *ir.Op, kind string) bool {
		return op.Kind == kind && op.In[0].Type.Elem == dtype.F8E8M0FNU
	}
	sound, err := loss(func(op *ir.Op) bool { return of(op, "all_to_all") })
	if err != nil {
		t.Fatal(err)
	}
	if _, err := loss(func(op *ir.Op) bool {
		if op.Kind != "dequantize" && op.Kind != "block_dot" || !of(op.In[1].Def(), "all_to_all") {
			return false
		}
		op.In[1] = op.In[1].Def().In[0] // as they were before the all-to-all
		return true
	}); err == nil {
		t.Error("scales may stay behind")
	}
	got, err := loss(func(op *ir.Op) bool {
		if !of(op, "dispatch") {
			return false
		}
		op.In[2] = op.In[1] // a slot by the number of its expert
		return true
	})
	if err != nil || got == sound {
		t.Errorf("scales of other rows give the loss %v, %v", got, err)
	}
}

// A payload costs no accuracy: fprop and dgrad take the codes that they would have made, and scales
// are powers of two, so that wgrad rounds only what is 2^15 times smaller than the largest of its
// block once more.
func TestPayloadRoundsNothingMore(t *testing.T) {
	c, g := rowsLoss(t, dtype.F32, dtype.FormatBF16)
	whole := quantizedBatch(g, c)
	want, err := quantizedGradients(g, nil, whole)
	if err != nil {
		t.Fatal(err)
	}
	_, g = rowsLoss(t, dtype.F32, "")
	got, err := quantizedGradients(g, nil, whole)
	if err != nil {
		t.Fatal(err)
	}
	worst := 0.0
	for name, list := range want {
		d := distance(got[name], list)
		if worst = max(worst, d); d > 1e-5 || d > 0 && !strings.Contains(name, ".expert_") {
			t.Errorf("%s is off by %.2g", name, d)
		}
	}
	t.Logf("gradients of experts are off by at most %.2g", worst)
}
