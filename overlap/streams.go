package overlap

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/lists"
)

// A span is a time in which a collective has a stream.
type span struct {
	begin, end float64
	site       *site
}

// A site is one collective instruction and what became of it over the whole run. Counts are
// numbers of runs, and what is summed up is multiplied out.
type site struct {
	Wait
	between float64 // bytes, if a product ran between start and end
	sync    float64 // bytes, if it ran in line
}

// A clock is where the streams stand.
type clock struct {
	compute float64
	free    map[string]float64 // when a stream of collectives is done with what it was given
}

// ahead tells how far streams are ahead of the compute stream; rounds that begin alike end alike.
func (c clock) ahead() map[string]float64 {
	list := map[string]float64{}
	for name, t := range c.free {
		if t > c.compute {
			list[name] = t - c.compute
		}
	}
	return list
}

// A player plays a schedule.
type player struct {
	rates Rates
	wire  wire
	clock clock
	spans map[string][]span // by stream, oldest first

	weight float64 // how often what is played now happens; 0 while a round is tried
	gemms  int     // GEMM and attention kernels so far

	sites   map[*hlo.Instruction]*site
	order   []*site
	loops   map[*hlo.Computation]*Loop
	rounds  []*Loop
	compute Compute
	notes   map[string]bool
}

// maxRounds is after how many unlike rounds of a loop the next stands for the rest. A round depends
// on the one before only by what a stream still has to do, which no round leaves to the next.
const maxRounds = 8

func (p *player) play(c *hlo.Computation) {
	flights := map[int]flight{}
	for n := range c.Body {
		i := &c.Body[n]
		switch {
		case i.Opcode == "while" && len(i.Calls) > 0:
			p.loop(i)
		case i.Opcode == "call":
			for _, inner := range i.Calls {
				p.play(inner)
			}
		case i.Opcode == "conditional":
			p.branches(i)
		case strings.HasSuffix(i.Opcode, "-done") && len(i.Operands) > 0:
			if f, ok := flights[i.Operands[0]]; ok {
				p.await(f)
			}
		case i.Opcode == "async-update" && len(i.Operands) > 0:
			if f, ok := flights[i.Operands[0]]; ok {
				flights[n] = f
			}
		default:
			if list, domain := sent(i); len(list) > 0 {
				flights[n] = p.send(c, i, list, domain)
			} else {
				p.kernel(costOf(c, i))
			}
		}
	}
}

// sent gives the tensors that an instruction sends, itself or by what it wraps.
func sent(i *hlo.Instruction) (list []hlo.Collective, domain string) {
	list, domain = i.Collectives, i.Domain
	if i.Opcode != "async-start" && i.Opcode != "fusion" {
		return list, domain
	}
	for _, c := range i.Calls {
		for n := range c.Body {
			more, inner := sent(&c.Body[n])
			list, domain = append(slices.Clip(list), more...), cmp.Or(domain, inner)
		}
	}
	return list, domain
}

func (p *player) kernel(k cost) {
	t := k.seconds(p.rates)
	p.clock.compute += t
	switch {
	case k.attention:
		p.gemms++
		p.compute.Attention += t * p.weight
		p.compute.AttentionFLOPs += float64(k.flops) * p.weight
	case k.flops > 0:
		p.gemms++
		p.compute.GEMMs += t * p.weight
		p.compute.GEMMFLOPs += float64(k.flops) * p.weight
	default:
		p.compute.Memory += t * p.weight
		p.compute.MemoryBytes += float64(k.bytes) * p.weight
	}
}

// A flight is a collective between its start and its end.
type flight struct {
	site   *site
	stream string
	end    float64
	bytes  float64
	gemms  int // that had run at its start
}

func (p *player) send(c *hlo.Computation, i *hlo.Instruction, list []hlo.Collective,
	stream string) flight {
	w := p.wire.travel(list, stream)
	s := p.site(c, i, list, w.fabric)
	f := flight{site: s, stream: stream, gemms: p.gemms}
	f.bytes = lists.Sum(list, func(c hlo.Collective) float64 { return float64(c.Bytes()) })
	s.Count += p.weight
	s.Bytes += f.bytes * p.weight
	s.Wire += w.seconds * p.weight
	if !list[0].Async {
		p.clock.compute += w.seconds
		s.Exposed += w.seconds * p.weight
		s.sync += f.bytes * p.weight
		f.end = p.clock.compute
		f.site = nil
		return f
	}
	begin := max(p.clock.compute, p.clock.free[stream])
	f.end = begin + w.seconds
	p.clock.free[stream] = f.end
	old := p.spans[stream]
	for len(old) > 0 && old[0].end <= p.clock.compute {
		old = old[1:] // nobody waits for it any more
	}
	p.spans[stream] = append(old, span{begin, f.end, s})
	return f
}

// await makes the compute stream wait for a collective. The exposed seconds are charged to the
// collective that occupies the stream meanwhile, which may be one that was started before.
func (p *player) await(f flight) {
	if f.site == nil { // in line, so it is done
		return
	}
	if p.gemms > f.gemms {
		f.site.between += f.bytes * p.weight
	}
	if f.end <= p.clock.compute {
		return
	}
	for _, s := range p.spans[f.stream] {
		if t := min(s.end, f.end) - max(s.begin, p.clock.compute); t > 0 {
			s.site.Exposed += t * p.weight
		}
	}
	p.clock.compute = f.end
}

func (p *player) site(c *hlo.Computation, i *hlo.Instruction, list []hlo.Collective,
	fabric string) *site {
	if s := p.sites[i]; s != nil {
		return s
	}
	first := list[0]
	s := &site{Wait: Wait{Name: i.Name, In: c.Name, Kind: first.Kind,
		Group: first.Group, Fabric: fabric, Shape: first.Shape, Tensors: len(list),
		OpName: cmp.Or(i.OpName, first.OpName)}}
	p.sites[i] = s
	p.order = append(p.order, s)
	return s
}

// branches plays the branch that takes longest, since the schedule does not tell which is taken.
func (p *player) branches(i *hlo.Instruction) {
	p.notes["of a conditional the longest branch counts"] = true
	var longest *hlo.Computation
	most := -1.0
	for _, c := range i.Calls {
		if t := p.try(c); t > most {
			longest, most = c, t
		}
	}
	if longest != nil {
		p.play(longest)
	}
}

// try plays a computation without counting it, and tells how long the compute stream took.
func (p *player) try(c *hlo.Computation) float64 {
	restore := p.suspend()
	defer restore()
	from := p.clock.compute
	p.play(c)
	return p.clock.compute - from
}

// suspend stops the counting; what it gives puts everything back.
func (p *player) suspend() (restore func()) {
	weight, compute, free := p.weight, p.clock.compute, maps.Clone(p.clock.free)
	spans := map[string][]span{}
	for name, list := range p.spans {
		spans[name] = slices.Clone(list)
	}
	p.weight = 0
	return func() {
		p.weight, p.clock, p.spans = weight, clock{compute, free}, spans
	}
}

// loop plays rounds until one leaves the streams as it found them, and takes the rest as equal. A
// loop inside a round that is only tried is taken as equal at once.
func (p *player) loop(i *hlo.Instruction) {
	body, left := i.Calls[0], i.Trips
	if left < 0 {
		p.notes["a loop without a known count is counted once"] = true
		left = 1
	}
	for round := 0; left > 0; round++ {
		times := int64(1)
		if left > 1 && (round >= maxRounds || p.weight == 0 || p.steady(body)) {
			times = left
		}
		p.round(i, body, times)
		left -= times
	}
}

// steady tells whether a round leaves the streams as it finds them.
func (p *player) steady(body *hlo.Computation) bool {
	before := p.clock.ahead()
	restore := p.suspend()
	defer restore()
	p.play(body)
	return maps.Equal(before, p.clock.ahead())
}

// round plays one round that stands for some.
func (p *player) round(i *hlo.Instruction, body *hlo.Computation, times int64) {
	weight, from := p.weight, p.clock.compute
	p.weight *= float64(times)
	wire, exposed := p.sums()
	p.play(body)
	took := p.clock.compute - from
	if p.weight > 0 {
		afterWire, afterExposed := p.sums()
		l := p.loopOf(i, body)
		l.Seconds, l.Rounds = took, i.Trips
		l.Wire = (afterWire - wire) / p.weight
		l.Exposed = (afterExposed - exposed) / p.weight
	}
	skipped := took * float64(times-1)
	p.clock.compute += skipped
	for name := range p.clock.free {
		if p.clock.free[name] > p.clock.compute-skipped {
			p.clock.free[name] += skipped
		}
	}
	p.weight = weight
}

func (p *player) sums() (wire, exposed float64) {
	for _, s := range p.order {
		wire, exposed = wire+s.Wire, exposed+s.Exposed
	}
	return wire, exposed
}

// doubled is how XLA's double buffering ends the names of a round's second half.
const doubled = ".double_buffer_clone"

func (p *player) loopOf(i *hlo.Instruction, body *hlo.Computation) *Loop {
	if p.loops[body] == nil {
		p.loops[body] = &Loop{Name: i.Name, Body: body.Name}
		p.rounds = append(p.rounds, p.loops[body])
		p.loops[body].Gathers = p.gathers(body)
		p.loops[body].Kernels = p.kernels(body)
		p.loops[body].Twice = slices.ContainsFunc(p.loops[body].Kernels, func(k Kernel) bool {
			return strings.HasSuffix(k.Name, doubled)
		})
	}
	return p.loops[body]
}

// kernels lists what the compute stream runs in a round, without what loops inside it run.
func (p *player) kernels(body *hlo.Computation) (out []Kernel) {
	for n := range body.Body {
		i := &body.Body[n]
		if list, _ := sent(i); len(list) > 0 || i.Opcode == "while" {
			continue
		}
		k := costOf(body, i)
		if k.bytes == 0 {
			continue
		}
		row := Kernel{Name: i.Name, OpName: nameOf(i), Target: i.Target, Spec: i.Spec, Bytes: k.bytes,
			FLOPs: k.flops, Bits: k.bits, Seconds: k.seconds(p.rates)}
		if call := libraryCall(i); call != nil { // a fusion by name only
			row.Target, i = call.Target, call
		}
		if len(i.Results) > 0 {
			row.Shape = i.Results[0].Shape.String()
		}
		out = append(out, row)
	}
	return out
}

// nameOf is what the author called an instruction, or if it has no name, as those that a loop puts
// into its stacks, the last that it computes.
func nameOf(i *hlo.Instruction) string {
	if i.OpName != "" || len(i.Calls) != 1 || i.Opcode != "fusion" && i.Opcode != "async-start" {
		return i.OpName
	}
	body := i.Calls[0].Body
	for n := len(body) - 1; n >= 0; n-- {
		if name := nameOf(&body[n]); name != "" {
			return name
		}
	}
	return ""
}
