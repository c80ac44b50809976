package train

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/link"
)

// leastStall is the shortest time after which anything counts as a stall: long compared with the
// delays of a busy host or a network file system, short compared with a night that hangs.
const leastStall = time.Minute

// The phases of a run. Each has a limit of its own, since each takes its own time.
const (
	phaseCompile  = "compile" // also after a fallback, and before an inspection
	phaseBetween  = "between"
	phaseVote     = "vote" // on whether to stop: waits for all processes
	phaseData     = "data"
	phaseStep     = "step"
	phaseInspect  = "inspect" // a step that also measures rounding errors
	phaseEvaluate = "evaluate"
	phaseSave     = "save"
	phaseCompare  = "compare" // replicas
)

// generous is how many times the shortest limit a phase may take before its usual time is known.
var generous = map[string]time.Duration{phaseCompile: 60, phaseBetween: 5, phaseVote: 1,
	phaseData: 5, phaseStep: 1, phaseInspect: 10, phaseEvaluate: 10, phaseSave: 30, phaseCompare: 10}

// A watchdog knows what a run does and since when, and calls it stalled when that takes many times
// longer than usual. It is armed when the first step is done.
//
// Only time in which this process was awake counts: age grows by the watchdog's own ticks, which
// stop while the process is stopped (SIGSTOP) or its host sleeps.
type watchdog struct {
	multiple float64       // of what is usual; 0 turns it off
	least    time.Duration // shortest limit
	now      event.Clock

	// The fields below belong to the loop's goroutine and the watchdog's.
	mu       sync.Mutex
	stack    []phase // the innermost last
	program  string  // program at work; "" if none is known
	step     int     // that is being taken, counted from 1
	last     time.Time
	stopping bool
	history  map[string][]float64 // seconds of each phase, lately
	alarm    *diag.Error
}

// A phase is one kind of activity of a run. Phases nest: a save inside a step stops the step's
// clock.
type phase struct {
	name  string
	began time.Time
	age   time.Duration // awake, without inner phases
}

// newWatchdog begins in the compile phase.
func newWatchdog(multiple float64, least time.Duration, now event.Clock) *watchdog {
	if least == 0 {
		least = leastStall
	}
	w := &watchdog{multiple: multiple, least: least, now: now, history: map[string][]float64{}}
	w.last = now()
	w.stack = []phase{{name: phaseCompile, began: w.last}}
	return w
}

// tick is the interval of the watchdog's checks.
func (w *watchdog) tick() time.Duration { return min(time.Second, w.least/16) }

// enter begins a phase inside the present one; the returned function ends it. A nil watchdog, of
// branches, does nothing.
func (w *watchdog) enter(name string, step int) (end func()) {
	if w == nil { // of a trainer that makes branches alone
		return func() {}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stack, w.step = append(w.stack, phase{name: name, began: w.now()}), step
	depth := len(w.stack)
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		took := w.now().Sub(w.stack[depth-1].began).Seconds()
		w.history[name] = last(append(w.history[name], took))
		w.stack = w.stack[:depth-1]
	}
}

// runs records which program is running until the returned function is called.
func (w *watchdog) runs(program string) (end func()) {
	if w == nil {
		return func() {}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	before := w.program
	w.program = program
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.program = before
	}
}

// limit is how long the present phase may take; 0 is any time. others are the statuses of the other
// processes: one that saves makes all others wait in their next step.
func (w *watchdog) limit(others []link.Status) time.Duration {
	name := w.stack[len(w.stack)-1].name
	steps := w.history[phaseStep]
	if w.multiple == 0 || len(steps) == 0 {
		return 0
	}
	// Steps are regular, so a multiple of their median is a limit. Other phases (saves, validations)
	// vary, and get a multiple of the longest so far, or of a step before there is one.
	step := seconds(median(steps))
	times := w.history[name]
	limit := generous[name] * w.least
	switch {
	case name == phaseStep || name == phaseVote:
		limit = max(limit, scale(w.multiple, step))
	case len(times) == 0:
		limit = max(limit, scale(10*w.multiple, step))
	default:
		limit = max(limit/3, w.least, scale(w.multiple, seconds(slices.Max(times))))
	}
	if waits := name == phaseStep || name == phaseVote || name == phaseData; w.stopping && waits {
		limit = min(limit, max(w.least/3, 3*step)) // who asked to stop waits too
	}
	for _, o := range others { // one that saves makes all others wait in the next step
		switch {
		case o.Phase == phaseStep || o.Phase == phaseVote:
		case o.Limit == 0:
			return 0
		default:
			limit = max(limit, o.Limit+w.least/6)
		}
	}
	return limit
}

// seconds converts a float to a duration.
func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// scale multiplies a duration, up to a time that nobody waits for.
func scale(x float64, d time.Duration) time.Duration {
	return time.Duration(min(x*float64(d), float64(1000*time.Hour)))
}

// check adds the time since the last check to the present phase, and reports whether the run has
// stalled.
func (w *watchdog) check(now time.Time, others []link.Status) (link.Status, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	at := &w.stack[len(w.stack)-1]
	// A tick that comes late by more than one interval means that the process was stopped.
	at.age += min(now.Sub(w.last), 2*w.tick())
	w.last = now
	limit := w.limit(others)
	s := link.Status{Step: int64(w.step), Phase: at.name, Age: at.age, Limit: limit}
	if w.program != "" {
		s.Waits = "the engine, program " + w.program
	}
	return s, limit > 0 && at.age > limit && w.alarm == nil
}

// status is what heartbeats carry to the other processes.
func (t *Trainer) status() link.Status {
	w := t.watchdog
	w.mu.Lock()
	at := w.stack[len(w.stack)-1]
	s := link.Status{Step: int64(w.step), Phase: at.name, Age: at.age, Limit: w.limit(nil)}
	if w.program != "" {
		s.Waits = "the engine, program " + w.program
	}
	w.mu.Unlock()
	if waits := t.opts.Processes.Hub.Waits(); len(waits) > 0 {
		s.Waits = strings.Join(waits, "; ")
	}
	return s
}

// phase begins a phase of the run; the returned function ends it.
func (t *Trainer) phase(name string) (end func()) { return t.watchdog.enter(name, t.step+1) }

// Run trains until the recipe's last step, or Options.Until, with the recipe's validations and
// saves. When its context ends, Run completes the step that has begun, saves, and returns an error
// of the code [diag.Canceled]; calling it again, or in another process, resumes the run. A run that
// stalls ends with an error that says what it waited for. When Run returns, the Dataset is not
// being read.
func (t *Trainer) Run(stop context.Context) error {
	if err := t.usable(); err != nil {
		return err
	}
	if err := t.hasData(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(stop)) // a step that began is ended
	defer cancel(nil)
	done := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() { t.guardAgainstStalls(stop, done, cancel) })
	wg.Go(func() {
		select {
		case <-done:
		case <-stop.Done(): // said at once: a step may take long
			t.opts.Events.Emit(event.Note{Text: "stopping after this step, with a checkpoint; Ctrl-C again" +
				" ends at once, without one"})
		}
	})
	t.opts.Events.Emit(event.Busy{Task: fmt.Sprintf("step %d", t.step+1)})
	end := t.phase(phaseBetween)
	err := t.loop(ctx, stop)
	if err != nil {
		t.dropPrefetched() // if Run goes on, it reads the batch again
	} else {
		t.awaitPrefetched()
	}
	end()
	if err == nil {
		t.reportMemory()
	}
	close(done)
	wg.Wait()
	if alarm := t.watchdog.alarm; err != nil && alarm != nil {
		return alarm
	}
	return err
}

// guardAgainstStalls checks the run from its own goroutine, since the loop may be stuck inside the
// engine, where nothing can be canceled.
func (t *Trainer) guardAgainstStalls(stop context.Context, done <-chan struct{},
	cancel context.CancelCauseFunc) {
	w := t.watchdog
	ticks := time.NewTicker(w.tick())
	defer ticks.Stop()
	for {
		select {
		case <-done:
			return
		case <-ticks.C:
		}
		if stop.Err() != nil {
			w.mu.Lock()
			w.stopping = true
			w.mu.Unlock()
		}
		var others []link.Status
		if t.opts.Processes != nil {
			others = t.opts.Processes.Hub.Statuses()
		}
		s, stalled := w.check(w.now(), others)
		if stalled {
			t.stall(s, others, cancel)
			return
		}
	}
}

// stall reports what the run waits for, cancels what can be canceled, dumps all goroutines into the
// run's folder, and lets the caller end the process if that is not enough.
func (t *Trainer) stall(s link.Status, others []link.Status, cancel context.CancelCauseFunc) {
	if t.opts.Processes != nil {
		if waits := t.opts.Processes.Hub.Waits(); len(waits) > 0 {
			s.Waits = strings.Join(waits, "; ")
		}
	}
	if s.Waits == "" {
		s.Waits = s.Phase
	}
	dump := filepath.Join(t.opts.Recipe.Out, fmt.Sprintf("stall-step-%08d-process-%d.txt", s.Step,
		t.opts.Processes.self()))
	e := diag.New(diag.RunStalled, "%s of step %d takes longer than %s", s.Phase, s.Step,
		s.Limit.Round(time.Second)).At("%s", t.opts.Processes.whereabouts(len(t.programs.Ranks))).
		Because("it waits for %s%s", s.Waits, describe(others)).
		Try("look at %s; then start the run again: it goes on from the newest checkpoint",
			filepath.ToSlash(dump))
	w := t.watchdog
	w.mu.Lock()
	w.alarm = e
	w.mu.Unlock()
	if t.opts.OnStall != nil { // before anything that may hang too, as a disk
		time.AfterFunc(w.least/6, func() { t.opts.OnStall(e) })
	}
	cancel(e)
	var text bytes.Buffer
	fmt.Fprintf(&text, "%s\n", e.Format())
	text.Write(stacks())
	if os.MkdirAll(t.opts.Recipe.Out, 0o777) != nil ||
		atomicfile.Write(dump, text.Bytes(), 0o666) != nil {
		dump = ""
	}
	t.opts.Events.Emit(event.Stalled{Step: int(s.Step), Phase: s.Phase, Seconds: s.Age.Seconds(),
		Limit: s.Limit.Seconds(), Waits: s.Waits, Dump: filepath.ToSlash(dump)})
}

// stacks are the stacks of all goroutines, as a panic prints them. Package runtime/pprof would say
// the same, and bring its formats into the binary.
func stacks() []byte {
	for size := 1 << 20; ; size *= 2 {
		buf := make([]byte, size)
		if n := runtime.Stack(buf, true); n < size {
			return buf[:n]
		}
	}
}

// describe lists what the other processes are doing.
func describe(others []link.Status) string {
	var b strings.Builder
	for _, o := range others {
		fmt.Fprintf(&b, "\n%s is in %s, heard %s ago", o.Peer, o,
			o.Silent.Round(100*time.Millisecond))
	}
	return b.String()
}
