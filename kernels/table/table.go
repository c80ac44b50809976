package table

import (
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower/stablehlo"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/overlap"
)

// A Table is the kernels of a model's layers on a GPU.
type Table struct {
	Model     string         `json:"model"`
	Cluster   string         `json:"cluster"`
	Precision string         `json:"precision"`
	Seq       int64          `json:"seq"`   // tokens of a sequence
	Batch     int64          `json:"batch"` // sequences of a step
	Passes    []kernels.Pass `json:"passes"`
	Layers    []Layer        `json:"layers"`
	Notes     []string       `json:"notes,omitempty"`
}

// A Layer is one round of a loop over layers.
type Layer struct {
	Pass    string  `json:"pass"` // forward or backward
	Rounds  int64   `json:"rounds"`
	Groups  []Group `json:"groups"`
	Total   Cost    `json:"total"`
	Unfused Cost    `json:"unfused"` // of the layer without kernels of our own
}

// A Group is the kernels of operations whose results have the same dimensions. What one program
// computes in one kernel the other may compute in several, but of the same dimensions: so far the
// two can be compared.
type Group struct {
	Dims    string `json:"dims"` // "" is what a loop moves from and into its stacks
	Rows    []Row  `json:"rows"`
	Total   Cost   `json:"total"`
	Unfused Cost   `json:"unfused"`
}

// A Row is equal kernels of a layer.
type Row struct {
	Operation string `json:"operation"`
	Shape     string `json:"shape"`
	Kernel    string `json:"kernel"`
	Provider  string `json:"provider"`
	Why       string `json:"why"`
	Cost
	FLOPs int64 `json:"flops,omitempty"`
	// Roofline is the share of the data sheet's roofline that the expected time stands for.
	Roofline float64 `json:"roofline"`
}

// A Cost is what some kernels read, write and take.
type Cost struct {
	Count   int     `json:"count"`
	Bytes   int64   `json:"bytes"`
	Seconds float64 `json:"seconds"`
}

func (c *Cost) add(k overlap.Kernel) {
	c.Count, c.Bytes, c.Seconds = c.Count+1, c.Bytes+k.Bytes, c.Seconds+k.Seconds
}

// over divides a cost.
func (c *Cost) over(n int64) {
	c.Count, c.Bytes, c.Seconds = c.Count/int(n), c.Bytes/n, c.Seconds/float64(n)
}

// Of makes the layers of a table from what package overlap read of two programs: as they run, and
// without kernels of our own. Choices are of the first.
func Of(own, without *overlap.Report, choices []kernels.Choice, gpu machine.GPUModel) ([]Layer,
	error) {
	used, other := layersOf(own), layersOf(without)
	if len(used) == 0 || len(used) != len(other) {
		return nil, diag.New(diag.NotSupported, "the programs have %d and %d loops over layers",
			len(used), len(other)).Because("a table is made of a round of such a loop").
			Try("a model with more layers")
	}
	var list []Layer
	for i, loop := range used {
		l := Layer{Pass: passOf(loop), Rounds: loop.Rounds * loop.Each()}
		m := maker{choices: choices, gpu: gpu}
		for _, k := range loop.Kernels {
			l.Total.add(k)
			m.add(&l, k)
		}
		for _, k := range other[i].Kernels {
			l.Unfused.add(k)
			l.group(k).Unfused.add(k)
		}
		l.share(loop.Each(), other[i].Each())
		for n := range l.Groups {
			lists.Sort(l.Groups[n].Rows, func(a, b Row) int { return compare(b.Seconds, a.Seconds) })
		}
		lists.Sort(l.Groups, func(a, b Group) int { return compare(b.Total.Seconds, a.Total.Seconds) })
		list = append(list, l)
	}
	return list, nil
}

// share leaves one layer's part of rounds of some layers each, of the program and of the one
// without kernels of our own.
func (l *Layer) share(each, without int64) {
	l.Total.over(each)
	l.Unfused.over(without)
	for i := range l.Groups {
		g := &l.Groups[i]
		g.Total.over(each)
		g.Unfused.over(without)
		for n := range g.Rows {
			g.Rows[n].over(each)
			g.Rows[n].FLOPs /= each
		}
	}
}

func compare(a, b float64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// layersOf lists the loops over layers: those with operations of a layer's parts.
func layersOf(r *overlap.Report) (list []overlap.Loop) {
	for _, l := range r.Loops {
		if slices.ContainsFunc(l.Kernels, func(k overlap.Kernel) bool {
			n, ok := stablehlo.ParseName(k.OpName)
			return ok && strings.HasPrefix(n.Kind, "attention")
		}) {
			list = append(list, l)
		}
	}
	return list
}

// passOf tells the backward pass by the gradient of attention.
func passOf(l overlap.Loop) string {
	for _, k := range l.Kernels {
		if n, _ := stablehlo.ParseName(k.OpName); strings.HasPrefix(n.Kind, "attention_grad") {
			return "backward"
		}
	}
	return "forward"
}

// group finds the group of a kernel, or adds it.
func (l *Layer) group(k overlap.Kernel) *Group {
	n, _ := stablehlo.ParseName(k.OpName)
	slices.Sort(n.Dims) // a transposed copy is the same data
	key := strings.Join(n.Dims, ",")
	for i := range l.Groups {
		if l.Groups[i].Dims == key {
			return &l.Groups[i]
		}
	}
	l.Groups = append(l.Groups, Group{Dims: key})
	return &l.Groups[len(l.Groups)-1]
}
