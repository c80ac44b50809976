package train

import (
	"os"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// written returns the programs of the example for eight GPUs, with something offloaded.
func written(t *testing.T, arch string, offload ...string) *step.Programs {
	t.Helper()
	const path = "../examples/plans/llama3.1-8b-8xb200.json"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	p, err := plan.Parse(text, path)
	if err != nil {
		t.Fatal(err)
	}
	preset, err := model.Find(p.Model)
	if err != nil {
		t.Fatal(err)
	}
	p.Offload = offload
	w, err := step.Build(step.Spec{Model: preset.Config, Recipe: step.RecipeOf(p),
		Arch: arch, Plan: p})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// What is offloaded moves its bytes, and nothing else, from the account of the device to the host.
func TestOffloadedBytesCountOnTheHost(t *testing.T) {
	none := func(*program.Module) step.Needs { return step.Needs{} }
	account := func(arch string, offload ...string) step.Footprint {
		list, err := written(t, arch, offload...).Footprints(none)
		if err != nil {
			t.Fatal(err)
		}
		return *list[0]
	}
	before, after := account("sm_100"), account("sm_100", plan.OptimizerState)
	if before.Host != 0 || after.Optimizer != 0 || after.Host != before.Optimizer ||
		after.Params != before.Params || after.Grads != before.Grads {
		t.Errorf("%+v became %+v", before, after)
	}
	// On a CPU programs compute with the f32 masters themselves, which are then the parameters; on a
	// GPU those are bf16 copies, and the masters count as the optimizer's.
	if cpu := account("cpu", plan.OptimizerState); cpu.Host != 0 ||
		cpu.Params+cpu.Optimizer != before.Optimizer {
		t.Errorf("on a CPU the host is the device: %+v, not %+v", cpu, before)
	}
	flag := "xla_gpu_enable_pipelined_host_offloading"
	w := written(t, "sm_100", plan.Activations)
	if w.Find(step.Gradient, 0).Module.Flags[flag] != true {
		t.Errorf("the gradient is compiled with %v", w.Find(step.Gradient, 0).Module.Flags)
	}
}

// Compiled for GPUs, offload makes the steps of 8B on eight of them smaller, by what lies on the
// host (docs/decisions/0016-offload.md).
func TestOffloadOnBlackwell(t *testing.T) {
	slowtest.Only(t)
	c := enginetest.GPUCompiler(t, false)
	cluster, err := machine.ParseCluster("8xb200")
	if err != nil {
		t.Fatal(err)
	}
	compile := func(offload ...string) *step.Footprint {
		w := written(t, cluster.GPU.Arch, offload...)
		list, err := w.Footprints(func(module *program.Module) step.Needs {
			r, err := c.Compile(t.Context(), module, cluster)
			if err != nil {
				t.Fatal(err)
			}
			if r.Recomputed > 0 || r.Fits() != nil {
				t.Errorf("%s: %d instructions again, %v", module.Name, r.Recomputed, r.Fits())
			}
			m := r.Memory
			return step.Needs{Temp: m.Temp, Output: m.Output, Alias: m.Alias, Host: m.Host}
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("offload %v: %s", offload, list[0])
		return list[0]
	}
	before := compile()
	after := compile(plan.Activations, plan.OptimizerState)
	// XLA packs what is left a little differently: 64 MiB of it were seen.
	if gone := before.Sum() - after.Sum(); gone < after.Host-(128<<20) {
		t.Errorf("%s are on the host, but only %s less on the device", event.Size(after.Host), event.Size(gone))
	}
}

// A stage of one layer is a loop of one round, which XLA unrolls: what comes from the host is moved
// before it is sliced, or "Bitcast cannot have different memory spaces" ends the compile.
func TestOffloadOfOneLayer(t *testing.T) {
	c := enginetest.GPUCompiler(t, false)
	cluster, err := machine.ParseCluster("2xb200")
	if err != nil {
		t.Fatal(err)
	}
	small, err := model.Find("llama3.2-1b")
	if err != nil {
		t.Fatal(err)
	}
	config := *small.Config
	config.Layers, config.Vocab = 2, 1024
	p := plan.Default()
	p.Model, p.Cluster = "small", "2xb200"
	p.Seq, p.Batch, p.Microbatches = 1024, 4, 4
	p.PP = plan.PP{Size: 2, Schedule: "1f1b"}
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	p.Offload = []string{plan.Activations}
	w, err := step.Build(step.Spec{Model: &config, Recipe: step.RecipeOf(p),
		Arch: cluster.GPU.Arch, Plan: p})
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range w.List {
		if _, err := c.Compile(t.Context(), one.Module, cluster); err != nil {
			t.Errorf("%s: %v", one.Module.Name, err)
		}
	}
}
