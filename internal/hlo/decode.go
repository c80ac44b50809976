package hlo

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
)

// The field numbers in this file are those of xla/service/hlo.proto and, for the configuration,
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
	for f := range fields(msg, &err) {
		switch f.num {
		case 1: // hlo_module
			module = f.b
		case 2: // config
			config = f.b
		}
	}
	if err != nil {
		return nil, err
	}
	if p, err = decodeModule(module); err != nil {
		return nil, err
	}
	for f := range fields(config, &err) {
		switch f.num {
		case 4: // replica_count
			p.replicas = max(f.int(), 0)
		case 5: // num_partitions
			p.partitions = max(f.int(), 0)
		}
	}
	return p, err
}

func decodeModule(msg []byte) (p *program, err error) {
	p = &program{
		byID:     map[int64]*computation{},
		schedule: map[int64][]int64{},
		parsed:   map[int64]backendConfig{},
	}
	for f := range fields(msg, &err) {
		err = p.decodeField(f)
	}
	for _, c := range p.computations {
		c.sort(p.schedule[c.id])
	}
	return p, err
}

func (p *program) decodeField(f field) (err error) {
	switch f.num {
	case 1: // name
		p.name = f.text()
	case 3: // computations
		c, err := decodeComputation(f.b)
		if err != nil {
			return err
		}
		if p.byID[c.id] != nil {
			return fmt.Errorf("two computations have number %d", c.id)
		}
		p.computations = append(p.computations, c)
		p.byID[c.id] = c
	case 6: // entry_computation_id
		p.entryID = f.int()
	case 7: // schedule
		err = p.decodeSchedule(f.b)
	case 8: // input_output_alias
		err = p.decodeAliases(f.b)
	case 15: // device_assignment, which a program without configuration may have
		err = p.decodeAssignment(f.b)
	case 18: // buffer_donor
		err = p.decodeDonors(f.b)
	case 22: // payloads
		p.payloads = append(p.payloads, f.b)
	}
	return err
}

// decodeSchedule reads HloScheduleProto, a map from computation to instructions.
func (p *program) decodeSchedule(msg []byte) (err error) {
	for entry := range fields(msg, &err) {
		var id int64
		var order []int64
		for f := range fields(entry.b, &err) {
			switch f.num {
			case 1: // key
				id = f.int()
			case 2: // value
				for s := range fields(f.b, &err) {
					if s.num == 1 { // instruction_ids
						s.addTo(&order, &err)
					}
				}
			}
		}
		p.schedule[id] = order
	}
	return err
}

func (p *program) decodeAliases(msg []byte) (err error) {
	for entry := range fields(msg, &err) {
		if entry.num != 1 { // entries
			continue
		}
		var a rawAlias
		for f := range fields(entry.b, &err) {
			switch f.num {
			case 1: // output_shape_index
				f.addTo(&a.result, &err)
			case 2: // parameter_number
				a.param = f.int()
			case 3: // parameter_shape_index
				f.addTo(&a.paramIndex, &err)
			case 4: // kind: 2 is MUST_ALIAS
				a.must = f.int() == 2
			}
		}
		p.aliases = append(p.aliases, a)
	}
	return err
}

func (p *program) decodeDonors(msg []byte) (err error) {
	for entry := range fields(msg, &err) {
		if entry.num != 1 { // entries
			continue
		}
		var param int64
		for f := range fields(entry.b, &err) {
			if f.num == 1 { // parameter_number
				param = f.int()
			}
		}
		p.donors = append(p.donors, param)
	}
	return err
}

func (p *program) decodeAssignment(msg []byte) (err error) {
	for f := range fields(msg, &err) {
		switch f.num {
		case 1: // replica_count
			p.replicas = max(f.int(), 0)
		case 2: // computation_count
			p.partitions = max(f.int(), 0)
		}
	}
	return err
}

func decodeComputation(msg []byte) (c *computation, err error) {
	c = &computation{}
	for f := range fields(msg, &err) {
		switch f.num {
		case 1: // name
			c.name = f.text()
		case 2: // instructions
			var i *instruction
			i, err = decodeInstruction(f.b)
			c.list = append(c.list, i)
		case 5: // id
			c.id = f.int()
		case 6: // root_id
			c.rootID = f.int()
		}
	}
	if err == nil && len(c.list) == 0 {
		err = fmt.Errorf("computation %q has no instructions", c.name)
	}
	return c, err
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
	for f := range fields(msg, &err) {
		err = i.decodeField(f)
	}
	if err == nil && i.opcode == "" {
		err = fmt.Errorf("instruction %q has no opcode", i.name)
	}
	return i, err
}

func (i *instruction) decodeField(f field) (err error) {
	switch f.num {
	case 1: // name
		i.name = f.text()
	case 2: // opcode
		i.opcode = f.text()
	case 3: // shape
		i.shape = f.b
	case 7: // metadata
		err = i.decodeMetadata(f.b)
	case 9: // parameter_number
		i.param = f.int()
	case 13: // tuple_index
		i.index = f.int()
	case 14: // dimensions
		i.split = true
	case 28: // custom_call_target
		i.target = f.text()
	case 30: // dot_dimension_numbers
		err = i.decodeDot(f.b)
	case 35: // id
		i.id = f.int()
	case 36: // operand_ids
		f.addTo(&i.operands, &err)
	case 38: // called_computation_ids
		f.addTo(&i.called, &err)
	case 43: // backend_config
		i.config = f.b
	case 99: // backend_config_payload
		err = i.decodePayload(f.b)
	case 26, 49, 52, 87, 92, 93:
		err = i.decodeGroup(f)
	}
	return err
}

func (i *instruction) decodeGroup(f field) error {
	if i.group == nil {
		i.group = &instructionGroup{}
	}
	var g Group
	var err error
	switch f.num {
	case 26: // channel_id
		i.group.global = f.int() > 0
		return nil
	case 49: // replica_groups
		return i.group.old.addGroup(f.b)
	case 52: // source_target_pairs
		i.group.pairs++
		return nil
	case 87: // collective_device_list
		g, err = decodeDeviceList(f.b)
	case 92: // iota_collective_device_list
		g, err = decodeIota(f.b)
	case 93: // mesh_axes_replica_group_list
		g, err = decodeMeshAxes(f.b)
	}
	i.group.list = &g
	return err
}

func (i *instruction) decodeMetadata(msg []byte) (err error) {
	for f := range fields(msg, &err) {
		if f.num == 2 { // op_name
			i.opName = f.text()
		}
	}
	return err
}

func (i *instruction) decodeDot(msg []byte) (err error) {
	for f := range fields(msg, &err) {
		if f.num == 1 { // lhs_contracting_dimensions
			f.addTo(&i.contracting, &err)
		}
	}
	return err
}

// decodePayload reads a Payload: the bytes themselves, or their number in the module's list.
func (i *instruction) decodePayload(msg []byte) (err error) {
	for f := range fields(msg, &err) {
		switch f.num {
		case 1: // value
			i.config = f.b
		case 2: // id
			i.payload = f.int() + 1
		}
	}
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
	var list []*instruction
	for _, i := range c.list {
		if i.opcode == "parameter" {
			list = append(list, i)
		}
	}
	slices.SortStableFunc(list, func(a, b *instruction) int { return cmp.Compare(a.param, b.param) })
	for n, i := range list {
		if i.param != int64(n) {
			return nil, fmt.Errorf("parameter %d of computation %q is missing", n, c.name)
		}
	}
	return list, nil
}
