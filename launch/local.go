package launch

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/deepwell/deepwell/diag"
)

// A Local is a run whose processes are all on this host.
type Local struct {
	// Command is a process of the run without --peers, --self and --key-file, which Run adds.
	Command []string
	// Env is the environment of process i; nil is the one of this process.
	Env func(i int) []string
	// Processes is how many there are.
	Processes int
	// Key is the file of their secret; "" makes one anew for every start, which is gone afterwards.
	Key string
	// Addresses finds as many addresses as there are processes, for every start.
	Addresses func(n int) ([]string, error)
	// Restarts is how often all processes are started again after a failure that a restart may mend.
	Restarts int
	// Output takes what processes print, each line with its process in front, and why they are
	// started again.
	Output io.Writer

	// wait, grace and stop replace the constants in tests.
	wait, grace, stop time.Duration
}

const (
	// restartWait is before a restart, so that a failure at the start does not spin.
	restartWait = time.Second
	// failGrace is how long processes may go on after one of them has failed. They find out within
	// ten seconds, and may be in a save.
	failGrace = time.Minute
	// stopTime is how long a process may take to save when it is asked to end.
	stopTime = 3 * time.Minute
	// drainTime is how long the output of a process is read after its end.
	drainTime = 2 * time.Second
)

// Run starts the processes, and starts all of them again while they fail in a way that a restart
// may mend ([diag.Class.Restart]). It returns how often, when all have ended. If ctx ends,
// processes are asked to save and end (SIGTERM, once).
func (l *Local) Run(ctx context.Context) (restarts int, err error) {
	if l.Processes < 1 || len(l.Command) == 0 {
		return 0, diag.New(diag.BadUsage, "a run of %d processes", l.Processes)
	}
	for {
		ends, err := l.once(ctx)
		if err != nil {
			return restarts, err
		}
		again, err := judge(ends)
		switch {
		case ctx.Err() != nil && err != nil:
			return restarts, diag.New(diag.Canceled, "the run was stopped").Wrap(err)
		case err == nil || !again:
			return restarts, err
		case restarts == l.Restarts:
			return restarts, diag.From(err).Because("it was started again %d times", restarts)
		}
		restarts++
		l.say("launch", "%s; restart %d of %d", diag.From(err).What, restarts, l.Restarts)
		select {
		case <-time.After(cmp.Or(l.wait, restartWait)):
		case <-ctx.Done():
			return restarts, diag.New(diag.Canceled, "the run was stopped").Wrap(err)
		}
	}
}

// once runs all processes to their ends.
func (l *Local) once(ctx context.Context) (ends []end, err error) {
	key := l.Key
	if key == "" {
		dir, err := os.MkdirTemp("", "deepwell-run-") // of this user alone
		if err != nil {
			return nil, diag.New(diag.FileError, "the key of the run cannot be made").Wrap(err)
		}
		defer func() { _ = os.RemoveAll(dir) }()
		key = filepath.Join(dir, "run.key")
		secret := make([]byte, 32)
		if _, err = rand.Read(secret); err == nil {
			err = os.WriteFile(key, secret, 0o600)
		}
		if err != nil {
			return nil, diag.New(diag.FileError, "the key of the run cannot be made").Wrap(err)
		}
	}
	at, err := l.Addresses(l.Processes)
	if err != nil {
		return nil, err
	}
	var list []*process
	ended := make(chan *process, l.Processes)
	for i := range l.Processes {
		p, err := l.start(i, at, key)
		if err != nil {
			for _, p := range list {
				p.signal(syscall.SIGKILL)
				<-ended
			}
			return nil, err
		}
		list = append(list, p)
		go func() {
			p.wait()
			ended <- p
		}()
	}
	l.attend(ctx, list, ended)
	for _, p := range list {
		ends = append(ends, p.end)
	}
	return ends, nil
}

// attend waits for all processes to end. When the context does, or one of them fails, the others
// have some time.
func (l *Local) attend(ctx context.Context, list []*process, ended <-chan *process) {
	all := func(s syscall.Signal) {
		for _, p := range list {
			p.signal(s)
		}
	}
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	defer timer.Stop()
	next := syscall.SIGTERM // what processes get when the timer is up
	asked, failed := ctx.Done(), false
	for left := len(list); left > 0; {
		select {
		case p := <-ended:
			left--
			if p.end.status != 0 && !failed {
				failed = true
				timer.Reset(cmp.Or(l.grace, failGrace))
			}
		case <-asked:
			asked, failed, next = nil, true, syscall.SIGKILL
			all(syscall.SIGTERM)
			timer.Reset(cmp.Or(l.stop, stopTime))
		case <-timer.C:
			all(next)
			next = syscall.SIGKILL
			timer.Reset(cmp.Or(l.grace, failGrace))
		}
	}
}

// An end is how a process ended.
type end struct {
	process int
	status  int            // of its exit; -1 if a signal ended it
	signal  syscall.Signal // that ended it, else 0
	asked   bool           // the launcher sent it a signal
}

func (e end) String() string {
	if e.signal != 0 {
		return fmt.Sprintf("process %d was ended by signal %d (%s)", e.process, int(e.signal), e.signal)
	}
	return fmt.Sprintf("process %d ended with status %d", e.process, e.status)
}

// judge tells what the ends of all processes come to: nil, or an error and whether starting all of
// them again may help. A process that fails for good takes the others with it, which then end as
// if they had lost a peer, so it counts before them; one that was asked to end by others than the
// launcher before those, too.
func judge(ends []end) (again bool, err error) {
	const (
		done = iota
		asked
		lost   // a peer, most likely
		killed // and so why the others lost one
		stopped
		final
	)
	rank := func(e end) int {
		class := diag.Class(e.status)
		stops := class == diag.Interrupted || class == diag.Terminated
		switch {
		case e.status == 0:
			return done
		case e.asked && (stops || e.signal != 0):
			return asked
		case e.signal != 0:
			return killed
		case class.Restart():
			return lost
		case stops:
			return stopped
		}
		return final
	}
	worst := slices.MaxFunc(ends, func(a, b end) int { return rank(a) - rank(b) })
	if worst.status == 0 {
		return false, nil
	}
	class := diag.Class(worst.status)
	if worst.signal != 0 {
		class = diag.Stalled
	}
	return rank(worst) < stopped, diag.New(diag.ProcessFailed, "%s", worst).Exit(class).
		Try("see what it printed, above: its lines begin with [%d]", worst.process)
}

// A process is one of the run's, at work.
type process struct {
	*exec.Cmd
	end   end
	lines []*lines
	mu    sync.Mutex
	over  bool
}

// start starts process i. It is in a process group of its own, so that a terminal's Ctrl-C reaches
// it once, through the launcher; if the launcher is killed, it is asked to end.
func (l *Local) start(i int, at []string, key string) (*process, error) {
	args := append(slices.Clone(l.Command), "--peers", strings.Join(at, ","), "--self",
		strconv.Itoa(i), "--key-file", key)
	p := &process{Cmd: exec.Command(args[0], args[1:]...), end: end{process: i}}
	if l.Env != nil {
		p.Env = l.Env(i)
	}
	for range 2 {
		p.lines = append(p.lines, &lines{to: l, prefix: strconv.Itoa(i)})
	}
	p.Stdout, p.Stderr, p.WaitDelay = p.lines[0], p.lines[1], drainTime
	p.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := p.Start(); err != nil {
		return nil, diag.New(diag.ProcessFailed, "process %d cannot be started", i).Wrap(err)
	}
	return p, nil
}

// wait fills p.end.
func (p *process) wait() {
	_ = p.Wait() // the state says how it ended
	p.mu.Lock()
	p.over = true
	p.mu.Unlock()
	for _, w := range p.lines {
		w.flush()
	}
	p.end.status = p.ProcessState.ExitCode()
	if s, ok := p.ProcessState.Sys().(syscall.WaitStatus); ok && s.Signaled() {
		p.end.signal = s.Signal()
	}
}

// signal sends a signal to a process that has not ended, and to what it started.
func (p *process) signal(s syscall.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.over {
		return
	}
	p.end.asked = true
	if s == syscall.SIGKILL {
		_ = syscall.Kill(-p.Process.Pid, s)
	}
	if err := p.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		_ = p.Process.Kill()
	}
}

// printing keeps the lines of processes apart.
var printing sync.Mutex

// say prints a line.
func (l *Local) say(who, format string, args ...any) {
	printing.Lock()
	defer printing.Unlock()
	_, _ = fmt.Fprintf(l.Output, "[%s] %s\n", who, fmt.Sprintf(format, args...))
}

// maxLine is the longest line that is kept together.
const maxLine = 64 << 10

// lines writes whole lines of a process's output with the process in front.
type lines struct {
	to     *Local
	prefix string
	mu     sync.Mutex
	rest   []byte // of a line that has not ended
}

// Write implements io.Writer. It takes everything, also where the output is closed: a process must
// not die of that.
func (w *lines) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.rest = append(w.rest, p...)
	for {
		at := bytes.IndexByte(w.rest, '\n')
		if at < 0 && len(w.rest) < maxLine {
			return len(p), nil
		}
		next := at + 1
		if at < 0 || at > maxLine {
			at, next = maxLine, maxLine
		}
		w.to.say(w.prefix, "%s", w.rest[:at])
		w.rest = append(w.rest[:0], w.rest[next:]...)
	}
}

// flush prints the last line, if nothing ended it.
func (w *lines) flush() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.rest) > 0 {
		w.to.say(w.prefix, "%s", w.rest)
		w.rest = nil
	}
}
