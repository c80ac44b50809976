package overlap

import (
	"cmp"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/kernels/flash"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/rownorm"
)

// A cost is what one kernel computes and moves.
type cost struct {
	flops     int64
	bytes     int64
	bits      int // of an element of a product's first operand
	attention bool
	share     float64 // of a library's FLOP rate, of kernels of our own; 0 is all of it
}

// seconds is the roofline: whichever takes longer.
func (c cost) seconds(r Rates) float64 {
	t := float64(c.bytes) / r.Memory
	switch {
	case c.attention:
		return max(t, float64(c.flops)/r.Attention/cmp.Or(c.share, 1))
	case c.flops > 0:
		return max(t, float64(c.flops)/r.gemm(c.bits)/cmp.Or(c.share, 1))
	}
	return t
}

// free are the instructions that run no kernel: they name what is there already.
var free = []string{"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all",
	"optimization-barrier", "opt-barrier", "partition-id", "replica-id", "async-update", "async-done",
	"copy-done", "add-dependency"}

// costOf counts what an instruction computes and how many bytes it reads and writes. A
// slice reads only its result, and an in-place update writes only its operand, however large the
// tensor is.
func costOf(c *hlo.Computation, i *hlo.Instruction) cost {
	if slices.Contains(free, i.Opcode) || i.Target == hlo.AllocateBuffer {
		return cost{}
	}
	k := cost{flops: i.FLOPs}
	switch {
	case i.Opcode == "fusion" && len(i.Calls) == 1:
		k.bytes = fusedBytes(i.Calls[0])
	case i.Opcode == "async-start" && len(i.Calls) == 1:
		return wrapped(i.Calls[0])
	case fused.IsGroup(i.Spec): // tiles without tokens are skipped
		g, err := fused.ParseGroup(i.Spec)
		if err != nil {
			return cost{}
		}
		return cost{flops: g.FLOPs(), bytes: g.Bytes(), bits: g.Bits(), share: g.Share()}
	case strings.HasPrefix(i.Spec, "loss "): // its logits are read twice and written once
		if l, err := fused.ParseLoss(i.Spec); err == nil {
			k.bytes = l.Bytes()
		}
	case rownorm.Is(i.Spec):
		if n, err := rownorm.Parse(i.Spec); err == nil {
			k.bytes = n.Bytes()
		}
	case flash.Is(i.Spec):
		a, err := flash.Parse(i.Spec)
		if err != nil {
			return cost{}
		}
		return cost{flops: a.FLOPs(), bytes: a.Bytes(), bits: 16, attention: true, share: a.Share()}
	case i.Spec != "": // its operands may be stacks, of which it reads one round's part
		if s, err := fused.ParseSpec(i.Spec); err == nil {
			k.bytes = s.Bytes()
		}
	case slicing(i.Opcode):
		k.bytes = 2 * bytesOf(i.Results)
	case i.Opcode == "dynamic-update-slice":
		k.bytes = 2 * operandBytes(c, i, 1)
	default:
		k.bytes = bytesOf(payload(i))
		for n := range i.Operands {
			k.bytes += operandBytes(c, i, n)
		}
	}
	if k.flops > 0 {
		k.attention = strings.HasPrefix(i.Target, "__cudnn$fmha")
		k.bits = operandBits(c, i)
	}
	return k
}

// wrapped is the cost of what an async-start runs, if it is no collective.
func wrapped(c *hlo.Computation) (sum cost) {
	for n := range c.Body {
		k := costOf(c, &c.Body[n])
		sum.flops, sum.bytes = sum.flops+k.flops, sum.bytes+k.bytes
		sum.bits = max(sum.bits, k.bits)
	}
	return sum
}

func slicing(opcode string) bool {
	return opcode == "dynamic-slice" || opcode == "slice" || opcode == "gather"
}

func bytesOf(list []hlo.Value) int64 {
	return lists.Sum(list, func(v hlo.Value) int64 { return v.Bytes })
}

// payload leaves out the scratch memory of a library call, the last of its results.
func payload(i *hlo.Instruction) []hlo.Value {
	if fromLibrary(i) && len(i.Results) > 1 {
		return i.Results[:len(i.Results)-1]
	}
	return i.Results
}

func operandBytes(c *hlo.Computation, i *hlo.Instruction, n int) int64 {
	if n >= len(i.Operands) {
		return 0
	}
	return bytesOf(c.Body[i.Operands[n]].Results)
}

// operandBits is the width of a GEMM's operand elements, in bits. Of a fusion the dot inside
// counts: the fusion's own first operand may be anything.
func operandBits(c *hlo.Computation, i *hlo.Instruction) int {
	if i.Opcode == "fusion" {
		for _, inner := range i.Calls {
			for n := range inner.Body {
				if inner.Body[n].FLOPs > 0 {
					return operandBits(inner, &inner.Body[n])
				}
			}
		}
	}
	if len(i.Operands) > 0 {
		if from := c.Body[i.Operands[0]].Results; len(from) > 0 {
			return from[0].Shape.Type.Bits()
		}
	}
	return 16
}

// fusedBytes counts what a fused computation reads of its parameters and writes of its results.
func fusedBytes(c *hlo.Computation) (n int64) {
	users := make([][]int, len(c.Body))
	for at := range c.Body {
		for _, o := range c.Body[at].Operands {
			users[o] = append(users[o], at)
		}
	}
	for at := range c.Body {
		if c.Body[at].Opcode == "parameter" {
			n += readBytes(c, at, users)
		}
	}
	if c.Root < 0 {
		return n
	}
	roots := []int{c.Root}
	if c.Body[c.Root].Opcode == "tuple" {
		roots = c.Body[c.Root].Operands
	}
	return n + lists.Sum(roots, func(at int) int64 { return writtenBytes(c, at) })
}

// readBytes is what is read of one value: all of it, unless everyone takes slices of it or puts
// something into it in place. Whoever renames it stands after it, so this ends.
func readBytes(c *hlo.Computation, at int, users [][]int) (n int64) {
	whole := bytesOf(c.Body[at].Results)
	for _, u := range users[at] {
		i := &c.Body[u]
		switch {
		case slicing(i.Opcode) && i.Operands[0] == at:
			n += bytesOf(i.Results)
		case i.Opcode == "dynamic-update-slice" && i.Operands[0] == at:
		case renames(i.Opcode) && u > at:
			n += readBytes(c, u, users)
		default:
			return whole
		}
	}
	return min(n, whole)
}

// libraryCall is the library call that a fusion slices operands for, or whose result it puts into
// place; nil if it has none.
func libraryCall(i *hlo.Instruction) *hlo.Instruction {
	if i.Opcode != "fusion" || len(i.Calls) != 1 {
		return nil
	}
	body := i.Calls[0].Body
	for n := range body {
		if fromLibrary(&body[n]) {
			return &body[n]
		}
	}
	return nil
}

func fromLibrary(i *hlo.Instruction) bool {
	return strings.HasPrefix(i.Target, "__cublas$") || strings.HasPrefix(i.Target, "__cudnn$")
}

func writtenBytes(c *hlo.Computation, at int) int64 {
	for renames(c.Body[at].Opcode) && len(c.Body[at].Operands) == 1 && c.Body[at].Operands[0] < at {
		at = c.Body[at].Operands[0]
	}
	i := &c.Body[at]
	switch {
	case i.Opcode == "dynamic-update-slice":
		return operandBytes(c, i, 1)
	case i.Opcode == "get-tuple-element" && fromLibrary(&c.Body[i.Operands[0]]) &&
		i.Index >= len(payload(&c.Body[i.Operands[0]])): // scratch memory
		return 0
	case fromLibrary(i):
		return bytesOf(payload(i))
	}
	return bytesOf(i.Results)
}

func renames(opcode string) bool { return opcode == "bitcast" || opcode == "reshape" }
