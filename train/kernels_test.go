package train

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/estimate"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/price"
	"github.com/deepwell/deepwell/step"
)

// The kernel of attention that a plan's price assumes is the one that its programs call: of context
// parallel plans, which once were priced as FlashAttention and compiled to plain attention, and of
// all others.
func TestPricesAssumeTheKernelsThatProgramsCall(t *testing.T) {
	gather, ring := plan.CP{Size: 4, Kind: "gather"}, plan.CP{Size: 4, Kind: "ring"}
	balanced := func(c plan.CP) plan.CP {
		c.Balance = true
		return c
	}
	for _, row := range []struct {
		model, gpu string
		seq        int64
		cp         plan.CP
		params     dtype.DType
		want       string
	}{
		{"qwen2.5-0.5b", "b200", 4096, plan.CP{Size: 1, Kind: "gather"}, dtype.BF16, kernels.CuDNN},
		{"qwen2.5-0.5b", "b200", 4096, plan.CP{Size: 1, Kind: "gather"}, dtype.F32, kernels.Plain},
		{"qwen2.5-0.5b", "gb200", 4096, gather, dtype.BF16, kernels.CuDNN},
		{"qwen2.5-0.5b", "gb200", 4096, balanced(gather), dtype.BF16, kernels.CuDNN},
		{"qwen2.5-0.5b", "gb300", 4096, ring, dtype.BF16, kernels.CuDNN},
		{"qwen2.5-0.5b", "gb300", 16384, ring, dtype.BF16, kernels.CuDNN},
		{"qwen2.5-0.5b", "b200", 4096, ring, dtype.F32, kernels.Plain},
		{"qwen2.5-0.5b", "b200", 4096, balanced(ring), dtype.BF16, kernels.CuDNN},
		{"qwen2.5-0.5b", "h100", 4096, ring, dtype.BF16, kernels.CuDNN},
		{"qwen2.5-0.5b", "rtx6000pro", 4096, ring, dtype.BF16, kernels.CuDNN},
		{"qwen2.5-0.5b", "a100", 4096, plan.CP{Size: 1, Kind: "gather"}, dtype.BF16, kernels.Plain},
		{"qwen2.5-0.5b", "cpu", 4096, gather, dtype.BF16, kernels.HeadFirst},
		{"qwen2.5-0.5b", "cpu", 4096, ring, dtype.BF16, kernels.Plain},
		{"llama3.2-1b", "h200", 8192, gather, dtype.BF16, kernels.CuDNN},
		{"phi3-mini", "b200", 4096, plan.CP{Size: 1, Kind: "gather"}, dtype.BF16, kernels.CuDNN},   // heads of 96
		{"gemma2-2b", "b200", 4096, plan.CP{Size: 1, Kind: "gather"}, dtype.BF16, kernels.Triton},  // a soft cap
		{"gemma3-270m", "b200", 4096, plan.CP{Size: 1, Kind: "gather"}, dtype.BF16, kernels.CuDNN}, // windows
		{"gemma3-270m", "b200", 4096, ring, dtype.BF16, kernels.CuDNN},
		{"mistral-7b-v0.1", "b200", 8192, ring, dtype.BF16, kernels.Plain},
	} {
		name := fmt.Sprintf("%s-%s-%d-%s-%v-%v-%s", row.model, row.gpu, row.cp.Size, row.cp.Kind, row.cp.Balance, row.seq, row.params)
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			preset, err := model.Find(row.model)
			if err != nil {
				t.Fatal(err)
			}
			cluster, err := machine.ParseCluster("4x" + row.gpu)
			if err != nil {
				t.Fatal(err)
			}
			prof, err := price.Find(price.Own)
			if err != nil {
				t.Fatal(err)
			}
			p := plan.Default()
			p.Model, p.Cluster, p.Seq, p.Batch, p.CP = row.model, cluster.String(), row.seq, 4, row.cp
			p.FSDP.Size = 4 / row.cp.Size
			p.Types = plan.Types{Params: row.params, Grads: dtype.F32, Collectives: row.params}
			e, err := estimate.New(preset.Config, cluster, prof)
			if err != nil {
				t.Fatal(err)
			}
			est, err := e.Price(p)
			if err != nil {
				t.Fatal(err)
			}
			if est.Attention != row.want {
				t.Errorf("priced as %q, want %q", est.Attention, row.want)
			}
			programs, err := step.Build(step.Spec{Model: preset.Config, Recipe: step.RecipeOf(p),
				Arch: cluster.Arch(), Plan: p})
			if err != nil {
				t.Fatal(err)
			}
			calls := func(kernel string) bool {
				return slices.ContainsFunc(programs.Notes, func(n string) bool {
					return strings.HasPrefix(n, "attention: "+kernel+",")
				})
			}
			// Layers with a window may have another kernel than layers without: the slower one is reported.
			if !calls(est.Attention) || est.Attention != kernels.Plain && calls(kernels.Plain) {
				t.Errorf("priced as %s, but the programs say %q", est.Attention, programs.Notes)
			}
		})
	}
}
