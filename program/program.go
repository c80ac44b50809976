package program

import (
	"regexp"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
)

// A Program is everything that an engine must compile and run to make one step.
type Program struct {
	Name    string   `json:"name"`
	Modules []Module `json:"stages"`
}

// A Module is one executable on its own devices.
type Module struct {
	Name string `json:"name"`
	// Devices are the global numbers of the devices that run the module, one replica each.
	Devices Devices `json:"devices"`
	// Mesh names the axes of the device mesh, the slowest first. Their sizes multiply to the number of
	// devices. A module without sharded arrays may leave it empty.
	Mesh []Axis `json:"mesh,omitempty"`
	// Args and Results describe the parameters and results of main, in order. A module read from a
	// bare .mlir file has none: then the compiled program alone says what it takes.
	Args    []Array `json:"args,omitempty"`
	Results []Array `json:"results,omitempty"`
	// Flags are compile options by XLA's name; a value is a bool, a number or a string.
	Flags map[string]any `json:"flags,omitempty"`
	// MemoryBytes is the device memory that the compiler may plan with; 0 leaves it to the engine.
	MemoryBytes int64 `json:"memory_bytes,omitempty"`
	// Text is the StableHLO module; in a file it is the section NAME.mlir.
	Text string `json:"-"`
}

// An Axis is one dimension of a mesh of devices.
type Axis struct {
	Name string `json:"name"`
	Size int    `json:"size"`
}

// An Array is one argument or result: each device has a shard of a global array.
type Array struct {
	Name   string      `json:"name"`
	Global dtype.Shape `json:"global"`
	// Split lists, for each dimension, the mesh axes that shard it, the slowest first. Over all other
	// axes the array is replicated. nil means fully replicated.
	Split [][]string `json:"split,omitempty"`
	// Memory is the kind of memory: "" is the device's own, "pinned_host" the host's.
	Memory string `json:"memory,omitempty"`
	// Into names the result that replaces this argument in place: the argument is donated.
	Into string `json:"into,omitempty"`
	// Role is what the array is for, and Param the parameter it belongs to. Programs that were not
	// written for a training step have neither.
	Role  Role   `json:"role,omitempty"`
	Param string `json:"param,omitempty"`
}

// Validate reports the first contradiction in the program.
func (p *Program) Validate() error {
	if len(p.Modules) == 0 {
		return diag.New(diag.ProgramInvalid, "program %q has no modules", p.Name)
	}
	seen := map[string]bool{}
	for i := range p.Modules {
		m := &p.Modules[i]
		if seen[m.Name] {
			return diag.New(diag.ProgramInvalid, "two modules are called %q", m.Name)
		}
		seen[m.Name] = true
		if err := m.Validate(); err != nil {
			return err
		}
	}
	return nil
}

var moduleName = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]*$`)

// Validate reports the first contradiction in the module.
func (m *Module) Validate() error {
	bad := func(format string, args ...any) error {
		return diag.New(diag.ProgramInvalid, format, args...).At("module %s", m.Name)
	}
	switch {
	case !moduleName.MatchString(m.Name):
		return bad("%q is not a module name: letters, digits, _ . -", m.Name)
	case len(m.Devices) == 0:
		return bad("the module has no devices")
	case strings.TrimSpace(m.Text) == "":
		return bad("the module has no text")
	}
	if err := m.checkMesh(bad); err != nil {
		return err
	}
	seen := map[int]bool{}
	for _, id := range m.Devices {
		switch {
		case id < 0:
			return bad("there is no device %d", id)
		case seen[id]:
			return bad("device %d stands twice", id)
		}
		seen[id] = true
	}
	for _, list := range [][]Array{m.Args, m.Results} {
		names := map[string]bool{}
		for _, a := range list {
			if names[a.Name] {
				return bad("two arrays of one list are called %q", a.Name)
			}
			names[a.Name] = true
			if _, err := m.Local(a); err != nil {
				return err
			}
		}
	}
	return m.checkDonations(bad)
}

// checkMesh compares the mesh with the number of devices.
func (m *Module) checkMesh(bad func(string, ...any) error) error {
	if len(m.Mesh) == 0 {
		return nil
	}
	size, names := 1, map[string]bool{}
	for _, a := range m.Mesh {
		if a.Size < 1 || a.Size > maxDevices || a.Name == "" || names[a.Name] {
			return bad("mesh axis %q of size %d", a.Name, a.Size)
		}
		names[a.Name] = true
		if size *= a.Size; size > maxDevices {
			break
		}
	}
	if size != len(m.Devices) {
		return bad("the mesh has %d positions for %d devices", size, len(m.Devices))
	}
	return nil
}

// checkDonations checks that every donated argument has a result of the same shape and sharding,
// and that no result takes two.
func (m *Module) checkDonations(bad func(string, ...any) error) error {
	taken := map[string]string{}
	for _, a := range m.Args {
		if a.Into == "" {
			continue
		}
		at := slices.IndexFunc(m.Results, func(r Array) bool { return r.Name == a.Into })
		switch {
		case at < 0:
			return bad("argument %s is donated to %s, which is not a result", a.Name, a.Into)
		case taken[a.Into] != "":
			return bad("arguments %s and %s are donated to the same result", taken[a.Into], a.Name)
		case !m.Results[at].Global.Equal(a.Global) ||
			!slices.EqualFunc(m.Results[at].Split, a.Split, slices.Equal[[]string]):
			return bad("argument %s and the result %s that takes its place differ in shape or split",
				a.Name, a.Into)
		}
		taken[a.Into] = a.Name
	}
	return nil
}

// Local is the shape of one device's shard.
func (m *Module) Local(a Array) (dtype.Shape, error) {
	local := dtype.Shape{Type: a.Global.Type, Dims: slices.Clone(a.Global.Dims)}
	fail := func(format string, args ...any) (dtype.Shape, error) {
		return dtype.Shape{}, diag.New(diag.ProgramInvalid, format, args...).At("module %s", m.Name)
	}
	if !a.Global.Type.Valid() || a.Name == "" {
		return fail("an array lacks a name or an element type")
	}
	if a.Split != nil && len(a.Split) != len(a.Global.Dims) {
		return fail("%s has %d dimensions and %d splits", a.Name, len(a.Global.Dims), len(a.Split))
	}
	used := map[string]bool{}
	for d, axes := range a.Split {
		for _, axis := range axes {
			at := slices.IndexFunc(m.Mesh, func(x Axis) bool { return x.Name == axis })
			if at < 0 {
				return fail("%s is sharded along %q, which the mesh does not have", a.Name, axis)
			}
			if used[axis] {
				return fail("%s is sharded along %q twice", a.Name, axis)
			}
			used[axis] = true
			size := int64(m.Mesh[at].Size)
			if size < 1 || local.Dims[d]%size != 0 {
				return fail("%s: dimension %d of size %d cannot be sharded over %d devices", a.Name, d,
					local.Dims[d], size)
			}
			local.Dims[d] /= size
		}
	}
	return local, nil
}

// Start is the global index of the first element of the i-th device's shard.
func (m *Module) Start(a Array, i int) ([]int64, error) {
	local, err := m.Local(a)
	if err != nil {
		return nil, err
	}
	position := m.coordinates(i)
	start := make([]int64, len(local.Dims))
	for d, axes := range a.Split {
		block := int64(0)
		for _, axis := range axes {
			at := slices.IndexFunc(m.Mesh, func(x Axis) bool { return x.Name == axis })
			block = block*int64(m.Mesh[at].Size) + int64(position[at])
		}
		start[d] = block * local.Dims[d]
	}
	return start, nil
}

// coordinates are the i-th device's position on the mesh, the last axis fastest.
func (m *Module) coordinates(i int) []int {
	position := make([]int, len(m.Mesh))
	for k := len(m.Mesh) - 1; k >= 0; k-- {
		position[k] = i % m.Mesh[k].Size
		i /= m.Mesh[k].Size
	}
	return position
}

// FromText makes a program of one module from a bare StableHLO module on devices 0 to n-1.
func FromText(name, text string, n int) *Program {
	return &Program{Name: name, Modules: []Module{{Name: name, Devices: Range(0, n), Text: text}}}
}
