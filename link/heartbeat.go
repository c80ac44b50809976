package link

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/lists"
)

// A Peer is another process of a run, as people know it.
type Peer struct {
	Process int
	Address string // host:port
	Ranks   string // that it hosts, such as "pipeline ranks 2 and 3"
}

// String names the process, its host and its ranks.
func (p Peer) String() string {
	return fmt.Sprintf("process %d at %s (%s)", p.Process, p.Address, p.Ranks)
}

// A Status is what a process does. Heartbeats carry it.
type Status struct {
	Step  int64         // that it works on, counted from 1
	Phase string        // compile, step, save and so on
	Waits string        // what it waits for; "" if it works
	Age   time.Duration // of the phase
	Limit time.Duration // age of the phase after which the process calls it a stall; 0 means never

	Peer   Peer          // whose status this is, in what [Hub.Statuses] gives
	Silent time.Duration // since the last heartbeat, likewise
}

// String says it in words.
func (s Status) String() string {
	text := fmt.Sprintf("%s of step %d for %s", s.Phase, s.Step, s.Age.Round(100*time.Millisecond))
	if s.Waits != "" {
		text += ", waiting for " + s.Waits
	}
	return text
}

const (
	// defaultHeartbeatTimeout finds a stopped process within 10 s, and is eight heartbeats long.
	defaultHeartbeatTimeout = 8 * time.Second
	// A process is lost after beatsInTimeout missing heartbeats, which are at most beatEvery apart.
	beatsInTimeout = 8
	beatEvery      = time.Second
	// maxStatus bounds the words of a status in a heartbeat.
	maxStatus = 200
)

// A member is another process that has joined, or will. The hub's lock guards the second part.
type member struct {
	Peer
	hub *Hub
	// due has a value when the next heartbeat is due at once: a process was lost.
	due chan struct{}

	in       *pendingConn
	joined   bool          // it has connected, or answered: heartbeats follow, whatever it does
	heard    bool          // a heartbeat has come
	left     bool          // it said that it ends
	closed   bool          // its control connection has ended
	silent   time.Duration // that this process was awake since the last heartbeat, or the connection
	age      time.Duration // that this process was awake since the join
	reported time.Duration // the age at which it was last reported missing
	tried    error         // why it could not be reached lately
	status   Status
	lost     error
}

// Join opens a control connection to and from each of the other processes. From then on heartbeats
// report what this process does, from goroutines of their own, so that they go on while the
// engine compiles or a checkpoint is written. A process that is silent for longer than the hub's
// HeartbeatTimeout is lost: all links to it end with an error that names it.
//
// Join is called once, before links are made.
func (h *Hub) Join(self int, peers []Peer, status func() Status) {
	h.mu.Lock()
	h.self, h.status = uint32(self), status
	for _, p := range peers {
		m := &member{Peer: p, hub: h, due: make(chan struct{}, 1)}
		m.in = h.expect(endpoint{true, uint32(p.Process), uint32(self)})
		h.members = append(h.members, m)
	}
	members := h.members
	h.mu.Unlock()
	for _, m := range members {
		h.wg.Go(m.beat)
		h.wg.Go(m.listen)
	}
	h.wg.Go(h.monitor)
}

// Report replaces the function that Join got: heartbeats carry what it gives from now on.
func (h *Hub) Report(status func() Status) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.status = status
}

// Watch calls do, from a goroutine of the hub, for each process that is lost, with the error, or
// leaves, with nil; also for processes that went before.
func (h *Hub) Watch(do func(p Peer, err error)) {
	h.mu.Lock()
	h.watch = append(h.watch, do)
	var gone []*member
	for _, m := range h.members {
		if m.lost != nil || m.left {
			gone = append(gone, m)
		}
	}
	h.mu.Unlock()
	for _, m := range gone {
		do(m.Peer, m.lost)
	}
}

// Failure is the error of the first process that was lost, which is why the others fail; nil if
// none was.
func (h *Hub) Failure() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.failure
}

// Explain gives the error of the first process that was lost in place of err, for whose reason it
// waits for some time: what fails because of a lost process often fails before that is known. A nil
// error stays nil.
func (h *Hub) Explain(err error, wait time.Duration) error {
	for end := time.Now().Add(wait); err != nil; time.Sleep(10 * time.Millisecond) {
		if lost := h.Failure(); lost != nil {
			return lost
		}
		if time.Now().After(end) || h.ctx.Err() != nil {
			break
		}
	}
	return err
}

// tell calls the watchers of the hub.
func (m *member) tell(err error) {
	m.hub.mu.Lock()
	watch := m.hub.watch
	m.hub.mu.Unlock()
	for _, do := range watch {
		do(m.Peer, err)
	}
}

// member finds a process by its address, under the hub's lock.
func (h *Hub) member(address string) *member {
	return lists.Find(h.members, func(m *member) bool { return m.Address == address })
}

// Statuses tells what the other processes did when they were last heard.
func (h *Hub) Statuses() (list []Status) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, m := range h.members {
		if m.heard && !m.left {
			s := m.status
			s.Peer, s.Silent = m.Peer, m.silent
			s.Age += m.silent
			list = append(list, s)
		}
	}
	return list
}

// Waits tells what the links of this process wait for.
func (h *Hub) Waits() (list []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, l := range h.wires {
		if tag := l.takes.Load(); tag != nil {
			list = append(list, fmt.Sprintf("%q from %s", *tag, h.nameOf(l.address)))
		}
		if tag := l.sends.Load(); tag != nil {
			list = append(list, fmt.Sprintf("room to send %q to %s", *tag, h.nameOf(l.address)))
		}
	}
	return list
}

// interval is the time between two heartbeats.
func (h *Hub) interval() time.Duration { return min(beatEvery, h.HeartbeatTimeout/beatsInTimeout) }

// beat sends heartbeats until the hub ends. If they cannot be sent any more, the other direction
// tells why.
func (m *member) beat() {
	h := m.hub
	h.mu.Lock()
	hello := &frame{kind: helloFrame, epoch: h.epoch, control: true, from: h.self,
		to: uint32(m.Process), self: h.self, peer: uint32(m.Process)}
	h.mu.Unlock()
	conn, err := h.dial(h.ctx, m.Address, hello, func(err error) {
		h.mu.Lock()
		m.tried = err
		h.mu.Unlock()
	})
	if err != nil {
		m.lose(err)
		return
	}
	defer func() { _ = conn.Close() }()
	h.mu.Lock()
	if !m.joined { // it lives, so its own connection and heartbeats are due
		m.joined, m.silent = true, 0
	}
	h.mu.Unlock()
	every := time.NewTicker(h.interval())
	defer every.Stop()
	for number := uint64(1); ; number++ {
		f := h.heartbeat(number)
		_ = conn.SetWriteDeadline(time.Now().Add(h.HeartbeatTimeout))
		if _, err := conn.Write(f.append(nil)); err != nil {
			return
		}
		select {
		case <-every.C:
		case <-m.due:
		case <-h.ctx.Done():
			last, bye := h.heartbeat(number+1), frame{kind: byeFrame, epoch: h.epoch}
			_ = conn.SetWriteDeadline(time.Now().Add(byeTime))
			_, _ = conn.Write(bye.append(last.append(nil)))
			return
		}
	}
}

// heartbeat is what this process does, and whom it has lost: others may not have noticed yet, and
// would blame this process, which is about to end for it.
func (h *Hub) heartbeat(number uint64) frame {
	h.mu.Lock()
	status, lost, failure := h.status, h.gone, h.failure
	h.mu.Unlock()
	f := frame{kind: beatFrame, epoch: h.epoch, number: number, status: status(), lost: anyProcess}
	f.status.Phase = f.status.Phase[:min(len(f.status.Phase), maxStatus)]
	f.status.Waits = f.status.Waits[:min(len(f.status.Waits), maxStatus)]
	if e := diag.From(failure); e != nil {
		f.lost, f.why = lost, e.What
		if e.Cause != "" {
			f.why += "; " + e.Cause
		}
	}
	return f
}

// heed takes the word of this member that another process is lost.
func (m *member) heed(process uint32, why string) {
	h := m.hub
	if process == anyProcess {
		return
	}
	e := diag.New(diag.LinkLost, "%s", why).Because("%s says so", m).Try(restart)
	if process == h.self {
		m.lose(diag.New(diag.LinkLost, "%s takes this process for lost", m).Because("%s", why).
			Try("see whether this process was stopped, or its network hung; then start all processes" +
				" again: they go on from the newest checkpoint"))
		return
	}
	for _, other := range h.members { // does not change after Join
		if uint32(other.Process) == process && other != m {
			other.lose(e)
		}
	}
}

// listen takes the heartbeats of the other process.
func (m *member) listen() {
	h := m.hub
	select {
	case <-m.in.ready:
	case <-h.ctx.Done():
		return
	}
	conn := m.in.conn
	h.mu.Lock()
	m.joined, m.silent = true, 0
	h.mu.Unlock()
	stop := context.AfterFunc(h.ctx, func() { _ = conn.Close() })
	defer stop()
	defer func() { _ = conn.Close() }()
	err := m.hear(conn)
	if err == nil || h.ctx.Err() != nil {
		return
	}
	if errors.Is(err, diag.LinkLost) {
		// The process has ended. What it sent before, perhaps the reason, is still on its links, whose
		// connections end by themselves after it.
		h.mu.Lock()
		m.closed = true
		h.mu.Unlock()
		select {
		case <-time.After(deliverTime):
		case <-h.ctx.Done():
			return
		}
	}
	m.lose(err)
}

// deliverTime is how long links go on after the end of the other process, for what is on its way.
const deliverTime = 2 * time.Second

// hear reads heartbeats until the other process says that it ends. It takes them no faster than
// they may come, so that who sends more is held up by TCP.
func (m *member) hear(conn net.Conn) error {
	h := m.hub
	pause := time.NewTicker(h.interval() / 16)
	defer pause.Stop()
	for last := uint64(0); ; {
		f, err := readFrame(conn)
		if _, coded := err.(*diag.Error); err != nil && !coded { //nolint:errorlint // made by readFrame
			return m.gone(err)
		}
		switch {
		case err != nil:
			return err
		case f.epoch != h.epoch:
			return diag.New(diag.LinkVersion, "%s sends for another run", m)
		case f.kind == byeFrame:
			h.mu.Lock()
			m.left = true
			h.mu.Unlock()
			m.tell(nil)
			return nil
		case f.kind != beatFrame || f.number <= last:
			return damaged("no heartbeat, or not the next one, from %s", m)
		}
		last = f.number
		s := f.status
		s.Age, s.Limit = clamp(s.Age), clamp(s.Limit)
		h.mu.Lock()
		m.heard, m.silent, m.status = true, 0, s
		h.mu.Unlock()
		m.heed(f.lost, f.why)
		select {
		case <-pause.C:
		case <-h.ctx.Done():
			return nil
		}
	}
}

// gone describes the end of a control connection.
func (m *member) gone(err error) error {
	m.hub.mu.Lock()
	defer m.hub.mu.Unlock()
	e := diag.New(diag.LinkLost, "%s has gone away", m).Try(restart)
	if m.heard {
		e = e.Because("it was last in %s", m.status)
	}
	return e.Wrap(err)
}

// clamp keeps what another process says of times within what can be meant.
func clamp(d time.Duration) time.Duration { return min(max(d, 0), 24*time.Hour) }

// monitor counts how long the others have been silent. Only time counts in which this process was
// awake: if it was stopped, or its host slept, its own ticks come late, and so did all heartbeats.
func (h *Hub) monitor() {
	every := h.interval() / 2
	ticks := time.NewTicker(every)
	defer ticks.Stop()
	for last := time.Now(); ; {
		select {
		case <-ticks.C:
		case <-h.ctx.Done():
			return
		}
		now := time.Now()
		awake := min(now.Sub(last), 2*every)
		last = now
		for _, m := range h.members { // does not change after Join
			if err := m.wait(awake); err != nil {
				m.lose(err)
			}
		}
	}
}

// tellEvery is how often a process that is waited for is named.
const tellEvery = 10 * time.Second

// wait counts time in which nothing came, and gives an error when it has been too long.
func (m *member) wait(awake time.Duration) error {
	h := m.hub
	h.mu.Lock()
	defer h.mu.Unlock()
	m.age += awake
	m.silent += awake
	switch {
	case m.left || m.closed || m.lost != nil:
	case !m.joined && m.age > h.StallTimeout:
		return diag.New(diag.LinkLost, "%s has not connected within %s", m, h.StallTimeout).
			Wrap(m.tried).Try(notThere)
	case !m.joined:
		if m.age-m.reported > min(tellEvery, h.StallTimeout/4) {
			m.reported = m.age
			why := ""
			if m.tried != nil {
				why = ": " + m.tried.Error()
			}
			h.events.Emit(event.Note{Text: fmt.Sprintf("waiting for %s, %s of at most %s%s", m,
				m.age.Round(time.Second), h.StallTimeout, why)})
		}
	case m.silent > h.HeartbeatTimeout:
		was := "it has answered, and sent no heartbeat yet"
		if m.heard {
			was = "it was last in " + m.status.String()
		}
		return diag.New(diag.LinkStalled, "%s has said nothing for %s", m,
			m.silent.Round(100*time.Millisecond)).Because("%s", was).
			Try("see whether that process is stopped, or its host or network hangs; then start all" +
				" processes again: they go on from the newest checkpoint")
	}
	return nil
}

// lose ends all links to the process.
func (m *member) lose(err error) {
	h := m.hub
	h.mu.Lock()
	if m.lost != nil || m.left {
		h.mu.Unlock()
		return
	}
	m.lost = err
	if h.failure == nil {
		h.failure, h.gone = err, uint32(m.Process)
	}
	wires, members := h.wires, h.members
	h.mu.Unlock()
	for _, other := range members {
		select {
		case other.due <- struct{}{}:
		default: // it is due already
		}
	}
	m.tell(err)
	for _, w := range wires {
		if w.address == m.Address {
			_ = w.fail(err)
		}
	}
}
