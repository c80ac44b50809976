package pjrt

import (
	"math"
	"slices"
	"unsafe"

	"github.com/deepwell/deepwell/diag"
)

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
		v := namedValue{name: stringPointer(o.Name), nameLen: uintptr(len(o.Name)), len: 1}
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
			return nil, diag.New(diag.CompileOption, "option %s has a value of type %T", o.Name, x)
		}
		n.values = append(n.values, v)
	}
	return n, nil
}

func (n *named) pointer() unsafe.Pointer { return slicePointer(n.values) }
func (n *named) len() uintptr            { return uintptr(len(n.values)) }

// readNamed copies a list of attributes out of C memory.
func readNamed(items unsafe.Pointer, n uintptr) map[string]any {
	out := make(map[string]any, n)
	for _, v := range unsafe.Slice((*namedValue)(items), int(n)) {
		name := copyString(v.name, v.nameLen)
		switch v.kind {
		case namedString:
			out[name] = copyString(pointer(v.value), v.len)
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
