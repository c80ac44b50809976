package quantize

import (
	"encoding/binary"
	"io"
	"math"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/safetensors"
)

// A work is a tensor of the source that becomes tensors of the output. It is done in chunks, in
// any order and concurrently; each writes at its own offset.
type work interface {
	// outputs lists the tensors that it writes.
	outputs() []*output
	// chunks is the number of chunks, at least one.
	chunks() int
	// do reads, converts and writes a chunk.
	do(chunk int, b *buffers, f io.WriterAt) (sums, error)
	// row is its line in the report, given the chunks' statistics.
	row(sums) Tensor
}

// An output is one tensor of the output, and where it begins in its file.
type output struct {
	name  string
	shape dtype.Shape
	at    int64
}

func (o *output) put(f io.WriterAt, p []byte, off int64) error {
	_, err := f.WriteAt(p, o.at+off)
	return err
}

// band is the number of elements of a chunk. At 16 bits it is 2 MiB: enough for a disk, and small
// enough that a worker's input is still in the processor's cache when it is quantized.
const band = 1 << 20

// buffers are one worker's inputs and outputs; they grow to the largest chunk.
type buffers struct {
	raw, q, scale []byte
	half          []uint16
	wide          []float32
	taken         int64  // source bytes of the last chunk
	shelf         *shelf // shared by all workers
}

// A shelf keeps chunks between the search for the amax and the quantization that needs it, so that
// they need not be read again: as many as fit, in bfloat16, which most checkpoints are in.
type shelf struct {
	free chan []uint16 // buffers to reuse
	made atomic.Int64
}

// shelved is the memory of shelved chunks: gate and up of an 8B model have 235 MB.
const shelved = 256 << 20

func newShelf() *shelf { return &shelf{free: make(chan []uint16, shelved/(2*band))} }

// take shelves the chunk in the buffers, if there is room, and replaces its buffer.
func (b *buffers) take() []uint16 {
	kept := b.half
	select {
	case b.half = <-b.shelf.free:
		return kept
	default:
	}
	if b.shelf.made.Add(1) > int64(cap(b.shelf.free)) {
		return nil
	}
	b.half = make([]uint16, band)
	return kept
}

// put returns a shelved chunk's buffer.
func (b *buffers) put(kept []uint16) { b.shelf.free <- kept }

// read fills the buffer with a part of a tensor.
func (b *buffers) read(t safetensors.Tensor, at, n int64) ([]byte, error) {
	b.taken = n
	p := grow(&b.raw, n)
	if n, err := t.ReadAt(p, at); n < len(p) {
		return nil, err
	}
	return p, nil
}

func grow[E any](p *[]E, n int64) []E {
	if int64(cap(*p)) < n {
		*p = make([]E, n)
	}
	return (*p)[:n]
}

// A keep copies a tensor, or rounds it to the type of its output.
type keep struct {
	choice
	out *output
}

func newKeep(c choice, t dtype.DType) *keep {
	return &keep{c, &output{name: c.tensor.Name(),
		shape: dtype.Shape{Type: t, Dims: c.tensor.Shape().Dims}}}
}

func (k *keep) outputs() []*output { return []*output{k.out} }

func (k *keep) chunks() int { return max(1, int((k.tensor.Size()+2*band-1)/(2*band))) }

func (k *keep) do(chunk int, b *buffers, f io.WriterAt) (sums, error) {
	at := int64(chunk) * 2 * band
	raw, err := b.read(k.tensor, at, min(2*band, k.tensor.Size()-at))
	if err != nil {
		return sums{}, err
	}
	if n := k.tensor.Shape().Type.NotFinite(raw); n > 0 && k.learned() {
		d := capture.Damaged{Tensor: k.tensor.Name(), Elements: n}
		return sums{}, diag.New(diag.WeightNotFinite, "%s not finite", d).
			At("%s", k.tensor.File()).Try("take an earlier checkpoint")
	}
	from, to := k.tensor.Shape().Type, k.out.shape.Type
	if from == to {
		return sums{}, k.out.put(f, raw, at)
	}
	wide := widen(from, raw, b)
	q := grow(&b.q, to.Bytes(int64(len(wide))))
	to.Encode(q, wide)
	return sums{}, k.out.put(f, q, at/int64(from.Bits())*int64(to.Bits()))
}

// learned tells parameters from buffers, such as masks, which may hold infinities. What a person
// asked to keep is kept whatever it is.
func (k *keep) learned() bool {
	name := k.tensor.Name()
	return (strings.HasSuffix(name, ".weight") || strings.HasSuffix(name, ".bias")) &&
		!strings.HasPrefix(k.why, "--skip ")
}

// A group is weights that share a global scale.
type group struct {
	members []*quantizedMatrix
	once    sync.Once    // lists its chunks for the first file that needs them
	left    atomic.Int64 // chunks whose amax is not known yet
	largest atomic.Uint32
	known   chan struct{} // closed when all are
}

// A quantizedMatrix is a matrix that is quantized.
type quantizedMatrix struct {
	matrix
	group *group     // nil for MXFP8
	why   [][]uint16 // shelved chunks
}

// A matrix becomes elements, scales and, in NVFP4, the global scales of the weights and, if known,
// of the activations.
type matrix struct {
	choice
	layout    Layout
	inputAmax float32
	outs      []*output // in that order, for one matrix after the other
}

func (m *matrix) outputs() []*output { return m.outs }

// add lays out a tensor.
func (m *matrix) add(name string, t dtype.DType, dims ...int64) {
	m.outs = append(m.outs, &output{name: name, shape: dtype.Shape{Type: t, Dims: dims}})
}

// nvfp4 lists the output tensors of a layer. The names are given in the package comment.
func (m *matrix) nvfp4(module string, rows, cols int64) {
	var one []int64 // modelopt's are scalars
	packed, global, input := ".weight", ".weight_scale_2", ".input_scale"
	if m.layout == CompressedTensors {
		one = []int64{1}
		packed, global, input = ".weight_packed", ".weight_global_scale", ".input_global_scale"
	}
	m.add(module+packed, dtype.U8, rows, cols/2)
	m.add(module+".weight_scale", dtype.F8E4M3FN, rows, cols/16)
	m.add(module+global, dtype.F32, one...)
	if m.inputAmax > 0 {
		m.add(module+input, dtype.F32, one...)
	}
}

func newQuantizedMatrix(c choice, o Options) *quantizedMatrix {
	dims := c.tensor.Shape().Dims
	w := &quantizedMatrix{matrix: matrix{choice: c, layout: o.Layout, inputAmax: o.InputAmax}}
	if c.format == dtype.MXFP8 {
		w.add(c.module+".weight", dtype.F8E4M3FN, dims...)
		w.add(c.module+".weight_scale", dtype.U8, dims[0], dims[1]/32)
	} else {
		w.nvfp4(c.module, dims[0], dims[1])
	}
	return w
}

// part is the range of elements of one chunk. Blocks do not cross rows, and a row is whole blocks,
// so the matrix is one long list of blocks.
func (w *quantizedMatrix) part(chunk int) (from, n int64) {
	from = int64(chunk) * band
	return from, min(band, w.tensor.Shape().Elements()-from)
}

func (w *quantizedMatrix) chunks() int {
	return max(1, int((w.tensor.Shape().Elements()+band-1)/band))
}

// load reads a chunk.
func (w *quantizedMatrix) load(chunk int, b *buffers) ([]byte, error) {
	from, n := w.part(chunk)
	t := w.tensor.Shape().Type
	return b.read(w.tensor, t.Bytes(from), t.Bytes(n))
}

// measure finds the amax of a chunk, for the group.
func (w *quantizedMatrix) measure(chunk int, b *buffers) error {
	raw, err := w.load(chunk, b)
	if err != nil {
		return err
	}
	bits := math.Float32bits(largest(w.tensor.Shape().Type, raw, b))
	if w.tensor.Shape().Type == dtype.BF16 {
		_, n := w.part(chunk)
		b.half = b.half[:n]
		w.why[chunk] = b.take()
	}
	g := w.group
	for {
		old := g.largest.Load() // magnitudes of floats are in the order of their bits
		if bits <= old || g.largest.CompareAndSwap(old, bits) {
			break
		}
	}
	if g.left.Add(-1) == 0 {
		close(g.known)
	}
	return nil
}

func (g *group) amax() float32 { return math.Float32frombits(g.largest.Load()) }

func (w *quantizedMatrix) do(chunk int, b *buffers, f io.WriterAt) (sums, error) {
	from, n := w.part(chunk)
	size, bits := w.format.Block(), int64(w.format.Codes().Bits())
	q, scale := grow(&b.q, n*bits/8), grow(&b.scale, n/size)
	c := coder{format: w.format, every: w.every(), empty: w.empty()}
	if w.group != nil {
		c.amax = w.group.amax()
	}
	s, err := w.encode(c, chunk, q, scale, b)
	if err != nil {
		return s, err
	}
	if !s.finite() {
		return s, diag.New(diag.WeightNotFinite, "%s holds a number that is not finite", w.tensor.Name()).
			At("%s, elements %d to %d", w.tensor.File(), from, from+n).
			Try("take an earlier checkpoint, or keep the layer: --skip %s", w.module)
	}
	if err := w.outs[0].put(f, q, from*bits/8); err != nil {
		return s, err
	}
	if err := w.outs[1].put(f, scale, from/size); err != nil || chunk > 0 || w.group == nil {
		return s, err
	}
	return s, w.putScalars(f, w.outs[2:], globalScale(w.layout, w.group.amax()))
}

// encode reads a chunk, or takes it from the shelf, and quantizes it.
func (w *quantizedMatrix) encode(c coder, chunk int, q, scale []byte, b *buffers) (sums, error) {
	if w.why != nil && w.why[chunk] != nil {
		x := w.why[chunk]
		w.why[chunk] = nil
		defer b.put(x)
		b.taken = 2 * int64(len(x))
		return encode(c, q, scale, x)
	}
	raw, err := w.load(chunk, b)
	if err != nil {
		return sums{}, err
	}
	return c.encode(q, scale, w.tensor.Shape().Type, raw, b)
}

// every is the stride of compared blocks. Quantizing takes a quarter of a nanosecond per element
// and comparing four, more than disks leave; in a matrix of more than a million elements one block
// in 17 gives the ratio to some hundredths of a decibel. 17 has no factor in common with a row, so
// all columns are sampled.
func (w *quantizedMatrix) every() int {
	if w.tensor.Shape().Elements() > band {
		return 17
	}
	return 1
}

// empty is the scale of a block of zeros, as the families write it.
func (w *quantizedMatrix) empty() byte {
	if w.layout == CompressedTensors {
		return 0x20 // 0.125 in E4M3
	}
	return 0x38 // 1
}

// putScalars writes the global scales of one matrix.
func (m *matrix) putScalars(f io.WriterAt, outs []*output, global float32) error {
	if err := putScalar(f, outs[0], global); err != nil || len(outs) == 1 {
		return err
	}
	return putScalar(f, outs[1], globalScale(m.layout, m.inputAmax))
}

func putScalar(f io.WriterAt, o *output, v float32) error {
	return o.put(f, binary.LittleEndian.AppendUint32(nil, math.Float32bits(v)), 0)
}

// globalScale is the scale of a tensor in the sense of a family: one divides by it, one multiplies.
func globalScale(l Layout, amax float32) float32 {
	in, out := block.Global(amax)
	if l == CompressedTensors {
		return in
	}
	return out
}

// row is what the report says of a tensor; what is kept has no sums.
func (c choice) row(s sums) Tensor {
	shape := c.tensor.Shape()
	return Tensor{Name: c.tensor.Name(), Type: shape.Type, Shape: shape.Dims, Format: c.format,
		Kept: c.why, Compared: s.n, SNR: decibel(s.power, s.noise), Power: s.power, Noise: s.noise,
		Amax: float64(s.amax), Zeros: share(s.zeros, s.n), Underflow: share(s.empty-s.zeros, s.n)}
}

func (w *quantizedMatrix) row(s sums) Tensor {
	t := w.choice.row(s)
	if w.group != nil {
		t.GlobalScale = float64(globalScale(w.layout, w.group.amax()))
	}
	return t
}

func share(n, of int64) float64 {
	if of == 0 {
		return 0
	}
	return float64(n) / float64(of)
}
