package replay

import (
	"cmp"
	"context"
	"flag"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/isolate"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

var (
	replayAll  = flag.Bool("replay.all", false, "replay all programs, not a pairwise selection")
	replaySeed = flag.Uint64("replay.seed", 0, "the seed of inputs; 0 is always the same")
	replayOnly = flag.String("replay.only", "", "replay programs whose names match this expression")
)

func TestMain(m *testing.M) {
	Main()
	os.Exit(m.Run())
}

// runner replays on two processes, as many as CI has cores.
func runner(t *testing.T) *Runner {
	t.Helper()
	r := NewRunner(RunOptions{Child: isolate.Self, Children: 2, Cache: enginetest.Cache(),
		WithoutCuDNN: true, Seed: slowtest.Seed(t, "replay.seed", *replaySeed),
		Log: io.Discard}) // XLA complains of slow compiles; what a crash says is in its error
	t.Cleanup(r.Close)
	return r
}

// XLA:GPU's programs compute what their references do: a selection in which every two of model,
// precision, plan and kind of program meet, or all of them.
// Compile is Optimized without the report.
func (r *Runner) Compile(ctx context.Context, m *program.Module, t machine.Cluster) (format string,
	code []byte, err error) {
	_, format, code, err = r.Optimized(ctx, m, t)
	return format, code, err
}

// Replay compiles a pair's program for its cluster, rewrites it, runs it and compares it with the
// reference.
func (r *Runner) Replay(ctx context.Context, p Pair, o Options) (*Result, *Module, error) {
	format, code, err := r.Compile(ctx, p.GPU, p.Cluster)
	if err != nil {
		return nil, nil, err
	}
	m, err := Rewrite(format, code, o)
	if err != nil {
		return nil, nil, err
	}
	results, err := r.Run(ctx, p, o.Wide, m)
	if err != nil {
		return nil, m, err
	}
	return results[0], m, nil
}

func TestReplay(t *testing.T) {
	slowtest.Only(t)
	some := selected(t)
	r := runner(t)
	todo := make(chan *distinct)
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for d := range todo {
				d.replay(t, r)
			}
		})
	}
	for _, d := range some {
		todo <- d
	}
	close(todo)
	wg.Wait()
}

// selected gives the programs that the flags ask for.
func selected(t *testing.T) []*distinct {
	t.Helper()
	all, err := allPrograms()
	if err != nil {
		t.Fatal(err)
	}
	some := pairwise(all)
	if *replayAll || *replayOnly != "" {
		some = slices.Clone(all)
	}
	if re := regexp.MustCompile(*replayOnly); *replayOnly != "" {
		some = slices.DeleteFunc(some, func(d *distinct) bool { return !re.MatchString(d.String()) })
	}
	t.Logf("%d of %d programs", len(some), len(all))
	// The longest first: what they leave of two cores the others take.
	slices.SortStableFunc(some, func(a, b *distinct) int { return cmp.Compare(b.cost(), a.cost()) })
	if *replayAll { // for an hour or more: what is wrong with many shows soon
		slices.Reverse(some)
	}
	return some
}

// modes are how a program is compared: where bits must be equal in its own types, else with bf16
// held as f32. Plain bf16 is compared in addition where it is cheap, or with -replay.all.
func (d *distinct) modes() []bool {
	switch kind := d.pair.Kind; {
	case !d.pair.Wide():
		return []bool{false}
	case *replayAll || kind == step.Evaluate || kind == step.Forward || d.plan == "one" &&
		d.format != "nvfp4":
		return []bool{true, false}
	}
	return []bool{true}
}

// replay compiles the program, and replays it in each mode.
func (d *distinct) replay(t *testing.T, r *Runner) {
	start := time.Now()
	format, code, err := r.Compile(t.Context(), d.pair.GPU, d.pair.Cluster)
	if err != nil {
		t.Errorf("%s: %v", d, err)
		return
	}
	compiled := time.Since(start).Seconds()
	for _, wide := range d.modes() {
		start, bound := time.Now(), d.pair.Bound(wide)
		if d.model == allExperts && !wide && d.pair.Kind == step.Gradient {
			bound = denseBound // no token can choose another expert
		}
		// A result that depends on memory to which nothing was written is NaN.
		m, err := Rewrite(format, code, Options{Wide: wide, Fill: NaNs})
		if err != nil {
			t.Errorf("%s: %v", d, err)
			continue
		}
		results, err := r.Run(t.Context(), d.pair, wide, m)
		if err != nil {
			t.Errorf("%s, wide %v: %v", d, wide, err)
			continue
		}
		one := results[0]
		t.Logf("%s, %s: %s; bound %.0e; %.0f s to compile, %.0f s to replay", d.model, d.format,
			d.plan+", "+one.Summary(), bound.Limit, compiled, time.Since(start).Seconds())
		for i, a := range d.pair.Reference.Results {
			if one.Arrays[i].Norm == 0 && d.pair.Kind != step.Zero && a.Role != program.Stat {
				t.Errorf("%s: the %s %s is all zeros, and compares nothing", d, a.Role, a.Name)
			}
		}
		if far := one.Beyond(bound); len(far) > 0 {
			t.Errorf("%s: %d arrays are farther than %.0e from the reference (%s)\n%s", d, len(far),
				bound.Limit, bound.Why, one)
		}
	}
}

// A GPU's program that is not rewritten ends the process that compiles it for the CPU: that is an
// error of its module, and the next one gets a new process.
func TestCrashIsAnErrorOfItsModule(t *testing.T) {
	slowtest.Only(t)
	m := modelNamed("llama")
	m.documents = 1 // with a document mask, the program's schedule is refused before anything crashes
	list, err := m.cases("bf16", planRows()[0])
	if err != nil {
		t.Fatal(err)
	}
	p := list[slices.IndexFunc(list, func(c testCase) bool { return c.pair.Kind == step.Evaluate })].pair
	r := NewRunner(RunOptions{Child: isolate.Self, Cache: enginetest.Cache(),
		WithoutCuDNN: true, Seed: 1, Log: io.Discard})
	t.Cleanup(r.Close)
	format, code, err := r.Compile(t.Context(), p.GPU, p.Cluster)
	if err != nil {
		t.Fatal(err)
	}
	number, typ, n := protowire.ConsumeTag(code) // hlo_with_config: the module is the first field
	raw, size := protowire.ConsumeBytes(code[n:])
	if number != 1 || typ != protowire.BytesType || size < 0 {
		t.Fatalf("format %s begins with field %d", format, number)
	}
	_, err = r.Run(t.Context(), p, false, &Module{Code: raw})
	if e := diag.From(err); err == nil || e.Code != diag.CompilerCrashed || e.Where != "module evaluate" {
		t.Errorf("the raw program gave %v", err)
	}
	one, _, err := r.Replay(t.Context(), p, Options{Wide: true})
	if err != nil || one.Exact() != 1 {
		t.Errorf("%v, %v", one, err)
	}
}

// The selection is a pairwise one, of at least 24 programs.
func TestSelectionIsPairwise(t *testing.T) {
	all, err := allPrograms()
	if err != nil {
		t.Fatal(err)
	}
	some := pairwise(all)
	count := map[step.Kind]int{}
	cost := 0
	for _, d := range some {
		count[d.pair.Kind]++
		cost += d.cost()
	}
	t.Logf("%d of %d programs, %d million bytes: %v", len(some), len(all), cost/1_000_000, count)
	if len(some) < 24 {
		t.Errorf("%d programs", len(some))
	}
	for _, kind := range []step.Kind{step.Gradient, step.Evaluate, step.Update, step.Quantize,
		step.Forward, step.Backward, step.Input, step.Weight} {
		if count[kind] == 0 {
			t.Errorf("no program is of kind %s", kind)
		}
	}
	if testing.Verbose() {
		for _, d := range some {
			t.Logf("%s: %d kB, %s", d, d.cost()/1000, strings.Join(d.others(), "; "))
		}
	}
}

// others are further combinations that have the same program.
func (d *distinct) others() (list []string) {
	for _, c := range d.names[1:] {
		list = append(list, c.plan)
	}
	return list
}
