package deepwell

import (
	"context"
	"fmt"
	"time"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/replay"
	"github.com/deepwell/deepwell/step"
)

// A FullCompile is how the programs of a full plan, as XLA made them, differ in kind from the
// small ones that were replayed.
type FullCompile struct {
	Programs int     `json:"programs"` // with different texts
	Seconds  float64 `json:"seconds"`
	// Needs is the memory of a device while it trains, on the rank that needs most, without cuDNN's
	// workspaces, which need plans; Capacity is what the GPU has.
	Needs    int64 `json:"needs_bytes"`
	Capacity int64 `json:"capacity_bytes"`
	Fits     bool  `json:"fits"`
	// OnlyFull and OnlySmall list opcodes, kinds of fusion, custom calls and collectives that only the
	// programs of one side have, by the kind of program.
	OnlyFull  map[step.Kind][]string `json:"only_full,omitempty"`
	OnlySmall map[step.Kind][]string `json:"only_small,omitempty"`
}

// compareFull compiles the programs of the full plan, and compares what they are made of.
func (r *verifier) compareFull(ctx context.Context, v *verb, runner *replay.Runner) {
	start := time.Now()
	var cluster machine.Cluster
	modules := get(v, "list the full plan's programs", func() (list []*step.Program, err error) {
		cluster, err = machine.ParseCluster(r.plan.Cluster)
		return distinctOf(r.full), err
	})
	full := map[step.Kind]replay.Census{}
	memory := map[string]engine.Memory{} // by text
	for i, p := range modules {
		name := fmt.Sprintf("compile %s of the full plan, %d of %d", p.Module.Name, i+1, len(modules))
		v.pass(name, func() error {
			report, format, code, err := runner.Optimized(ctx, p.Module, cluster)
			if err != nil {
				return at(err, r.job.Source)
			}
			memory[p.Module.Text] = report.Memory
			c, err := replay.CensusOf(format, code, p.Module.Mesh)
			full[p.Kind] = full[p.Kind].Union(c)
			return err
		})
	}
	v.pass("compare with the full plan", func() error {
		r.done.Full = &FullCompile{Programs: len(modules), OnlyFull: map[step.Kind][]string{},
			OnlySmall: map[step.Kind][]string{}, Seconds: time.Since(start).Seconds()}
		r.done.Full.compare(full, r.done.Programs)
		return r.done.Full.addUp(r.full, memory, cluster.MemoryBytes())
	})
}

// distinctOf lists programs with different texts, on the devices of rank 0.
func distinctOf(all *step.Programs) (list []*step.Program) {
	seen := map[string]bool{}
	for _, one := range all.List {
		if seen[one.Module.Text] {
			continue
		}
		seen[one.Module.Text] = true
		row, m := *one, *one.Module
		m.Devices = program.Range(0, len(m.Devices))
		row.Module = &m
		list = append(list, &row)
	}
	return list
}

// addUp adds up the memory of a device on the rank that needs most, from what the compiler said of
// each program, by its text.
func (f *FullCompile) addUp(p *step.Programs, memory map[string]engine.Memory,
	capacity int64) error {
	ranks, err := p.Footprints(func(m *program.Module) step.Needs {
		n := memory[m.Text]
		return step.Needs{Temp: n.Temp, Output: n.Output, Alias: n.Alias, Host: n.Host}
	})
	for _, one := range ranks {
		f.Needs = max(f.Needs, one.Sum())
	}
	f.Capacity, f.Fits = capacity, f.Needs <= capacity
	return err
}

// compare fills in what only one side has.
func (f *FullCompile) compare(full map[step.Kind]replay.Census, replayed []*replay.Outcome) {
	small := map[step.Kind]replay.Census{}
	for _, o := range replayed {
		small[o.Kind] = small[o.Kind].Union(o.Census)
	}
	for kind, census := range full {
		if more := census.Without(small[kind]); len(more) > 0 {
			f.OnlyFull[kind] = more
		}
		if less := small[kind].Without(census); len(less) > 0 {
			f.OnlySmall[kind] = less
		}
	}
}
