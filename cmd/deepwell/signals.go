package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/diag"
)

// A stopped is why a context ended: a signal asked for it.
type stopped struct{ signal os.Signal }

func (s stopped) Error() string { return "signal: " + s.signal.String() }

// class is the exit status of a program that a signal stopped in good order.
func (s stopped) class() diag.Class {
	if s.signal == os.Interrupt {
		return diag.Interrupted
	}
	return diag.Terminated
}

// sameRequest is the time in which a second SIGTERM is the first one again: timeout(1) sends one to
// its child and one to its group, and the kernel one for each thread of a launcher that is gone.
const sameRequest = 2 * time.Second

// untilSignal gives a context that ends, with a [stopped] as its cause, when the process is asked
// to stop. SIGHUP asks as SIGTERM does: a lost terminal is no reason to lose steps. A second SIGINT
// or SIGTERM ends the process at once; a second SIGHUP does not, since a shell sends one more to
// what the terminal has sent one to. Where nohup has SIGHUP ignored, it stays ignored.
func untilSignal(parent context.Context, exit func(int)) context.Context {
	ctx, cancel := context.WithCancelCause(parent)
	asks := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) {
		asks = append(asks, syscall.SIGHUP)
	}
	heard := make(chan os.Signal, 8)
	signal.Notify(heard, asks...)
	go func() {
		cancel(stopped{<-heard})
		first := time.Now()
		for s := range heard {
			again := s == syscall.SIGTERM && time.Since(first) < sameRequest
			if s != syscall.SIGHUP && !again {
				fmt.Fprintln(os.Stderr, "ended at once, without a save: the newest checkpoint stays")
				exit(int(diag.Failed)) // 130 and 143 mean that everything is saved
			}
		}
	}()
	return ctx
}

// parentEnv holds the process id of a program that waits for this one, such as Python.
const parentEnv = "DEEPWELL_PARENT"

// endWithParent has the kernel send SIGTERM when the program that [parentEnv] names ends, however
// it ends, so that it leaves no process behind. Children have another parent and are not concerned.
func endWithParent() {
	parent := os.Getppid()
	if os.Getenv(parentEnv) != strconv.Itoa(parent) {
		return
	}
	set := make(chan struct{})
	go func() {
		runtime.LockOSThread() // the setting is the thread's, and ends with it
		// If it fails the program only runs to its end.
		_ = unix.Prctl(unix.PR_SET_PDEATHSIG, uintptr(syscall.SIGTERM), 0, 0, 0)
		close(set)
		select {}
	}()
	<-set
	if os.Getppid() != parent { // it ended meanwhile
		os.Exit(int(diag.Terminated))
	}
}

// outlivePipe lets writes to a pipe that nobody reads any more fail instead of ending the process,
// for commands whose work is worth more than their output. Children get the default back, which
// they would not if the signal were ignored.
func outlivePipe() { signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) }
