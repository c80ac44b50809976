package price

import "github.com/deepwell/deepwell/machine"

// A Shared is a host whose devices share the cores of one processor, as those of XLA's CPU engine
// do. What one device waits for another one uses, so that a step takes as long as the work of all
// devices together: bubbles cost nothing, while copies of the same work, and each program,
// operation and meeting of devices, cost what they take from the cores.
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

// What a step does is not what a probe measures: products of 1,024 by 1,024, and copies of 64 MiB
// that are counted read and written. The factors are round numbers. They, and what estimate.Shared
// counts, were chosen while looking at the plans of seed 1 of bench/live, so that only other seeds
// say how good they are. On seed 1 bytes that are four times as dear or as cheap change Kendall's
// tau with processor time by less than 0.1.
const (
	ofArithmetic = 0.6  // products of a step are smaller
	ofPacked     = 2.0  // they are in a cache
	ofSent       = 0.75 // sums are read twice
	operation    = 3e-6
	program      = 60e-6 // docs/results/dispatch.txt: 40 µs on an idle machine
	meeting      = 60e-6 // the same table: 240 µs for two devices, less a program for each
)

// NewShared takes the rates that a probe measured with all cores at work. The seconds are those of
// one core, and all have something to do.
func NewShared(m machine.Measured, cores int) Shared {
	n, stream := float64(max(cores, 1)), float64(m.DeviceCopy)
	return Shared{Arithmetic: ofArithmetic * float64(m.MatmulF32), Packed: ofPacked * stream,
		Stream: stream, Sent: ofSent * stream, Operation: operation / n, Program: program / n,
		Meeting: meeting / n}
}

// Seconds is what the usage takes.
func (s Shared) Seconds(u Usage) float64 {
	return u.Work/s.Arithmetic + u.Sides/s.Packed + u.Streams/s.Stream + u.Sent/s.Sent +
		u.Operations*s.Operation + u.Programs*s.Program + u.Meetings*s.Meeting
}
