package hlo

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// maxCallDepth bounds how deep computations may call each other. A loop over layers in a loop
// over microbatches with fusions is five deep.
const maxCallDepth = 1000

// A visit is where the walk stands with a computation.
type visit uint8

const (
	unseen visit = iota
	open         // being walked: a call to it is a cycle
	done
)

// A reach says how a computation is come by, over all the calls to it.
type reach struct {
	runs        int64 // executions per run of the program
	tripUnknown bool  // inside a loop whose trip count is not known
	branch      bool  // inside a branch of a conditional
	async       bool  // inside an asynchronous call
	site        *step // the outermost fusion or asynchronous call around it, if there is one
}

// An edge is one call: how often the callee runs for one run of the caller.
type edge struct {
	to    *computation
	times int64
	reach // what the call adds to the caller's own
}

// A step is one instruction on the way through the program.
type step struct {
	in *computation
	*instruction
}

// walk gives every instruction that the entry reaches, in the order of execution, each once, and
// sets the reach of every computation. A loop's body comes where the loop stands.
func (p *program) walk(entry *computation) ([]step, error) {
	w := walker{program: p}
	if err := w.visit(entry, 0); err != nil {
		return nil, err
	}
	entry.runs = 1
	// In reverse postorder a caller comes before what it calls, so each sum is complete when it
	// is passed on; the work is linear in the number of calls, however many paths there are.
	for _, c := range slices.Backward(w.postorder) {
		for _, e := range c.edges {
			e.to.runs = satAdd(e.to.runs, satMul(c.runs, e.times))
			e.to.tripUnknown = e.to.tripUnknown || c.tripUnknown || e.tripUnknown
			e.to.branch = e.to.branch || c.branch || e.branch
			e.to.async = e.to.async || c.async || e.async
			if e.to.site == nil {
				e.to.site = cmp.Or(c.site, e.site)
			}
		}
	}
	return w.steps, nil
}

type walker struct {
	*program
	steps     []step
	postorder []*computation
}

func (w *walker) visit(c *computation, depth int) error {
	if depth > maxCallDepth {
		return fmt.Errorf("computations call each other more than %d deep", maxCallDepth)
	}
	c.visited = open
	for _, i := range c.list {
		w.steps = append(w.steps, step{c, i})
		edges, err := w.calls(c, i)
		if err != nil {
			return err
		}
		c.edges = append(c.edges, edges...)
		for _, e := range edges {
			switch e.to.visited {
			case open:
				return fmt.Errorf("computation %q calls itself through %q", e.to.name, i.name)
			case unseen:
				if err := w.visit(e.to, depth+1); err != nil {
					return err
				}
			}
		}
	}
	c.visited = done
	w.postorder = append(w.postorder, c)
	return nil
}

// calls lists what an instruction runs. What it only applies to elements or hands to a library
// (the sum of a reduction, the order of a sort) is not run in the sense of the account, and an
// async-done names again what its async-start has run.
func (p *program) calls(c *computation, i *instruction) ([]edge, error) {
	var how []edge
	switch i.opcode {
	case "call":
		how = repeat(edge{times: 1}, len(i.called))
	case "fusion":
		how = repeat(edge{times: 1, reach: reach{site: &step{c, i}}}, len(i.called))
	case "conditional":
		how = repeat(edge{times: 1, reach: reach{branch: true}}, len(i.called))
	case "async-start":
		e := edge{times: 1, reach: reach{site: &step{c, i}}}
		e.async = !p.backendConfig(i).Collective.IsSync
		how = repeat(e, len(i.called))
	case "while":
		if len(i.called) != 2 {
			return nil, fmt.Errorf("loop %q has %d computations, not a body and a condition",
				i.name, len(i.called))
		}
		n, known := p.tripCount(i)
		e := edge{reach: reach{tripUnknown: !known}}
		body, condition := e, e
		body.times, condition.times = n, satAdd(n, 1) // the condition also ends the loop
		if !known {
			condition.times = 1
		}
		how = []edge{body, condition}
	case "scan": // newer plugins; its length is not written down
		how = repeat(edge{times: 1, reach: reach{tripUnknown: true}}, len(i.called))
	}
	for n := range how {
		if how[n].to = p.byID[i.called[n]]; how[n].to == nil {
			return nil, fmt.Errorf("instruction %q calls computation %d, which is not there",
				i.name, i.called[n])
		}
	}
	return how, nil
}

func repeat(e edge, n int) []edge { return slices.Repeat([]edge{e}, n) }

// tripCount gives how often a loop runs, 1 if the compiler does not know.
func (p *program) tripCount(i *instruction) (n int64, known bool) {
	c := p.backendConfig(i)
	if c.TripCount == nil {
		return 1, false
	}
	text := strings.Trim(string(c.TripCount.N), `"`)
	if text == "" { // a zero may be left out
		return 0, true
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return 1, false
	}
	return n, true
}
