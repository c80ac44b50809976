package lower

import (
	"cmp"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/rewrite"
)

// Module writes a graph as a module that an engine runs, on devices 0 to n-1. Arguments have the
// names of the graph's inputs, results those of its results; a result that replaces an argument
// has the argument's name. Roles and parameters come from the values' meanings.
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

// array describes a value as a whole: what devices hold of it, times those that cut it. Terms of a
// sum are described as copies, since no dimension is cut.
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
