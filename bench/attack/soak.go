package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// soak runs two processes for many steps under everything that is slow and not stuck, and counts
// false alarms of the watchdog: bursts of ten times the machine's load, one process suspended for
// less than the silence that is allowed, both suspended for longer than it, as a host that sleeps
// does, and saves that wait for a lock.
func (a *attack) soak(count int) error {
	dir, err := a.lay("soak")
	if err != nil {
		return err
	}
	more := []string{"--set", fmt.Sprintf("steps=%d", count), "--set", "save.every=100",
		"--set", "eval.every=500"}
	both, err := a.pair(dir, more...)
	if err != nil {
		return err
	}
	if !a.training(both[:]) {
		return fmt.Errorf("the soak does not begin\n%s", &both[0].out)
	}
	troubles := []struct {
		name string
		do   func(both [2]*process, dir string)
	}{{"burst of load", burst}, {"one process suspended for 5 s", suspendOne},
		{"both suspended for 12 s", suspendBoth}, {"save that waits 6 s for a lock", slowSave}}
	counts := make([]int, len(troubles))
	for i := 0; !both[0].within(2 * time.Second); i++ {
		troubles[i%len(troubles)].do(both, dir)
		counts[i%len(troubles)]++
	}
	for _, p := range both {
		if !p.within(2*time.Minute) || p.code != 0 {
			a.harm("a process of the soak ends with %d\n%s", p.code, &p.out)
			p.kill()
		}
	}
	events, err := os.ReadFile(filepath.Join(dir, "run", "events.jsonl"))
	if err != nil {
		return err
	}
	alarms := bytes.Count(events, []byte(`"kind":"stalled"`))
	if alarms > 0 {
		a.harm("%d false alarms of the watchdog", alarms)
	}
	fmt.Printf("soak: %d steps in two processes, %d false alarms", count, alarms)
	for i, t := range troubles {
		fmt.Printf(" · %d × %s", counts[i], t.name)
	}
	fmt.Println()
	return nil
}

// burst keeps ten times as many processes busy as there are processors, on a machine of two.
func burst([2]*process, string) {
	var busy []*exec.Cmd
	for range 20 {
		c := exec.Command("sh", "-c", "while :; do :; done")
		if c.Start() == nil {
			busy = append(busy, c)
		}
	}
	time.Sleep(5 * time.Second)
	for _, c := range busy {
		_ = c.Process.Kill()
		_ = c.Wait()
	}
}

func suspendOne(both [2]*process, _ string) {
	_ = both[1].Process.Signal(syscall.SIGSTOP)
	time.Sleep(5 * time.Second)
	_ = both[1].Process.Signal(syscall.SIGCONT)
}

func suspendBoth(both [2]*process, _ string) {
	for _, p := range both {
		_ = p.Process.Signal(syscall.SIGSTOP)
	}
	time.Sleep(12 * time.Second)
	for _, p := range both {
		_ = p.Process.Signal(syscall.SIGCONT)
	}
}

// slowSave holds the lock that a save needs.
func slowSave(_ [2]*process, dir string) {
	f, err := os.OpenFile(filepath.Join(dir, "run", "checkpoints", ".lock"), os.O_RDWR, 0)
	if err != nil {
		return // no save has been made yet
	}
	defer func() { _ = f.Close() }()
	if syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
		time.Sleep(6 * time.Second)
	}
}
