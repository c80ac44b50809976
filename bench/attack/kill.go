package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/deepwell/deepwell/diag"
)

var errMissing error = diag.CheckpointMissing

// stalled is the exit status that asks for a restart.
const stalled = int(diag.Stalled)

// whole runs once in one process and once in two, left alone, and gives what each ends with.
func (a *attack) whole() (map[bool]map[string][]byte, error) {
	ends := map[bool]map[string][]byte{}
	for _, two := range []bool{false, true} {
		dir, err := a.lay(fmt.Sprintf("whole-%t", two))
		if err != nil {
			return nil, err
		}
		list, err := a.begin(dir, two)
		if err != nil {
			return nil, err
		}
		for _, p := range list {
			if <-p.ended; p.code != 0 {
				return nil, fmt.Errorf("a run that was left alone ends with %d\n%s", p.code, &p.out)
			}
		}
		if ends[two], err = a.tensors(dir); err != nil {
			return nil, err
		}
	}
	return ends, nil
}

func (a *attack) begin(dir string, two bool) ([]*process, error) {
	if two {
		both, err := a.pair(dir)
		return both[:], err
	}
	p, err := a.start(dir)
	return []*process{p}, err
}

// killOne kills runs in one process at random moments, and resumes them.
func (a *attack) killOne(kills int, want map[bool]map[string][]byte) error {
	done, runs, step := 0, 0, int64(0)
	dir, err := a.lay("one-0")
	if err != nil {
		return err
	}
	for done < kills || step > 0 {
		p, err := a.start(dir)
		if err != nil {
			return err
		}
		// From before the engine is open to after the last step of what is left.
		if done < kills && !p.within(time.Duration(a.random.Float64()*4*float64(time.Second))) {
			p.kill()
			done++
		}
		<-p.ended
		switch now := a.reached(dir); {
		case now < step:
			a.harm("step %d after step %d", now, step)
		case p.code == 0:
			a.same(dir, want[false])
			runs++
			if dir, err = a.lay(fmt.Sprintf("one-%d", runs)); err != nil {
				return err
			}
			step = 0
		case p.code != -1:
			a.harm("exit %d\n%s", p.code, &p.out)
		default:
			step = now
		}
	}
	fmt.Printf("one process: %d kills, %d runs to their end, the bits of a run left alone\n", done,
		runs)
	return nil
}

// killTwo kills or suspends one of two processes at random moments; the other must ask for a
// restart, and name who is gone.
func (a *attack) killTwo(kills, stops int, want map[bool]map[string][]byte) error {
	attacks := make([]syscall.Signal, 0, kills+stops)
	for range kills {
		attacks = append(attacks, syscall.SIGKILL)
	}
	for range stops {
		attacks = append(attacks, syscall.SIGSTOP)
	}
	a.random.Shuffle(len(attacks), func(i, k int) { attacks[i], attacks[k] = attacks[k], attacks[i] })
	found := map[syscall.Signal][]float64{}
	runs, unnamed, missed := 0, 0, 0
	dir, err := a.lay("two-0")
	if err != nil {
		return err
	}
	for step := int64(0); len(attacks) > 0 || step > 0; {
		both, err := a.pair(dir)
		if err != nil {
			return err
		}
		victim := a.random.IntN(2)
		if len(attacks) > 0 && a.training(both[:]) {
			time.Sleep(time.Duration(a.random.Float64() * float64(time.Second)))
			if took, ok := a.strike(both[victim], both[1-victim], attacks[0]); ok {
				found[attacks[0]] = append(found[attacks[0]], took)
				if !strings.Contains(both[1-victim].out.String(), "127.0.0.1:") {
					unnamed++
				}
				attacks = attacks[1:]
			} else {
				missed++ // the run had ended
			}
		}
		for _, p := range both {
			if !p.within(2 * time.Minute) {
				a.harm("a process of two hangs\n%s", &p.out)
				p.kill()
			}
		}
		switch now := a.reached(dir); {
		case now < step:
			a.harm("step %d after step %d", now, step)
		case both[0].code == 0 && both[1].code == 0:
			a.same(dir, want[true])
			runs++
			if dir, err = a.lay(fmt.Sprintf("two-%d", runs)); err != nil {
				return err
			}
			step = 0
		default:
			step = now
		}
	}
	for _, s := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
		if t := found[s]; len(t) > 0 {
			slices.Sort(t)
			fmt.Printf("two processes: %d × %s, found within %.2f s (median %.2f s), exit %d each time\n",
				len(t), map[syscall.Signal]string{syscall.SIGKILL: "kill -9", syscall.SIGSTOP: "SIGSTOP"}[s],
				t[len(t)-1], t[len(t)/2], stalled)
		}
	}
	fmt.Printf("two processes: %d runs to their end, the bits of a run left alone; in %d the "+
		"culprit's address was not named; %d attacks came after the end\n", runs, unnamed, missed)
	return nil
}

// training waits until a run has made a few steps, so that processes know each other.
func (a *attack) training(both []*process) bool {
	events := filepath.Join(both[0].Dir, "run", "events.jsonl")
	before := fileSize(events)
	for range 600 {
		if both[0].within(50*time.Millisecond) || fileSize(events) > before+2000 {
			break
		}
	}
	return fileSize(events) > before+2000
}

func fileSize(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}

// foundWithin is how soon a suspended process must be found: ten seconds, which are far more than
// three steps here, and something for a machine that does other work.
const foundWithin = 13 * time.Second

// strike attacks one process and waits for the other to notice.
func (a *attack) strike(victim, other *process, signal syscall.Signal) (seconds float64, ok bool) {
	start := time.Now()
	if err := victim.Process.Signal(signal); errors.Is(err, os.ErrProcessDone) {
		return 0, false
	}
	noticed := other.within(foundWithin)
	took := time.Since(start).Seconds()
	victim.kill()
	switch {
	case noticed && other.code == 0:
		return 0, false // both had ended
	case !noticed:
		a.harm("%v was not noticed in %s\n%s", signal, foundWithin, &other.out)
		other.kill()
	case other.code != stalled:
		a.harm("%v: the other process ends with %d\n%s", signal, other.code, &other.out)
	}
	return took, true
}
