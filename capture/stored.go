package capture

import (
	"encoding/json"
	"math"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/safetensors"
)

// The names of tensors that stand for another or beside it: FP8 keeps the scale of each block of
// NAME in NAME_scale_inv, and gpt-oss has NAME in MXFP4 as NAME_blocks and NAME_scales.
const (
	scalesOfFP8 = "_scale_inv"
	mxfp4Blocks = "_blocks"
	mxfp4Scales = "_scales"
	mxfp4Block  = 32 // elements, two to a byte
)

// A stored is a tensor of a parameter as a checkpoint has it: plain, or with scales.
type stored struct {
	param  model.Param // its Shape, Axis and Transposed are the tensor's as it is stored
	tensor safetensors.Tensor
	scales *safetensors.Tensor // of FP8 and MXFP4
	block  [2]int64            // of FP8: rows and columns that share a scale
}

// spelled lists the tensors of the checkpoint that a tensor of the model is made of. Where it is
// not there, that is the name that was missed, and false.
func (m *Model) spelled(name string) ([]string, bool) {
	own, ok := m.find(name)
	if ok {
		if scales, ok := m.find(name + scalesOfFP8); ok {
			return []string{own, scales}, true
		}
		return []string{own}, true
	}
	blocks, ok := m.find(name + mxfp4Blocks)
	if scales, both := m.find(name + mxfp4Scales); ok && both {
		return []string{blocks, scales}, true
	}
	return []string{own}, false
}

// readable are the types that weights are read from without scales.
var readable = []dtype.DType{dtype.F32, dtype.BF16, dtype.F16, dtype.F64}

// stored compares one tensor of a checkpoint with what a parameter asks of it. The checkpoint's
// files must be here, and names are what spelled gave.
func (m *Model) stored(p *model.Param, names []string) (*stored, error) {
	tensors := make([]safetensors.Tensor, len(names))
	for i, name := range names {
		var err error
		if tensors[i], err = m.weights.Tensor(name); err != nil {
			return nil, err
		}
	}
	s := &stored{param: *p, tensor: tensors[0]}
	of := s.tensor.Shape().Type
	want := []dtype.Shape{{Type: of, Dims: p.Shape}}
	switch n := len(p.Shape); {
	case len(names) == 1 && slices.Contains(readable, of):
	case len(names) == 2 && n > 1 && of == dtype.F8E4M3FN:
		want = append(want, m.fp8(s, &tensors[1]))
	case len(names) == 2 && n > 1 && of == dtype.U8:
		want = s.mxfp4(&tensors[1])
	default:
		e := diag.New(diag.WeightType, "%s is %s", names[0], of).At("%s", m.where(s.tensor.File()))
		if of.Bits() <= 8 {
			e = e.Because("weights of 8 and 4 bits are read in two forms: FP8 with %s, MXFP4 with %s",
				scalesOfFP8, mxfp4Scales)
		}
		return nil, e.Try("take the model in bf16")
	}
	for i, want := range want {
		if have := tensors[i].Shape(); !have.Equal(want) {
			return nil, diag.New(diag.WeightMismatch, "%s is %s; the configuration says %v", names[i], have,
				want.Dims).At("%s", m.where(tensors[i].File())).
				Try("see that %s belongs to these weights", configName)
		}
	}
	return s, nil
}

// fp8 takes the scales of FP8, one for each block of a matrix, and gives the shape they must have.
func (m *Model) fp8(s *stored, scales *safetensors.Tensor) dtype.Shape {
	s.scales, s.block = scales, m.blockOfFP8()
	n := len(s.param.Shape)
	dims := slices.Clone(s.param.Shape)
	for i, of := range s.block {
		dims[n-2+i] = (dims[n-2+i] + of - 1) / of
	}
	// Any float type will do.
	want := dtype.Shape{Type: dtype.F32, Dims: dims}
	if slices.Contains(readable, scales.Shape().Type) {
		want.Type = scales.Shape().Type
	}
	return want
}

// mxfp4 takes the scales of MXFP4, and gives the shapes of both tensors. They have out before in,
// so that blocks lie along what products sum over.
func (s *stored) mxfp4(scales *safetensors.Tensor) []dtype.Shape {
	p, n := &s.param, len(s.param.Shape)
	p.Shape = slices.Clone(p.Shape)
	p.Shape[n-1], p.Shape[n-2] = p.Shape[n-2], p.Shape[n-1]
	p.Axis, p.Transposed = 1-p.Axis, !p.Transposed
	s.scales = scales
	dims := slices.Clone(p.Shape)
	dims[n-1] /= mxfp4Block
	return []dtype.Shape{{Type: dtype.U8, Dims: append(slices.Clone(dims), mxfp4Block/2)},
		{Type: dtype.U8, Dims: dims}}
}

// blockOfFP8 is the size of the blocks that share a scale, 128 by 128 unless config.json says
// otherwise.
func (m *Model) blockOfFP8() [2]int64 {
	var c struct {
		Quantized struct {
			Block []int64 `json:"weight_block_size"`
		} `json:"quantization_config"`
	}
	if json.Unmarshal(m.source, &c) == nil && len(c.Quantized.Block) == 2 &&
		min(c.Quantized.Block[0], c.Quantized.Block[1]) > 0 {
		return [2]int64(c.Quantized.Block)
	}
	return [2]int64{128, 128}
}

// A block is some rows of the box of a tensor that is a parameter's, or of one of its matrices.
type block struct {
	*stored
	t         int   // which of the parameter's tensors
	matrix    int64 // of a tensor with several
	row, rows int64 // within the matrix
	col, cols int64
	whole     bool // the block is all of the box
}

// blocks splits the tensors of a parameter into chunks of at most size elements, or one row.
func (m *Model) blocks(p *model.Param, size int64) ([]block, error) {
	var list []block
	for t, name := range p.Tensors() {
		names, ok := m.spelled(name)
		if !ok {
			return nil, diag.New(diag.WeightMismatch, "no tensor is called %s", names[0]).
				At("%s", m.Folder)
		}
		s, err := m.stored(p, names)
		if err != nil {
			return nil, err
		}
		list = append(list, s.blocks(t, size)...)
	}
	return list, nil
}

// blocks splits one tensor.
func (s *stored) blocks(t int, size int64) (list []block) {
	r, step := s.param.Region(), int64(1)
	if s.param.Axis == 0 { // rows of the box are a step apart
		step = max(1, s.param.Every)
	}
	b := block{stored: s, t: t, col: r.Cols[0], cols: r.Cols[1] - r.Cols[0]}
	most := max(1, size/b.cols/step) * step
	b.whole = r.Rows[1]-r.Rows[0] <= most
	for b.matrix = r.Matrices[0]; b.matrix < r.Matrices[1]; b.matrix++ {
		for b.row = r.Rows[0]; b.row < r.Rows[1]; b.row += most {
			b.rows = min(most, r.Rows[1]-b.row)
			list = append(list, b)
		}
	}
	return list
}

// load reads the bytes of a block.
func (w *worker) load(b block) (err error) {
	start, size := []int64{b.row}, []int64{b.rows}
	if n := len(b.param.Shape); n > 1 {
		start, size = append(start, b.col), append(size, b.cols)
		if n > 2 {
			start, size = append([]int64{b.matrix}, start...), append([]int64{1}, size...)
		}
	}
	if b.scales == nil {
		w.bytes, err = slice(b.tensor, w.bytes, start, size)
		return err
	}
	at, last := slices.Clone(start), len(start)-1
	n := slices.Clone(size)
	if b.block[0] == 0 { // MXFP4, whose columns are all of the matrix
		n[last] /= mxfp4Block
		if w.scales, err = slice(*b.scales, w.scales, at, n); err == nil {
			w.bytes, err = slice(b.tensor, w.bytes, append(at, 0), append(n, mxfp4Block/2))
		}
		return err
	}
	for i, of := range b.block {
		axis := last - 1 + i
		at[axis], n[axis] = start[axis]/of, (start[axis]+size[axis]-1)/of-start[axis]/of+1
	}
	if w.scales, err = slice(*b.scales, w.scales, at, n); err == nil {
		w.bytes, err = slice(b.tensor, w.bytes, start, size)
	}
	return err
}

// slice reads a part of a tensor into a buffer, which it may replace.
func slice(t safetensors.Tensor, buf []byte, start, size []int64) ([]byte, error) {
	elements := lists.Product(size, func(n int64) int64 { return n })
	buf = lists.Resize(buf, int(t.Shape().Type.Bytes(elements)))
	return buf, t.ReadSlice(buf, start, size)
}

// decode brings the loaded bytes of a block to float32.
func (w *worker) decode(b block, dst []float32) {
	switch of := b.tensor.Shape().Type; {
	case b.scales == nil:
		of.Decode(dst, w.bytes)
	case of == dtype.U8:
		dtype.F4E2M1FN.Decode(dst, w.bytes)
		for i, scale := range w.scales {
			scaleBy(dst[i*mxfp4Block:][:mxfp4Block], dtype.F32FromE8M0(scale))
		}
	default:
		of.Decode(dst, w.bytes)
		row0, col0 := b.row/b.block[0], b.col/b.block[1]
		wide := (b.col+b.cols-1)/b.block[1] - col0 + 1
		w.factors = lists.Resize(w.factors, len(w.scales)*8/b.scales.Shape().Type.Bits())
		b.scales.Shape().Type.Decode(w.factors, w.scales)
		for r := range b.rows {
			factors := w.factors[((b.row+r)/b.block[0]-row0)*wide:][:wide]
			for c := int64(0); c < b.cols; {
				at := (b.col + c) / b.block[1]
				end := min(b.cols, (at+1)*b.block[1]-b.col)
				scaleBy(dst[r*b.cols+c:r*b.cols+end], factors[at-col0])
				c = end
			}
		}
	}
}

// scaleBy multiplies the elements of a block by its scale.
func scaleBy(list []float32, scale float32) {
	for i := range list {
		list[i] *= scale
	}
}

// notFinite counts the numbers of the loaded block that are not finite.
func (w *worker) notFinite(b block) int64 {
	if b.scales == nil {
		return b.tensor.Shape().Type.NotFinite(w.bytes)
	}
	w.rows = lists.Resize(w.rows, int(b.rows*b.cols))
	w.decode(b, w.rows)
	n := int64(0)
	for _, f := range w.rows {
		if math.IsNaN(float64(f - f)) {
			n++
		}
	}
	return n
}
