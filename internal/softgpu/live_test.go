package softgpu_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/internal/softgpu"
	"github.com/deepwell/deepwell/machine"
)

// What runs is what was planned: the program that XLA makes for live GPUs is the one of the dry run,
// instruction by instruction.
func TestLiveProgramsAreTheDryRuns(t *testing.T) {
	if !softgpu.Child(t, softgpu.Options{GPUs: 8, Memory: 64 << 20}) {
		return
	}
	e := open(t, engine.Options{Cache: enginetest.Cache()})
	c, err := engine.OpenCompiler(t.Context(), engine.Options{Cache: enginetest.Cache()})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	cluster, err := machine.ParseCluster("8xb200")
	if err != nil {
		t.Fatal(err)
	}
	cluster.GPU.UsableBytes = 64 << 20
	tried := plans
	if !slowtest.Enabled {
		tried = plans[:1]
	}
	for _, row := range tried {
		w := programsOf(t, "sm_100", row)
		for _, p := range w.List {
			x, err := e.Compile(t.Context(), p.Module)
			if err != nil {
				t.Fatal(err)
			}
			live, err := x.Optimized()
			if err != nil {
				t.Fatal(err)
			}
			_, format, code, err := c.Optimized(t.Context(), p.Module, cluster)
			if err != nil {
				t.Fatal(err)
			}
			dry, err := hlo.Read(format, code)
			if err != nil {
				t.Fatal(err)
			}
			compareModules(t, fmt.Sprintf("%s, %s", row.Name, p.Module.Name), live, dry)
			x.Free()
		}
	}
}

// compareModules compares what two programs do: their instructions with shapes, layouts and streams,
// however numbered. cuBLAS has more workspace where XLA can ask it: 32 MiB instead of 4.
func compareModules(t *testing.T, name string, live, dry *hlo.Module) {
	t.Helper()
	a, err := live.Schedule()
	if err != nil {
		t.Fatal(err)
	}
	b, err := dry.Schedule()
	if err != nil {
		t.Fatal(err)
	}
	got, want := map[string]int{}, map[string]int{}
	count(a, got)
	count(b, want)
	for line := range maps.Keys(want) {
		if _, ok := got[line]; !ok {
			got[line] = 0
		}
	}
	for _, line := range slices.Sorted(maps.Keys(got)) {
		if got[line] != want[line] {
			t.Errorf("%s: %d times live, %d times in the dry run: %s", name, got[line], want[line], line)
		}
	}
	t.Logf("%s: %d kinds of instructions agree", name, len(want))
}

// count counts the instructions of a program by all that makes them what they are but their names.
func count(c *hlo.Computation, kinds map[string]int) {
	for _, i := range c.Body {
		line := i.Opcode + " " + i.Target + " " + i.Domain
		for _, r := range i.Results {
			if !strings.HasPrefix(i.Target, "__cublas$lt") || !strings.HasPrefix(r.Text, "s8[") {
				line += " " + r.Text
			}
		}
		for _, send := range i.Collectives {
			line += fmt.Sprintf(" %s %v x%d", send.Kind, send.Group, send.Count)
		}
		kinds[line]++
		for _, called := range i.Calls {
			count(called, kinds)
		}
	}
}
