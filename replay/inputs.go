package replay

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// A filler draws the arguments of a program: numbers of about the size that training has, which
// depend on the seed, the argument's name and the place of a shard, so that replicas are equal.
type filler struct {
	module *program.Module
	kind   step.Kind
	seed   uint64
	vocab  int64
	order  []int64  // of a sequence's tokens, see [Pair]
	peaked bool     // of programs whose only result is a loss: the norm before the logits is large
	first  *float64 // the first element of the global array, if it is not drawn
}

// shards gives an argument's bytes on each device of the module.
func (f filler) shards(a program.Array) ([][]byte, error) {
	list := make([][]byte, len(f.module.Devices))
	for i := range list {
		var err error
		if list[i], err = f.shard(a, i); err != nil {
			return nil, err
		}
	}
	return list, nil
}

func (f filler) shard(a program.Array, device int) ([]byte, error) {
	local, err := f.module.Local(a)
	if err != nil {
		return nil, err
	}
	start, err := f.module.Start(a, device)
	if err != nil {
		return nil, err
	}
	h := fnv.New64a()
	fmt.Fprint(h, a.Name, start)
	if f.terms(a) {
		fmt.Fprint(h, device)
	}
	draw := rand.New(rand.NewPCG(f.seed, h.Sum64()))
	number := f.numbers(a, draw)
	if number == nil {
		return nil, diag.New(diag.NotSupported, "replay draws no %s %s of role %q", local, a.Name,
			a.Role).At("module %s", f.module.Name)
	}
	index, values := newIndex(a.Global.Dims, local.Dims, start), make([]float64, local.Elements())
	for i := range values {
		at := index.next()
		if values[i] = number(at); at == 0 && f.first != nil {
			values[i] = *f.first
		}
	}
	return encode(local.Type, values), nil
}

// terms reports whether an argument is each device's term of a sum: gradients before they are
// reduced. All other arguments are equal on the devices that have the same shard.
func (f filler) terms(a program.Array) bool {
	if a.Role != program.Gradient {
		return false
	}
	switch f.kind {
	case step.Gradient, step.Backward, step.Weight, step.Reduce:
		return true
	}
	return false
}

// scalars are the numbers of a whole step. The limit of the gradient norm is far above any norm:
// an update that is skipped leaves everything as it was, and compares little; see [skip].
var scalars = map[string]float64{optim.Commit: 1, optim.LR: 1e-3, optim.MaxNorm: 1e9,
	optim.BiasCorrection1: 1.25, optim.BiasCorrection2: 5.5, optim.GradSquare: 42}

// numbers returns what draws an argument's elements in row-major order, each from its place in the
// flattened global array; nil for an argument that no training step has.
func (f filler) numbers(a program.Array, draw *rand.Rand) func(at int64) float64 {
	scaled := func(scale float64) func(int64) float64 {
		return func(int64) float64 { return scale * draw.NormFloat64() }
	}
	constant := func(x float64) func(int64) float64 { return func(int64) float64 { return x } }
	norm := strings.Contains(a.Param, "norm")
	switch a.Role {
	case program.Batch:
		return f.batch(a, draw)
	case program.Scalar:
		if x, ok := scalars[a.Name]; ok {
			return constant(x)
		}
	case program.Param, program.Copy:
		if norm {
			scale := 1.0
			if f.peaked && a.Param == "norm" {
				scale = peak
			}
			return func(int64) float64 { return scale * (1 + 0.1*draw.NormFloat64()) }
		}
		return scaled(0.05)
	case program.Moment:
		if strings.HasPrefix(a.Name, "v.") { // a mean of squares
			return func(int64) float64 { x := draw.NormFloat64(); return 1e-4 * x * x }
		}
		return scaled(0.01)
	case program.Gradient, program.PeerGradient:
		if f.kind == step.Gradient {
			return scaled(accumulated)
		}
		return scaled(0.05)
	case program.Activation:
		return scaled(1)
	case program.Seed:
		return scaled(1e-3)
	case program.LossSeed:
		return constant(1)
	}
	return nil
}

// peak makes logits of a program that only evaluates vary by about 10, not 1: with small ones the
// loss is near the logarithm of the vocabulary's size, whatever the layers before them do.
const peak = 12

// accumulated is the size of gradients of microbatches before this one: about a quarter of its own.
// Larger ones would hide what is wrong in them, and with zeros nobody would see that they are lost.
const accumulated = 1e-3

// ignored is the share of labels that do not count.
const ignored = 0.1

// batch draws the host's inputs: tokens, places, and what stochastic rounding takes.
func (f filler) batch(a program.Array, draw *rand.Rand) func(at int64) float64 {
	token := func(int64) float64 { return float64(draw.Int64N(f.vocab)) }
	switch a.Name {
	case model.InputIDs:
		return token
	case model.InputLabels:
		return func(at int64) float64 {
			if draw.Float64() < ignored {
				return -1
			}
			return token(at)
		}
	case model.InputPositions:
		seq := a.Global.Dims[len(a.Global.Dims)-1]
		return func(at int64) float64 { return float64(at % seq) }
	case model.InputSegments:
		numbers := documents(a.Global.Dims[len(a.Global.Dims)-1])
		return func(at int64) float64 {
			if at %= int64(len(numbers)); f.order != nil {
				at = f.order[at]
			}
			return float64(numbers[at])
		}
	case ir.InputRows:
		return func(at int64) float64 { return float64(at) }
	case ir.InputNoise, ir.InputSlotNoise:
		return func(int64) float64 { return float64(draw.Int32()) }
	case model.InputShare:
		return func(int64) float64 { return 1.0 / 1024 }
	}
	return nil
}

// documents numbers the documents of a sequence: one half of it, a quarter, five tokens and the
// rest. Kernels may treat long and short ones apart.
func documents(seq int64) (numbers []int64) {
	left := seq
	for n, length := range []int64{seq / 2, seq / 4, 5, seq} {
		length = min(length, left)
		numbers = append(numbers, slices.Repeat([]int64{int64(n)}, int(length))...)
		left -= length
	}
	return numbers
}

// An index walks over the elements of a shard and gives their places in the flattened global array.
type index struct {
	global, local, start []int64
	at                   []int64
}

func newIndex(global, local, start []int64) *index {
	return &index{global: global, local: local, start: start, at: make([]int64, len(local))}
}

// next returns the place of an element and goes on to the one after it.
func (x *index) next() (flat int64) {
	for d, n := range x.global {
		flat = flat*n + x.start[d] + x.at[d]
	}
	for d := len(x.at) - 1; d >= 0; d-- {
		if x.at[d]++; x.at[d] < x.local[d] {
			break
		}
		x.at[d] = 0
	}
	return flat
}

// encode writes numbers in an element type, rounded to it.
func encode(t dtype.DType, values []float64) []byte {
	return t.Append(make([]byte, 0, t.Bytes(int64(len(values)))), values...)
}

// widenBytes holds bf16 numbers as f32.
func widenBytes(src []byte) []byte {
	dst := make([]byte, 2*len(src))
	for i := range len(src) / 2 {
		x := dtype.F32FromBF16(binary.LittleEndian.Uint16(src[2*i:]))
		binary.LittleEndian.PutUint32(dst[4*i:], math.Float32bits(x))
	}
	return dst
}
