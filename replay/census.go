package replay

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/wire"
	"github.com/deepwell/deepwell/program"
)

// A Census is what an optimized program is made of, whatever its sizes: opcodes, kinds of fusion,
// custom calls with their configurations, collectives with the axes of the mesh that they run
// along, loops that run more than once, and slices that step from one iteration to the next. Each
// stands once, as a line; lines are sorted. The compiler chooses by size, so a small program need
// not be made of what a large one is, and what only the large one has was not replayed.
type Census []string

// CensusOf reads the census of an optimized program, in one of the formats that [Rewrite] reads,
// whose devices are a mesh of the given axes.
func CensusOf(format string, code []byte, mesh []program.Axis) (Census, error) {
	m, err := decodeProgram(format, code)
	if err != nil {
		if _, ok := errors.AsType[*diag.Error](err); ok {
			return nil, err
		}
		return nil, diag.New(diag.ProgramRead, "optimized program: %s", err)
	}
	var list Census
	for _, c := range m.computations {
		types := map[int64]string{} // of results, by instruction
		for _, i := range c.list {
			types[i.id] = i.shape.typesOf()
		}
		for _, i := range c.list {
			list = append(list, "opcode "+i.opcode)
			list = append(list, i.repeats()...)
			operands := strings.Join(lists.Map(i.operands, func(id int64) string { return types[id] }), ", ")
			switch {
			case i.opcode == "fusion":
				list = append(list, "fusion "+i.fusionKind())
			case i.opcode == "custom-call":
				list = append(list, fmt.Sprintf("call %s(%s) → %s%s", i.target, operands, types[i.id],
					i.configured()))
			case slices.Contains(collectiveOpcodes, strings.TrimSuffix(i.opcode, "-start")):
				list = append(list, fmt.Sprintf("collective %s of %s along %s",
					strings.TrimSuffix(i.opcode, "-start"), firstType(operands), i.along(mesh)))
			}
		}
	}
	return list.Union(nil), nil
}

// Union is the census of both programs.
func (c Census) Union(o Census) Census {
	all := slices.Concat(c, o)
	slices.Sort(all)
	return slices.Compact(all)
}

// Without lists what o does not have.
func (c Census) Without(o Census) []string {
	return lists.Filter(c, func(line string) bool {
		_, found := slices.BinarySearch(o, line)
		return !found
	})
}

var collectiveOpcodes = []string{"all-gather", "reduce-scatter", "all-reduce", "all-to-all",
	"collective-permute", "collective-broadcast"}

// typesOf names the element types of an array or a tuple.
func (s *shape) typesOf() string {
	if !s.isTuple() {
		return s.typ.String()
	}
	return "(" + strings.Join(lists.Map(s.elems, (*shape).typesOf), ", ") + ")"
}

// firstType is the first of a list: how many arrays one collective takes depends on their sizes.
func firstType(list string) string {
	first, _, _ := strings.Cut(list, ",")
	return first
}

// fusionKind is the kind of a fusion, and the emitter that its configuration names.
func (i *instruction) fusionKind() string {
	var c struct {
		Fusion struct {
			Kind   string `json:"kind"`
			Custom struct {
				Name string `json:"name"`
			} `json:"custom_fusion_config"`
		} `json:"fusion_backend_config"`
	}
	_ = json.Unmarshal(i.config, &c) // without a configuration there is only the kind
	words := []string{i.fusion, c.Fusion.Kind, c.Fusion.Custom.Name}
	return strings.Join(slices.DeleteFunc(words, func(s string) bool { return s == "" }), " ")
}

// repeats tells of loops and slices whether more than their first iteration says something: how
// often they repeat is a size.
func (i *instruction) repeats() (list []string) {
	var loop loopConfig
	if i.opcode == "while" && json.Unmarshal(i.config, &loop) == nil && loop.Trips != nil &&
		loop.Trips.N > 1 {
		list = append(list, "loop of more than one trip")
	}
	var config sliceConfig
	if json.Unmarshal(i.config, &config) == nil && config.Slice != nil {
		if _, stride := config.bytes(); stride != 0 {
			list = append(list, i.opcode+" with a stride")
		}
	}
	return list
}

// sizes are keys of configurations that hold sizes, choices of the autotuner, or the place of a
// call in the schedule.
var sizes = []string{"lhs_stride", "rhs_stride", "selected_algorithm", "autotune_workspace_size",
	"algo_id", "seed", "intermediate_tensor_shape", "operation_queue_id",
	"wait_on_operation_queues", "force_earliest_schedule", "reification_cost", "device_type"}

// configured writes a call's configuration without sizes: "; key value" for each leaf, sorted. Of a
// window only its presence is written.
func (i *instruction) configured() string {
	var config any
	if json.Unmarshal(i.config, &config) != nil {
		return ""
	}
	var list []string
	var walk func(key string, v any)
	walk = func(key string, v any) {
		switch v := v.(type) {
		case map[string]any:
			for name, inner := range v {
				if !slices.Contains(sizes, name) {
					walk(name, inner)
				}
			}
			return
		case []any:
			if len(v) == 0 {
				return
			}
		case string:
			if key == "sliding_window_length" && v != "0" {
				list = append(list, "; "+key)
				return
			}
		case bool:
			if !v {
				return
			}
		}
		if text := fmt.Sprint(v); text != "0" && text != "" {
			list = append(list, "; "+key+" "+text)
		}
	}
	walk("", config)
	slices.Sort(list)
	return strings.Join(list, "")
}

// along names the axes of a mesh that the devices of a collective differ in.
func (i *instruction) along(mesh []program.Axis) string {
	if i.groups.unknown != "" {
		return i.groups.unknown
	}
	groups := i.groups.lists
	var err error
	for f := range wire.Fields(i.kept, &err) {
		var from, to int64
		if f.Num == sourceTargetPairs && (wire.Into{1: &from, 2: &to}).Read(f.B) == nil {
			groups = append(groups, []int64{from, to})
		}
	}
	differ := map[string]bool{}
	for _, g := range groups {
		for _, device := range g {
			stride := int64(1)
			for _, a := range slices.Backward(mesh) {
				size := int64(a.Size)
				if device/stride%size != g[0]/stride%size {
					differ[a.Name] = true
				}
				stride *= size
			}
		}
	}
	var names []string
	for _, a := range mesh {
		if differ[a.Name] || len(groups) == 0 {
			names = append(names, a.Name)
		}
	}
	if len(names) == 0 {
		return "no axis"
	}
	return strings.Join(names, " × ")
}
