package train

import (
	"context"
	"errors"
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

// A stateTensor is one array of the state (a parameter, or one of its moments) and the checkpoint
// tensors that it is made of: one, or one for each layer of a stack, in order. Checkpoints have one
// tensor per layer whatever the programs, so a run may move between plans.
type stateTensor struct {
	rank    int // the pipeline rank that stores it
	param   *model.Param
	layout  *spmd.Layout // how it is sharded; nil on one device
	name    string       // of the program argument
	master  bool         // the parameter itself, in f32, and not a moment
	elem    dtype.DType
	tensors []ckpt.Tensor // of the whole array, not of a shard
}

// A stateShard is what one pipeline rank holds of the state, and the programs that use it.
type stateShard struct {
	state   *engine.State
	update  *program.Module
	readers []*program.Module // of stages: they read parameters or copies of them
	mesh    []ir.Axis
}

// stateTensors lists the state of all ranks: each parameter, followed by its moments. A parameter
// that two ranks share is listed for both.
func stateTensors(p *step.Programs) []stateTensor {
	var list []stateTensor
	for rank, r := range p.Ranks {
		for i := range r.Params {
			h := &r.RankParams[i]
			l := &h.Layout
			if p.Stages[0].Sharding == nil {
				l = nil
			}
			list = append(list, tensorsOf(p, rank, &r.Params[i], h.Param, l)...)
		}
	}
	return list
}

// tensorsOf lists what is stored of one parameter: the f32 master, then the optimizer's moments.
func tensorsOf(p *step.Programs, home int, one *model.Param, param optim.Param,
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

// bytes is the size of the whole array, over all devices.
func (pc *stateTensor) bytes() int64 { return pc.tensors[0].Bytes() * int64(len(pc.tensors)) }

// A boxReader reads boxes (hyperrectangles) of checkpoint tensors, as a [ckpt.Source] does.
type boxReader interface {
	// ReadSlice fills dst with the elements of a box in row-major order.
	ReadSlice(name string, box ckpt.Box, dst []byte) error
}

// fill puts the state on the devices of this process, tensor by tensor: of a stack, the host holds
// no more than one layer. Compute copies of the masters (bf16 under mixed precision) are made on
// the way; quantized ones by their own program.
func (t *Trainer) fill(ctx context.Context, src boxReader) error {
	shards := t.exec.stateShards()
	for _, pc := range stateTensors(t.programs) {
		h := shards[pc.rank]
		if h == nil {
			continue
		}
		// The array that the update reads, sharded as it is stored (over FSDP devices too).
		ways := []target{{module: h.update, name: pc.name, elem: pc.elem}}
		if pc.layout != nil {
			ways[0].local = pc.layout.Stored
		}
		name := program.Copy.Of(pc.name)
		at := slices.IndexFunc(h.readers, func(m *program.Module) bool { return argument(m, name) >= 0 })
		// The compute copy, sharded as stages read it, where they do not read the master itself.
		if pc.master && at >= 0 {
			ways = append(ways, target{module: h.readers[at], name: name, elem: t.programs.Shape.Elem})
			if pc.layout != nil {
				ways[1].local = pc.layout.Compute
			}
		}
		if err := t.fillArrays(ctx, &pc, src, h, ways); err != nil {
			return err
		}
	}
	return t.exec.quantize(ctx)
}

// fillArrays fills the arrays of one stateTensor, and puts them into the state.
func (t *Trainer) fillArrays(ctx context.Context, pc *stateTensor, src boxReader, h *stateShard,
	ways []target) error {
	for i := range ways {
		w := &ways[i]
		at := argument(w.module, w.name)
		if at < 0 {
			return diag.New(diag.ProgramInvalid, "stage %s has no argument %s", w.module.Name, w.name)
		}
		var err error
		if w.array, err = t.opts.Engine.Allocate(w.module, w.module.Args[at]); err != nil {
			return err
		}
		defer func() {
			if w.array != nil {
				w.array.Free()
			}
		}()
	}
	// Tensor by tensor in the outer loop: see computed.
	for k, one := range pc.tensors {
		for i := range ways {
			if err := pc.fillLayer(ctx, src, one, k, h.mesh, &ways[i], t.opts.Engine.Has); err != nil {
				return err
			}
		}
	}
	for i := range ways {
		w := &ways[i]
		if err := w.array.Filled(); err != nil {
			return err
		}
		h.state.Put(w.array)
		w.array = nil
	}
	return nil
}

// A target is one array to fill: the program argument that it becomes.
type target struct {
	module *program.Module
	name   string
	elem   dtype.DType
	local  ir.Type // of a shard; zero on one device
	array  *engine.Array
	// read and data are a box as the source has it, and as the shard has it; all layers use them.
	read, data []byte
}

// fillLayer writes the k-th tensor of an array to the devices that this process has. A box that
// several devices store (dp, or parameters that an axis does not shard) is read once. The source
// has masters in f32 also for a compute copy, which is rounded here.
func (pc *stateTensor) fillLayer(ctx context.Context, src boxReader, one ckpt.Tensor, k int,
	mesh []ir.Axis, w *target, has func(device int) bool) error {
	dims, part := pc.param.Dims, w.local
	if pc.layout != nil {
		dims = pc.layout.Whole
	} else {
		part = ir.Type{Dims: dims}
	}
	if pc.param.Stacked() { // the layer dimension comes first, and is not sharded
		dims, part.Dims = dims[1:], part.Dims[1:]
	}
	// A shard has its layers one after the other: layer k begins at k·size bytes.
	width := int64(w.elem.Bits() / 8)
	size := part.Shape().Elements() * width
	done := map[int]bool{}
	for device, id := range w.module.Devices {
		if done[device] || !has(id) {
			continue
		}
		box := spmd.BoxOf(mesh, dims, part, device)
		data, err := w.readLayer(src, one, box, size)
		if err != nil {
			return err
		}
		for other := device; other < len(w.module.Devices); other++ {
			if !has(w.module.Devices[other]) ||
				!slices.Equal(spmd.BoxOf(mesh, dims, part, other).Start, box.Start) {
				continue
			}
			done[other] = true
			if err := w.array.WriteAt(ctx, other, int64(k)*size, data); err != nil {
				return err
			}
		}
	}
	return nil
}

// readLayer reads a box of a tensor, and gives it as a shard of size bytes has it, until the next
// call.
func (w *target) readLayer(src boxReader, one ckpt.Tensor, box spmd.Box, size int64) ([]byte,
	error) {
	bytes := one.Bytes() / max(times(one.Shape), 1) * times(box.Size)
	w.read = slices.Grow(w.read[:0], int(bytes))[:bytes]
	read := w.read
	if err := src.ReadSlice(one.Name, ckpt.Box{Start: box.Start, Size: box.Size}, read); err != nil {
		return nil, err
	}
	if one.DType != w.elem {
		read = convert(read, one.DType, w.elem)
	}
	if _, _, dense := box.Span(box.Start, box.Size); dense && int64(len(read)) == size {
		return read, nil
	}
	w.data = slices.Grow(w.data[:0], int(size))[:size]
	if int64(len(read)) < size {
		clear(w.data) // zeros beyond the box
	}
	box.Take(w.data, read, int64(w.elem.Bits()/8))
	return w.data, nil
}

// times is the product of a list: the elements of a shape.
func times(list []int64) int64 {
	n := int64(1)
	for _, x := range list {
		n *= x
	}
	return n
}

// computed is a boxReader that makes a tensor whole when it is first read, and keeps it until
// another one is. It reads from functions that fill whole tensors: initializers, or another state
// in memory.
type computed struct {
	tensors map[string]ckpt.Tensor
	params  map[string]*model.Param // of masters
	make    func(name string, param *model.Param, dst []byte) error
	held    ckpt.Memory
	// ofExperts: make also fills a part of a layer's experts, those from first on are held.
	ofExperts bool
	first     int64
}

// computed returns a boxReader over a function that fills one tensor; param is nil for moments.
func (t *Trainer) computed(make func(name string, param *model.Param, dst []byte) error) *computed {
	c := &computed{tensors: tensors(t.programs), params: map[string]*model.Param{}, make: make}
	for _, pc := range stateTensors(t.programs) {
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

// tensors returns the tensors of a checkpoint of these programs, by name.
func tensors(p *step.Programs) map[string]ckpt.Tensor {
	all := map[string]ckpt.Tensor{}
	for _, pc := range stateTensors(p) {
		for _, one := range pc.tensors {
			all[one.Name] = one
		}
	}
	return all
}

// ReadSlice implements boxReader.
func (c *computed) ReadSlice(name string, box ckpt.Box, dst []byte) error {
	one, param, first := c.tensors[name], c.params[name], int64(0)
	if c.ofExperts && param != nil && param.HasExperts() {
		// The experts of a layer are 45 GB of DeepSeek-V3; a device has a few of them.
		first = box.Start[0]
		some := param.SliceExperts(first, first+box.Size[0])
		param, one.Shape = &some, append([]int64{box.Size[0]}, one.Shape[1:]...)
		box.Start = append([]int64{0}, box.Start[1:]...)
	}
	// Tensors are read in order, all boxes of one before the next, so one is enough to hold.
	if c.held.Bytes(name) == nil || c.first != first || int64(len(c.held.Bytes(name))) != one.Bytes() {
		whole, err := c.held.Only(one)
		if err != nil {
			return err
		}
		c.first = first
		if err := c.make(name, param, whole); err != nil {
			return err
		}
	}
	return c.held.ReadSlice(name, box, dst)
}

// initial returns the state before the first step: parameters from init, moments zero.
func initial(init func(p *model.Param, dst []float32) error) func(string, *model.Param,
	[]byte) error {
	var x []float32
	return func(_ string, p *model.Param, dst []byte) error {
		if p == nil {
			return nil
		}
		x = slices.Grow(x[:0], len(dst)/4)[:len(dst)/4]
		clear(x)
		if init == nil {
			return diag.New(diag.BadInput, "there is no Init for the parameters")
		}
		if err := init(p, x); err != nil {
			if _, ok := errors.AsType[*diag.Error](err); ok {
				return err
			}
			return diag.New(diag.BadInput, "Init of %s failed", p.Name).Wrap(err)
		}
		dtype.F32.Encode(dst, x)
		return nil
	}
}

// argument returns the index of a program's argument, or -1.
func argument(m *program.Module, name string) int {
	return slices.IndexFunc(m.Args, func(a program.Array) bool { return a.Name == name })
}

// shardBytes copies a device's shard out of a whole array.
func shardBytes(mesh []ir.Axis, whole []ir.Dim, data []byte, part ir.Type, device int) []byte {
	n := int64(1)
	for _, d := range whole {
		n *= d.Size
	}
	out := engine.Aligned(int(part.Shape().Elements() * (int64(len(data)) / n)))
	spmd.TakeShardBytes(out, data, mesh, whole, part, device)
	return out
}

// floats decodes elements of a float type.
func floats(b []byte, elem dtype.DType) []float32 {
	list := make([]float32, len(b)*8/elem.Bits())
	elem.Decode(list, b)
	return list
}

// convert rounds elements of one float type to another, to the nearest, ties to even.
func convert(b []byte, from, to dtype.DType) []byte {
	x := floats(b, from)
	out := make([]byte, len(x)*to.Bits()/8)
	to.Encode(out, x)
	return out
}

// A snapshot reads the state for a checkpoint by boxes, as they are asked for.
type snapshot struct {
	ctx    context.Context
	shards []*stateShard
	arrays []stateTensor
	where  map[string]place // of tensors

	// sliced tells that this process has only some shards: it reads boxes inside of them.
	sliced bool

	mu     sync.Mutex      // ckpt reads tensors concurrently
	layers map[held][]byte // that have bytes left to read
	left   map[held]int    // bytes of each that are left to read
	// sent are arrays received from another process. They stay, since they cannot be read from a
	// device again.
	sent map[string][]byte
}

// A place is where a checkpoint tensor is found: a layer of an array.
type place struct {
	tensor *stateTensor
	layer  int
}

// snapshot lists the state once; of a parameter that two ranks share, the first copy is saved.
func (t *Trainer) snapshot(ctx context.Context) *snapshot {
	s := &snapshot{ctx: ctx, shards: t.exec.stateShards(), where: map[string]place{},
		layers: map[held][]byte{}, left: map[held]int{}, sent: map[string][]byte{}}
	s.sliced = t.opts.Processes != nil && t.opts.Processes.Client
	for _, pc := range stateTensors(t.programs) {
		if _, twice := s.where[pc.tensors[0].Name]; twice {
			continue // another rank has it as well
		}
		for k, one := range pc.tensors {
			s.where[one.Name] = place{&pc, k}
		}
		s.arrays = append(s.arrays, pc)
	}
	return s
}

// Tensors implements ckpt.Source.
func (s *snapshot) Tensors() []ckpt.Tensor {
	var list []ckpt.Tensor
	for _, pc := range s.arrays {
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
	one := at.tensor.tensors[at.layer]
	whole := s.sent[at.tensor.name]
	if whole == nil {
		return s.readBox(at, one, box, dst)
	}
	from, ok := offset(one, box)
	if !ok {
		return diag.New(diag.CheckpointTensor, "%s is read in one run of bytes, not by %s", name, box)
	}
	copy(dst, whole[int64(at.layer)*one.Bytes()+from:][:len(dst)])
	return nil
}

// offset returns the byte offset of a box that is contiguous in its tensor (row-major); ok is false
// for others.
func offset(t ckpt.Tensor, box ckpt.Box) (bytes int64, ok bool) {
	// From the last dimension: once a box does not span a dimension, all before it must have size 1.
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

// gather reads an array from the first device of each distinct shard and joins the shards.
func gather(ctx context.Context, a *engine.Array, pc *stateTensor, mesh []ir.Axis) ([]byte, error) {
	if pc.layout == nil {
		return a.Read(ctx, 0)
	}
	whole := make([]byte, pc.bytes())
	// Reading every replica would cost bandwidth and give the same bytes.
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

// first reports whether a device is the first of the replicas of its shard.
func first(mesh []ir.Axis, part ir.Type, device int) bool {
	// Devices are numbered row-major over the mesh: the last axis varies fastest. A replica is first
	// if its coordinate is 0 on every axis that does not shard the array.
	for _, a := range slices.Backward(mesh) {
		if at := device % int(a.Size); at != 0 && part.Place.On(a.Name) == "" {
			return false
		}
		device /= int(a.Size)
	}
	return true
}

// rewind lets the state be read again from its beginning, after a save that failed.
func (s *snapshot) rewind() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.layers)
	clear(s.left)
}
