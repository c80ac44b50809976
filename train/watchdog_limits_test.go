package train

import (
	"testing"
	"time"

	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/link"
)

// A kennel moves a watchdog's clock by hand.
type kennel struct {
	t   *testing.T
	at  time.Time
	dog *watchdog
}

func newKennel(t *testing.T) *kennel {
	k := &kennel{t: t, at: time.Unix(1, 0)}
	k.dog = newWatchdog(20, 0, func() time.Time { return k.at })
	return k
}

// pass lets time go by with a look at every tick, and tells whether there was an alarm.
func (k *kennel) pass(d time.Duration, others ...link.Status) bool {
	k.t.Helper()
	for end := k.at.Add(d); k.at.Before(end); {
		k.at = k.at.Add(min(k.dog.tick(), end.Sub(k.at)))
		if _, stalled := k.dog.check(k.at, others); stalled {
			return true
		}
	}
	return false
}

// sleep stops the process for a while: nobody looks.
func (k *kennel) sleep(d time.Duration) { k.at = k.at.Add(d) }

// do passes through a phase.
func (k *kennel) do(name string, d time.Duration, others ...link.Status) bool {
	k.t.Helper()
	defer k.dog.enter(name, 1)()
	return k.pass(d, others...)
}

// steps takes some steps of a second.
func (k *kennel) steps(n int) {
	k.t.Helper()
	for i := range n {
		if k.do(phaseVote, time.Millisecond) || k.do(phaseData, time.Millisecond) ||
			k.do(phaseStep, time.Second) {
			k.t.Fatalf("false alarm in step %d", i)
		}
	}
}

func TestWatchdogLimits(t *testing.T) {
	for name, c := range map[string]struct {
		before func(k *kennel)
		phase  string
		fine   time.Duration // takes no alarm
		stalls time.Duration // takes one
	}{
		"step":             {nil, phaseStep, 59 * time.Second, 2 * time.Minute},
		"vote":             {nil, phaseVote, 59 * time.Second, 2 * time.Minute},
		"data":             {nil, phaseData, 90 * time.Second, 6 * time.Minute},
		"first evaluation": {nil, phaseEvaluate, 9 * time.Minute, 11 * time.Minute},
		"first save":       {nil, phaseSave, 29 * time.Minute, 31 * time.Minute},
		"second save":      {func(k *kennel) { k.do(phaseSave, time.Second) }, phaseSave, 9 * time.Minute, 11 * time.Minute},
		"save after slow":  {func(k *kennel) { k.do(phaseSave, 5*time.Minute) }, phaseSave, 99 * time.Minute, 101 * time.Minute},
		"recompilation":    {nil, phaseCompile, 59 * time.Minute, 61 * time.Minute},
		"first inspection": {nil, phaseInspect, 9 * time.Minute, 11 * time.Minute},
		"slow steps": {func(k *kennel) {
			for range window {
				k.do(phaseStep, 10*time.Second)
			}
		}, phaseStep, 199 * time.Second, 201 * time.Second},
		"asked to stop": {func(k *kennel) { k.dog.stopping = true }, phaseStep, 19 * time.Second, 22 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			for _, long := range []bool{false, true} {
				k := newKennel(t)
				k.steps(3)
				if c.before != nil {
					c.before(k)
				}
				took := c.fine
				if long {
					took = c.stalls
				}
				if got := k.do(c.phase, took); got != long {
					t.Errorf("%s of %s: alarm %v", c.phase, took, got)
				}
			}
		})
	}
}

// Before the first step nothing is known, and 0 turns the watchdog off.
func TestWatchdogIsArmedByTheFirstStep(t *testing.T) {
	k := newKennel(t)
	if k.do(phaseStep, 3*time.Hour) {
		t.Error("an alarm in the first step")
	}
	k = newKennel(t)
	k.dog.multiple = 0
	k.steps(3)
	if k.do(phaseStep, 3*time.Hour) {
		t.Error("an alarm though it is off")
	}
}

// Time in which the process was stopped does not count, however often.
func TestWatchdogSleepsWithTheProcess(t *testing.T) {
	k := newKennel(t)
	k.steps(3)
	end := k.dog.enter(phaseStep, 4)
	for range 10 {
		k.sleep(8 * time.Hour)
		if k.pass(time.Second) {
			t.Fatal("an alarm after the process was stopped")
		}
	}
	if !k.pass(2 * time.Minute) {
		t.Error("no alarm of a step that hangs after the process was stopped")
	}
	end()
}

// A process that saves makes the others wait in the next step: its own limit counts for them.
func TestWatchdogWaitsForProcessesThatSave(t *testing.T) {
	k := newKennel(t)
	k.steps(3)
	saves := link.Status{Phase: phaseSave, Limit: 10 * time.Minute}
	if k.do(phaseVote, 9*time.Minute, saves) {
		t.Error("an alarm while the leader saves")
	}
	if !k.do(phaseVote, 11*time.Minute, saves) {
		t.Error("no alarm long after the leader's own limit")
	}
	if k.do(phaseVote, time.Hour, link.Status{Phase: phaseCompile}) {
		t.Error("an alarm while another process compiles for the first time")
	}
	if !k.do(phaseVote, 2*time.Minute, link.Status{Phase: phaseStep, Limit: time.Hour}) {
		t.Error("no alarm though the other process is in a step too")
	}
}

// 2,000 steps with bursts of ten times the load, stops, slow saves and long evaluations: no alarm.
func TestWatchdogRaisesNoFalseAlarm(t *testing.T) {
	k := newKennel(t)
	for i := range 2000 {
		took := 400 * time.Millisecond
		if i%50 < 7 {
			took *= 10
		}
		bad := k.do(phaseVote, time.Millisecond) || k.do(phaseData, took/8)
		end := k.dog.enter(phaseStep, i+1)
		bad = bad || k.pass(took/2)
		if i%97 == 0 {
			k.sleep(time.Duration(i) * time.Minute)
		}
		bad = bad || k.pass(took/2)
		end()
		if i%100 == 99 {
			bad = bad || k.do(phaseSave, 4*time.Minute) || k.do(phaseEvaluate, time.Minute)
		}
		if bad {
			t.Fatalf("an alarm in step %d", i)
		}
		if i > 200 && !slowtest.Enabled && testing.Short() {
			return
		}
	}
}
