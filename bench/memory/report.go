package main

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"

	"github.com/deepwell/deepwell/estimate/footprint"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/precision"
	"github.com/deepwell/deepwell/step"
)

// A miss is what the compiler and the predictor say of a row.
type miss struct {
	row       *row
	gpu       string
	want      *step.Footprint // the rank that holds most
	got       footprint.Rank
	predictor *footprint.Predictor
	combination
}

// off is how far the prediction of the peak is off, relative to what was compiled.
func (m *miss) off() float64 {
	return float64(m.got.Sum()-m.want.Sum()) / float64(m.want.Sum())
}

// predict gives the peak of a row, and the predictor's.
func predict(r *row) (*miss, error) {
	c, err := planOf(r.key)
	if err != nil {
		return nil, err
	}
	cluster, err := machine.ParseCluster(r.cluster)
	if err != nil {
		return nil, err
	}
	p, err := footprint.New(c.config, cluster.Arch())
	if err != nil {
		return nil, err
	}
	if c.plan.Precision != "" { // the policy that step.Build takes where none is given
		policy, err := precision.Default(c.config, c.plan.Precision)
		if err != nil {
			return nil, err
		}
		p.In(policy)
	}
	f, err := p.Predict(c.plan)
	if err != nil {
		return nil, err
	}
	return &miss{r, cluster.GPU.Name, r.peak(), *f.Peak(), p, c}, nil
}

// misses predicts all rows.
func misses(rows []*row) ([]*miss, error) {
	var all []*miss
	for _, r := range rows {
		m, err := predict(r)
		if err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	return all, nil
}

// A cause is a part of what is held, as the compiler and the predictor have it.
type cause struct {
	name      string
	want, got func(m *miss) int64
}

var causes = []cause{
	{"params", func(m *miss) int64 { return m.want.Params },
		func(m *miss) int64 { return m.got.Params }},
	{"optimizer", func(m *miss) int64 { return m.want.Optimizer },
		func(m *miss) int64 { return m.got.Optimizer }},
	{"gradients", func(m *miss) int64 { return m.want.Grads },
		func(m *miss) int64 { return m.got.Grads }},
	{"activations and temp", func(m *miss) int64 { return m.want.Activations + m.want.Temp },
		func(m *miss) int64 { return m.got.Activations + m.got.Temp }},
}

// spread is the mean and the largest of the sizes of errors.
func spread(all []*miss, of func(m *miss) float64) (mean, most float64) {
	for _, m := range all {
		mean += math.Abs(of(m)) / float64(len(all))
		most = max(most, math.Abs(of(m)))
	}
	return mean, most
}

// report prints the errors by target, by cause in shares of the whole, and the worst rows.
func report(w io.Writer, rows []*row, worst int) error {
	all, err := misses(rows)
	if err != nil {
		return err
	}
	fmt.Fprintf(w, "predicted peak against the compiled one\n%-11s %5s %8s %8s\n", "target", "rows",
		"mean", "maximum")
	for _, gpu := range []string{"cpu", "b200", "rtx6000pro", "all"} {
		of := slices.DeleteFunc(slices.Clone(all), func(m *miss) bool {
			return gpu != "all" && m.gpu != gpu
		})
		mean, most := spread(of, (*miss).off)
		fmt.Fprintf(w, "%-11s %5d %7.2f%% %7.2f%%\n", gpu, len(of), 100*mean, 100*most)
	}
	fmt.Fprintf(w, "\n%-25s %8s %8s   of the whole\n", "cause", "mean", "maximum")
	for _, c := range causes {
		mean, most := spread(all, func(m *miss) float64 {
			return float64(c.got(m)-c.want(m)) / float64(m.want.Sum())
		})
		fmt.Fprintf(w, "%-25s %7.2f%% %7.2f%%\n", c.name, 100*mean, 100*most)
	}
	slices.SortStableFunc(all, func(a, b *miss) int {
		return cmp.Compare(math.Abs(b.off()), math.Abs(a.off()))
	})
	fmt.Fprintf(w, "\nthe worst rows\n")
	for _, m := range all[:min(worst, len(all))] {
		if err := m.print(w); err != nil {
			return err
		}
	}
	return nil
}

// print writes a row with its programs.
func (m *miss) print(w io.Writer) error {
	fmt.Fprintf(w, "%+6.2f%% %.3f GB, largest %s; %s\n", 100*m.off(), gb(m.want.Sum()),
		m.want.Largest, m.row.key)
	needs, err := m.predictor.Needs(m.plan)
	if err != nil {
		return err
	}
	for _, n := range m.row.programs {
		got := needs[n.name]
		if max(n.Temp, got[0])*50 > m.want.Sum() {
			fmt.Fprintf(w, "        %-16s temp %.3f GB, predicted %.3f; results %.3f GB, predicted %.3f\n",
				n.name, gb(n.Temp), gb(got[0]), gb(n.Output-n.Alias), gb(got[1]))
		}
	}
	return nil
}

func gb(n int64) float64 { return float64(n) / 1e9 }
