package program

import "github.com/deepwell/deepwell/internal/lists"

// Memory is the bytes that one device holds at one moment, by cause. All accounts of memory, those
// that are predicted and those of compiled programs, use these causes and their names.
type Memory struct {
	// Params is what the model computes with: copies in its own type or in blocks, and masters where
	// there is no copy of them.
	Params int64 `json:"params"`
	// Copies is what other stacks keep of parameters besides: whole ones where they are in pieces.
	Copies int64 `json:"copies,omitempty"`
	Grads  int64 `json:"grads"` // kept between programs
	// Optimizer is what only the update takes: moments, and masters of which there are copies.
	Optimizer int64 `json:"optimizer"`
	// Activations is arrays of microbatches in flight: residuals, and inputs and results of the
	// program that runs.
	Activations int64 `json:"activations"`
	Temp        int64 `json:"temp"`              // what the program that runs needs besides
	Runtime     int64 `json:"runtime,omitempty"` // of the stack itself: workspaces, communicators
	// Host is what is in the memory of the host for the device, beside all that.
	Host int64 `json:"host,omitempty"`
}

// Sum is all that is on the device.
func (m Memory) Sum() int64 {
	return m.Params + m.Copies + m.Grads + m.Optimizer + m.Activations + m.Temp + m.Runtime
}

// A Cause is one part of a memory.
type Cause struct {
	Name  string
	Bytes int64
}

// Causes lists the parts that make the sum, in an order that never changes; those that only other
// stacks have are left out where there are none.
func (m Memory) Causes() []Cause {
	list := []Cause{{"params", m.Params}, {"copies", m.Copies}, {"gradients", m.Grads},
		{"optimizer", m.Optimizer}, {"activations", m.Activations}, {"temp", m.Temp},
		{"runtime", m.Runtime}}
	return lists.Filter(list, func(c Cause) bool {
		return c.Bytes > 0 || c.Name != "copies" && c.Name != "runtime"
	})
}
