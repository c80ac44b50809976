package replay

import (
	"math"
	"slices"

	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// A skip is a second run of an update, with other inputs, after which all state must be what it
// was: the host does not commit the step, or a gradient is not a number.
type skip struct {
	name   string
	inputs map[string][][]byte // that differ from the job's
}

// skipRows are what differs: scalars, and whether the first gradient has a NaN, on one device or
// its replicas. A program of a pipeline's stage gets the square of the norm as an input.
var skipRows = []struct {
	name    string
	scalars map[string]float64
	nan     bool
}{
	{"not committed", map[string]float64{optim.Commit: 0}, false},
	{"NaN gradient", map[string]float64{optim.GradSquare: math.NaN()}, true},
}

// fillSkips draws the inputs of skips, if the job is an update.
func (j *job) fillSkips() error {
	if j.Kind != step.Update {
		return nil
	}
	for _, row := range skipRows {
		s := skip{row.name, map[string][][]byte{}}
		nan := row.nan
		for _, a := range j.Reference.Args {
			f := filler{module: j.Reference, kind: j.Kind, seed: j.Seed, vocab: j.Vocab}
			x, ok := row.scalars[a.Name]
			switch {
			case a.Role == program.Scalar && ok:
				f.first = &x
			case a.Role == program.Gradient && nan:
				x, nan = math.NaN(), false
				f.first = &x
			default:
				continue
			}
			shards, err := f.shards(a)
			if err != nil {
				return err
			}
			s.inputs[a.Name] = shards
		}
		j.skips = append(j.skips, s)
	}
	return nil
}

// compareSkips compares the state after skips with the state before, where it is an argument, too,
// and else with the reference's.
func (j *job) compareSkips(m *program.Module, got, want [][][][]byte) (list []Difference) {
	state := []program.Role{program.Param, program.Copy, program.Moment}
	for k, s := range j.skips {
		for i, a := range m.Results {
			if !slices.Contains(state, a.Role) {
				continue
			}
			before := want[k][i]
			if at := slices.IndexFunc(m.Args, func(b program.Array) bool {
				return a.Name == b.Name && a.Role == b.Role && a.Global.Equal(b.Global)
			}); at >= 0 {
				before = j.inputs[a.Name]
			}
			d := compare(a.Name+", "+s.name, a.Global.Type, got[k][i], before)
			d.Shape = j.Reference.Results[i].Global
			list = append(list, d)
		}
	}
	return list
}
