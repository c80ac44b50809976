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

// A process is a child as its parent sees it: it answers one request after the other, until it is
// closed or crashes.
type process struct {
	cmd  *exec.Cmd
	log  *journal      // what it wrote to standard error
	gone chan struct{} // closed when the process has ended and cmd.ProcessState is set

	in      *os.File // requests
	results *os.File // events and answers
	out     *bufio.Reader

	mu   sync.Mutex // one request at a time
	dead error      // why there is no child any more
}

// A child is the process that compiles.
type child struct {
	*process
	o Options
}

// openChild starts a child and lets it load the compiler.
func openChild(ctx context.Context, o Options) (*Compiler, error) {
	p, err := startChild(ctx, verb, o)
	if err != nil {
		return nil, err
	}
	c := &child{p, o}
	_, err = c.ask(ctx, "while it was opened", greeting{Version: wireVersion, Engines: o.Engines,
		Cluster: fmt.Sprintf("%dx%s", o.Cluster.Count, o.Cluster.GPU.Name),
		Cache:   o.Cache, WithoutCuDNN: o.WithoutCuDNN, Ahead: o.Ahead}, "")
	if err != nil {
		c.close()
		return nil, err
	}
	return &Compiler{c.compile, c.close}, nil
}

// startChild starts the child of some options with a verb.
func startChild(ctx context.Context, verb string, o Options) (*process, error) {
	if err := ctx.Err(); err != nil {
		return nil, diag.New(diag.Canceled, "stopped before the compiler was opened").Wrap(err)
	}
	p := &process{log: &journal{out: o.Log}, gone: make(chan struct{})}
	if err := p.start(verb, o); err != nil {
		return nil, diag.New(diag.EngineLoad, "the process that compiles cannot be started").
			At("%s", o.Child).Wrap(err).
			Try("look at the limits of processes, memory and open files: ulimit -a")
	}
	return p, nil
}

// start starts the process and a goroutine that waits for its end.
func (p *process) start(verb string, o Options) error {
	requests, in, err := os.Pipe()
	if err != nil {
		return err
	}
	out, answers, err := os.Pipe()
	if err != nil {
		return errors.Join(err, requests.Close(), in.Close())
	}
	p.in, p.results, p.out = in, out, bufio.NewReaderSize(out, 64<<10)
	name := o.Child
	if name == Self {
		name = os.Args[0] // what ps shows, and by what a test binary knows which program it plays
	}
	environ := o.Environ
	if environ == nil {
		environ = os.Environ()
	}
	p.cmd = &exec.Cmd{Path: o.Child, Args: []string{name, verb}, Stdin: requests, Stderr: p.log,
		ExtraFiles: []*os.File{answers}, WaitDelay: grace,
		// Go's own account of a crash need not walk all goroutines; the first line is what counts.
		Env:         append([]string{"GOTRACEBACK=none"}, environ...),
		SysProcAttr: &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}}
	started := make(chan error)
	go func() {
		// Pdeathsig is sent when the thread that started the child ends, so that thread waits here.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		_ = requests.Close()
		_ = answers.Close()
		started <- err
		if err == nil {
			_ = p.cmd.Wait()
		}
		p.log.end()
		close(p.gone)
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

// ask sends a request and waits for the answer.
func (c *child) ask(ctx context.Context, doing string, request any, text string) (a *answer,
	err error) {
	err = c.exchange(ctx, doing, func(w *os.File) error { return send(w, request, text) },
		func(in *bufio.Reader) (err error) {
			a, err = listen(in, c.o.Events)
			return err
		})
	if err == nil && a.Error != nil {
		return nil, a.Error
	}
	return a, err
}

// exchange sends a request and reads the answer. A context that ends kills the child: nothing else
// stops XLA in the middle of a compile. Whatever ends the exchange otherwise is a crash.
func (p *process) exchange(ctx context.Context, doing string, send func(*os.File) error,
	receive func(*bufio.Reader) error) error {
	stop := context.AfterFunc(ctx, p.kill)
	defer stop()
	sent := make(chan error, 1)
	// A child that crashes early does not read all of it.
	go func() { sent <- send(p.in) }()
	err := receive(p.out)
	if err == nil {
		err = <-sent
	}
	if err == nil {
		return nil
	}
	p.end()
	if p.dead = p.crash(doing); ctx.Err() != nil {
		p.dead = diag.New(diag.Canceled, "stopped while compiling").Wrap(ctx.Err())
	}
	return p.dead
}

// kill ends the child and what it started.
func (p *process) kill() { _ = syscall.Kill(-p.cmd.Process.Pid, syscall.SIGKILL) }

// close lets the child end itself.
func (p *process) close() { p.end() }

// end closes the requests, at which a child ends, and waits until it has.
func (p *process) end() {
	_ = p.in.Close()
	select {
	case <-p.gone:
	case <-time.After(grace):
		p.kill()
		<-p.gone
	}
	_ = p.results.Close()
}

// crash says how the child ended without an answer.
func (p *process) crash(doing string) error {
	how := p.log.signal
	status, _ := p.cmd.ProcessState.Sys().(syscall.WaitStatus)
	switch {
	case status.Signaled():
		how = unix.SignalName(status.Signal())
	case how == "":
		how = fmt.Sprintf("status %d", status.ExitStatus())
	}
	cause := p.log.reason()
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
		strings.Contains(strings.Join(p.log.kept, "\n"), "XLA_FLAGS") {
		fix = "unset XLA_FLAGS, or mend what it says: " + flags
	}
	e := diag.New(diag.CompilerCrashed, "the compiler crashed (%s) %s", how, doing).
		Because("%s", cause).Try("%s", fix)
	if module, ok := strings.CutPrefix(doing, "on "); ok {
		e = e.At("%s", module)
	}
	return e
}
