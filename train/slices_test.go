package train

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/plan"
)

// slicesEnv is how a test tells a child of its own binary to measure itself.
const slicesEnv = "DEEPWELL_TEST_SLICES"

// resident reads a line of /proc/self/status, in bytes.
func resident(t *testing.T, line string) (bytes int64) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Skip(err)
	}
	_, after, _ := strings.Cut(string(text), line+":")
	if _, err := fmt.Sscanf(after, "%d", &bytes); err != nil {
		t.Fatal(err)
	}
	return bytes << 10
}

// peakOf is by how much the resident memory of this process grows while do runs.
func peakOf(t *testing.T, do func() error) int64 {
	t.Helper()
	debug.FreeOSMemory()
	if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil {
		t.Skip(err)
	}
	before := resident(t, "VmRSS")
	if err := do(); err != nil {
		t.Fatal(err)
	}
	return resident(t, "VmHWM") - before
}

// Filling and saving the largest stack of a plan takes no more host memory than one shard of it and
// a chunk, whether shards have their dimensions in the checkpoint's order or not. On CPU devices,
// the array that is filled is host memory, too.
func TestStacksGoBySlices(t *testing.T) {
	slowtest.Only(t) // 1.2 GB of state
	if slowtest.Raced {
		t.Skip("the race detector takes memory of its own")
	}
	if os.Getenv(slicesEnv) == "" {
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(self, "-test.run=^TestStacksGoBySlices$", "-test.v")
		cmd.Dir = t.TempDir() // of the run
		// What C frees goes back to the system at once, as Go's memory does below.
		cmd.Env = append(os.Environ(), slicesEnv+"=1", "MALLOC_MMAP_THRESHOLD_=1048576")
		out, err := cmd.CombinedOutput()
		t.Logf("%s", out)
		if err != nil {
			t.Fatal(err)
		}
		return
	}
	const devices, layers, hidden, mlp = 4, 16, 256, 8192
	const layer = 4 * hidden * mlp // bytes
	const stack, shard = layers * layer, layers * layer / devices
	const slack = 24 << 20 // Go's runtime, threads, and the checkpoint's manifest
	p := &parity{engine: openCPU(t, devices), config: &model.Config{Arch: "llama", Vocab: 64,
		Hidden: hidden, Layers: layers, Heads: 4, KVHeads: 4, HeadDim: 64, MLP: mlp, Context: 64,
		Norm: model.Norm{Eps: 1e-5}, Activation: model.SiLU, Gated: true, Rope: ir.Rope{Theta: 100},
		Rotary: 64, AttnScale: 0.5, BOS: -1}, hasty: true,
		optimizer: optim.AdamW{Beta1: 0.9, Beta2: 0.95, Eps: 1e-8}, scale: 1}
	size := plantest.Size{Batch: 4, Micros: 1, Seq: 8}
	how := plantest.Row{Name: "fsdp", Apply: func(p *plan.Plan) {
		p.FSDP.Size, p.Recompute = devices, []ir.Tag{ir.Embed} // nothing, but layers are a loop
	}}.Plan(size)
	tr, err := p.start(t.Context(), how, size, Options{Ahead: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	dir := t.TempDir()
	within := func(what string, bound, filled int64, do func() error) {
		t.Helper()
		tr.opts.Engine.ResetHighWater()
		arrays := -lists.Sum(tr.opts.Engine.LiveBytes(), func(n int64) int64 { return n })
		grew := peakOf(t, do)
		arrays += lists.Sum(tr.opts.Engine.HighWater(), func(n int64) int64 { return n })
		t.Logf("%s: %s more, of which arrays %s; bound of the rest %s (stack %s, shard %s, layer %s)", what,
			event.Size(grew), event.Size(arrays), event.Size(bound), event.Size(stack), event.Size(shard),
			event.Size(layer))
		if grew -= arrays; arrays < filled {
			t.Errorf("the stack is not one array")
		}
		if grew > bound {
			t.Errorf("%s takes %s", what, event.Size(grew-bound))
		}
	}
	// An initializer makes one layer whole, as numbers and as bytes.
	within("initializing", shard+2*layer+slack, stack, func() error {
		return tr.fill(t.Context(), tr.computed(initial(tr.opts.Init)))
	})
	// The program that compares replicas is compiled before: the compiler has memory of its own.
	if err := tr.checkReplicas(t.Context()); err != nil {
		t.Fatal(err)
	}
	// Two writers have a chunk of 8 MiB each, and what they read into it.
	within("saving", shard+4*8<<20+slack, 0, func() error {
		return tr.saveTo(t.Context(), dir, 0, nil)
	})
	c, err := ckpt.Open(filepath.Join(dir, "step-00000000"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	within("loading", shard+layer+slack, stack, func() error { return tr.load(t.Context(), c) })
	differ, err := ckpt.Diff(t.Context(), c, tr.snapshot(t.Context()))
	if err != nil || len(differ) > 0 {
		t.Errorf("%d tensors differ from what was loaded, %v", len(differ), err)
	}
}
