package overlap

import (
	"cmp"
	"maps"
	"math"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/machine"
)

// A Report says where the time of one execution of a program goes, by the model. All sums count for
// one device, with loops multiplied out.
type Report struct {
	Name  string `json:"name"` // of the program
	Rates Rates  `json:"rates"`

	Seconds float64 `json:"seconds"` // of the whole run
	Compute Compute `json:"compute"`
	Wire    float64 `json:"wire"`    // seconds of collectives
	Exposed float64 `json:"exposed"` // of those, seconds in which compute waited
	Hidden  float64 `json:"hidden"`  // 1 − Exposed / Wire; 1 without collectives

	Traffic []Traffic `json:"traffic"`
	Loops   []Loop    `json:"loops,omitempty"`
	Waits   []Wait    `json:"waits,omitempty"`   // that expose anything, the longest first
	Kernels []Kernel  `json:"kernels,omitempty"` // outside of loops, in the order of the schedule
	Notes   []string  `json:"notes,omitempty"`
}

// A Compute is what the compute stream does, in seconds, and how much of it.
type Compute struct {
	GEMMs          float64 `json:"gemms"`
	Attention      float64 `json:"attention"`
	Memory         float64 `json:"memory"` // kernels that only move and change elements
	GEMMFLOPs      float64 `json:"gemm_flops"`
	AttentionFLOPs float64 `json:"attention_flops"`
	MemoryBytes    float64 `json:"memory_bytes"`
}

// Seconds is the sum over all kernels.
func (c Compute) Seconds() float64 { return c.GEMMs + c.Attention + c.Memory }

// A Traffic sums up the collectives of one kind in one kind of group.
type Traffic struct {
	Kind    hlo.Kind  `json:"kind"`
	Group   hlo.Group `json:"group"`
	Fabric  string    `json:"fabric"` // nvlink or network
	Count   float64   `json:"count"`  // of instructions; a combined one is one
	Bytes   float64   `json:"bytes"`  // of whole tensors, as a group sees them
	Wire    float64   `json:"wire"`
	Exposed float64   `json:"exposed"`
	Between float64   `json:"between"` // bytes with a product or attention between start and end
	Sync    float64   `json:"sync,omitzero"`
}

// A Loop is what one round of a loop takes.
type Loop struct {
	Name    string   `json:"name"`
	Body    string   `json:"body"`
	Rounds  int64    `json:"rounds"` // -1 if the compiler does not know
	Twice   bool     `json:"twice"`  // a round does what two rounds of the program do
	Seconds float64  `json:"seconds"`
	Wire    float64  `json:"wire"`
	Exposed float64  `json:"exposed"`
	Gathers []Gather `json:"gathers,omitempty"`
	Kernels []Kernel `json:"kernels,omitempty"` // of a round, in the order of the schedule
}

// A Kernel is one launch of the compute stream.
type Kernel struct {
	Name    string  `json:"name"`
	OpName  string  `json:"op_name,omitempty"` // what the author of the program called it
	Target  string  `json:"target,omitempty"`  // of a custom call
	Spec    string  `json:"spec,omitempty"`    // of a kernel of our own (package kernels/fused)
	Shape   string  `json:"shape"`             // of its first result
	Bytes   int64   `json:"bytes"`
	FLOPs   int64   `json:"flops,omitempty"`
	Bits    int     `json:"bits,omitempty"` // of an element of a product's operands
	Seconds float64 `json:"seconds"`
}

// Each is how many rounds of the program's loop one round of the compiled loop is.
func (l *Loop) Each() int64 {
	if l.Twice {
		return 2
	}
	return 1
}

// Moved is what the kernels of one of the program's rounds read and write, without GEMMs and
// attention.
func (l *Loop) Moved() (bytes int64, kernels int) {
	for _, k := range l.Kernels {
		if k.FLOPs == 0 {
			bytes, kernels = bytes+k.Bytes, kernels+1
		}
	}
	return bytes / l.Each(), kernels / int(l.Each())
}

// A Gather is what one round gathers in one kind of group, and how much of it is for the next
// round: with layers in a loop, the weights of layer i+1 fetched while layer i computes. A round
// that does two layers (double buffering) fetches the second's weights for itself, so that half of
// them are for the next.
type Gather struct {
	Group  hlo.Group `json:"group"`
	Fabric string    `json:"fabric"`
	Bytes  int64     `json:"bytes"`
	Ahead  int64     `json:"ahead"`
}

// A Wait is one collective instruction.
type Wait struct {
	Kind    hlo.Kind  `json:"kind"`
	Name    string    `json:"name"`
	In      string    `json:"in"` // the computation that it is in
	OpName  string    `json:"op_name,omitempty"`
	Group   hlo.Group `json:"group"`
	Fabric  string    `json:"fabric"`
	Shape   string    `json:"shape"` // of the first of its tensors, as one device brings it in
	Tensors int       `json:"tensors"`
	Count   float64   `json:"count"`
	Bytes   float64   `json:"bytes"`
	Wire    float64   `json:"wire"`
	Exposed float64   `json:"exposed"`
}

// Read plays the schedule of an optimized program for a target and says what of its communication
// the compute hides.
func Read(m *hlo.Module, t machine.Cluster, r Rates) (*Report, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	entry, err := m.Schedule()
	if err != nil {
		return nil, err
	}
	p := &player{rates: r, wire: newWire(m, t, r), clock: clock{free: map[string]float64{}},
		spans: map[string][]span{}, weight: 1, sites: map[*hlo.Instruction]*site{},
		loops: map[*hlo.Computation]*Loop{}, notes: map[string]bool{}}
	p.play(entry)
	out, err := p.report(m)
	if err == nil {
		out.Kernels = p.kernels(entry)
	}
	return out, err
}

func (p *player) report(m *hlo.Module) (*Report, error) {
	out := &Report{Name: m.Name, Rates: p.rates, Seconds: p.clock.compute, Compute: p.compute,
		Hidden: 1}
	out.Wire, out.Exposed = p.sums()
	if math.IsInf(out.Wire, 0) || math.IsNaN(out.Wire) {
		return nil, diag.New(diag.BadInput, "%s sends over a network whose rate is not known",
			m.Name).Try("give the rates of NVLink and the network")
	}
	if out.Wire > 0 {
		out.Hidden = 1 - out.Exposed/out.Wire
	}
	for _, s := range p.order {
		out.traffic(s)
		if s.Exposed > 0 {
			out.Waits = append(out.Waits, s.Wait)
		}
	}
	lists.Sort(out.Traffic, func(a, b Traffic) int { return cmp.Compare(b.Wire, a.Wire) })
	lists.Sort(out.Waits, func(a, b Wait) int { return cmp.Compare(b.Exposed, a.Exposed) })
	out.Loops = lists.Map(p.rounds, func(l *Loop) Loop { return *l })
	out.Notes = slices.Sorted(maps.Keys(p.notes))
	return out, nil
}

func (r *Report) traffic(s *site) {
	at := slices.IndexFunc(r.Traffic, func(t Traffic) bool {
		return t.Kind == s.Kind && t.Group == s.Group && t.Fabric == s.Fabric
	})
	if at < 0 {
		at = len(r.Traffic)
		r.Traffic = append(r.Traffic, Traffic{Kind: s.Kind, Group: s.Group, Fabric: s.Fabric})
	}
	t := &r.Traffic[at]
	t.Count, t.Bytes = t.Count+s.Count, t.Bytes+s.Bytes
	t.Wire, t.Exposed = t.Wire+s.Wire, t.Exposed+s.Exposed
	t.Between, t.Sync = t.Between+s.between, t.Sync+s.sync
}
