package train

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/link"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// Processes assigns the ranks of a pipeline to processes: contiguous, as evenly as possible. nil is
// a run in one process.
//
// Each process has an engine of its own, with the devices of its ranks; or all share one client
// (Client), and have equally many of its devices, in order. Then a rank may have devices of several
// processes, whose number is a multiple of the number of ranks, or the other way round.
type Processes struct {
	// Self is the index of this process in Addresses, where the hub of each process listens.
	Self      int
	Addresses []string
	// Hub is this process's own; the caller closes it after the Trainer.
	Hub *link.Hub
	// Client tells that the engines of all processes are one PJRT client, whose hub has joined.
	Client bool
}

// Leads reports whether this process writes the run's folder: process 0 does.
func (p *Processes) Leads() bool { return p == nil || p.Self == 0 }

// Hosts reports whether a rank is in this process.
func (p *Processes) Hosts(rank, ranks int) bool {
	return p == nil || p.hosts(p.Self, rank, ranks)
}

// hosts reports whether a process has devices of a rank.
func (p *Processes) hosts(process, rank, ranks int) bool {
	if n := len(p.Addresses); n > ranks {
		return process*ranks/n == rank
	}
	return p.process(rank, ranks) == process
}

// process is the number of the process that hosts a rank, or the first of those.
func (p *Processes) process(rank, ranks int) int { return rank * len(p.Addresses) / ranks }

// repeats reports whether another process has the same results of its rank as this one, and tells
// them: each rank counts once.
func (p *Processes) repeats(ranks int) bool {
	return len(p.Addresses) > ranks && p.process(p.Self*ranks/len(p.Addresses), ranks) != p.Self
}

// self is the number of this process.
func (p *Processes) self() int {
	if p == nil {
		return 0
	}
	return p.Self
}

// others returns the other processes and the ranks that they host.
func (p *Processes) others(ranks int) (list []link.Peer) {
	for n, address := range p.Addresses {
		if n != p.Self {
			list = append(list, link.Peer{Process: n, Address: address, Ranks: p.ranksOf(n, ranks)})
		}
	}
	return list
}

// ranksOf names the ranks of a process for people: "pipeline ranks 2, 3".
func (p *Processes) ranksOf(process, ranks int) string {
	var list []string
	for r := range ranks {
		if p.hosts(process, r, ranks) {
			list = append(list, strconv.Itoa(r))
		}
	}
	if n := len(p.Addresses); n > ranks {
		return fmt.Sprintf("part %d of %d of pipeline rank %s", process%(n/ranks)+1, n/ranks, list[0])
	}
	if len(list) == 1 {
		return "pipeline rank " + list[0]
	}
	return "pipeline ranks " + strings.Join(list, ", ")
}

// whereabouts names this process, its host and its ranks, for error messages.
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

// A peers exchanges messages with the other processes of a run; nil is a run in one process. Short
// messages travel along a binary tree in which the parent of process n is (n-1)/2, so a barrier
// takes O(log n) hops. Arrays of the pipeline have links of their own.
type peers struct {
	*Processes
	engine *engine.Engine
	// wires go to the neighbours in the tree, and for saves between process 0 and all others.
	wires map[int]*link.Wire
	turn  int // of exchanges so far; the same in all processes
	ranks int // of the pipeline
}

// The numbers under which hubs know links that are not between two ranks.
const (
	processLinks = 1 << 20 // between two processes
	wayLinks     = 1 << 16 // between two ranks, beside the first
)

// newPeers joins the hub and connects to the neighbours in the tree.
func newPeers(p *Processes, t *Trainer, ranks int) *peers {
	if p.Client {
		p.Hub.Report(t.status)
	} else {
		p.Hub.Join(p.Self, p.others(ranks), t.status)
	}
	x := p.connect(t.opts.Engine)
	x.ranks = ranks
	return x
}

// Join opens control connections to the other processes of a client, before the engine is opened:
// opening waits for all of them.
func (p *Processes) Join(ranks int) {
	began := time.Now()
	p.Hub.Join(p.Self, p.others(ranks), func() link.Status {
		return link.Status{Phase: "open the devices", Age: time.Since(began)}
	})
}

// connect opens the wires of this process: to its parent and children, and between process 0 and
// all others for saves.
func (p *Processes) connect(e *engine.Engine) *peers {
	x := &peers{Processes: p, engine: e, wires: map[int]*link.Wire{}}
	for n, address := range p.Addresses {
		if n != p.Self && (p.Self == 0 || n == 0 || n == (p.Self-1)/2 || p.Self == (n-1)/2) {
			x.wires[n] = p.Hub.Wire(processLinks+p.Self, processLinks+n, address)
		}
	}
	return x
}

// close closes the wires; p may be nil.
func (p *peers) close() {
	if p != nil {
		for _, w := range p.wires {
			_ = w.Close()
		}
	}
}

// below lists the processes of a subtree in pre-order.
func (p *Processes) below(root int) (list []int) {
	if root < len(p.Addresses) {
		list = append(append([]int{root}, p.below(2*root+1)...), p.below(2*root+2)...)
	}
	return list
}

// exchange is an all-gather of byte strings of equal length, returned in the order of the
// processes. Contributions travel up the tree in the order of [Processes.below], and the
// concatenation comes down.
func (p *peers) exchange(ctx context.Context, what string, mine []byte) ([][]byte, error) {
	all, err := p.pass(ctx, what, mine)
	if err == nil {
		return all, nil
	}
	wait := time.Second
	if errors.Is(err, diag.Canceled) {
		wait = 0
	}
	return nil, p.Hub.Explain(err, wait) // why the neighbours went, too
}

func (p *peers) pass(ctx context.Context, what string, mine []byte) ([][]byte, error) {
	// The tag has the number of the exchange: processes that got out of step fail at once instead of
	// reading each other's messages as something else.
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
	// Up: the subtree's contributions, this process's first.
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
	// Down: all contributions, from the root.
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

// blobs is [peers.exchange] for byte strings of any length: sizes first, then padded contents.
func (p *peers) blobs(ctx context.Context, what string, mine []byte) ([][]byte, error) {
	// Reports and verdicts are short, so padding to the longest is cheaper than a second kind of
	// message.
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

// hosts reports whether a rank is in this process.
func (p *peers) hosts(rank, ranks int) bool { return p == nil || p.Hosts(rank, ranks) }

// local returns the devices of a rank as this process's engine numbers them: from 0.
func (p *peers) local(devices program.Devices, rank, ranks int) program.Devices {
	if p == nil || p.Client {
		return devices
	}
	// Ranks of a process are contiguous, and so are its devices.
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

// link makes this process's end of a link between one of its ranks and a rank of another process.
func (p *peers) link(self, peer, way, ranks int) engine.Link {
	// If a rank has several processes, the first of each are linked, the second, and so on: shard
	// i goes from device i of a rank to device i of the other.
	at := p.process(peer, ranks) + max(0, p.Self-p.process(self, ranks))
	if len(p.Addresses) <= ranks {
		at = p.process(peer, ranks)
	}
	address := p.Addresses[at]
	return p.engine.Wired(p.Hub.Wire(wayLinks*way+self, wayLinks*way+peer, address))
}

// sum is an all-reduce of one number of each rank. All processes add in the same order, and so get
// the same bits.
func (p *peers) sum(ctx context.Context, mine float64) (float64, error) {
	if p != nil && p.repeats(p.ranks) {
		mine = 0
	}
	return p.add(ctx, mine)
}

// add is an all-reduce of one number of each process.
func (p *peers) add(ctx context.Context, mine float64) (float64, error) {
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

// any reports whether a condition holds in any process; all get the same answer.
func (p *peers) any(ctx context.Context, here bool) (bool, error) {
	mine := 0.0
	if here {
		mine = 1
	}
	all, err := p.add(ctx, mine)
	return all > 0, err
}

// collect sends the state of the other processes to process 0, for processes that do not see the
// leader's folder. The leader reads each array as it comes, so one array at a time is on its
// devices beside its own.
func (c *executor) collect(ctx context.Context, s *snapshot) error {
	if c.peers == nil {
		return nil
	}
	if c.peers.Client {
		return diag.New(diag.CheckpointWrite, "the processes of this run do not see one folder").
			At("%s", c.t.folder()).
			Try("put the run on a file system that all hosts share: --set out=FOLDER")
	}
	p := c.t.programs
	// All processes walk the same list, so sends and receives match without messages about them.
	for i := range s.arrays {
		pc := &s.arrays[i]
		from := c.peers.process(pc.rank, len(p.Ranks))
		switch {
		case from == 0:
		case from == c.peers.Self:
			a := s.shards[pc.rank].state.Get(pc.name)
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
			s.sent[pc.name] = data
		}
	}
	return nil
}
