package engine

import (
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/pjrt"
)

// A Call is one invocation of a Go function by a running program. Its memory belongs to the
// program and must not be used after the handler returns.
type Call struct {
	Args    []HostArray
	Results []HostArray    // to be filled
	Attrs   map[string]any // int64, int32, float32, float64, bool or string
	Device  int            // ordinal of the device on its host; -1 if the runtime does not report it
}

// A HostArray is an argument or a result of a [Call]. On CPU devices Data is the array itself,
// dense and row-major. On GPUs Data is nil and Address is a device address.
type HostArray struct {
	Shape   dtype.Shape
	Data    []byte
	Address uintptr
}

// Register makes a Go function callable by the engine's programs: as a custom call with that
// target name and api_version 4. A process can register a name only once.
//
// The handler runs on threads of the engine, for several devices at the same time. A returned
// error, or a panic, fails the run. If the devices meet in a collective after the call, the others
// wait there for the failed one, and XLA:CPU ends the process after 40 s; the error is therefore
// also written to the standard error stream at once.
func (e *Engine) Register(target string, handler func(*Call) error) error {
	return e.plugin.Register(target, e.platform, func(c *pjrt.Call) error {
		return handler(&Call{Args: hostArrays(c.Args), Results: hostArrays(c.Results), Attrs: c.Attrs,
			Device: c.Device})
	})
}

func hostArrays(list []pjrt.HostArray) []HostArray {
	arrays := make([]HostArray, len(list))
	for i, a := range list {
		arrays[i] = HostArray(a)
	}
	return arrays
}
