package replay

import (
	"fmt"
	"slices"
	"sync"

	"github.com/deepwell/deepwell/step"
)

// A distinct program stands in several combinations: the stages of 1f1b and of gpipe are the same,
// and evaluation does not depend on what is offloaded.
type distinct struct {
	testCase
	names []testCase // all combinations that have it
}

// allPrograms are the programs of all combinations, each text once, in a fixed order.
var allPrograms = sync.OnceValues(func() ([]*distinct, error) {
	var list []*distinct
	at := map[string]*distinct{}
	for _, m := range models {
		for _, f := range formats {
			for _, row := range planRows() {
				if !m.has(f, row.name) {
					continue
				}
				some, err := cases(m.name, f, row)
				if err != nil {
					return nil, err
				}
				for _, c := range some {
					if m.plans != nil && c.pair.Kind != step.Gradient {
						continue
					}
					key := fmt.Sprint(c.pair.GPU.Devices, c.pair.GPU.Flags, c.pair.GPU.Text)
					if at[key] == nil {
						at[key] = &distinct{testCase: c}
						list = append(list, at[key])
					}
					at[key].names = append(at[key].names, c)
				}
			}
		}
	}
	return list, nil
})

// pairs are the pairs of values that a program has: of model, precision, plan and kind. A model that
// is replayed in a few plans only counts with its kind, so that one program of it is selected.
func (d *distinct) pairs() (list []string) {
	for _, c := range d.names {
		if modelNamed(c.model).plans != nil {
			list = append(list, c.model+" & "+string(c.pair.Kind))
			continue
		}
		values := []string{c.model, c.format, c.plan, string(c.pair.Kind)}
		for i := range values {
			for j := range i {
				list = append(list, values[j]+" & "+values[i])
			}
		}
	}
	return list
}

// cost is what a program takes to compile and run, in bytes of text: for the GPU, replayed, the
// reference, and what is run before it.
func (d *distinct) cost() int {
	n := 2*len(d.pair.GPU.Text) + len(d.pair.Reference.Text)
	for _, b := range d.pair.Before {
		n += len(b.Module.Text)
	}
	return n + 60_000 // starting up, inputs, comparing
}

// pairwise selects programs such that every pair of values that some program has is in one of them.
// It takes, again and again, the program with the most new pairs for its cost.
func pairwise(all []*distinct) (list []*distinct) {
	some := slices.DeleteFunc(slices.Clone(all), func(d *distinct) bool {
		// They take milliseconds to understand, and their text is the same in all precisions.
		return slices.Contains([]step.Kind{step.Zero, step.Reduce, step.Square}, d.pair.Kind)
	})
	covered := map[string]bool{}
	fresh := func(d *distinct) int {
		seen := map[string]bool{}
		for _, p := range d.pairs() {
			if !covered[p] {
				seen[p] = true
			}
		}
		return len(seen)
	}
	for {
		var best *distinct
		var most float64
		for _, d := range some {
			if gain := float64(fresh(d)) / float64(d.cost()); gain > most {
				best, most = d, gain
			}
		}
		if best == nil {
			return list
		}
		list = append(list, best)
		for _, p := range best.pairs() {
			covered[p] = true
		}
	}
}
