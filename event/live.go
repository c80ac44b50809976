package event

import (
	"fmt"
	"io"
	"math"
	"strings"
	"sync"
	"time"
)

// A Live sink keeps what is newest on the last line of a terminal: progress, a step, or what a
// command is busy with and for how long. Above it stay all other events, validations, and as many
// steps as a log has. Close it before anything else writes to the terminal.
type Live struct {
	mu      sync.Mutex
	w       io.Writer
	columns func() int
	now     Clock
	drawn   time.Time
	shown   string
	run     course
	step    *Step // the newest, if it does not stand above; Close leaves it behind
	busy    string
	since   time.Time // when busy began
}

// liveEvery bounds how often the live line is redrawn; a person cannot read faster. What takes
// longer than patience without a word is shown with its seconds.
const (
	liveEvery = 100 * time.Millisecond
	patience  = 900 * time.Millisecond
)

// NewLive returns a Live sink for a terminal; width is asked before each line, since windows are
// resized while a run goes on.
func NewLive(w io.Writer, width func() int, now Clock) *Live {
	return &Live{w: w, columns: width, now: now, drawn: now()}
}

// width is the terminal's current width, at least what a step's number and loss need.
func (l *Live) width() int { return max(l.columns(), 20) }

// Emit implements Sink.
func (l *Live) Emit(e Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.run.note(e)
	if b, ok := e.(Busy); ok {
		l.busy, l.since = b.Task, l.now()
		return
	}
	switch e.(type) {
	case Note, Warning: // a remark ends nothing
	default:
		l.busy = ""
	}
	switch e := e.(type) {
	case Progress:
		l.draw(e.text(), e.Total > 0 && e.Done >= e.Total)
	case Step:
		if line := l.run.line(e, l.width()-1, math.Inf(1)); line != "" {
			l.step = nil
			l.print(line)
			return
		}
		l.step = &e
		l.draw(e.text(l.run, l.width()-1), e.Step == e.Steps)
	default:
		if line := e.Line(); line != "" {
			l.print(line)
		}
	}
}

// Tick draws what goes on, if nothing has been drawn for a while. The owner of the terminal calls
// it several times a second.
func (l *Live) Tick() {
	l.mu.Lock()
	defer l.mu.Unlock()
	at := l.now()
	if l.busy == "" || at.Sub(l.since) < patience || at.Sub(l.drawn) < patience {
		return
	}
	l.draw(fmt.Sprintf("%s  %s", l.busy, remaining(at.Sub(l.since).Seconds())), true)
}

// print leaves a line above the live one.
func (l *Live) print(line string) {
	l.clear()
	_, _ = io.WriteString(l.w, line+"\n")
}

// draw puts a text on the live line, unless it is too early; what is last is always shown.
func (l *Live) draw(text string, last bool) {
	at := l.now()
	if !last && at.Sub(l.drawn) < liveEvery {
		return
	}
	l.drawn = at
	room := l.width() - 1
	if r := []rune(text); len(r) > room {
		text = string(r[:room])
	}
	pad := max(0, l.blanks()-len([]rune(text)))
	_, _ = io.WriteString(l.w, "\r"+text+strings.Repeat(" ", pad))
	l.shown = text
}

// Close wipes the live line; the last step of a training run stays.
func (l *Live) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.busy = ""
	l.clear()
	if l.step != nil {
		_, _ = io.WriteString(l.w, l.step.text(l.run, l.width()-1)+"\n")
		l.step = nil
	}
}

func (l *Live) clear() {
	if l.shown != "" {
		_, _ = io.WriteString(l.w, "\r"+strings.Repeat(" ", l.blanks())+"\r")
		l.shown = ""
	}
}

// blanks is how many columns wipe the live line, with the ^C that a terminal may have put behind
// it. More than fit would wrap into a line of their own.
func (l *Live) blanks() int {
	if l.shown == "" {
		return 0
	}
	return min(len([]rune(l.shown))+len("^C"), l.width()-1)
}

func (p Progress) text() string {
	amount := func(n int64) string {
		if p.Unit == "B" {
			return Size(n)
		}
		return fmt.Sprintf("%d %s", n, p.Unit)
	}
	if p.Total <= 0 {
		return fmt.Sprintf("%s  %s", p.Task, amount(p.Done))
	}
	return fmt.Sprintf("%s  %3d %%  %s of %s", p.Task, 100*p.Done/p.Total, amount(p.Done),
		amount(p.Total))
}
