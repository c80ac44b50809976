package hlo

import (
	"cmp"
	"encoding/json"
	"fmt"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/wire"
)

// The field numbers in this file come from xla/service/hlo.proto and, for the configuration, from
// xla/xla.proto at openxla/xla e5d008b; the plugins before and after it agree on them.

// A program is an HloModuleProto with the parts of its configuration that matter here.
type program struct {
	name         string
	entryID      int64
	computations []*computation
	byID         map[int64]*computation
	schedule     map[int64][]int64 // computation → instructions in the order of execution
	aliases      []rawAlias
	donors       []int64
	payloads     [][]byte // backend configurations that instructions refer to by number
	parsed       map[int64]backendConfig
	replicas     int64
	partitions   int64
}

// A rawAlias is an entry of HloInputOutputAliasProto.
type rawAlias struct {
	result     []int64 // path into the result tuple
	param      int64
	paramIndex []int64 // path into a parameter that is a tuple
	must       bool
}

// A computation is a list of instructions, and what the walk through the calls finds out on it.
type computation struct {
	name   string
	id     int64
	rootID int64
	list   []*instruction // in the order of execution
	byID   map[uint32]*instruction

	visited visit
	edges   []edge
	reach
}

// An instruction keeps what the account may need; everything else of the proto is dropped.
type instruction struct {
	name, opcode, opName string
	target               string // of a custom call
	id                   int64
	param                int64
	shape                []byte // ShapeProto, decoded once when it is asked for
	decoded              *shape
	config               []byte
	payload              int64 // index into the payloads plus 1, in place of config
	operands, called     []int64
	group                *instructionGroup // of a collective
	split                bool              // a dimension is given
	index                int64             // of get-tuple-element
	contracting          []int64           // of a dot: dimensions of its first operand
}

// An instructionGroup holds what a collective says of its devices.
type instructionGroup struct {
	old    tally  // replica_groups, as plugins wrote them before 2025
	list   *Group // one of the three newer forms
	pairs  int64
	global bool // a channel is given: partitions count beside replicas
}

// key makes an instruction's number one of its computation. Newer plugins put the computation's
// number into the upper half; older ones have numbers below 2³² that are unique in the module.
func key(id int64) uint32 { return uint32(id) }

func decodeWithConfig(msg []byte) (p *program, err error) {
	var module, config []byte
	if err := (wire.Into{1: &module, 2: &config}).Read(msg); err != nil { // hlo_module, config
		return nil, err
	}
	if p, err = decodeModule(module); err != nil {
		return nil, err
	}
	return p, p.decodeCounts(config, 4, 5) // replica_count, num_partitions
}

// decodeCounts reads the numbers of replicas and partitions from two fields.
func (p *program) decodeCounts(msg []byte, replicas, partitions protowire.Number) error {
	err := wire.Into{replicas: &p.replicas, partitions: &p.partitions}.Read(msg)
	p.replicas, p.partitions = max(p.replicas, 0), max(p.partitions, 0)
	return err
}

func decodeModule(msg []byte) (p *program, err error) {
	p = &program{
		byID:     map[int64]*computation{},
		schedule: map[int64][]int64{},
		parsed:   map[int64]backendConfig{},
	}
	err = wire.Into{
		1:  &p.name,
		3:  p.decodeComputation,
		6:  &p.entryID,
		7:  p.decodeSchedule,
		8:  wire.Into{1: p.decodeAlias}, // input_output_alias: entries
		18: wire.Into{1: p.decodeDonor}, // buffer_donor: entries
		22: func(b []byte) error { // payloads
			p.payloads = append(p.payloads, b)
			return nil
		},
		// device_assignment, which a program without configuration may have
		15: func(b []byte) error { return p.decodeCounts(b, 1, 2) },
	}.Read(msg)
	for _, c := range p.computations {
		c.sort(p.schedule[c.id])
	}
	return p, err
}

// decodeSchedule reads HloScheduleProto, a map from computation to instructions.
func (p *program) decodeSchedule(msg []byte) (err error) {
	for entry := range wire.Fields(msg, &err) {
		var id int64
		var order []int64
		// key, value: instruction_ids
		err = wire.Into{1: &id, 2: wire.Into{1: &order}}.Read(entry.B)
		p.schedule[id] = order
	}
	return err
}

func (p *program) decodeAlias(msg []byte) error {
	var a rawAlias
	var kind int64
	// output_shape_index, parameter_number, parameter_shape_index
	err := wire.Into{1: &a.result, 2: &a.param, 3: &a.paramIndex, 4: &kind}.Read(msg)
	a.must = kind == 2 // MUST_ALIAS
	p.aliases = append(p.aliases, a)
	return err
}

func (p *program) decodeDonor(msg []byte) error {
	var param int64
	err := wire.Into{1: &param}.Read(msg) // parameter_number
	p.donors = append(p.donors, param)
	return err
}

func (p *program) decodeComputation(msg []byte) error {
	c := &computation{}
	err := wire.Into{1: &c.name, 5: &c.id, 6: &c.rootID, 2: func(b []byte) error { // instructions
		i, err := decodeInstruction(b)
		c.list = append(c.list, i)
		return err
	}}.Read(msg)
	switch {
	case err != nil:
		return err
	case len(c.list) == 0:
		return fmt.Errorf("computation %q has no instructions", c.name)
	case p.byID[c.id] != nil:
		return fmt.Errorf("two computations have number %d", c.id)
	}
	p.computations = append(p.computations, c)
	p.byID[c.id] = c
	return nil
}

// find gives the instruction of that number, or nil.
func (c *computation) find(id int64) *instruction {
	if c.byID == nil {
		c.byID = make(map[uint32]*instruction, len(c.list))
		for _, i := range c.list {
			c.byID[key(i.id)] = i
		}
	}
	return c.byID[key(id)]
}

// sort puts the instructions in the order of the schedule. Fused computations have none, and a
// schedule that does not name each instruction once is not believed.
func (c *computation) sort(order []int64) {
	if len(order) != len(c.list) {
		return
	}
	sorted := make([]*instruction, 0, len(order))
	seen := make(map[uint32]bool, len(order))
	for _, id := range order {
		i := c.find(id)
		if i == nil || seen[key(id)] {
			return
		}
		seen[key(id)] = true
		sorted = append(sorted, i)
	}
	c.list = sorted
}

func decodeInstruction(msg []byte) (i *instruction, err error) {
	i = &instruction{}
	for f := range wire.Fields(msg, &err) {
		err = i.decodeField(f)
	}
	if err == nil && i.opcode == "" {
		err = fmt.Errorf("instruction %q has no opcode", i.name)
	}
	return i, err
}

func (i *instruction) decodeField(f wire.Field) (err error) {
	switch f.Num {
	case 1: // name
		i.name = f.Text()
	case 2: // opcode
		i.opcode = f.Text()
	case 3: // shape
		i.shape = f.B
	case 7: // metadata
		err = wire.Into{2: &i.opName}.Read(f.B)
	case 9: // parameter_number
		i.param = f.Int()
	case 13: // tuple_index
		i.index = f.Int()
	case 14: // dimensions
		i.split = true
	case 28: // custom_call_target
		i.target = f.Text()
	case 30: // dot_dimension_numbers
		err = wire.Into{1: &i.contracting}.Read(f.B) // lhs_contracting_dimensions
	case 35: // id
		i.id = f.Int()
	case 36: // operand_ids
		f.AddTo(&i.operands, &err)
	case 38: // called_computation_ids
		f.AddTo(&i.called, &err)
	case 43: // backend_config
		i.config = f.B
	case 99: // backend_config_payload
		err = i.decodePayload(f.B)
	case 26, 49, 52, 87, 92, 93:
		err = i.decodeGroup(f)
	}
	return err
}

func (i *instruction) decodeGroup(f wire.Field) error {
	if i.group == nil {
		i.group = &instructionGroup{}
	}
	var g Group
	var err error
	switch f.Num {
	case 26: // channel_id
		i.group.global = f.Int() > 0
		return nil
	case 49: // replica_groups
		return i.group.old.addGroup(f.B)
	case 52: // source_target_pairs
		i.group.pairs++
		return nil
	case 87: // collective_device_list
		g, err = decodeDeviceList(f.B)
	case 92: // iota_collective_device_list
		g, err = decodeIota(f.B)
	case 93: // mesh_axes_replica_group_list
		g, err = decodeMeshAxes(f.B)
	}
	i.group.list = &g
	return err
}

// decodePayload reads a Payload: the bytes themselves, or their number in the module's list.
func (i *instruction) decodePayload(msg []byte) (err error) {
	id := int64(-1)
	err = wire.Into{1: &i.config, 2: &id}.Read(msg)
	i.payload = id + 1
	return err
}

// result gives the shape of an instruction's result.
func (i *instruction) result() (*shape, error) {
	if i.decoded == nil {
		s, err := decodeShape(i.shape, 0)
		if err != nil {
			return nil, err
		}
		i.decoded = &s
	}
	return i.decoded, nil
}

// A backendConfig is what is read of the JSON that the compiler writes beside an instruction.
// XLA:CPU and XLA:GPU write the same for a loop; the rest is XLA:GPU's. The zero value stands
// for no configuration and for one that is not JSON.
type backendConfig struct {
	TripCount *struct {
		N json.RawMessage `json:"n"` // proto3 JSON quotes an int64
	} `json:"known_trip_count"`
	Collective collectiveConfig `json:"collective_backend_config"`
	Attention  *attentionConfig `json:"cudnn_fmha_backend_config"`
	Product    *struct {
		Dims struct {
			Contracting numbers `json:"lhs_contracting_dimensions"`
		} `json:"dot_dimension_numbers"`
	} `json:"gemm_backend_config"`
}

type collectiveConfig struct {
	IsSync      bool `json:"is_sync"`
	IsPipelined bool `json:"is_pipelined"`
	Domain      word `json:"communication_domain"`
}

type attentionConfig struct {
	Deterministic *bool `json:"force_deterministic"`
	Mask          word  `json:"mask_type"`
	Window        word  `json:"sliding_window_length"`
	Scores        struct {
		Dims numbers `json:"dimensions"`
	} `json:"intermediate_tensor_shape"`
}

// backendConfig reads an instruction's configuration. A payload is read once, however many
// instructions share it.
func (p *program) backendConfig(i *instruction) backendConfig {
	n := i.payload - 1
	if n < 0 || n >= int64(len(p.payloads)) {
		return parseConfig(i.config)
	}
	c, ok := p.parsed[n]
	if !ok {
		c = parseConfig(p.payloads[n])
		p.parsed[n] = c
	}
	return c
}

func parseConfig(text []byte) backendConfig {
	var c backendConfig
	if json.Unmarshal(text, &c) != nil {
		return backendConfig{}
	}
	return c
}

// params gives the parameters of a computation in the order of their numbers.
func (c *computation) params() ([]*instruction, error) {
	list := lists.Filter(c.list, func(i *instruction) bool { return i.opcode == "parameter" })
	lists.Sort(list, func(a, b *instruction) int { return cmp.Compare(a.param, b.param) })
	for n, i := range list {
		if i.param != int64(n) {
			return nil, fmt.Errorf("parameter %d of computation %q is missing", n, c.name)
		}
	}
	return list, nil
}
