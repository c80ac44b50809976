package program

import "github.com/deepwell/deepwell/internal/lists"

// Memory is the bytes of one device at one moment, by cause. Predictions and measurements of
// compiled programs use the same causes.
type Memory struct {
	// Params is what the model computes with: compute copies, quantized or in the model's type, and
	// masters without a copy.
	Params int64 `json:"params"`
	// Copies is what other training stacks keep besides: unsharded parameters beside their shards.
	Copies int64 `json:"copies,omitempty"`
	Grads  int64 `json:"grads"` // accumulators between programs
	// Optimizer is what only the update takes: moments, and masters that have compute copies.
	Optimizer int64 `json:"optimizer"`
	// Activations is arrays of microbatches in flight: residuals, and inputs and results of the
	// running program.
	Activations int64 `json:"activations"`
	Temp        int64 `json:"temp"`              // temporary buffers of the running program
	Runtime     int64 `json:"runtime,omitempty"` // of the training stack: workspaces, communicators
	// Host is host memory used for the device; it is not part of Sum.
	Host int64 `json:"host,omitempty"`
}

// Sum is all bytes on the device.
func (m Memory) Sum() int64 {
	return m.Params + m.Copies + m.Grads + m.Optimizer + m.Activations + m.Temp + m.Runtime
}

// A Cause is one line of a memory account.
type Cause struct {
	Name  string
	Bytes int64
}

// Causes lists the lines that make the sum, in a fixed order. Copies and runtime, which only other
// training stacks have, are left out when zero.
func (m Memory) Causes() []Cause {
	list := []Cause{{"params", m.Params}, {"copies", m.Copies}, {"gradients", m.Grads},
		{"optimizer", m.Optimizer}, {"activations", m.Activations}, {"temp", m.Temp},
		{"runtime", m.Runtime}}
	return lists.Filter(list, func(c Cause) bool {
		return c.Bytes > 0 || c.Name != "copies" && c.Name != "runtime"
	})
}
