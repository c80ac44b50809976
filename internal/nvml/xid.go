package nvml

import (
	"cmp"
	"fmt"

	"github.com/ebitengine/purego"
)

// An Xid is a critical error that the driver reports.
type Xid struct {
	GPU    int // in NVML's order
	Number int // in NVIDIA's catalogue of Xid errors
}

// A Watch hears of Xid errors from when it was opened. What happened before stands in the kernel's
// log only.
type Watch struct {
	reader
	library, set uintptr
}

// WatchXid begins to listen, through NVML from path, or by its soname where path is empty. An error
// means that the driver tells of none.
func WatchXid(path string) (*Watch, error) {
	library, err := purego.Dlopen(cmp.Or(path, soname), purego.RTLD_NOW|purego.RTLD_LOCAL)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoLibrary, err)
	}
	w := &Watch{library: library}
	w.bind(library)
	if code := w.Init(); code != 0 {
		return nil, w.failure("nvmlInit_v2", code)
	}
	if code := w.EventSet(&w.set); code != 0 {
		w.Shutdown()
		return nil, w.failure("nvmlEventSetCreate", code)
	}
	var n uint32
	if code := w.Count(&n); code != 0 {
		w.Close()
		return nil, w.failure("nvmlDeviceGetCount_v2", code)
	}
	listening := false
	for i := range n {
		var h handle
		if w.ByIndex(i, &h) != 0 {
			h = 0
		}
		w.handles = append(w.handles, h)
		listening = h != 0 && w.RegisterEvent(h, eventXid, w.set) == 0 || listening
	}
	if !listening {
		w.Close()
		return nil, w.failure("nvmlDeviceRegisterEvents", codeNotSupported)
	}
	return w, nil
}

// maxXids bounds what one reading takes: a GPU that is lost may repeat itself.
const maxXids = 64

// Read gives the errors since the last reading. It does not wait.
func (w *Watch) Read() (list []Xid) {
	for range maxXids {
		var e eventData
		if w.WaitEvent(w.set, &e, 0) != 0 {
			break
		}
		for i, h := range w.handles {
			if h == e.device && e.kind == eventXid {
				list = append(list, Xid{i, int(e.data)})
			}
		}
	}
	return list
}

// Close ends it.
func (w *Watch) Close() {
	w.FreeEvents(w.set)
	w.Shutdown()
	_ = purego.Dlclose(w.library)
}
