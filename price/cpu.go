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
	// Seconds of the cores for each operation of a program, each run of a program on a device, each
	// array that it takes or gives, each matrix of a product of many, and each device that meets
	// others in a collective.
	Operation, Program, Array, Matrix, Meeting float64
}

// Usage is what a step of all devices asks of a host.
type Usage struct {
	Work    float64 // operations of products
	Sides   float64 // bytes of their operands and results
	Streams float64 // bytes of all else
	Sent    float64 // bytes that devices get from others, or give

	Operations, Programs, Arrays, Matrices, Meetings float64
}

// What a step does is not what a probe measures: products of 1,024 by 1,024, and copies of 64 MiB
// that are counted read and written. The factors are round numbers between rates of single programs
// on 2 cores of a Xeon with AMX, in processor time, which other work on the machine changes least.
// Only a meeting was chosen by plans, those of seed 2 of bench/live: single programs say 20 to 130
// µs of a core for each device, more with more to compute between meetings, and from 150 to 300 µs
// on Kendall's tau of these plans stays where it is (0.76; 0.69 with 50 µs). A device that waits
// leaves its core to another, and comes back to a cache that is not its own any more.
const (
	// Products of 64 to 1,024 rows by 64 to 1,024 by 256 to 1,024 take what 130 GFLOP/s and 2.8 GB/s
	// of their sides come to on one core, within a fifth; one of 1,024 cubed gets 90 GFLOP/s.
	ofArithmetic = 1.45
	ofPacked     = 0.8
	ofStream     = 3.0 // x + y of 1 MiB: 10 GB/s of a core; they are in a cache
	ofSent       = 1.5 // an all-reduce of 1 MiB in groups of 2, 4 or 8: 0.2 ms of a core each
	operation    = 3e-6
	program      = 10e-6 // docs/results/dispatch.txt: 40 µs for 8 devices on 2 cores
	meeting      = 150e-6
	array        = 1.7e-6 // 0.54 ms for 160 arguments and as many results
	matrix       = 1.5e-6 // a product of 128 pairs of [8,32] and [32,8]: 1.3 µs each
)

// NewShared takes the rates that a probe measured with all cores at work. The seconds are those of
// one core, and all have something to do.
func NewShared(m machine.Measured, cores int) Shared {
	n, copied := float64(max(cores, 1)), float64(m.DeviceCopy)
	return Shared{Arithmetic: ofArithmetic * float64(m.MatmulF32), Packed: ofPacked * copied,
		Stream: ofStream * copied, Sent: ofSent * copied, Operation: operation / n,
		Program: program / n, Array: array / n, Matrix: matrix / n, Meeting: meeting / n}
}

// Seconds is what the usage takes.
func (s Shared) Seconds(u Usage) float64 {
	return u.Work/s.Arithmetic + u.Sides/s.Packed + u.Streams/s.Stream + u.Sent/s.Sent +
		u.Operations*s.Operation + u.Programs*s.Program + u.Arrays*s.Array + u.Matrices*s.Matrix +
		u.Meetings*s.Meeting
}
