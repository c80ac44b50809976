package train

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/program"
)

// Processes says how the ranks of a pipeline are dealt to processes: in order, as evenly as can be.
// Each process has an engine of its own, whose devices are those of its ranks.
type Processes struct {
	Self      int         // which of them this process is
	Addresses []string    // where the hub of each listens
	Hub       *engine.Hub // of this process
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
func (p *Processes) others(ranks int) (list []engine.Peer) {
	for n, address := range p.Addresses {
		if n != p.Self {
			list = append(list, engine.Peer{Process: n, Address: address, Ranks: p.ranksOf(n, ranks)})
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
func (p *Processes) whereabouts(pipe *Pipe) string {
	host, err := os.Hostname()
	if err != nil {
		host = "this host"
	}
	if p == nil {
		return host
	}
	return fmt.Sprintf("process %d at %s on %s (%s)", p.Self, p.Addresses[p.Self], host,
		p.ranksOf(p.Self, len(pipe.Ranks)))
}

// A peers exchanges with the other processes of a run; nil is for a run in one process.
type peers struct {
	*Processes
	engine *engine.Engine
	links  []engine.Link // by process; nil is this one
	turn   int
}

// The numbers under which hubs know links that are not between two ranks.
const (
	processLinks = 1 << 20 // between two processes
	wayLinks     = 1 << 16 // between two ranks, beside the first
)

func newPeers(p *Processes, t *Trainer, ranks int) *peers {
	x := &peers{Processes: p, engine: t.Engine, links: make([]engine.Link, len(p.Addresses))}
	p.Hub.Join(p.Self, p.others(ranks), t.status)
	for n, address := range p.Addresses {
		if n != p.Self {
			x.links[n] = p.Hub.Link(processLinks+p.Self, processLinks+n, address)
		}
	}
	return x
}

// all lists the links to other processes.
func (p *peers) all() (list []engine.Link) {
	if p == nil {
		return nil
	}
	for _, l := range p.links {
		if l != nil {
			list = append(list, l)
		}
	}
	return list
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
	return p.Hub.Link(wayLinks*way+self, wayLinks*way+peer, address)
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

// stop asks all processes.
func (c *ranks) stop(ctx context.Context, wish bool) (bool, error) {
	mine := 0.0
	if wish {
		mine = 1
	}
	all, err := c.peers.sum(ctx, mine)
	return all > 0, err
}

// collect sends the pieces of this process to the first, which reads them as they come: one piece
// of the state at a time lies on its devices beside its own.
func (c *ranks) collect(ctx context.Context, s *snapshot) error {
	if c.peers == nil {
		return nil
	}
	all := c.t.Programs.Pipe.Ranks
	for i := range s.pieces {
		pc := &s.pieces[i]
		from := c.peers.process(pc.home, len(all))
		switch {
		case from == 0:
		case from == c.peers.Self:
			a := s.homes[pc.home].state.Get(pc.name)
			if err := c.peers.links[0].Send(ctx, "save "+pc.name, a); err != nil {
				return err
			}
		case c.peers.Self == 0:
			on := *all[pc.home].Update
			on.Devices = all[0].Update.Devices
			at := argument(&on, pc.name)
			a, err := c.peers.links[from].Recv(ctx, "save "+pc.name, &on, on.Args[at])
			if err != nil {
				return err
			}
			data, err := gather(ctx, a, pc, c.hosted[0].mesh)
			a.Free()
			if err != nil {
				return err
			}
			s.held[pc.name], s.sent[pc.name] = data, true
		}
	}
	return nil
}
