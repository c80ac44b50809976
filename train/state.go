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
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/spmd"
)

// A piece is one array of the state and the tensors of a checkpoint that it is made of: one, or one
// for each layer of a stack, in order.
type piece struct {
	param   *model.Param
	name    string // of the array
	elem    dtype.DType
	tensors []ckpt.Tensor
}

// pieces lists the whole state: masters, then what the optimizer keeps of each.
func (p *Programs) pieces() []piece {
	var list []piece
	for i := range p.Params {
		one := &p.Params[i]
		param := p.Step.Params[i]
		add := func(name, prefix string, elem dtype.DType) {
			pc := piece{param: one, name: name, elem: elem}
			for _, layer := range one.Layers() {
				t := ckpt.Tensor{Name: prefix + layer.Name, DType: elem}
				for _, d := range layer.Dims {
					t.Shape = append(t.Shape, d.Size)
				}
				pc.tensors = append(pc.tensors, t)
			}
			list = append(list, pc)
		}
		add(one.Name, "", dtype.F32)
		for _, s := range p.optimizer.State(param) {
			add(s.Name, s.Name[:len(s.Name)-len(param.Name)], s.Type.Elem)
		}
	}
	return list
}

// bytes is the size of one piece.
func (pc *piece) bytes() int64 { return pc.tensors[0].Bytes() * int64(len(pc.tensors)) }

// isMaster tells parameters from what the optimizer keeps of them.
func (pc *piece) isMaster() bool { return pc.name == pc.param.Name }

// fill puts the state on the devices: each piece as read gives it. Copies that the model computes
// with are made of the masters.
func (t *Trainer) fill(read func(pc *piece, dst []byte) error) error {
	stage := t.programs.Update
	for _, pc := range t.programs.pieces() {
		data := engine.Aligned(int(pc.bytes()))
		if err := read(&pc, data); err != nil {
			return err
		}
		if err := t.place(stage, stage.Args, pc.name, data); err != nil {
			return err
		}
		if elem := t.programs.Shape.Elem; pc.isMaster() && elem != dtype.F32 {
			gradient := t.programs.Gradient
			err := t.place(gradient, gradient.Args, spmd.CopyOf(pc.name), narrow(data, elem))
			if err != nil {
				return err
			}
		}
	}
	return nil
}

// place puts one array of a stage into the state. The memory is given away.
func (t *Trainer) place(s *program.Stage, specs []program.Array, name string, data []byte) error {
	i := slices.IndexFunc(specs, func(a program.Array) bool { return a.Name == name })
	if i < 0 {
		return diag.New(diag.ProgramInvalid, "stage %s has no argument %s", s.Name, name)
	}
	a, err := t.engine.Place(s, specs[i], engine.Given, func(int) ([]byte, error) {
		return data, nil
	})
	if err != nil {
		return err
	}
	t.state.Put(a)
	return nil
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

// narrow rounds f32 to the nearest number of a type of 16 bits, to even in the middle.
func narrow(data []byte, to dtype.DType) []byte {
	if to != dtype.BF16 {
		panic("train: no model keeps its values in " + to.String())
	}
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
	t      *Trainer
	ctx    context.Context
	pieces []piece
	where  map[string]place // of tensors

	mu   sync.Mutex
	held map[string][]byte // arrays that were read and are still wanted
	left map[string]int    // bytes that are
}

type place struct {
	piece *piece
	layer int
}

func (t *Trainer) snapshot(ctx context.Context) *snapshot {
	s := &snapshot{t: t, ctx: ctx, pieces: t.programs.pieces(), where: map[string]place{},
		held: map[string][]byte{}, left: map[string]int{}}
	for i := range s.pieces {
		for k, one := range s.pieces[i].tensors {
			s.where[one.Name] = place{&s.pieces[i], k}
		}
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
func (s *snapshot) array(pc *piece) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if data := s.held[pc.name]; data != nil {
		return data, nil
	}
	a := s.t.state.Get(pc.name)
	if a == nil {
		return nil, diag.New(diag.CheckpointTensor, "the state has no %s", pc.name)
	}
	data, err := a.Read(s.ctx, 0)
	if err != nil {
		return nil, err
	}
	s.held[pc.name], s.left[pc.name] = data, len(data)
	return data, nil
}

func (s *snapshot) release(pc *piece, bytes int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.left[pc.name] -= bytes; s.left[pc.name] <= 0 {
		delete(s.held, pc.name)
	}
}
