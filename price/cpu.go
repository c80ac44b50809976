package price

import "github.com/deepwell/deepwell/machine"

// A Shared is a host whose devices share the cores of one processor, as those of XLA's CPU engine
// do. What one device waits for another one uses, so that a step takes as long as the work of all
// devices together: bubbles cost nothing, while copies of the same work, and each program, operation
// and meeting of devices, cost what they take from the cores.
type Shared struct {
	// Arithmetic is operations a second of the products of a step, and Packed bytes a second of
	// their sides, which are copied into the order that a product reads them in.
	Arithmetic, Packed float64
	// Stream is bytes a second through what is no product, and Sent of collectives.
	Stream, Sent float64
	// Seconds of the cores for each operation of a program, each run of a program on a device, and
	// each device that meets others in a collective.
	Operation, Program, Meeting float64
}

// Usage is what a step of all devices asks of a host.
type Usage struct {
	Work    float64 // operations of products
	Sides   float64 // bytes of their operands and results
	Streams float64 // bytes of all else
	Sent    float64 // bytes that devices get from others

	Operations, Programs, Meetings float64
}

// NewShared takes the rates that a probe measured. It measures products of 1,024 by 1,024, which
// have all cores for themselves and stay in them, and copies of 64 MiB, which no cache holds; what
// a step does lies elsewhere, by factors that were fitted on one set of plans (docs/results/live.txt
// has how they do on another).
func NewShared(m machine.Measured) Shared {
	work, copied := float64(m.MatmulF32), float64(m.DeviceCopy)
	return Shared{Arithmetic: work, Packed: copied, Stream: copied, Sent: copied,
		Operation: 2e-6, Program: 40e-6, Meeting: 60e-6}
}

// Seconds is what the usage takes.
func (s Shared) Seconds(u Usage) float64 {
	return u.Work/s.Arithmetic + u.Sides/s.Packed + u.Streams/s.Stream + u.Sent/s.Sent +
		u.Operations*s.Operation + u.Programs*s.Program + u.Meetings*s.Meeting
}
