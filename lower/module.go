package lower

import (
	"cmp"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/rewrite"
)

// Module lowers a graph to a module that an engine runs, on devices counted from 0. The module is
// called name in programs and reports; g.Name is the name of the MLIR module in its text.
//
// Arguments have the names of the graph's inputs, results the names of its results. A result that
// replaces an input (Meaning.Replaces) is named after the input, whether or not it reuses the
// input's buffer: it does if the types are equal (see [ir.Graph.Donations]).
func Module(name string, g *ir.Graph, o Options) (*program.Module, error) {
	text, err := StableHLO(g, o)
	if err != nil {
		return nil, err
	}
	s := &program.Module{Name: name, Text: text}
	for _, a := range g.Mesh {
		s.Mesh = append(s.Mesh, program.Axis{Name: a.Name, Size: int(a.Size)})
	}
	s.Devices = program.Range(0, int(ir.Devices(g.Mesh)))
	g = rewrite.Packed(g)
	into, hosted := g.Donations(), g.Hosted()
	described := func(v *ir.Value) program.Array {
		a := array(g, v)
		if hosted[v] {
			a.Memory = o.Kernels.HostMemory()
		}
		return a
	}
	for _, v := range g.Inputs {
		a := described(v)
		if into[v.Name] != "" {
			a.Into = v.Name
		}
		s.Args = append(s.Args, a)
	}
	for _, v := range g.Results {
		a := described(v)
		a.Name = cmp.Or(v.Means.Replaces, v.Name)
		s.Results = append(s.Results, a)
	}
	return s, s.Validate()
}

// array describes a whole value: a device's shape times the axes that shard it. A partial sum is
// described as replicated, since no dimension is sharded.
func array(g *ir.Graph, v *ir.Value) program.Array {
	is := v.Meaning()
	a := program.Array{Name: v.Name, Global: dtype.Shape{Type: v.Type.Elem}, Role: is.Role,
		Param: is.Param}
	for _, d := range v.Type.Dims {
		size := d.Size
		var cut []string
		for _, a := range g.Mesh {
			if v.Type.Place.On(a.Name) == d.Name {
				cut = append(cut, a.Name)
				size *= a.Size
			}
		}
		a.Global.Dims = append(a.Global.Dims, size)
		if len(cut) > 0 && a.Split == nil {
			a.Split = make([][]string, len(v.Type.Dims))
		}
		if len(cut) > 0 {
			a.Split[len(a.Global.Dims)-1] = cut
		}
	}
	return a
}
