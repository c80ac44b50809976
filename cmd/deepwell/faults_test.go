package main

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
)

// A gpuFault is what happens to one process of a run, and when.
type gpuFault struct {
	processes, victim int
	how               string // killed, stopped, or off the network
	phase             string // start, compile, step, save
	step              int    // of the phases step and save
	after             time.Duration
}

func (f gpuFault) String() string {
	return fmt.Sprintf("%d processes, %d %s in %s %d after %s", f.processes, f.victim, f.how, f.phase,
		f.step, f.after)
}

const (
	faultSteps = 12 // of a run
	faultEvery = 2  // steps between its checkpoints
)

// gpuFaults draws faults from a seed: each way in each phase comes as many times as any other.
func gpuFaults(seed uint64, n int) (list []gpuFault) {
	r := rand.New(rand.NewPCG(seed, 18))
	var all []gpuFault
	for _, phase := range []string{"start", "compile", "step", "save"} {
		for _, how := range []string{"killed", "stopped", "off the network"} {
			all = append(all, gpuFault{how: how, phase: phase})
		}
	}
	r.Shuffle(len(all), func(i, k int) { all[i], all[k] = all[k], all[i] })
	for i := range n {
		f := all[i%len(all)]
		f.processes = 2 + 2*(i%5/4) // one in five has four processes
		f.victim = r.IntN(f.processes)
		longest := 200 * time.Millisecond
		switch f.phase {
		case "start":
			longest = 800 * time.Millisecond
		case "compile":
			longest = 3 * time.Second
		case "step":
			f.step = 1 + r.IntN(faultSteps/2)
		case "save":
			f.step = faultEvery * (1 + r.IntN(faultSteps/faultEvery/2))
			longest = 20 * time.Millisecond
		}
		f.after = time.Duration(r.Int64N(int64(longest))).Round(time.Millisecond)
		list = append(list, f)
	}
	return list
}

// A tap passes the connections to one address on until it is shut: they stay open, and nothing comes
// through any more, in either direction.
type tap struct {
	net.Listener
	shut chan struct{}
}

// newTap listens for connections that go to an address.
func newTap(t *testing.T, to string) *tap {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &tap{Listener: l, shut: make(chan struct{})}
	end := make(chan struct{})
	t.Cleanup(func() { close(end); _ = l.Close() })
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = in.Close() }()
				out, err := net.Dial("tcp", to)
				if err != nil {
					return // nobody listens there yet
				}
				defer func() { _ = out.Close() }()
				over := make(chan struct{}, 2)
				for _, way := range [][2]net.Conn{{in, out}, {out, in}} {
					go func() { p.pass(way[0], way[1], end); over <- struct{}{} }()
				}
				<-over
			}()
		}
	}()
	return p
}

// pass copies one direction of a connection. What comes after the tap is shut is kept from the other
// end until the test is over.
func (p *tap) pass(from, to net.Conn, end chan struct{}) {
	b := make([]byte, 64<<10)
	for {
		n, err := from.Read(b)
		select {
		case <-p.shut:
			<-end
			return
		default:
		}
		if n > 0 {
			if _, err := to.Write(b[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// A faultRun is a run of several processes with one GPU each, and taps between them.
type faultRun struct {
	*hosts
	f     gpuFault
	all   []*started
	taps  map[[2]int]*tap // from one process to another
	ended []time.Time
}

// startAll starts all processes of a run; with taps, each reaches each other one through a tap.
func (c *hosts) startAll(t *testing.T, f gpuFault, args []string, taps bool, env ...string) *faultRun {
	t.Helper()
	r := &faultRun{hosts: c, f: f, taps: map[[2]int]*tap{}, ended: make([]time.Time, f.processes)}
	at := enginetest.Addresses(t, f.processes)
	for self := range f.processes {
		mine := append([]string{}, at...)
		for n := range mine {
			if taps && n != self {
				p := newTap(t, at[n])
				r.taps[[2]int{self, n}], mine[n] = p, p.Addr().String()
			}
		}
		p := &started{Cmd: c.with(1, env...).command(append(slices.Clip(args), "-v", "--peers",
			strings.Join(mine, ","), "--self", fmt.Sprint(self))...), done: make(chan struct{})}
		p.Stdout, p.Stderr = &p.out, &p.out
		if err := p.Start(); err != nil {
			t.Fatal(err)
		}
		go func() {
			_ = p.Wait()
			r.ended[self] = time.Now()
			close(p.done)
		}()
		t.Cleanup(func() {
			_ = p.Process.Kill()
			<-p.done
		})
		r.all = append(r.all, p)
	}
	return r
}

// reach waits until all processes, or the first, which prints the steps, are in the fault's phase.
func (r *faultRun) reach(t *testing.T, out string) {
	t.Helper()
	switch r.f.phase {
	case "start":
		for _, p := range r.all {
			p.until(t, "open the engine", time.Minute)
		}
		time.Sleep(200 * time.Millisecond) // they connect
	case "compile":
		r.all[r.f.victim].until(t, "compile and fill the state", 2*time.Minute)
	case "step":
		r.all[0].until(t, fmt.Sprintf(`step +%d\b`, r.f.step), 3*time.Minute)
	case "save": // the draft of a checkpoint appears
		r.all[0].until(t, `step +1\b`, 3*time.Minute)
		pattern := filepath.Join(r.dir, out, "checkpoints", fmt.Sprintf("*%08d*", r.f.step))
		for end := time.Now().Add(time.Minute); time.Now().Before(end); time.Sleep(200 * time.Microsecond) {
			if found, _ := filepath.Glob(pattern); len(found) > 0 {
				break
			}
		}
	}
	r.wait()
}

// wait lets the time pass between the fault's phase and the fault, but no more than a run has: one
// whose programs are in the cache is over within 600 ms on a quiet machine.
func (r *faultRun) wait() {
	last := faultSteps / 2
	if r.f.phase == "start" {
		last = 1
	}
	reached := regexp.MustCompile(fmt.Sprintf(`step +%d\b`, max(last, r.f.step+1)))
	for end := time.Now().Add(r.f.after); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if reached.MatchString(r.all[0].out.String()) {
			return
		}
	}
}

// strike does to the victim what the fault says.
func (r *faultRun) strike() {
	victim := r.all[r.f.victim]
	switch r.f.how {
	case "killed":
		_ = victim.Process.Kill()
	case "stopped":
		_ = victim.Process.Signal(syscall.SIGSTOP)
	default:
		for ends, p := range r.taps {
			if ends[0] == r.f.victim || ends[1] == r.f.victim {
				close(p.shut)
			}
		}
	}
}

var errorLine = regexp.MustCompile(`(?m)^DW\d+ (?:[^w]|w[^a]).*$`) // no warnings

// survivors holds the other processes to an end that names the victim, within 10 s, with the status
// on which a launcher starts a run again. It gives the longest time that it took.
func (r *faultRun) survivors(t *testing.T, struck time.Time) (longest time.Duration) {
	t.Helper()
	for n, p := range r.all {
		if n == r.f.victim {
			continue
		}
		status, _ := p.ends(t, 60*time.Second)
		took := r.ended[n].Sub(struck)
		longest = max(longest, took)
		text := p.out.String()
		said := errorLine.FindString(text)
		if status != 5 || !strings.Contains(said, fmt.Sprintf("process %d at ", r.f.victim)) ||
			took > faultLimit {
			t.Errorf("process %d: status %d after %s: %s\n%s", n, status, took, said,
				text[max(0, len(text)-1500):])
		}
	}
	// The victim must not stay either: one that goes on finds that the others are gone.
	if r.f.how != "killed" {
		victim := r.all[r.f.victim]
		_ = victim.Process.Signal(syscall.SIGCONT)
		if status, took := victim.ends(t, 60*time.Second); status != 5 || took > 2*faultLimit {
			t.Errorf("the victim: status %d after %s\n%s", status, took, victim.out.String())
		}
	}
	return longest
}

// faultLimit is 10 s, and some for a machine whose two cores run several processes of this test.
const faultLimit = 12 * time.Second

// Whatever happens to one process of a run, and whenever, the others find it within 10 s, name it
// and end with status 5; the same command then goes on to the numbers of a run that nothing happened
// to.
func TestProcessesSurviveFaults(t *testing.T) {
	slowtest.Only(t)
	seed, n := uint64(1), 8
	if *processesAll {
		n = 100
	}
	fmt.Sscan(os.Getenv("DEEPWELL_FAULT_SEED"), &seed)
	c := newHosts(t)
	c.write("config.json", signalModel)
	args := func(processes int, out string) []string {
		return c.plan(fmt.Sprintf(`"fsdp": {"size": %d, "zero": 3, "gather": "layer"}`, processes), processes,
			"--set", fmt.Sprintf("steps=%d", faultSteps), "--set", fmt.Sprintf("save.every=%d", faultEvery),
			"--set", "out="+out)
	}
	unbroken := map[int][]loggedStep{}
	for _, processes := range []int{2, 4} {
		out := fmt.Sprintf("unbroken-%d", processes)
		c.together(processes, processes, args(processes, out))
		unbroken[processes] = c.logged(t, out)
	}
	var longest atomic.Int64 // nanoseconds
	t.Cleanup(func() {
		t.Logf("seed %d: %d faults, the last survivor ended after %s at most", seed, n,
			time.Duration(longest.Load()).Round(100*time.Millisecond))
	})
	for i, f := range gpuFaults(seed, n) {
		t.Run(fmt.Sprintf("%03d %s %s", i, f.phase, f.how), func(t *testing.T) {
			t.Parallel() // they wait most of the time
			c := &hosts{&desk{t, c.dir, c.env}, c.gpu}
			out := fmt.Sprintf("fault-%03d", i)
			var env []string
			if f.phase == "compile" {
				env = []string{"DEEPWELL_CACHE=" + t.TempDir()}
			}
			r := c.startAll(t, f, args(f.processes, out), f.how == "off the network", env...)
			r.reach(t, out)
			struck := time.Now()
			r.strike()
			took := r.survivors(t, struck)
			for was := longest.Load(); int64(took) > was && !longest.CompareAndSwap(was, int64(took)); {
				was = longest.Load()
			}
			c.together(f.processes, f.processes, args(f.processes, out))
			if got := c.logged(t, out); fmt.Sprint(got) != fmt.Sprint(unbroken[f.processes]) {
				t.Errorf("resumed: %v, unbroken: %v", got, unbroken[f.processes])
			}
			t.Logf("%s: found after %s: %s", f, took.Round(100*time.Millisecond),
				errorLine.FindString(r.all[(f.victim+1)%f.processes].out.String()))
		})
	}
}
