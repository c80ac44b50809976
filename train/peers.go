package train

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/link"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// Processes says how the ranks of a pipeline are dealt to processes: in order, as evenly as can be.
// Each process has an engine of its own, whose devices are those of its ranks.
type Processes struct {
	Self      int       // which of them this process is
	Addresses []string  // where the hub of each listens
	Hub       *link.Hub // of this process
}

// Leads tells whether this process writes what a run leaves behind; nil is the only process.
func (p *Processes) Leads() bool { return p == nil || p.Self == 0 }

// Hosts tells whether a rank is in this process.
func (p *Processes) Hosts(rank, ranks int) bool {
	return p == nil || p.process(rank, ranks) == p.Self
}

// process is where a rank is.
func (p *Processes) process(rank, ranks int) int { return rank * len(p.Addresses) / ranks }

// self is the number of this process; nil is the only one.
func (p *Processes) self() int {
	if p == nil {
		return 0
	}
	return p.Self
}

// others lists the other processes with the ranks that they host.
func (p *Processes) others(ranks int) (list []link.Peer) {
	for n, address := range p.Addresses {
		if n != p.Self {
			list = append(list, link.Peer{Process: n, Address: address, Ranks: p.ranksOf(n, ranks)})
		}
	}
	return list
}

// ranksOf names the ranks of a process: "pipeline ranks 2, 3".
func (p *Processes) ranksOf(process, ranks int) string {
	var list []string
	for r := range ranks {
		if p.process(r, ranks) == process {
			list = append(list, strconv.Itoa(r))
		}
	}
	if len(list) == 1 {
		return "pipeline rank " + list[0]
	}
	return "pipeline ranks " + strings.Join(list, ", ")
}

// whereabouts names this process, its host and its ranks.
func (p *Processes) whereabouts(ranks int) string {
	host, err := os.Hostname()
	if err != nil {
		host = "this host"
	}
	if p == nil {
		return host
	}
	return fmt.Sprintf("process %d at %s on %s (%s)", p.Self, p.Addresses[p.Self], host,
		p.ranksOf(p.Self, ranks))
}

// A peers exchanges with the other processes of a run; nil is for a run in one process. Short
// messages go along a binary tree, in which process n hangs below (n-1)/2.
type peers struct {
	*Processes
	engine *engine.Engine
	wires  map[int]*link.Wire // by process: those beside this one in the tree, and for saves the first
	turn   int
}

// The numbers under which hubs know links that are not between two ranks.
const (
	processLinks = 1 << 20 // between two processes
	wayLinks     = 1 << 16 // between two ranks, beside the first
)

func newPeers(p *Processes, t *Trainer, ranks int) *peers {
	p.Hub.Join(p.Self, p.others(ranks), t.status)
	return p.connect(t.opts.Engine)
}

func (p *Processes) connect(e *engine.Engine) *peers {
	x := &peers{Processes: p, engine: e, wires: map[int]*link.Wire{}}
	for n, address := range p.Addresses {
		if n != p.Self && (p.Self == 0 || n == 0 || n == (p.Self-1)/2 || p.Self == (n-1)/2) {
			x.wires[n] = p.Hub.Wire(processLinks+p.Self, processLinks+n, address)
		}
	}
	return x
}

func (p *peers) close() {
	if p != nil {
		for _, w := range p.wires {
			_ = w.Close()
		}
	}
}

// below lists the processes of a subtree: its root, then the subtrees of its children.
func (p *Processes) below(root int) (list []int) {
	if root < len(p.Addresses) {
		list = append(append([]int{root}, p.below(2*root+1)...), p.below(2*root+2)...)
	}
	return list
}

// exchange gives what every process has sent, in their order; all send as many bytes. What a
// subtree has goes up in the order of below, and what all have comes down.
func (p *peers) exchange(ctx context.Context, what string, mine []byte) ([][]byte, error) {
	p.turn++
	tag := fmt.Sprintf("%s %d", what, p.turn)
	sent := slices.Clone(mine)
	hear := func(from, processes int) ([]byte, error) {
		got, err := p.wires[from].Hear(ctx, tag)
		if want := processes * len(mine); err == nil && len(got) != want {
			err = diag.New(diag.LinkShape, "process %d sends %d bytes; %d are expected", from, len(got),
				want).At("%s", tag)
		}
		return got, err
	}
	children := []int{2*p.Self + 1, 2*p.Self + 2}
	for _, n := range children {
		if subtree := p.below(n); len(subtree) > 0 {
			theirs, err := hear(n, len(subtree))
			if err != nil {
				return nil, err
			}
			sent = append(sent, theirs...)
		}
	}
	if p.Self > 0 {
		parent := (p.Self - 1) / 2
		err := p.wires[parent].Tell(ctx, tag, sent)
		if err == nil {
			sent, err = hear(parent, len(p.Addresses))
		}
		if err != nil {
			return nil, err
		}
	}
	for _, n := range children {
		if n < len(p.Addresses) {
			if err := p.wires[n].Tell(ctx, tag, sent); err != nil {
				return nil, err
			}
		}
	}
	all := make([][]byte, len(p.Addresses))
	for i, n := range p.below(0) {
		all[n] = sent[i*len(mine) : (i+1)*len(mine)]
	}
	return all, nil
}

// blobs is exchange for bytes of any length.
func (p *peers) blobs(ctx context.Context, what string, mine []byte) ([][]byte, error) {
	size := binary.LittleEndian.AppendUint32(nil, uint32(len(mine)))
	sizes, err := p.exchange(ctx, what+" size", size)
	if err != nil {
		return nil, err
	}
	longest := uint32(0)
	for _, b := range sizes {
		longest = max(longest, binary.LittleEndian.Uint32(b))
	}
	padded := make([]byte, longest)
	copy(padded, mine)
	all, err := p.exchange(ctx, what, padded)
	if err != nil {
		return nil, err
	}
	for n := range all {
		all[n] = all[n][:binary.LittleEndian.Uint32(sizes[n])]
	}
	return all, nil
}

func (p *peers) hosts(rank, ranks int) bool { return p == nil || p.Hosts(rank, ranks) }

// local gives the devices of a rank as this process counts them.
func (p *peers) local(devices program.Devices, rank, ranks int) program.Devices {
	if p == nil {
		return devices
	}
	first := 0
	for !p.hosts(first, ranks) {
		first++
	}
	list := make(program.Devices, len(devices))
	for i := range list {
		list[i] = (rank-first)*len(devices) + i
	}
	return list
}

// link makes this process's end of a link between a rank here and one elsewhere.
func (p *peers) link(self, peer, way, ranks int) engine.Link {
	address := p.Addresses[p.process(peer, ranks)]
	return p.engine.Wired(p.Hub.Wire(wayLinks*way+self, wayLinks*way+peer, address))
}

// sum adds up a number over all processes, in their order, so that all get the same.
func (p *peers) sum(ctx context.Context, mine float64) (float64, error) {
	if p == nil {
		return mine, nil
	}
	bits := binary.LittleEndian.AppendUint64(nil, math.Float64bits(mine))
	all, err := p.exchange(ctx, "sum", bits)
	if err != nil {
		return 0, err
	}
	total := 0.0
	for _, b := range all {
		total += math.Float64frombits(binary.LittleEndian.Uint64(b))
	}
	return total, nil
}

// some tells whether something holds in any process; all get the same answer.
func (p *peers) some(ctx context.Context, here bool) (bool, error) {
	mine := 0.0
	if here {
		mine = 1
	}
	all, err := p.sum(ctx, mine)
	return all > 0, err
}

// collect sends the pieces of this process to the first, which reads them as they come: one piece
// of the state at a time lies on its devices beside its own. It is for processes that do not see
// the leader's folder.
func (c *executor) collect(ctx context.Context, s *snapshot) error {
	if c.peers == nil {
		return nil
	}
	p := c.t.programs
	for i := range s.pieces {
		pc := &s.pieces[i]
		from := c.peers.process(pc.rank, len(p.Ranks))
		switch {
		case from == 0:
		case from == c.peers.Self:
			a := s.homes[pc.rank].state.Get(pc.name)
			if err := c.peers.engine.Wired(c.peers.wires[0]).Send(ctx, "save "+pc.name, a); err != nil {
				return err
			}
		case c.peers.Self == 0:
			on := *p.Find(step.Update, pc.rank).Module
			on.Devices = p.Find(step.Update, 0).Module.Devices
			at := argument(&on, pc.name)
			a, err := c.peers.engine.Wired(c.peers.wires[from]).Recv(ctx, "save "+pc.name, &on, on.Args[at])
			if err != nil {
				return err
			}
			data, err := gather(ctx, a, pc, c.ranks[0].mesh)
			a.Free()
			if err != nil {
				return err
			}
			s.held[pc.name], s.sent[pc.name] = data, true
		}
	}
	return nil
}
