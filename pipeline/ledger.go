package pipeline

import (
	"sync/atomic"

	"github.com/deepwell/deepwell/engine"
)

// An item is a reference-counted array: a microbatch that keeps it holds one reference, a channel
// that sends it another.
type item struct {
	array *engine.Array
	refs  atomic.Int32
}

// newItem wraps an array, with one reference for the caller.
func newItem(a *engine.Array) *item {
	x := &item{array: a}
	x.refs.Store(1)
	return x
}

// hold adds a reference.
func (x *item) hold() *item {
	x.refs.Add(1)
	return x
}

// drop releases a reference; the last one frees the array.
func (x *item) drop() {
	if x.refs.Add(-1) == 0 {
		x.array.Free()
	}
}

// bytes is the array's size on one device.
func (x *item) bytes() int64 { return x.array.Local().Bytes() }

// A ledger records the arrays that a rank's microbatches keep from one action to the next, by
// virtual stage. Arrays in flight between ranks belong to the links. It is used by one goroutine.
type ledger struct {
	stages map[int]*stageArrays // by stage
	total  int64                // bytes on one device now
	most   int64                // and at most
}

// stageArrays are the arrays of one stage, by microbatch and name.
type stageArrays struct {
	microbatches map[int]map[string]*item
	begun        int // microbatches between their forward pass and their last gradient
	bytes        int64
	peak         Usage
}

// newLedger is empty, with an entry for each stage.
func newLedger(stages map[int]*stage) *ledger {
	l := &ledger{stages: map[int]*stageArrays{}}
	for s := range stages {
		l.stages[s] = &stageArrays{microbatches: map[int]map[string]*item{}, peak: Usage{Stage: s}}
	}
	return l
}

// get returns an array of a microbatch, or nil.
func (l *ledger) get(stage, microbatch int, name string) *item {
	return l.stages[stage].microbatches[microbatch][name]
}

// put gives a microbatch an item; the ledger takes over the caller's reference.
func (l *ledger) put(stage, microbatch int, name string, x *item) {
	h := l.stages[stage]
	if h.microbatches[microbatch] == nil {
		h.microbatches[microbatch] = map[string]*item{}
	}
	if old := h.microbatches[microbatch][name]; old != nil {
		l.remove(h, microbatch, name)
	}
	h.microbatches[microbatch][name] = x
	h.bytes += x.bytes()
	l.total += x.bytes()
}

// remove takes one item away and drops its reference.
func (l *ledger) remove(h *stageArrays, microbatch int, name string) {
	x := h.microbatches[microbatch][name]
	h.bytes -= x.bytes()
	l.total -= x.bytes()
	delete(h.microbatches[microbatch], name)
	x.drop()
}

// keep drops all of a microbatch's arrays that no later action needs.
func (l *ledger) keep(stage, microbatch int, needed map[string]bool) {
	h := l.stages[stage]
	for name := range h.microbatches[microbatch] {
		if !needed[name] {
			l.remove(h, microbatch, name)
		}
	}
	if len(h.microbatches[microbatch]) == 0 {
		delete(h.microbatches, microbatch)
	}
}

// mark updates the peaks; it is called between two actions.
func (l *ledger) mark() {
	for _, h := range l.stages {
		h.peak.Bytes = max(h.peak.Bytes, h.bytes)
		h.peak.Microbatches = max(h.peak.Microbatches, h.begun)
	}
	l.most = max(l.most, l.total)
}

// usage lists the peaks of all stages, in no order.
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
		for microbatch := range h.microbatches {
			l.keep(stage, microbatch, nil)
		}
	}
}
