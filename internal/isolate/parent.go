package isolate

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/program"
)

// grace is how long a child that was asked to end, or whose process is gone, may take for it.
const grace = 5 * time.Second

// A child is the process that compiles, as its parent sees it.
type child struct {
	o    Options
	cmd  *exec.Cmd
	log  *journal      // what it wrote to standard error
	gone chan struct{} // closed when the process has ended and cmd.ProcessState is set

	in      *os.File // requests
	results *os.File // events and answers
	out     *bufio.Reader

	mu   sync.Mutex // one request at a time
	dead error      // why there is no child any more
}

// openChild starts a child and lets it load the compiler.
func openChild(ctx context.Context, o Options) (*Compiler, error) {
	if err := ctx.Err(); err != nil {
		return nil, diag.New(diag.Canceled, "stopped before the compiler was opened").Wrap(err)
	}
	c := &child{o: o, log: &journal{out: o.Log}, gone: make(chan struct{})}
	if err := c.start(); err != nil {
		return nil, diag.New(diag.EngineLoad, "the process that compiles cannot be started").
			At("%s", o.Child).Wrap(err).
			Try("look at the limits of processes, memory and open files: ulimit -a")
	}
	_, err := c.ask(ctx, "while it was opened", greeting{Version: wireVersion, Engines: o.Engines,
		Cluster: fmt.Sprintf("%dx%s", o.Cluster.Count, o.Cluster.GPU.Name),
		Cache:   o.Cache, WithoutCuDNN: o.WithoutCuDNN}, "")
	if err != nil {
		c.close()
		return nil, err
	}
	return &Compiler{c.compile, c.close}, nil
}

// start starts the process and a goroutine that waits for its end.
func (c *child) start() error {
	requests, in, err := os.Pipe()
	if err != nil {
		return err
	}
	out, answers, err := os.Pipe()
	if err != nil {
		return errors.Join(err, requests.Close(), in.Close())
	}
	c.in, c.results, c.out = in, out, bufio.NewReaderSize(out, 64<<10)
	name := c.o.Child
	if name == Self {
		name = os.Args[0] // what ps shows, and by what a test binary knows which program it plays
	}
	environ := c.o.Environ
	if environ == nil {
		environ = os.Environ()
	}
	c.cmd = &exec.Cmd{Path: c.o.Child, Args: []string{name, verb}, Stdin: requests, Stderr: c.log,
		ExtraFiles: []*os.File{answers}, WaitDelay: grace,
		// Go's own account of a crash need not walk all goroutines; the first line is what counts.
		Env:         append([]string{"GOTRACEBACK=none"}, environ...),
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}}
	started := make(chan error)
	go func() {
		// Pdeathsig is sent when the thread that started the child ends, so that thread waits here.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := c.cmd.Start()
		_ = requests.Close()
		_ = answers.Close()
		started <- err
		if err == nil {
			_ = c.cmd.Wait()
		}
		c.log.end()
		close(c.gone)
	}()
	if err := <-started; err != nil {
		return errors.Join(err, in.Close(), out.Close())
	}
	return nil
}

// compile is Compiler.Compile in the child.
func (c *child) compile(ctx context.Context, m *program.Module) (*engine.Report, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dead != nil {
		return nil, c.dead
	}
	if err := ctx.Err(); err != nil {
		return nil, diag.New(diag.Canceled, "stopped before compiling %s", m.Name).Wrap(err)
	}
	o, err := newOrder(m)
	if err != nil {
		return nil, err
	}
	a, err := c.ask(ctx, "on module "+m.Name, o, m.Text)
	if err != nil {
		return nil, err
	}
	return a.Report, nil
}

// ask sends a request and waits for the answer. A context that ends kills the child: nothing else
// stops XLA in the middle of a compile.
func (c *child) ask(ctx context.Context, doing string, request any, text string) (*answer, error) {
	stop := context.AfterFunc(ctx, c.kill)
	defer stop()
	sent := make(chan error, 1)
	// A child that crashes early does not read all of it.
	go func() { sent <- send(c.in, request, text) }()
	a, err := listen(c.out, c.o.Events)
	if err == nil {
		err = <-sent
	}
	switch {
	case err == nil && a.Error != nil:
		return nil, a.Error
	case err == nil:
		return a, nil
	case ctx.Err() != nil:
		c.end()
		c.dead = diag.New(diag.Canceled, "stopped while compiling").Wrap(ctx.Err())
		return nil, c.dead
	}
	c.end()
	c.dead = c.crash(doing)
	return nil, c.dead
}

// kill ends the child and what it started.
func (c *child) kill() { _ = syscall.Kill(-c.cmd.Process.Pid, syscall.SIGKILL) }

// close lets the child end itself.
func (c *child) close() { c.end() }

// end closes the requests, at which a child ends, and waits until it has.
func (c *child) end() {
	_ = c.in.Close()
	select {
	case <-c.gone:
	case <-time.After(grace):
		c.kill()
		<-c.gone
	}
	_ = c.results.Close()
}

// crash says how the child ended without an answer.
func (c *child) crash(doing string) error {
	how := c.log.signal
	status, _ := c.cmd.ProcessState.Sys().(syscall.WaitStatus)
	switch {
	case status.Signaled():
		how = unix.SignalName(status.Signal())
	case how == "":
		how = fmt.Sprintf("status %d", status.ExitStatus())
	}
	cause := c.log.reason()
	fix := "look at the cause; if the program is right, please report it with the program"
	switch {
	case how == "SIGKILL" && cause == "":
		cause, fix = "somebody killed it; the kernel does when memory runs out",
			"give the machine or the container more memory"
	case how == "SIGSEGV" && cause == "":
		cause = "it gave no reason; a program that is nested too deeply overflows its stack"
	case how == "SIGABRT" && cause == "":
		cause = "it gave no reason"
	}
	if flags := os.Getenv("XLA_FLAGS"); flags != "" &&
		strings.Contains(strings.Join(c.log.kept, "\n"), "XLA_FLAGS") {
		fix = "unset XLA_FLAGS, or mend what it says: " + flags
	}
	e := diag.New(diag.CompilerCrashed, "the compiler crashed (%s) %s", how, doing).
		Because("%s", cause).Try("%s", fix)
	if module, ok := strings.CutPrefix(doing, "on "); ok {
		e = e.At("%s", module)
	}
	return e
}
