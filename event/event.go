package event

import (
	"fmt"
	"reflect"
	"time"
)

// An Event is one fact. Its exported fields are its JSON form.
type Event interface {
	// Line tells the fact in one line for people; "" keeps it out of plain output.
	Line() string
}

// A Sink takes events. Sinks are safe for use by several goroutines.
type Sink interface{ Emit(Event) }

// Discard is a Sink that drops everything.
var Discard Sink = discard{}

type discard struct{}

func (discard) Emit(Event) {}

// A Clock tells the time; time.Now is one.
type Clock func() time.Time

// Phase says that a named pass of a verb begins. The names come from the verb's pass list in
// package deepwell, in order.
type Phase struct {
	Verb string `json:"verb"`
	Name string `json:"name"`
}

// Progress says how far a long task is; Total is 0 when it is not known.
type Progress struct {
	Task  string `json:"task"`
	Done  int64  `json:"done"`
	Total int64  `json:"total,omitempty"`
	Unit  string `json:"unit"`
}

// Note is a remark worth a line, with no consequence.
type Note struct {
	Text string `json:"text"`
}

// Warning is a remark that a person should act on some day; Fix says how.
type Warning struct {
	Code string `json:"code,omitempty"`
	Text string `json:"text"`
	Fix  string `json:"fix,omitempty"`
}

// Installed says that an engine is on disk and verified.
type Installed struct {
	Engine string `json:"engine"`
	Bytes  int64  `json:"bytes"`
	Digest string `json:"digest"`
}

// Compiled says that one program was compiled, or taken from the cache.
type Compiled struct {
	Module  string  `json:"stage"` // the key is older than the field: readers of logs know it
	Target  string  `json:"target"`
	Devices int     `json:"devices"`
	Seconds float64 `json:"seconds"`
	Cached  bool    `json:"cached"`
	// From is who compiled it, if it was neither this process nor one before it: "process 0" of the
	// run, or "a compile ahead".
	From string `json:"from,omitempty"`
}

// Checked is the outcome of one check of doctor.
type Checked struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail"`
	Fix    string `json:"fix,omitempty"`
}

// Unknown is an event of a kind this binary does not know, kept as it was read.
type Unknown struct {
	Name string `json:"-"`
	Raw  []byte `json:"-"`
}

// kinds names every type in JSON, for good: a new kind is a type above and a row here.
var kinds = map[string]reflect.Type{
	"phase":            reflect.TypeFor[Phase](),
	"progress":         reflect.TypeFor[Progress](),
	"note":             reflect.TypeFor[Note](),
	"warning":          reflect.TypeFor[Warning](),
	"installed":        reflect.TypeFor[Installed](),
	"compiled":         reflect.TypeFor[Compiled](),
	"checked":          reflect.TypeFor[Checked](),
	"busy":             reflect.TypeFor[Busy](),
	"run":              reflect.TypeFor[Run](),
	"finished":         reflect.TypeFor[Finished](),
	"step":             reflect.TypeFor[Step](),
	"eval":             reflect.TypeFor[Eval](),
	"rejected":         reflect.TypeFor[Rejected](),
	"precision":        reflect.TypeFor[Precision](),
	"experts":          reflect.TypeFor[Experts](),
	"router_collapsed": reflect.TypeFor[RouterCollapsed](),
	"saved":            reflect.TypeFor[Saved](),
	"resumed":          reflect.TypeFor[Resumed](),
	"profiled":         reflect.TypeFor[Profiled](),
	"memory":           reflect.TypeFor[Memory](),
	"weights":          reflect.TypeFor[Weights](),
	"stalled":          reflect.TypeFor[Stalled](),
	"kernel_differs":   reflect.TypeFor[KernelDiffers](),
}

// Kind names an event's type as JSON does; it is "" for a type that is not in the table.
func Kind(e Event) string {
	e = pointed(e)
	if u, ok := e.(Unknown); ok {
		return u.Name
	}
	for name, t := range kinds {
		if t == reflect.TypeOf(e) {
			return name
		}
	}
	return ""
}

// pointed gives the event that a pointer points to, and any other event as it is.
func pointed(e Event) Event {
	if v := reflect.ValueOf(e); v.Kind() == reflect.Pointer && !v.IsNil() {
		if at, ok := reflect.TypeAssert[Event](v.Elem()); ok {
			return at
		}
	}
	return e
}

// Line implements Event.
func (p Phase) Line() string { return p.Verb + ": " + p.Name }

// Line implements Event: progress belongs on the live line, not in a log.
func (p Progress) Line() string { return "" }

// Line implements Event.
func (n Note) Line() string { return n.Text }

// Line implements Event.
func (w Warning) Line() string {
	line := "warning: " + w.Text
	if w.Code != "" {
		line = w.Code + " " + line
	}
	if w.Fix != "" {
		line += "; fix: " + w.Fix
	}
	return line
}

// Line implements Event.
func (i Installed) Line() string {
	return fmt.Sprintf("installed %s  %s  sha256 %.12s", i.Engine, Size(i.Bytes), i.Digest)
}

// Line implements Event.
func (c Compiled) Line() string {
	how := fmt.Sprintf("in %.2f s", c.Seconds)
	if c.Cached {
		how = "from the cache"
	}
	if c.From != "" {
		how = fmt.Sprintf("by %s, loaded in %.2f s", c.From, c.Seconds)
	}
	return fmt.Sprintf("compiled %s for %d x %s %s", c.Module, c.Devices, c.Target, how)
}

// Line implements Event.
func (c Checked) Line() string {
	mark := "ok  "
	if !c.OK {
		mark = "FAIL"
	}
	return fmt.Sprintf("%s  %-14s %s", mark, c.Name, c.Detail)
}

// Line implements Event.
func (u Unknown) Line() string { return "" }

// Size writes a number of bytes as people read it, in binary units: 1.5 GiB.
func Size(bytes int64) string {
	value, unit := float64(bytes), 0
	units := []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}
	for value >= 1024 && unit < len(units)-1 {
		value, unit = value/1024, unit+1
	}
	if unit == 0 {
		return fmt.Sprintf("%d B", bytes)
	}
	return fmt.Sprintf("%.1f %s", value, units[unit])
}
