package pjrt

import (
	"maps"
	"math"
	"slices"
	"unsafe"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/wire"
)

// CompileOptions say for what devices, and how, a program is compiled.
type CompileOptions struct {
	// Devices are the global numbers of the devices that run the program, one replica each.
	Devices []int
	// DeviceMemory is the bytes that the scheduler may plan with; 0 leaves it to XLA, which
	// then takes 80 % of the GPU's memory and recomputes to stay below (reference: overlap notes, 4b).
	DeviceMemory int64
	// Flags are XLA's debug options by name. A value is a bool, an int, a float64 or a string;
	// XLA wants enumerations as strings, by their proto name.
	Flags map[string]any
	// HLO says that the program is a serialized xla.HloModuleProto, and not StableHLO. It is no part
	// of the encoded options: whoever keeps programs by their options must tell the two apart.
	HLO bool
}

// Field numbers of xla.CompileOptionsProto, ExecutableBuildOptionsProto, DeviceAssignmentProto
// and OptionOverrideProto.
const (
	optBuild        protowire.Number = 3
	optOverrides    protowire.Number = 7
	buildOrdinal    protowire.Number = 1
	buildReplicas   protowire.Number = 4
	buildPartitions protowire.Number = 5
	buildAssignment protowire.Number = 9
	buildMemory     protowire.Number = 15
	assignReplicas  protowire.Number = 1
	assignParts     protowire.Number = 2
	assignComputed  protowire.Number = 3
	computedIDs     protowire.Number = 1
	overrideString  protowire.Number = 1
	overrideBool    protowire.Number = 2
	overrideInt     protowire.Number = 3
	overrideDouble  protowire.Number = 4
)

// Encode writes the options as a serialized xla.CompileOptionsProto. Equal options give equal
// bytes.
func (o CompileOptions) Encode() ([]byte, error) {
	if len(o.Devices) == 0 {
		return nil, diag.New(diag.CompileOption, "a program needs at least one device").
			Try("give the module devices")
	}
	n := int64(len(o.Devices))
	ids := lists.Map(o.Devices, func(d int) int64 { return int64(d) })
	assign := wire.Msg(nil).Int(assignReplicas, n).Int(assignParts, 1).
		Bytes(assignComputed, wire.Msg(nil).Packed(computedIDs, ids...))
	build := wire.Msg(nil).Int(buildOrdinal, -1).Int(buildReplicas, n).Int(buildPartitions, 1).
		Bytes(buildAssignment, assign)
	if o.DeviceMemory > 0 {
		build = build.Int(buildMemory, o.DeviceMemory)
	}
	out := wire.Msg(nil).Bytes(optBuild, build)
	for _, name := range slices.Sorted(maps.Keys(o.Flags)) {
		value, err := encodeFlag(name, o.Flags[name])
		if err != nil {
			return nil, err
		}
		out = out.Bytes(optOverrides, wire.Msg(nil).Text(1, name).Bytes(2, value))
	}
	return out, nil
}

func encodeFlag(name string, value any) (m wire.Msg, err error) {
	switch v := value.(type) {
	case string:
		return m.Text(overrideString, v), nil
	case bool:
		return m.Int(overrideBool, int64(protowire.EncodeBool(v))), nil
	case int:
		return m.Int(overrideInt, int64(v)), nil
	case int64:
		return m.Int(overrideInt, v), nil
	case float64:
		return m.Double(overrideDouble, v), nil
	}
	return nil, diag.New(diag.CompileOption, "option %s has a value of type %T", name,
		value).Try("give a bool, an int, a float64 or a string")
}

// An Option is a named value that a plugin takes when a client or a topology is created. The
// value is a string, an int, a []int64, a float32 or a bool.
type Option struct {
	Name  string
	Value any
}

// named is a list of options as C reads it, together with the Go memory it points to.
type named struct {
	values []namedValue
	keep   []any
}

func newNamed(options []Option) (*named, error) {
	n := &named{}
	for _, o := range options {
		v := namedValue{name: textSpan(o.Name), len: 1}
		v.size = unsafe.Sizeof(v)
		n.keep = append(n.keep, o.Name, o.Value)
		switch x := o.Value.(type) {
		case string:
			v.kind, v.value, v.len = namedString, uintptr(stringPointer(x)), uintptr(len(x))
		case int:
			v.kind, v.value = namedInt64, uintptr(x)
		case []int64:
			v.kind, v.value, v.len = namedInt64List, uintptr(slicePointer(x)), uintptr(len(x))
		case float32:
			v.kind, v.value = namedFloat, uintptr(math.Float32bits(x))
		case bool:
			v.kind = namedBool
			if x {
				v.value = 1
			}
		default:
			return nil, diag.New(diag.CompileOption, "option %s has a value of type %T", o.Name, x).
				Try("give a bool, an int, a float32 or a string")
		}
		n.values = append(n.values, v)
	}
	return n, nil
}

// readNamed copies a list of attributes out of C memory.
func readNamed(items unsafe.Pointer, n uintptr) map[string]any {
	out := make(map[string]any, n)
	for _, v := range unsafe.Slice((*namedValue)(items), int(n)) {
		name := v.name.String()
		switch v.kind {
		case namedString:
			out[name] = span{pointer(v.value), v.len}.String()
		case namedInt64:
			out[name] = int64(v.value)
		case namedInt64List:
			out[name] = slices.Clone(unsafe.Slice((*int64)(pointer(v.value)), int(v.len)))
		case namedFloat:
			out[name] = math.Float32frombits(uint32(v.value))
		case namedBool:
			out[name] = v.value&0xff != 0
		}
	}
	return out
}
