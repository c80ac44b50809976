package lower_test

import (
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
)

// Values on the host are marked for a GPU in the text and in the module's list; a CPU, whose memory
// is the host's, has no marks.
func TestHostMemory(t *testing.T) {
	g, err := irtest.Tiny(3)
	if err != nil {
		t.Fatal(err)
	}
	gr, err := ir.Grad(g, ir.GradPlan{Offload: true, Recompute: []ir.Tag{ir.Norm, ir.Attn, ir.MLP}})
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		kernels *kernels.Selector
		memory  string
	}{{kernels.For("sm_100"), "pinned_host"}, {kernels.For("cpu"), ""}, {nil, ""}} {
		forward, err := lower.Module("forward", gr.Forward, lower.Options{Kernels: row.kernels})
		if err != nil {
			t.Fatal(err)
		}
		backward, err := lower.Module("backward", gr.Backward, lower.Options{Kernels: row.kernels})
		if err != nil {
			t.Fatal(err)
		}
		kept, moves := 0, 0
		for i, v := range gr.Forward.Results {
			a, want := forward.Results[i], ""
			if strings.HasPrefix(v.Name, "kept") {
				want = row.memory
			}
			if a.Memory != want {
				t.Errorf("%s lies in %q, want %q", a.Name, a.Memory, want)
			}
			for _, b := range backward.Args {
				if b.Name == a.Name && b.Memory != want {
					t.Errorf("%s is taken from %q, want %q", a.Name, b.Memory, want)
				}
			}
			if want != "" {
				kept, moves = kept+1, moves+1
			}
		}
		text := forward.Text + backward.Text
		if n := strings.Count(text, "mhlo.memory_kind"); n != 2*kept {
			t.Errorf("%d arguments and results have a memory, want %d", n, 2*kept)
		}
		if n := strings.Count(text, "annotate_device_placement"); n != 2*moves {
			t.Errorf("%d moves, want %d:\n%s", n, 2*moves, text)
		}
		if row.memory != "" && kept == 0 {
			t.Error("nothing is kept on the host")
		}
	}
}

// A move that waits does so behind a barrier; an argument may be donated and lie on the host.
func TestMoveWaits(t *testing.T) {
	b := ir.NewBuilder("update")
	typ := irtest.F32(irtest.D("n", 4))
	m, v := b.Input("m", ir.Param, typ, ""), b.Input("v", ir.Param, typ, "")
	m1 := b.ToHost(b.Scale(b.ToDevice(m, nil), 0.5))
	v1 := b.ToHost(b.Scale(b.ToDevice(v, m1), 0.5))
	g, err := b.Graph(m1, v1)
	if err != nil {
		t.Fatal(err)
	}
	m1.Means.Replaces, v1.Means.Replaces = "m", "v"
	text, err := lower.StableHLO(g, lower.Options{Kernels: kernels.For("sm_100")})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		`%arg1: tensor<4xf32> {tf.aliasing_output = 1 : i32, mhlo.memory_kind = "pinned_host"}`,
		`(tensor<4xf32> {mhlo.memory_kind = "pinned_host"}, tensor<4xf32>`,
		`stablehlo.optimization_barrier %arg1, %`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("no %s in\n%s", want, text)
		}
	}
}

// On a CPU a graph that moves state between memories is the program of one that does not: the
// update reads its moment back from where it was stored, and overwrites it in place.
func TestMovesAreNothingOnACPU(t *testing.T) {
	program := func(moves bool) string {
		b := ir.NewBuilder("update")
		typ := irtest.F32(irtest.D("n", 4))
		ok := b.Input("ok", ir.Data, ir.Type{Elem: dtype.Pred}, "")
		w, m := b.Input("w", ir.Param, typ, ""), b.Input("m", ir.Param, typ, "")
		to, from := b.ToHost, func(x *ir.Value) *ir.Value { return b.ToDevice(x, nil) }
		if !moves {
			to = func(x *ir.Value) *ir.Value { return x }
			from = to
		}
		old, was := from(m), from(w)
		m1 := b.Scale(old, 0.5)
		w1 := to(b.Select(ok, b.Sub(was, m1), was))
		m1 = to(b.Select(ok, m1, old))
		g, err := b.Graph(w1, m1)
		if err != nil {
			t.Fatal(err)
		}
		w1.Name, w1.Means.Replaces = "w1", "w"
		m1.Name, m1.Means.Replaces = "m1", "m"
		text, err := lower.StableHLO(g, lower.Options{Kernels: kernels.For("cpu")})
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	plain := program(false)
	if !strings.Contains(plain, "optimization_barrier") { // or the test shows nothing
		t.Errorf("the moment is not read back:\n%s", plain)
	}
	if got := program(true); got != plain {
		t.Errorf("with moves:\n%s\nwithout:\n%s", got, plain)
	}
}
