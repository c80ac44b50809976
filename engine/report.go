package engine

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
)

// reportVersion is the version of the JSON form; it grows with incompatible changes.
const reportVersion = 1

// A Report says what a compiler made of one module: memory by kind, the kernels it calls and the
// collectives it issues. It prints itself for people and, as JSON, for programs.
type Report struct {
	Version  int    `json:"version"`
	Module   string `json:"stage"`           // of the program; saved reports have the key
	Target   string `json:"target"`          // name of the GPU, or cpu
	Devices  int    `json:"devices"`         // that run the module
	Topology string `json:"topology"`        // domains x hosts x devices
	Engine   string `json:"engine"`          // name and version
	CuDNN    string `json:"cudnn,omitempty"` // version that plans were made with
	// Seconds is how long the compile took: of a report that came from the cache, the compile of
	// then.
	Seconds float64 `json:"seconds"`
	Cached  bool    `json:"cached,omitempty"`
	// Memory is what one device needs; CapacityBytes what it has, 0 if unknown.
	Memory        Memory `json:"memory"`
	CapacityBytes int64  `json:"capacity,omitempty"`
	// ExecutableBytes is the size of the compiled program itself, cuDNN's plans included.
	ExecutableBytes int64            `json:"executable_bytes,omitempty"`
	CustomCalls     []hlo.CustomCall `json:"custom_calls"`
	Collectives     []hlo.Collective `json:"collectives"`
	// Recomputed counts the instructions that the compiler repeats to save memory.
	Recomputed int      `json:"recomputed,omitempty"`
	Notes      []string `json:"notes,omitempty"`
}

// Memory is what one device needs to run a program, in bytes, by the compiler's count.
type Memory struct {
	Code     int64 `json:"code"`     // the compiled program
	Argument int64 `json:"argument"` // all arguments, donated ones included
	Output   int64 `json:"output"`   // all results
	Alias    int64 `json:"alias"`    // the part of Output that reuses donated arguments
	Temp     int64 `json:"temp"`     // intermediate values, live during a run only
	Peak     int64 `json:"peak"`     // most that is live at once, as XLA's liveness analysis has it
	Host     int64 `json:"host"`     // host memory: arguments, outputs and temp together
}

// Total is what must be free on the device: XLA's own Peak can be below what is allocated.
func (m Memory) Total() int64 { return m.Argument + m.Output - m.Alias + m.Temp }

// need is the memory that must be free on the device. XLA's peak is not used if anything is
// offloaded: it then counts host arguments, too.
func (r *Report) need() int64 {
	if r.Memory.Host > 0 {
		return r.Memory.Total()
	}
	return max(r.Memory.Total(), r.Memory.Peak)
}

// Fits reports whether the module fits the device: everything that is allocated counts, because
// XLA's own peak can be below it.
func (r *Report) Fits() error {
	need := r.need()
	if r.CapacityBytes == 0 || need <= r.CapacityBytes {
		return nil
	}
	m := r.Memory
	return diag.New(diag.TooLarge, "module %s needs %s, %s has %s", r.Module,
		event.Size(need), r.Target, event.Size(r.CapacityBytes)).
		Because("arguments %s · outputs %s · in place %s · temp %s", event.Size(m.Argument),
			event.Size(m.Output), event.Size(m.Alias), event.Size(m.Temp)).
		Try("donate arguments, recompute, or shard the program over more devices")
}

// String writes the report for people.
func (r *Report) String() string {
	var b strings.Builder
	head := []string{human.Thousands(int64(r.Devices)) + " " + strings.ToUpper(r.Target),
		"XLA " + r.Engine}
	if r.CuDNN != "" {
		head = append(head, "cuDNN "+r.CuDNN)
	}
	head = append(head, fmt.Sprintf("%.2f s", r.Seconds))
	if r.Cached {
		head = append(head, "from the cache")
	}
	fmt.Fprintln(&b, strings.Join(head, " · "))
	m := r.Memory
	need := r.need()
	if r.CapacityBytes > 0 {
		verdict := "fits"
		if r.Fits() != nil {
			verdict = "does not fit"
		}
		fmt.Fprintf(&b, "needs       %s of %s   %s\n", event.Size(need),
			event.Size(r.CapacityBytes), verdict)
	} else {
		fmt.Fprintf(&b, "needs       %s\n", event.Size(need))
	}
	fmt.Fprintf(&b, "            arguments %s · outputs %s · in place %s · temp %s · peak %s\n",
		event.Size(m.Argument), event.Size(m.Output), event.Size(m.Alias), event.Size(m.Temp),
		event.Size(m.Peak))
	label := "kernels"
	for _, k := range r.kernels() {
		fmt.Fprintf(&b, "%-11s %s\n", label, k)
		label = ""
	}
	label = "collectives"
	for _, c := range r.census() {
		fmt.Fprintf(&b, "%-11s %s\n", label, c)
		label = ""
	}
	if async, all := r.asyncBytes(); all > 0 {
		fmt.Fprintf(&b, "overlap     %d %% of bytes asynchronous\n", 100*async/all)
	}
	for _, n := range r.Notes {
		fmt.Fprintln(&b, n)
	}
	return b.String()
}

// kernels sums custom calls up by target and plan: "__cublas$lt$matmul × 1,234, workspace 32 MiB".
func (r *Report) kernels() []string {
	type sum struct {
		target    string
		count     int64
		workspace int64
		plan      hlo.Plan
	}
	var sums []sum
	for _, c := range r.CustomCalls {
		at := slices.IndexFunc(sums, func(s sum) bool { return s.target == c.Target && s.plan == c.Plan })
		if at < 0 {
			at, sums = len(sums), append(sums, sum{target: c.Target, plan: c.Plan})
		}
		sums[at].count += c.Count
		sums[at].workspace = max(sums[at].workspace, c.Workspace)
	}
	var lines []string
	for _, s := range sums {
		line := fmt.Sprintf("%s × %s", s.target, human.Thousands(s.count))
		switch s.plan {
		case hlo.PlanCompiled:
			line += ", plan compiled"
		case hlo.PlanMissing:
			line += ", name only: no plan"
		}
		if s.workspace > 0 {
			line += ", workspace " + event.Size(s.workspace)
		}
		lines = append(lines, line)
	}
	return lines
}

// census sums collectives up by kind, group and whether they are asynchronous, most bytes first. A
// collective in a loop counts once for each iteration.
func (r *Report) census() []string {
	type sum struct {
		kind  hlo.Kind
		group string
		async bool
		count int64
		bytes int64
	}
	var sums []sum
	for _, c := range r.Collectives {
		group := c.Group.String()
		at := slices.IndexFunc(sums, func(s sum) bool {
			return s.kind == c.Kind && s.group == group && s.async == c.Async
		})
		if at < 0 {
			at, sums = len(sums), append(sums, sum{kind: c.Kind, group: group, async: c.Async})
		}
		sums[at].count += c.Count
		sums[at].bytes += c.Count * c.Bytes()
	}
	lists.Sort(sums, func(a, b sum) int { return cmp.Compare(b.bytes, a.bytes) })
	var lines []string
	for _, s := range sums {
		how := "synchronous"
		if s.async {
			how = "asynchronous"
		}
		lines = append(lines, fmt.Sprintf("%s × %s in %s, %s, %s", s.kind, human.Thousands(s.count),
			s.group, event.Size(s.bytes), how))
	}
	return lines
}

// asyncBytes returns the bytes that devices send asynchronously, beside compute, and all they send.
func (r *Report) asyncBytes() (async, all int64) {
	for _, c := range r.Collectives {
		bytes := c.Count * c.Bytes()
		all += bytes
		if c.Async {
			async += bytes
		}
	}
	return async, all
}
