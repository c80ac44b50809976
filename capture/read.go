package capture

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync/atomic"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/parallel"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
)

// blockElements is how much of a tensor one worker holds at a time: 16 MiB as float32, so that a
// worker has some 40 MiB whatever the model.
const blockElements = 4 << 20

// Read fills dst with a parameter, from the tensors it is made of. It works block by block on all
// processors and may be called from several goroutines.
func (m *Model) Read(p *model.Param, dst []float32) error {
	return m.read(p, dst, blockElements)
}

// read is Read in chunks of at most size elements, or one row.
func (m *Model) read(p *model.Param, dst []float32, size int64) error {
	if m.Program != nil && m.lack == nil {
		return m.Program.read(p, dst)
	}
	if m.weights == nil {
		return m.absent()
	}
	if int64(len(dst)) != p.Size() {
		return diag.New(diag.BufferMismatch, "parameter %s has %d elements, its buffer %d",
			p.Name, p.Size(), len(dst))
	}
	blocks, err := m.blocks(p, size)
	if err != nil {
		return err
	}
	err = parallel.Each(runtime.GOMAXPROCS(0), len(blocks), func() func(int) error {
		w := &worker{p: p, dst: dst}
		return func(i int) error { return w.read(blocks[i]) }
	})
	if errors.Is(err, errNotFinite) { // tell of all of them, whichever block was first
		if bad, scanErr := m.NotFinite(context.Background()); scanErr == nil && len(bad) > 0 {
			return m.notFinite(bad)
		}
	}
	return err
}

// errNotFinite is what a block says that holds a number that is not finite.
var errNotFinite = diag.New(diag.WeightNotFinite, "a weight is not finite")

// A Damaged is a tensor with numbers that are not finite.
type Damaged struct {
	Tensor   string `json:"tensor"`
	Elements int64  `json:"elements"` // that are not finite
}

// String tells it in words: x.weight holds 2 numbers that are.
func (d Damaged) String() string {
	are := "are"
	if d.Elements == 1 {
		are = "is"
	}
	return fmt.Sprintf("%s holds %s that %s", d.Tensor, human.Count(d.Elements, "number"), are)
}

// NotFinite reads every tensor that the parameters are made of, at the speed of the disk or of
// memory, and lists those that hold numbers that are not finite, by name.
func (m *Model) NotFinite(ctx context.Context) ([]Damaged, error) {
	if m.Program != nil && m.lack == nil {
		return m.Program.notFinite()
	}
	if m.weights == nil {
		return nil, m.absent()
	}
	counts := map[string]*atomic.Int64{}
	var list []block
	for _, p := range m.Config.Params() {
		blocks, err := m.blocks(&p, blockElements)
		if err != nil {
			return nil, err
		}
		for _, b := range blocks {
			counts[b.tensor.Name()] = &atomic.Int64{}
		}
		list = append(list, blocks...)
	}
	err := parallel.Each(runtime.GOMAXPROCS(0), len(list), func() func(int) error {
		var w worker
		return func(i int) error {
			if err := ctx.Err(); err != nil {
				return diag.New(diag.Canceled, "stopped while the weights were read").Wrap(err)
			}
			if err := w.load(list[i]); err != nil {
				return err
			}
			counts[list[i].tensor.Name()].Add(w.notFinite(list[i]))
			return nil
		}
	})
	var bad []Damaged
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		if n := counts[name].Load(); n > 0 {
			bad = append(bad, Damaged{name, n})
		}
	}
	return bad, err
}

// notFinite is the error for tensors that hold such numbers.
func (m *Model) notFinite(bad []Damaged) error {
	e := diag.New(diag.WeightNotFinite, "%s not finite", bad[0]).At("%s", m.Folder)
	if len(bad) > 1 {
		total := lists.Sum(bad, func(d Damaged) int64 { return d.Elements })
		e = e.Because("%s of %s tensors are not finite", human.Count(total, "number"),
			human.Thousands(int64(len(bad))))
	}
	return e.Try("take another copy of the weights, or an earlier checkpoint")
}

// A worker holds the buffers of one goroutine.
type worker struct {
	p             *model.Param
	dst           []float32
	bytes, scales []byte
	factors       []float32 // scales as numbers
	rows          []float32 // a block as it stands in the tensor
	turn          []float32 // the same, transposed
}

// read brings one block to its place. Where it belongs is what the parameter says of its first
// element, or of the first element of each column where the parameter goes down columns.
func (w *worker) read(b block) error {
	if err := w.load(b); err != nil {
		return err
	}
	if w.notFinite(b) > 0 {
		return errNotFinite.At("%s", b.tensor.Name())
	}
	width, height := int64(1), b.param.Shape[0]
	if n := len(b.param.Shape); n > 1 {
		height, width = b.param.Shape[n-2], b.param.Shape[n-1]
	}
	place := func(col int64) (int64, error) {
		i, ok := b.param.Inverse(b.t, (b.matrix*height+b.row)*width+b.col+col)
		if !ok {
			return 0, diag.New(diag.Internal, "%s is not part of %s", b.tensor.Name(), w.p.Name)
		}
		return i, nil
	}
	first, err := place(0)
	if err != nil {
		return err
	}
	// part is what the parameter has of the block.
	part := model.Param{Name: w.p.Name, Shape: []int64{b.rows, b.cols}, Axis: b.param.Axis,
		Every: b.param.Every, Transposed: b.param.Transposed}
	part.To = part.Shape[part.Axis]
	step := max(1, part.Every)
	n := b.rows * b.cols / part.To * ((part.To + step - 1) / step)
	part.Dims = []ir.Dim{{Name: "block", Size: n}}
	if !part.Transposed && step == 1 {
		w.decode(b, w.dst[first:first+n])
		return nil
	}
	w.rows = lists.Resize(w.rows, int(b.rows*b.cols))
	w.decode(b, w.rows)
	if b.whole || !part.Transposed {
		return model.Take(&part, 0, w.dst[first:first+n], w.rows)
	}
	w.turn = lists.Resize(w.turn, int(n))
	if err := model.Take(&part, 0, w.turn, w.rows); err != nil {
		return err
	}
	return w.spread(b, part, n, place)
}

// spread copies the columns of a transposed block to their places, which are not side by side.
func (w *worker) spread(b block, part model.Param, n int64,
	place func(col int64) (int64, error)) error {
	across := int64(1) // the step of columns
	if part.Axis == 1 {
		across = max(1, part.Every)
	}
	cols := (b.cols + across - 1) / across
	rows := n / cols
	for col := range cols {
		at, err := place(col * across)
		if err != nil {
			return err
		}
		copy(w.dst[at:at+rows], w.turn[col*rows:][:rows])
	}
	return nil
}
