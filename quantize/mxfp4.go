package quantize

import (
	"fmt"
	"io"
	"math"
	"strings"
	"sync"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/safetensors"
)

// An experts is a matrix of every expert in MXFP4, as gpt-oss has it: BASE_blocks U8 [experts,
// rows, columns/32, 16] and BASE_scales U8 [experts, rows, columns/32]. The elements of NVFP4 are
// the same and stay; a scale of MXFP4 is a power of two, and two of NVFP4 take its place. They hold
// it if it is at most 2¹⁷ below the largest. A block below that is rounded to the smallest scale,
// and the report has the noise of it; none is known in a published checkpoint.
//
// compressed-tensors has a layer for each expert, and gate and up apart, whose rows take turns in
// gate_up_proj. Each expert has its own global scale. modelopt has one tensor BASE for all of them,
// [experts, columns/2, rows], with BASE_weight_scale and one BASE_weight_scale_2.
type experts struct {
	matrix
	base       string
	scales     safetensors.Tensor
	count      int64
	rows, cols int64
	once       sync.Once
	most       int // largest exponent of all, for modelopt
	mostErr    error
}

func (j *job) experts(c choice) (*experts, error) {
	name := c.tensor.Name()
	base := strings.TrimSuffix(name, "_blocks")
	scales, ok := j.src.tensor(base + "_scales")
	dims := c.tensor.Shape().Dims
	fits := ok && len(dims) == 4 && dims[3] == 16 && c.tensor.Shape().Type == dtype.U8 &&
		scales.Shape().Equal(dtype.Shape{Type: dtype.U8, Dims: dims[:3]})
	if !fits {
		return nil, diag.New(diag.WeightQuantized, "%s and its scales are not as gpt-oss has them", name).
			At("%s", c.tensor.File())
	}
	if j.To != dtype.NVFP4 {
		return nil, diag.New(diag.WeightQuantized, "a checkpoint in mxfp4 converts to nvfp4 only").
			Try("--to nvfp4")
	}
	c.format, c.why, c.module = dtype.NVFP4, "", base
	w := &experts{matrix: matrix{choice: c, layout: j.Layout, inputAmax: j.InputAmax}, base: base,
		scales: scales, count: dims[0], rows: dims[1], cols: dims[2] * 32}
	if j.Layout == ModelOpt {
		w.stack()
	} else {
		for _, name := range w.modules() { // each expert's matrices by themselves
			w.nvfp4(name, w.rows/int64(len(w.parts())), w.cols)
		}
	}
	return w, nil
}

// stack lays out modelopt's tensors.
func (w *experts) stack() {
	w.add(w.base, dtype.U8, w.count, w.cols/2, w.rows)
	w.add(w.base+"_weight_scale", dtype.F8E4M3FN, w.count, w.cols/16, w.rows)
	w.add(w.base+"_weight_scale_2", dtype.F32)
	if w.inputAmax > 0 {
		w.add(w.base+"_input_scale", dtype.F32)
	}
}

// parts are the layers that one expert's matrix is.
func (w *experts) parts() []string { return expertParts(w.base) }

func expertParts(base string) []string {
	if strings.HasSuffix(base, ".gate_up_proj") {
		return []string{"gate_proj", "up_proj"}
	}
	return []string{base[strings.LastIndexByte(base, '.')+1:]}
}

func expertName(base string, expert int64, part string) string {
	return fmt.Sprintf("%s.%d.%s", base[:strings.LastIndexByte(base, '.')], expert, part)
}

// modules lists the layers as the configuration names them.
func (w *experts) modules() []string {
	if w.layout == ModelOpt {
		return []string{w.base}
	}
	var list []string
	for e := range w.count {
		for _, part := range w.parts() {
			list = append(list, expertName(w.base, e, part))
		}
	}
	return list
}

func (w *experts) chunks() int { return int(w.count) }

func (w *experts) do(chunk int, b *buffers, f io.WriterAt) (sums, error) {
	q, err := b.read(w.tensor, int64(chunk)*w.rows*w.cols/2, w.rows*w.cols/2)
	if err != nil {
		return sums{}, err
	}
	exponents := make([]byte, w.rows*w.cols/32)
	if _, err := w.scales.ReadAt(exponents, int64(chunk)*int64(len(exponents))); err != nil {
		return sums{}, err
	}
	most := largestExponent(q, exponents)
	if w.layout == ModelOpt {
		if most, err = w.largest(); err != nil {
			return sums{}, err
		}
	}
	scale := grow(&b.scale, w.rows*w.cols/16)
	s, err := rescale(q, scale, exponents, most)
	if err != nil {
		return s, diag.New(diag.WeightNotFinite, "%s, expert %d: %s", w.tensor.Name(), chunk, err)
	}
	out := float32(math.Ldexp(1, most-127-8))
	if w.layout == ModelOpt {
		return s, w.putStacked(f, chunk, q, scale, out, b)
	}
	return s, w.putSeparate(f, chunk, q, scale, out, b)
}

// largest looks at all experts, which share one global scale in modelopt's layout.
func (w *experts) largest() (int, error) {
	w.once.Do(func() {
		q := make([]byte, w.rows*w.cols/2)
		exponents := make([]byte, w.rows*w.cols/32)
		for e := range w.count {
			if _, w.mostErr = w.tensor.ReadAt(q, e*int64(len(q))); w.mostErr != nil {
				return
			}
			if _, w.mostErr = w.scales.ReadAt(exponents, e*int64(len(exponents))); w.mostErr != nil {
				return
			}
			w.most = max(w.most, largestExponent(q, exponents))
		}
	})
	return w.most, w.mostErr
}

func (w *experts) putStacked(f io.WriterAt, chunk int, q, scale []byte, out float32,
	b *buffers) error {
	at := int64(chunk)
	transposed := grow(&b.q, int64(len(q)))
	if err := block.Transpose(transposed, q, int(w.rows), int(w.cols/2)); err != nil {
		return err
	}
	if err := w.outs[0].put(f, transposed, at*int64(len(q))); err != nil {
		return err
	}
	transposed = transposed[:len(scale)]
	if err := block.Transpose(transposed, scale, int(w.rows), int(w.cols/16)); err != nil {
		return err
	}
	if err := w.outs[1].put(f, transposed, at*int64(len(scale))); err != nil || chunk > 0 {
		return err
	}
	return w.putScalars(f, w.outs[2:], out)
}

func (w *experts) putSeparate(f io.WriterAt, chunk int, q, scale []byte, out float32,
	b *buffers) error {
	n := len(w.parts())
	each := len(w.outs) / int(w.count) / n
	for i := range n {
		outs := w.outs[(chunk*n+i)*each:][:each]
		for k, data := range [][]byte{q, scale} {
			some := every(grow(&b.q, int64(len(data)/n)), data, len(data)/int(w.rows), i, n)
			if err := outs[k].put(f, some, 0); err != nil {
				return err
			}
		}
		if err := w.putScalars(f, outs[2:], 1/out); err != nil {
			return err
		}
	}
	return nil
}

// every copies one of every n rows, from the given one on.
func every(dst, src []byte, row, from, n int) []byte {
	for i := 0; i*row < len(dst); i++ {
		copy(dst[i*row:(i+1)*row], src[(i*n+from)*row:])
	}
	return dst
}

// largestExponent is the largest scale of a block that is not all zero, as E8M0; 127 for none.
func largestExponent(q, exponents []byte) int {
	most := -1
	for k, e := range exponents {
		if int(e) > most && !blank(q[k*16:][:16]) {
			most = int(e)
		}
	}
	if most < 0 {
		return 127
	}
	return most
}

func blank(q []byte) bool {
	for _, b := range q {
		if b&0x77 != 0 {
			return false
		}
	}
	return true
}

// rescale writes NVFP4 scales for MXFP4 elements whose largest exponent is most. It changes
// an element only if its block has no exact NVFP4 form.
func rescale(q, scale, exponents []byte, most int) (sums, error) {
	s := sums{n: int64(len(q)) * 2}
	var x [32]float32
	for k, e := range exponents {
		codes := q[k*16:][:16]
		if e == 0xff && !blank(codes) {
			return s, fmt.Errorf("the scale of block %d is NaN", k)
		}
		shift := min(max(int(e)-most+8, -9), 8)
		two := dtype.E4M3FromF32(float32(math.Ldexp(1, shift)))
		scale[2*k], scale[2*k+1] = two, two
		unit := float64(math.Ldexp(1, int(e)-127))
		for i := range x {
			x[i] = dtype.F32FromE2M1(codes[i/2] >> (4 * (i % 2)))
			s.power += float64(x[i]) * float64(x[i]) * unit * unit
			s.amax = max(s.amax, float32(math.Abs(float64(x[i]))*unit))
			if x[i] == 0 {
				s.zeros++
			}
		}
		if int(e)-most+8 < -9 && !blank(codes) {
			factor := float32(math.Ldexp(1, int(e)-most+17))
			block.Pack(codes[:8], x[:16], factor)
			block.Pack(codes[8:], x[16:], factor)
			for i, v := range x {
				back := float64(dtype.F32FromE2M1(codes[i/2]>>(4*(i%2)))) / float64(factor)
				s.noise += (float64(v) - back) * (float64(v) - back) * unit * unit
			}
		}
		for _, c := range codes {
			if c&7 == 0 {
				s.empty++
			}
			if c&0x70 == 0 {
				s.empty++
			}
		}
	}
	return s, nil
}

// isExpertBias knows the biases that go with such matrices.
func isExpertBias(t safetensors.Tensor) bool {
	return strings.HasSuffix(t.Name(), ".experts.gate_up_proj_bias") ||
		strings.HasSuffix(t.Name(), ".experts.down_proj_bias")
}

// A biases is a bias of every expert that goes with its layer in compressed-tensors' layout.
type biases struct {
	choice
	parts []string
	outs  []*output // by expert, then by part
}

func newBiases(c choice) *biases {
	base := strings.TrimSuffix(c.tensor.Name(), "_bias")
	w := &biases{choice: c, parts: expertParts(base)}
	shape := c.tensor.Shape()
	for e := range shape.Dims[0] {
		for _, part := range w.parts {
			w.outs = append(w.outs, &output{name: expertName(base, e, part) + ".bias",
				shape: dtype.Shape{Type: shape.Type, Dims: []int64{shape.Dims[1] / int64(len(w.parts))}}})
		}
	}
	return w
}

func (w *biases) outputs() []*output { return w.outs }

func (w *biases) chunks() int { return 1 }

func (w *biases) do(_ int, b *buffers, f io.WriterAt) (sums, error) {
	raw, err := b.read(w.tensor, 0, w.tensor.Size())
	if err != nil {
		return sums{}, err
	}
	n, size := len(w.parts), w.tensor.Shape().Type.Bits()/8
	each := len(raw) * n / len(w.outs)
	for i, o := range w.outs {
		mine := raw[i/n*each:][:each]
		if err := o.put(f, every(grow(&b.q, int64(each/n)), mine, size, i%n, n), 0); err != nil {
			return sums{}, err
		}
	}
	return sums{}, nil
}
