// Package aten turns the program of torch.export into a model: the graph of its loss.
//
//	archive, err := pt2.Open("model.pt2")
//	...
//	m, err := aten.New(archive)
//	g, err := m.Graph(model.Shape{Batch: 8, Seq: 1024, Elem: dtype.BF16})
//
// # Names of dimensions
//
// Dimensions of ATen have places, and dimensions of the graph have names, by which plans shard and
// policies choose. One idea leads from places to names: an axis of a tensor is a product of
// dimensions. A view that splits an axis splits a dimension, a view that joins axes lists the
// dimensions of one axis, and a transposition puts axes in another order: none of them moves
// anything. An operation that lines two axes up makes their dimensions one. What was split or made
// one is remembered, and the program is read again until nothing new is found; by then the weight
// [out, in] of queries is [heads, head, embed], since a view has split its result and a residual
// has joined its input. Two dimensions of one tensor are never made one: there a tensor is renamed
// on the way, as keys are that come from the queries' sequence.
//
// A dimension has the name that an operation knows: attention knows seq, keys, heads, kv and head,
// the loss vocab, the embedding vocab and embed, experts theirs. Others are called by what they
// are part of, or numbered.
//
// # What becomes of the program
//
// Regions without gradients are inlined. An operation in place becomes the same operation on a
// copy: what it changed is put back into whatever it is a view of, and other views are taken again
// when they are read. Where torch itself decides by strides whether something is a view or a copy,
// a read after such a change is refused. What computes nothing is dropped: assertions, aliases,
// dropout of nothing. The labels stand where the logits stand ([model.InputLabels]): a shift in the
// program is taken out. The mean over labels becomes a sum times [model.InputShare], and what
// counts along the sequence reads [model.InputPositions]. Buffers that no state_dict has are
// written as what they count; tables that count nothing are inputs, as buffers of a state_dict are.
//
// Layers that follow each other in a list of modules become one loop if their operations are equal,
// and if they read the same values from outside, or what the layer before made: the parameters are
// stacked. Layers may differ in turn, as with local and global attention.
//
// What is not supported is listed in one error: every operator, with its module and source line.
package aten

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
)

// A Model is a captured program. It implements [model.Model].
type Model struct {
	archive *pt2.Archive
	sole    map[string]string // the name that a tied parameter goes by
	elem    dtype.DType       // of the program's parameters
	loss    pt2.Ref
	logits  pt2.Ref
	inputs  map[pt2.Ref]pt2.Spec
	params  []model.Param
	stacks  map[string]stack // parameters of loops by name
	// Shifted: the program moves the labels itself. Labels of [model.InputLabels] are moved already.
	shifted bool
	context int64 // the longest sequence of the export's range
	masked  bool  // masks of dropout are inputs
	tables  bool  // buffers that are tables are inputs
	facts   model.Facts
	sparse  map[string]bool // modules that have experts, by path
}

// New reads the program of an archive, which must stay open. An error lists all that is not
// supported. Dropout of more than nothing is not: an engine's random numbers would have to be the
// same under every plan.
func New(a *pt2.Archive) (*Model, error) { return read(newModel(a)) }

// NewMasked is New for programs with dropout, whose graphs take what dropout keeps from the caller:
// [MaskInput] is 1 where an element is kept and 0 elsewhere. It serves to compare a program with
// PyTorch, which draws the masks.
func NewMasked(a *pt2.Archive) (*Model, error) {
	m := newModel(a)
	m.masked = true
	return read(m)
}

// MaskInput names the input with the mask of a module's dropout, whose calls count from 0 on.
func MaskInput(module string, call int) string { return fmt.Sprintf("mask.%s.%d", module, call) }

// read finds the loss of a program and its parameters.
func read(m *Model) (*Model, error) {
	a := m.archive
	for _, s := range a.Program.Outputs {
		ref, _ := s.Arg.(pt2.Ref)
		switch s.Name[strings.LastIndexByte(s.Name, '.')+1:] {
		case "loss":
			m.loss = ref
		case "logits":
			m.logits = ref
		}
	}
	if m.loss == "" {
		return nil, diag.New(diag.NotSupported, "the program returns no loss").
			Try("export the module with labels, and return {\"loss\": ...}")
	}
	m.context = probeSeq
	for _, s := range a.Program.Inputs {
		ref, _ := s.Arg.(pt2.Ref)
		if d := a.Program.Graph.Values[string(ref)].Dims; s.Kind == pt2.UserInput && len(d) > 1 &&
			d[1].Op == "Symbol" {
			m.context = a.Program.Ranges[d[1].Name].Max
		}
	}
	var g *ir.Graph
	err := withTables(func(tables bool) (err error) {
		m.tables = tables
		g, err = m.build(model.Shape{Batch: 2, Seq: probeSeq, Elem: m.elem}, m.loss)
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, v := range g.Params() {
		p, err := m.param(v)
		if err != nil {
			return nil, err
		}
		m.params = append(m.params, p)
	}
	m.describe(g)
	return m, nil
}

// withTables reads a program with all numbers of its buffers known, by which masks and positions
// are found. Where that is refused it is read once more, with tables as inputs; if that is refused
// as well, the first error tells why.
func withTables(read func(tables bool) error) error {
	err := read(false)
	if err == nil || !errors.Is(err, diag.NotSupported) || read(true) != nil {
		return err
	}
	return nil
}

// newModel reads the signature of an archive, but for its outputs.
func newModel(a *pt2.Archive) *Model {
	m := &Model{archive: a, sole: map[string]string{}, inputs: map[pt2.Ref]pt2.Spec{},
		elem: dtype.F32, stacks: map[string]stack{}, sparse: map[string]bool{}}
	for _, group := range a.Tied() {
		for _, name := range group {
			m.sole[name] = group[0]
		}
	}
	for _, s := range a.Program.Inputs {
		if ref, ok := s.Arg.(pt2.Ref); ok {
			m.inputs[ref] = s
			if i := strings.Index(s.Name, ".experts."); i >= 0 {
				m.sparse[s.Name[:i]] = true
			}
			if s.Kind == pt2.Parameter {
				m.elem = a.Program.Graph.Values[string(ref)].Type
			}
		}
	}
	return m
}

// probeSeq is the length of sequences that parameters are named with: a number that weights do not
// have by chance, within every range.
const probeSeq = 7

// Params implements [model.Model].
func (m *Model) Params() []model.Param { return m.params }

// param describes an input of the graph.
func (m *Model) param(v *ir.Value) (model.Param, error) {
	p := model.Param{Name: v.Name, Dims: v.Type.Dims, Source: v.Source}
	first := v.Source
	if s, ok := m.stacks[v.Name]; ok {
		p.Source, p.First, p.Step = s.source, s.first, s.step
		first = strings.Replace(s.source, "{}", strconv.FormatInt(s.first, 10), 1)
	}
	t, err := m.archive.Tensor(first)
	if err != nil {
		return p, err
	}
	p.Tag, p.Shape, p.Buffer = m.tag(first), slices.Clone(t.Dims), !t.Param
	if len(p.Shape) == 0 {
		p.Shape = []int64{1}
	}
	p.To = p.Shape[max(len(p.Shape)-2, 0)]
	return p, nil
}

// Graph implements [model.Model].
func (m *Model) Graph(s model.Shape) (*ir.Graph, error) { return m.build(s, m.loss) }

// Init fills dst with a parameter as the archive has it: training goes on from there.
func (m *Model) Init(p *model.Param, _ uint64, dst []float32) error {
	for i, name := range p.Tensors() {
		t, err := m.archive.Tensor(name)
		if err != nil {
			return err
		}
		whole := make([]float32, t.Shape().Elements())
		if err := t.Read(whole); err != nil {
			return err
		}
		if err := model.Take(p, i, dst, whole); err != nil {
			return err
		}
	}
	return nil
}

// maxReadings bounds how often a program is read to name its dimensions.
const maxReadings = 40

// build reads the program until the names of its dimensions stay.
func (m *Model) build(s model.Shape, result pt2.Ref) (*ir.Graph, error) {
	dims := newTable()
	for range maxReadings {
		dims.changed = false
		r := &maker{Model: m, b: ir.NewBuilder("model"), dims: dims, shape: s,
			matmulType: s.MatmulType, mixed: map[*ir.Value]*node{}, tables: m.tables}
		g, err := r.read(result)
		if err != nil {
			return nil, err
		}
		if renamed := dims.rename(); !dims.changed && !renamed {
			g.Ops = used(g)
			if err := r.separate(g); err != nil {
				return nil, err
			}
			return r.looped(g)
		}
	}
	return nil, diag.New(diag.Internal, "the dimensions of the program got no names in %d readings",
		maxReadings)
}

// separate reports where tokens of several documents meet in a graph.
func (m *maker) separate(g *ir.Graph) error {
	for _, op := range g.Ops {
		if n := m.mixed[op.Out[0]]; n != nil {
			m.missing.add(n, "documents in attention that is written out")
		}
	}
	if len(m.missing) == 0 {
		return nil
	}
	return m.missing.err()
}

// used lists the operations that results depend on.
func used(g *ir.Graph) []*ir.Op {
	want := map[*ir.Value]bool{}
	for _, v := range g.Results {
		want[v] = true
	}
	var list []*ir.Op
	for _, op := range slices.Backward(g.Ops) {
		if !slices.ContainsFunc(op.Out, func(v *ir.Value) bool { return want[v] }) {
			continue
		}
		list = append(list, op)
		for _, v := range op.In {
			want[v] = true
		}
	}
	slices.Reverse(list)
	return list
}

// unsupported lists what rules refused.
type unsupported []string

func (u *unsupported) add(n *node, why string) {
	line := n.Target
	if why != "" {
		line += " (" + why + ")"
	}
	if p := n.path(); p != "" {
		line += " in " + p
	}
	if n.Source != "" {
		line += " at " + n.Source
	}
	if !slices.Contains(*u, line) {
		*u = append(*u, line)
	}
}

func (u unsupported) err() error {
	what := "1 call of the program is"
	if len(u) > 1 {
		what = fmt.Sprintf("%d calls of the program are", len(u))
	}
	return diag.New(diag.NotSupported, "%s not supported:\n  %s", what, strings.Join(u, "\n  ")).
		Try("write these calls with operators that docs/operators.md lists")
}

// eval computes a size.
func (m *maker) eval(e pt2.Expr) int64 {
	n, err := e.Eval(m.symbols)
	if err != nil {
		panic(refusal(fmt.Sprint("the size ", e)))
	}
	return n
}

// elem is the type that the graph has for a type of the program.
func (m *maker) elem(t dtype.DType) dtype.DType {
	switch t {
	case m.Model.elem:
		return m.shape.Elem
	case dtype.S64:
		if m.own == nil { // tokens and places only
			return dtype.S32
		}
	}
	return t
}
