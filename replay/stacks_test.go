package replay

import (
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/step"
)

// allocates tells that a program begins with memory of any contents.
func allocates(c *testCase) bool {
	return strings.Contains(c.pair.GPU.Text, "@AllocateBuffer")
}

// stackPrograms are the programs that TestUninitializedStacks runs: one of each of these rows, and
// with -replay.all every program that has an uninitialized stack. A stage needs two layers: the
// loop over a single one is no loop after compiling.
func stackPrograms(t *testing.T) (some []*distinct) {
	t.Helper()
	for _, want := range []struct {
		format, plan string
		layers       int
		kind         step.Kind
	}{
		{"mxfp8", "one", 2, step.Gradient},
		{"nvfp4", "one", 2, step.Gradient},
		{"bf16", "fsdp8", 2, step.Gradient},
		{"bf16", "one", 2, step.Gradient},
		{"bf16", "fsdp8 offload", 2, step.Gradient},
		{"bf16", "pp2 1f1b fsdp4", 4, step.Forward},
	} {
		row := lists.Find(planRows(), func(r planRow) bool { return r.name == want.plan })
		row.layers = want.layers
		found, err := cases(models[0].name, want.format, row)
		if err != nil {
			t.Fatal(err)
		}
		at := slices.IndexFunc(found, func(c testCase) bool {
			return c.pair.Kind == want.kind && allocates(&c)
		})
		if at < 0 {
			t.Fatalf("no program of %+v has an uninitialized stack", want)
		}
		some = append(some, &distinct{testCase: found[at]})
	}
	if !*replayAll {
		return some
	}
	all, err := allPrograms()
	if err != nil {
		t.Fatal(err)
	}
	return append(some, lists.Filter(all, func(d *distinct) bool { return allocates(&d.testCase) })...)
}

// Whatever uninitialized stacks hold, zeros, NaN or random bits, the results have the same bits.
func TestUninitializedStacks(t *testing.T) {
	slowtest.Only(t)
	r := runner(t)
	todo := make(chan *distinct)
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for d := range todo {
				d.fill(t, r)
			}
		})
	}
	for _, d := range stackPrograms(t) {
		todo <- d
	}
	close(todo)
	wg.Wait()
}

// fill replays a program with each kind of fill.
func (d *distinct) fill(t *testing.T, r *Runner) {
	start := time.Now()
	format, code, err := r.Compile(t.Context(), d.pair.GPU, d.pair.Cluster)
	if err != nil {
		t.Errorf("%s: %v", d, err)
		return
	}
	compiled := time.Since(start).Seconds()
	var programs []*Module
	for _, fill := range []Fill{Zeros, NaNs, RandomBits} {
		m, err := Rewrite(format, code, Options{Fill: fill})
		if err != nil {
			t.Errorf("%s: %v", d, err)
			return
		}
		if m.Rules["AllocateBuffer"] == 0 { // a stage of one layer has no loop
			if !*replayAll {
				t.Errorf("%s: the compiler dropped all uninitialized stacks: %v", d, m.Rules)
			}
			return
		}
		programs = append(programs, m)
	}
	results, err := r.Run(t.Context(), d.pair, false, programs...)
	if err != nil {
		t.Errorf("%s: %v", d, err)
		return
	}
	t.Logf("%s: %d stacks, %d results; %.0f s to compile, %.0f s to replay", d,
		programs[0].Rules["AllocateBuffer"], len(results[0].Arrays), compiled,
		time.Since(start).Seconds()-compiled)
	for i, a := range results[0].Arrays {
		for k, fill := range []string{"NaN", "random bits"} {
			if b := results[1+k].Arrays[i]; a.Sum != b.Sum {
				t.Errorf("%s: %s depends on uninitialized memory: %.1e from the reference with zeros, "+
					"%.1e with %s", d, a.Name, a.Relative, b.Relative, fill)
			}
		}
	}
}
