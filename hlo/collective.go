package hlo

import (
	"fmt"
	"strings"

	"github.com/deepwell/deepwell/dtype"
)

// A Kind names a collective as HLO does.
type Kind string

// The collectives. CollectiveReduce is one of newer compilers only.
const (
	AllGather           Kind = "all-gather"
	AllReduce           Kind = "all-reduce"
	AllToAll            Kind = "all-to-all"
	CollectiveBroadcast Kind = "collective-broadcast"
	CollectivePermute   Kind = "collective-permute"
	CollectiveReduce    Kind = "collective-reduce"
	RaggedAllToAll      Kind = "ragged-all-to-all"
	ReduceScatter       Kind = "reduce-scatter"
)

// A Collective is one tensor that one instruction sends among devices.
//
// Bytes count for one device and one execution. OperandBytes is what the device brings in and
// ResultBytes what it has afterwards, so for groups of n devices
//
//	all-gather                  ResultBytes = n × OperandBytes
//	reduce-scatter              OperandBytes = n × ResultBytes
//	all-reduce, all-to-all      both are the same
//	collective-permute          both are the same
//	collective-broadcast        both are the same, though only the root's operand is used
//	collective-reduce           both are the same, though only the root's result is used
//	ragged-all-to-all           the buffers, of which a part is used
//
// None of them is the traffic on the wire, which depends on the algorithm.
type Collective struct {
	Kind         Kind        `json:"kind"`
	Group        Group       `json:"group"`
	Type         dtype.DType `json:"type,omitzero"` // of the operand; Invalid if Deepwell lacks it
	Shape        string      `json:"shape"`         // of the operand, as HLO writes it
	OperandBytes int64       `json:"operand_bytes"`
	ResultBytes  int64       `json:"result_bytes"`

	// Count is how often the instruction runs in one run of the program. TripUnknown says that
	// a loop around it has no known trip count and was counted once; Branch, that it is in a
	// branch of a conditional, which may not be taken.
	Count       int64 `json:"count"`
	TripUnknown bool  `json:"trip_unknown,omitzero"`
	Branch      bool  `json:"branch,omitzero"`

	// Async says that the instruction starts the transfer and another one awaits it. Pipelined
	// says that XLA:GPU moved it into another iteration of its loop.
	Async     bool `json:"async"`
	Pipelined bool `json:"pipelined,omitzero"`

	// Operand is the place of the tensor in a combined instruction, which has Operands of them.
	// An all-to-all that has one operand for each peer is one tensor in Parts slices.
	Operand  int `json:"operand"`
	Operands int `json:"operands"`
	Parts    int `json:"parts,omitzero"`

	Name   string `json:"name"`              // of the instruction
	In     string `json:"in"`                // computation that the instruction is in
	OpName string `json:"op_name,omitempty"` // what the author of the program called it
}

// Bytes is the size of the whole tensor as a group sees it: the result of a gather, the operand
// of a scatter.
func (c Collective) Bytes() int64 { return max(c.OperandBytes, c.ResultBytes) }

// collectiveKind tells whether an opcode is a collective. The older of the asynchronous forms
// are opcodes of their own, such as all-gather-start.
func collectiveKind(opcode string) (kind Kind, start, ok bool) {
	name, start := strings.CutSuffix(opcode, "-start")
	switch kind = Kind(name); kind {
	case AllGather, AllReduce, AllToAll, CollectiveBroadcast, CollectivePermute, CollectiveReduce,
		RaggedAllToAll, ReduceScatter:
		return kind, start, true
	}
	return "", false, false
}

// collectives gives the rows of one instruction, none if it is no collective.
func (p *program) collectives(s step) ([]Collective, error) {
	kind, start, ok := collectiveKind(s.opcode)
	if !ok {
		return nil, nil
	}
	operands, result, err := s.shapes()
	if err != nil {
		return nil, err
	}
	config := p.backendConfig(s.instruction)
	row := Collective{
		Kind: kind, Group: p.groupOf(s.instruction),
		Count: s.in.runs, TripUnknown: s.in.tripUnknown, Branch: s.in.branch,
		Async:     (start || s.in.async) && !config.Collective.IsSync,
		Pipelined: config.Collective.IsPipelined,
		Operands:  1, Name: s.name, In: s.in.name, OpName: s.opName,
	}
	// What wraps the instruction is the better place: the wrapper is scheduled, and it stands
	// in a computation that the author wrote. XLA:GPU wraps most collectives in an async-start,
	// and a small sum in a fusion of its own (__triton_collective) inside that.
	if site := s.in.site; site != nil {
		row.Name, row.In = site.name, site.in.name
	}
	results := resultShapes(kind, start, result)
	if kind == AllToAll && len(operands) > 1 && !s.split {
		return []Collective{row.inParts(operands, results)}, nil
	}
	// There is a row for each result: the offsets of a ragged exchange and the root of a
	// broadcast are operands that send nothing.
	n := min(len(operands), len(results))
	rows := make([]Collective, n)
	for i := range n {
		rows[i] = row
		rows[i].Operand, rows[i].Operands = i, n
		rows[i].setTensor(operands[i])
		rows[i].OperandBytes, rows[i].ResultBytes = operands[i].bytes, results[i].bytes
	}
	return rows, nil
}

func (c *Collective) setTensor(operand *shape) {
	c.Type = primitives[operand.typ].typ
	c.Shape = operand.short()
}

// inParts makes one row of an all-to-all that has one operand for each peer: a slice of the tensor.
func (c Collective) inParts(operands []*shape, results []shape) Collective {
	c.Parts = len(operands)
	c.setTensor(operands[0])
	for _, o := range operands {
		c.OperandBytes = satAdd(c.OperandBytes, o.bytes)
	}
	for _, r := range results {
		c.ResultBytes = satAdd(c.ResultBytes, r.bytes)
	}
	return c
}

// resultShapes gives a collective's results, one for each tensor. The older asynchronous forms
// of a gather and a permute carry the operands before them.
func resultShapes(kind Kind, start bool, s *shape) []shape {
	if start && kind != AllReduce && s.isTuple() && len(s.elems) > 1 {
		s = &s.elems[1]
	}
	if s.isTuple() {
		return s.elems
	}
	return []shape{*s}
}

// shapes decodes the shapes of an instruction's operands and of its result.
func (s step) shapes() (operands []*shape, result *shape, err error) {
	for _, id := range s.operands {
		i := s.in.find(id)
		if i == nil {
			return nil, nil, fmt.Errorf("instruction %q has operand %d, which is not in %q",
				s.name, id, s.in.name)
		}
		sh, err := i.result()
		if err != nil {
			return nil, nil, err
		}
		operands = append(operands, sh)
	}
	result, err = s.result()
	return operands, result, err
}

// groupOf gives the devices of a collective. One that names none takes all.
func (p *program) groupOf(i *instruction) Group {
	var g Group
	if d := i.group; d != nil {
		switch {
		case d.pairs > 0:
			return Group{Pairs: d.pairs}
		case d.list != nil:
			g = *d.list
		default:
			g = d.old.group()
		}
	}
	if g.Count == 0 && p.replicas > 0 {
		g = Group{Count: 1, Size: p.replicas}
		if i.group != nil && i.group.global {
			g.Size = satMul(g.Size, max(p.partitions, 1))
		}
		if g.Size > 1 {
			g.Stride = 1
		}
	}
	return g
}
