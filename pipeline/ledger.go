package pipeline

import (
	"sync/atomic"

	"github.com/deepwell/deepwell/engine"
)

// An item is an array with one or more holders: a microbatch that keeps it, a channel that sends
// it.
type item struct {
	array *engine.Array
	refs  atomic.Int32
}

func newItem(a *engine.Array) *item {
	x := &item{array: a}
	x.refs.Store(1)
	return x
}

func (x *item) hold() *item {
	x.refs.Add(1)
	return x
}

// drop frees the array with its last holder.
func (x *item) drop() {
	if x.refs.Add(-1) == 0 {
		x.array.Free()
	}
}

// bytes is what the array takes on one device.
func (x *item) bytes() int64 { return x.array.Local().Bytes() }

// A ledger is what the microbatches of a rank hold, by virtual stage. It counts what stays from one
// action to another; what is under way between ranks belongs to the links.
type ledger struct {
	stages map[int]*stageArrays // by stage
	total  int64
	most   int64
}

// A stageArrays is what a stage holds.
type stageArrays struct {
	micros map[int]map[string]*item
	begun  int // microbatches that have gone forward and still wait for a gradient
	bytes  int64
	peak   Usage
}

func newLedger(stages map[int]*stage) *ledger {
	l := &ledger{stages: map[int]*stageArrays{}}
	for s := range stages {
		l.stages[s] = &stageArrays{micros: map[int]map[string]*item{}, peak: Usage{Stage: s}}
	}
	return l
}

// get finds what a microbatch has, or nil.
func (l *ledger) get(stage, micro int, name string) *item {
	return l.stages[stage].micros[micro][name]
}

// put gives a microbatch an item, which the ledger now holds.
func (l *ledger) put(stage, micro int, name string, x *item) {
	h := l.stages[stage]
	if h.micros[micro] == nil {
		h.micros[micro] = map[string]*item{}
	}
	if old := h.micros[micro][name]; old != nil {
		l.remove(h, micro, name)
	}
	h.micros[micro][name] = x
	h.bytes += x.bytes()
	l.total += x.bytes()
}

func (l *ledger) remove(h *stageArrays, micro int, name string) {
	x := h.micros[micro][name]
	h.bytes -= x.bytes()
	l.total -= x.bytes()
	delete(h.micros[micro], name)
	x.drop()
}

// keep drops everything of a microbatch that is not needed any more.
func (l *ledger) keep(stage, micro int, needed map[string]bool) {
	h := l.stages[stage]
	for name := range h.micros[micro] {
		if !needed[name] {
			l.remove(h, micro, name)
		}
	}
	if len(h.micros[micro]) == 0 {
		delete(h.micros, micro)
	}
}

// mark notes what is held between two actions.
func (l *ledger) mark() {
	for _, h := range l.stages {
		h.peak.Bytes = max(h.peak.Bytes, h.bytes)
		h.peak.Micros = max(h.peak.Micros, h.begun)
	}
	l.most = max(l.most, l.total)
}

func (l *ledger) usage() []Usage {
	var list []Usage
	for _, h := range l.stages {
		list = append(list, h.peak)
	}
	return list
}

// free drops everything.
func (l *ledger) free() {
	for stage, h := range l.stages {
		for micro := range h.micros {
			l.keep(stage, micro, nil)
		}
	}
}
