package train

import (
	"context"
	"encoding/binary"
	"math"
	"slices"
	"sync"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/optim"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/spmd"
	"github.com/deepwell/deepwell/step"
)

// A stateTensor is one array of the state and the tensors of a checkpoint that it is made of: one,
// or one for each layer of a stack, in order.
type stateTensor struct {
	rank    int // the rank of a pipeline that has it
	param   *model.Param
	layout  *spmd.Layout // how it lies on a mesh; nil on one device
	name    string       // of the array
	master  bool         // not what the optimizer keeps
	elem    dtype.DType
	tensors []ckpt.Tensor
}

// A stateShard is where pieces of the state live: on one mesh, or on one rank of a pipeline.
type stateShard struct {
	state  *engine.State
	update *program.Module
	takers []*program.Module // what computes with copies of the masters
	mesh   []ir.Axis
}

// pieces lists the whole state: masters, then what the optimizer keeps of each. What two ranks
// have stands twice.
func pieces(p *step.Programs) []stateTensor {
	var list []stateTensor
	for rank, r := range p.Ranks {
		for i := range r.Params {
			h := &r.RankParams[i]
			l := &h.Layout
			if p.Stages[0].Sharding == nil {
				l = nil
			}
			list = append(list, piecesOf(p, rank, &r.Params[i], h.Param, l)...)
		}
	}
	return list
}

// piecesOf lists what is kept of one parameter.
func piecesOf(p *step.Programs, home int, one *model.Param, param optim.Param,
	l *spmd.Layout) []stateTensor {
	var list []stateTensor
	add := func(name, prefix string, elem dtype.DType) {
		pc := stateTensor{rank: home, param: one, layout: l, name: name, master: prefix == "",
			elem: elem}
		for _, layer := range one.Layers() {
			t := ckpt.Tensor{Name: prefix + layer.Name, DType: elem}
			for _, d := range layer.Dims {
				t.Shape = append(t.Shape, d.Size)
			}
			pc.tensors = append(pc.tensors, t)
		}
		list = append(list, pc)
	}
	add(param.Name, "", dtype.F32)
	for _, s := range p.Optimizer.State(param) {
		add(s.Name, s.Name[:len(s.Name)-len(param.Name)], s.Type.Elem)
	}
	return list
}

// bytes is the size of one piece.
func (pc *stateTensor) bytes() int64 { return pc.tensors[0].Bytes() * int64(len(pc.tensors)) }

// A boxReader gives boxes of the tensors of a checkpoint, as a [ckpt.Source] does.
type boxReader interface {
	ReadSlice(name string, box ckpt.Box, dst []byte) error
}

// fill puts the state on the devices of this process: the box that each device has of a tensor, as
// src gives it. Copies that the model computes with are made of the masters.
func (t *Trainer) fill(src boxReader) error {
	homes := t.exec.homes()
	var garbage collector
	for _, pc := range pieces(t.programs) {
		h := homes[pc.rank]
		if h == nil {
			continue
		}
		garbage.add(pc.bytes())
		ways := []way{{stage: h.update, name: pc.name, elem: pc.elem}}
		if pc.layout != nil {
			ways[0].part = pc.layout.Stored
		}
		name := program.Copy.Of(pc.name)
		at := slices.IndexFunc(h.takers, func(s *program.Module) bool { return argument(s, name) >= 0 })
		if pc.master && at >= 0 {
			ways = append(ways, way{stage: h.takers[at], name: name, elem: t.programs.Shape.Elem})
			if pc.layout != nil {
				ways[1].part = pc.layout.Compute
			}
		}
		if err := pc.readParts(src, h.mesh, ways); err != nil {
			return err
		}
		for _, w := range ways {
			if err := t.place(h, w); err != nil {
				return err
			}
		}
	}
	return t.exec.quantize()
}

// A way is how the devices of a stage have a piece: the part of each, in its bytes.
type way struct {
	stage *program.Module
	name  string
	elem  dtype.DType
	part  ir.Type // zero on one device
	parts [][]byte
}

// readParts reads the parts of all devices, tensor by tensor, so that a source that computes or
// fetches a tensor does so once. Devices that have the same box get copies of it.
func (pc *stateTensor) readParts(src boxReader, mesh []ir.Axis, ways []way) error {
	for k, one := range pc.tensors {
		for i := range ways {
			w := &ways[i]
			if w.parts == nil {
				w.parts = make([][]byte, len(w.stage.Devices))
			}
			for device := range w.parts {
				if err := pc.readPart(src, one, k, mesh, w, device); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// readPart reads what a device has of the k-th tensor, which is f32 for a copy too.
func (pc *stateTensor) readPart(src boxReader, one ckpt.Tensor, k int, mesh []ir.Axis, w *way,
	device int) error {
	dims, part := pc.param.Dims, w.part
	if pc.layout != nil {
		dims = pc.layout.Whole
	} else {
		part = ir.Type{Dims: dims}
	}
	if pc.param.Stacked() { // layers come first, and no axis cuts them
		dims, part.Dims = dims[1:], part.Dims[1:]
	}
	size := part.Shape().Elements()
	width := int64(w.elem.Bits() / 8)
	if w.parts[device] == nil {
		w.parts[device] = engine.Aligned(int(size * width * int64(len(pc.tensors))))
	}
	dst := w.parts[device][int64(k)*size*width:][:size*width]
	box := spmd.BoxOf(mesh, dims, part, device)
	for other := range device {
		if slices.Equal(spmd.BoxOf(mesh, dims, part, other).Start, box.Start) {
			copy(dst, w.parts[other][int64(k)*size*width:])
			return nil
		}
	}
	wide := int64(one.DType.Bits() / 8)
	read := make([]byte, one.Bytes()/max(times(one.Shape), 1)*times(box.Size))
	if err := src.ReadSlice(one.Name, ckpt.Box{Start: box.Start, Size: box.Size}, read); err != nil {
		return err
	}
	if wide != width {
		read = roundBF16(read)
	}
	box.Take(dst, read, width)
	return nil
}

func times(list []int64) int64 {
	n := int64(1)
	for _, x := range list {
		n *= x
	}
	return n
}

// A computed boxReader makes a tensor whole when it is first asked for, and keeps it until another
// is.
type computed struct {
	tensors map[string]ckpt.Tensor
	params  map[string]*model.Param // of masters
	make    func(name string, param *model.Param, dst []byte) error
	held    ckpt.Memory
}

// computed makes a boxReader of the state; param is nil for what the optimizer keeps.
func (t *Trainer) computed(make func(name string, param *model.Param, dst []byte) error) *computed {
	c := &computed{tensors: tensors(t.programs), params: map[string]*model.Param{}, make: make}
	for _, pc := range pieces(t.programs) {
		if !pc.master {
			continue
		}
		layers := pc.param.Layers()
		for k, one := range pc.tensors {
			c.params[one.Name] = &layers[k]
		}
	}
	return c
}

// tensors lists what a checkpoint of the state has, by name.
func tensors(p *step.Programs) map[string]ckpt.Tensor {
	all := map[string]ckpt.Tensor{}
	for _, pc := range pieces(p) {
		for _, one := range pc.tensors {
			all[one.Name] = one
		}
	}
	return all
}

// ReadSlice implements boxReader.
func (c *computed) ReadSlice(name string, box ckpt.Box, dst []byte) error {
	if c.held.Bytes(name) == nil {
		c.held = ckpt.Memory{}
		whole, err := c.held.Add(c.tensors[name])
		if err != nil {
			return err
		}
		if err := c.make(name, c.params[name], whole); err != nil {
			return err
		}
	}
	return c.held.ReadSlice(name, box, dst)
}

// initial gives the state before training: what init makes of the masters, and zeros.
func initial(init func(p *model.Param, dst []float32) error) func(string, *model.Param,
	[]byte) error {
	return func(_ string, p *model.Param, dst []byte) error {
		if p == nil {
			return nil
		}
		x := make([]float32, len(dst)/4)
		if err := init(p, x); err != nil {
			return err
		}
		put(dst, x)
		return nil
	}
}

// argument finds an argument of a stage, or gives -1.
func argument(s *program.Module, name string) int {
	return slices.IndexFunc(s.Args, func(a program.Array) bool { return a.Name == name })
}

// place puts one array of a stage into the state, on each device its part. The memory is given
// away.
func (t *Trainer) place(h *stateShard, w way) error {
	i := argument(w.stage, w.name)
	if i < 0 {
		return diag.New(diag.ProgramInvalid, "stage %s has no argument %s", w.stage.Name, w.name)
	}
	a, err := t.opts.Engine.Place(w.stage, w.stage.Args[i], engine.Given,
		func(device int) ([]byte, error) { return w.parts[device], nil })
	if err != nil {
		return err
	}
	h.state.Put(a)
	return nil
}

// cut takes a device's part of the bytes of a whole array.
func cut(mesh []ir.Axis, whole []ir.Dim, data []byte, part ir.Type, device int) []byte {
	n := int64(1)
	for _, d := range whole {
		n *= d.Size
	}
	out := engine.Aligned(int(part.Shape().Elements() * (int64(len(data)) / n)))
	spmd.TakeShardBytes(out, data, mesh, whole, part, device)
	return out
}

// put writes numbers as little-endian f32, which is how all engines have them.
func put(dst []byte, x []float32) {
	for i, v := range x {
		binary.LittleEndian.PutUint32(dst[4*i:], math.Float32bits(v))
	}
}

// numbers reads f32 or bf16.
func numbers(b []byte, elem dtype.DType) []float32 {
	size := elem.Bits() / 8
	list := make([]float32, len(b)/size)
	for i := range list {
		var bits uint32
		if size == 4 {
			bits = binary.LittleEndian.Uint32(b[4*i:])
		} else {
			bits = uint32(binary.LittleEndian.Uint16(b[2*i:])) << 16
		}
		list[i] = math.Float32frombits(bits)
	}
	return list
}

// roundBF16 rounds f32 to the nearest bf16, to even in the middle.
func roundBF16(data []byte) []byte {
	out := engine.Aligned(len(data) / 2)
	for i, x := range numbers(data, dtype.F32) {
		b := math.Float32bits(x)
		if b&0x7fffffff > 0x7f800000 {
			b |= 1 << 22 // stays no number
		} else {
			b += 0x7fff + b>>16&1
		}
		binary.LittleEndian.PutUint16(out[2*i:], uint16(b>>16))
	}
	return out
}

// A snapshot gives the state to a checkpoint, array by array.
type snapshot struct {
	ctx    context.Context
	homes  []*stateShard
	pieces []stateTensor
	where  map[string]place // of tensors

	mu   sync.Mutex
	held map[string][]byte // arrays that were read and are still wanted
	left map[string]int    // bytes that are
	done collector         // of arrays that are not
	// sent are arrays that another process has sent, which stay until the snapshot is done with.
	sent map[string]bool
}

type place struct {
	piece *stateTensor
	layer int
}

func (t *Trainer) snapshot(ctx context.Context) *snapshot {
	s := &snapshot{ctx: ctx, homes: t.exec.homes(), where: map[string]place{},
		held: map[string][]byte{}, left: map[string]int{}, sent: map[string]bool{}}
	for _, pc := range pieces(t.programs) {
		if _, twice := s.where[pc.tensors[0].Name]; twice {
			continue // another rank has it as well
		}
		for k, one := range pc.tensors {
			s.where[one.Name] = place{&pc, k}
		}
		s.pieces = append(s.pieces, pc)
	}
	return s
}

// Tensors implements ckpt.Source.
func (s *snapshot) Tensors() []ckpt.Tensor {
	var list []ckpt.Tensor
	for _, pc := range s.pieces {
		list = append(list, pc.tensors...)
	}
	return list
}

// ReadSlice implements ckpt.Source.
func (s *snapshot) ReadSlice(name string, box ckpt.Box, dst []byte) error {
	at, ok := s.where[name]
	if !ok {
		return diag.New(diag.CheckpointTensor, "the state has no %s", name)
	}
	whole, err := s.array(at.piece)
	if err != nil {
		return err
	}
	one := at.piece.tensors[at.layer]
	from, ok := offset(one, box)
	if !ok {
		return diag.New(diag.CheckpointTensor, "%s is read in one run of bytes, not by %s", name, box)
	}
	copy(dst, whole[int64(at.layer)*one.Bytes()+from:][:len(dst)])
	s.release(at.piece, len(dst))
	return nil
}

// offset gives the place of a box whose elements follow each other without a gap.
func offset(t ckpt.Tensor, box ckpt.Box) (bytes int64, ok bool) {
	stride, whole := int64(t.DType.Bits()/8), true
	for i, d := range slices.Backward(t.Shape) {
		if !whole && box.Size[i] != 1 {
			return 0, false
		}
		whole = whole && box.Size[i] == d
		bytes += box.Start[i] * stride
		stride *= d
	}
	return bytes, true
}

// array reads an array from the device, and keeps it until all of its tensors were taken.
func (s *snapshot) array(pc *stateTensor) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if data := s.held[pc.name]; data != nil {
		return data, nil
	}
	var a *engine.Array
	if h := s.homes[pc.rank]; h != nil {
		a = h.state.Get(pc.name)
	}
	if a == nil {
		return nil, diag.New(diag.CheckpointTensor, "the state has no %s", pc.name)
	}
	data, err := gather(s.ctx, a, pc, s.homes[pc.rank].mesh)
	if err != nil {
		return nil, err
	}
	s.held[pc.name], s.left[pc.name] = data, len(data)
	return data, nil
}

// gather reads an array from the devices that have different parts of it.
func gather(ctx context.Context, a *engine.Array, pc *stateTensor, mesh []ir.Axis) ([]byte, error) {
	if pc.layout == nil {
		return a.Read(ctx, 0)
	}
	whole := make([]byte, pc.bytes())
	for device := range a.Parts() {
		if !first(mesh, pc.layout.Stored, device) {
			continue
		}
		part, err := a.Read(ctx, device)
		if err != nil {
			return nil, err
		}
		spmd.PutShardBytes(whole, part, mesh, pc.layout.Whole, pc.layout.Stored, device)
	}
	return whole, nil
}

// first tells whether a device is the first of those that have the same part.
func first(mesh []ir.Axis, part ir.Type, device int) bool {
	for _, a := range slices.Backward(mesh) {
		if at := device % int(a.Size); at != 0 && part.Place.On(a.Name) == "" {
			return false
		}
		device /= int(a.Size)
	}
	return true
}

// rewind lets the state be read once more from its beginning.
func (s *snapshot) rewind() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name := range s.held {
		if !s.sent[name] {
			delete(s.held, name)
		}
	}
}

func (s *snapshot) release(pc *stateTensor, bytes int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.sent[pc.name] {
		return
	}
	if s.left[pc.name] -= bytes; s.left[pc.name] <= 0 {
		delete(s.held, pc.name)
		s.done.add(pc.bytes())
	}
}
