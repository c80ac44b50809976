package price

import "github.com/deepwell/deepwell/machine"

// A Shared is a host whose devices share the cores of one processor, as XLA's CPU devices do.
// While one device waits, another uses its core, so a step takes as long as the work of all
// devices together: bubbles are free, while replicated work, and each program launch, operation
// and rendezvous, costs core time.
type Shared struct {
	// Arithmetic is FLOP/s of matmuls in a step, and Packed bytes per second of their operands, which
	// are packed into the order that the matmul reads.
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

// A step is not what a probe measures: matmuls of 1,024 × 1,024, and copies of 64 MiB counted as
// read and written. The factors are round numbers between rates of single programs on 2 cores of a
// Xeon with AMX, in CPU time, which other load on the machine affects least. Only the rendezvous
// was chosen by plans (seed 2 of bench/live): single programs show 20 to 130 µs of a core per
// device, more with more work between rendezvous; from 150 to 300 µs, Kendall's tau of these plans
// is constant (0.76; 0.69 with 50 µs). A waiting device gives its core to another, and returns to
// a cold cache.
const (
	// Matmuls of 64 to 1,024 by 64 to 1,024 by 256 to 1,024 take the sum of 130 GFLOP/s and 2.8 GB/s
	// of operands on one core, within a fifth; one of 1,024³ reaches 90 GFLOP/s.
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

// NewShared uses rates that a probe measured with all cores busy. Seconds are of one core, with
// all cores in use.
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
