package gpucheck

import (
	"context"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/selftest"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/replay"
)

// Options say what is checked, and for how long.
type Options struct {
	Runner  *replay.Runner // whose children see the GPUs
	Machine *machine.Machine
	Seed    uint64 // that the runner has, for the report
	// Limit is the time for one check; 0 means 3 minutes. When ctx ends, what is left is skipped.
	Limit time.Duration
	// Progress, if there is one, hears of each check that is done.
	Progress func(Check)
}

const defaultLimit = 3 * time.Minute

// version is the version of the report's JSON.
const version = 1

// Groups of checks.
const (
	groupCalls       = "GEMMs of cuBLAS"
	groupOwn         = "kernels of our own"
	groupAttention   = "attention"
	groupBlocks      = "block-scaled GEMMs"
	groupCollectives = "collectives"
	groupSteps       = "training steps"
)

// checker has the state of a run.
type checker struct {
	o       Options
	r       *Report
	cluster machine.Cluster
	known   bool // the catalogue has the GPU, so that steps can be built and priced
}

// Run checks the GPUs. Whatever happens to a check is its result; only a host without a GPU, or
// whose GPUs cannot be opened at all, is an error.
func Run(ctx context.Context, o Options) (*Report, error) {
	start := time.Now()
	if o.Limit == 0 {
		o.Limit = defaultLimit
	}
	c := &checker{o: o, r: &Report{Version: version, Seed: o.Seed}}
	if err := c.describe(ctx); err != nil {
		return nil, err
	}
	for _, group := range []struct {
		name string
		list []operation
	}{{groupCalls, gemms()}, {groupOwn, ownKernels()}, {groupAttention, attentions()},
		{groupBlocks, blockDots()}} {
		for _, op := range group.list {
			c.operation(ctx, group.name, op)
		}
	}
	for _, name := range selftest.CollectiveNames() {
		c.collective(ctx, name)
	}
	for _, row := range precisions {
		c.step(ctx, row)
	}
	c.times(ctx)
	c.r.conclude()
	c.r.scrubAll()
	c.r.Seconds = time.Since(start).Seconds()
	return c.r, nil
}

// describe notes what there is.
func (c *checker) describe(ctx context.Context) (err error) {
	m, r := c.o.Machine, c.r
	first := m.GPUs[0]
	r.GPU, r.Arch, r.Count = first.Name, first.Arch, len(m.GPUs)
	r.Driver, r.CUDA, r.Memory = m.Driver, m.CUDA, first.MemoryBytes
	for _, g := range m.GPUs {
		r.Memory = min(r.Memory, g.MemoryBytes)
	}
	c.cluster, err = machine.ParseCluster(fmt.Sprintf("%dx%s", len(m.GPUs), first.Model))
	c.known = err == nil && first.Model != ""
	ctx, cancel := context.WithTimeout(ctx, c.o.Limit)
	defer cancel()
	r.Versions, r.Flags, err = c.o.Runner.Describe(ctx)
	const without = "without_cudnn"
	r.WithoutCuDNN = r.Versions[without]
	delete(r.Versions, without)
	return err
}

// add notes a check.
func (c *checker) add(k Check) {
	k.Note = scrub(k.Note)
	if c.r.Checks = append(c.r.Checks, k); c.o.Progress != nil {
		c.o.Progress(k)
	}
}

// timeUp is why what was left is skipped.
const timeUp = "the time was up"

// guarded runs a check within its time, and makes its result of whatever happens.
func (c *checker) guarded(ctx context.Context, k Check, run func(context.Context, *Check) error) {
	k.Status = OK
	switch {
	case ctx.Err() != nil:
		k.Status, k.Note = Skipped, timeUp
	default:
		within, cancel := context.WithTimeout(ctx, c.o.Limit)
		err := run(within, &k)
		timedOut := within.Err() != nil
		cancel()
		switch {
		case err == nil:
		case ctx.Err() != nil:
			k.Status, k.Note = Skipped, timeUp
		case timedOut:
			k.Status, k.Note = Failed, fmt.Sprintf("not done after %s", c.o.Limit)
		default:
			k.Status, k.Note = statusOf(err)
		}
	}
	c.add(k)
}

// unplayed is how a driver that plays a part of CUDA only, as the software GPU of the tests, names
// what it lacks.
var unplayed = regexp.MustCompile(`not played: [^\n]*`)

// statusOf is the result of a check that ended in an error.
func statusOf(err error) (Status, string) {
	e := diag.From(err)
	if lacks := unplayed.FindString(e.Format()); lacks != "" {
		return Skipped, lacks
	}
	note := fmt.Sprintf("%s %s", e.Code, e.What)
	if e.Cause != "" {
		first, _, _ := strings.Cut(e.Cause, "\n")
		note += ": " + first
	}
	return Failed, note
}

// errSkipped ends a check that does not run here; the check has its reason.
var errSkipped = errors.New("skipped")

// take notes an outcome in a check. Of several, the one nearest to its bound, or beyond it, counts.
func (k *Check) take(o *replay.Outcome) {
	near := func(apart, bound float64) float64 {
		if bound == 0 {
			return apart
		}
		return apart / bound
	}
	if k.Arrays == 0 || near(o.Apart, o.Bound) > near(k.Apart, k.Bound) {
		k.Apart, k.Bound, k.Why, k.Worst = o.Apart, o.Bound, o.Why, o.Worst
	}
	k.Arrays += o.Arrays
	for _, call := range o.Calls {
		if !slices.Contains(k.Calls, call) {
			k.Calls = append(k.Calls, call)
		}
	}
	slices.Sort(k.Calls)
	if len(o.Beyond) > 0 || math.IsNaN(o.Apart) {
		k.Status = Beyond
		k.Note = fmt.Sprintf("%s of %s", o.Beyond[0].Name, o.Program)
	}
}

// compare runs one pair.
func (c *checker) compare(ctx context.Context, k *Check, p replay.Pair, b replay.Bound) error {
	o, err := c.o.Runner.Live(ctx, p, b)
	if err == nil {
		k.take(o)
	}
	return err
}

// noCuDNN is why a check is skipped; [Report].WithoutCuDNN has cuDNN's own reason.
const noCuDNN = "cuDNN does not open here"

// needsCuDNN skips a program that calls cuDNN where it does not open.
func (c *checker) needsCuDNN(k *Check, text string) bool {
	if c.r.WithoutCuDNN == "" || !strings.Contains(text, "__cudnn$") {
		return false
	}
	k.Status, k.Note = Skipped, noCuDNN
	return true
}

func (c *checker) operation(ctx context.Context, group string, op operation) {
	c.guarded(ctx, Check{Group: group, Name: op.name}, func(ctx context.Context, k *Check) error {
		p, err := op.pair(c.r.Arch)
		if err != nil || c.needsCuDNN(k, p.GPU.Text) {
			return err
		}
		return c.compare(ctx, k, p, op.bound)
	})
}

func (c *checker) collective(ctx context.Context, name string) {
	c.guarded(ctx, Check{Group: groupCollectives, Name: name, Why: "every element is compared"},
		func(ctx context.Context, k *Check) error {
			if c.r.Count < 2 {
				k.Status, k.Note = Skipped, "there is one GPU"
				return nil
			}
			n, err := c.o.Runner.Collective(ctx, name)
			if errors.Is(err, diag.RuntimeFailed) { // a wrong element
				k.Status, k.Note = Beyond, diag.From(err).What
				return nil
			}
			k.Arrays = n
			return err
		})
}

func (c *checker) step(ctx context.Context, row precisionRow) {
	one := Check{Group: groupSteps, Name: row.name}
	c.guarded(ctx, one, func(ctx context.Context, k *Check) error {
		if !c.known {
			k.Status, k.Note = Skipped, fmt.Sprintf("%s is not in the catalogue of GPUs", c.r.GPU)
			return nil
		}
		pairs, err := row.pairs(small, c.cluster)
		if err != nil {
			return err
		}
		for _, p := range pairs {
			if c.needsCuDNN(k, p.GPU.Text) {
				return nil
			}
		}
		for _, p := range pairs {
			if err := c.compare(ctx, k, p, stepBound(&p, row.format)); err != nil {
				return err
			}
		}
		return nil
	})
}

// times measures steps beside their predictions.
func (c *checker) times(ctx context.Context) {
	s := small
	if float64(c.r.Memory) >= largeMemory {
		s = large
	}
	c.r.Timed, _ = s.title()
	for _, row := range precisions {
		t := Time{Precision: row.name}
		switch err := c.time(ctx, row, s, &t); {
		case err == nil || errors.Is(err, errSkipped):
		case ctx.Err() != nil:
			t.Note = timeUp
		default:
			_, t.Note = statusOf(err)
		}
		c.r.Times = append(c.r.Times, t)
	}
}

func (c *checker) time(ctx context.Context, row precisionRow, s size, t *Time) (err error) {
	if !c.known {
		t.Note = "not in the catalogue of GPUs"
		return errSkipped
	}
	if t.Predicted, err = row.predicted(s, c.cluster); err != nil {
		return err
	}
	pairs, err := row.pairs(s, c.cluster)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, c.o.Limit)
	defer cancel()
	sum := 0.0
	for _, p := range pairs {
		if k := (&Check{}); c.needsCuDNN(k, p.GPU.Text) {
			t.Note = k.Note
			return errSkipped
		}
		seconds, err := c.o.Runner.Time(ctx, p.GPU, p.Vocab)
		if err != nil {
			return err
		}
		sum += seconds
	}
	t.Measured = sum
	return nil
}
