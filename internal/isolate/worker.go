package isolate

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/flat"
)

// A Worker is a child that does other work with an engine than compiling: it answers the requests
// of one kind, one after the other. Package flat says what requests and answers may hold.
type Worker struct {
	process *process
}

// A verdict comes before the answer to a request, or in its place.
type verdict struct {
	Error []byte // a diag.Error as JSON; nil if the answer follows
}

// OpenWorker starts a child whose main calls [Work] with the verb. Of the options it takes Child,
// Environ and Log.
func OpenWorker(ctx context.Context, verb string, o Options) (*Worker, error) {
	o.Log = cmp.Or[io.Writer](o.Log, os.Stderr)
	p, err := startChild(ctx, verb, o)
	if err != nil {
		return nil, err
	}
	return &Worker{p}, nil
}

// Ask sends a request and fills in the answer, both pointers. Doing says what a crash happened on,
// as in "on module step". After a crash, or when ctx has ended, the worker answers nothing more.
func (w *Worker) Ask(ctx context.Context, doing string, request, answer any) error {
	w.process.mu.Lock()
	defer w.process.mu.Unlock()
	if w.process.dead != nil {
		return w.process.dead
	}
	if err := ctx.Err(); err != nil {
		return diag.New(diag.Canceled, "stopped before %s", doing).Wrap(err)
	}
	var v verdict
	err := w.process.exchange(ctx, doing, func(in *os.File) error { return flat.Write(in, request) },
		func(out *bufio.Reader) error {
			if err := flat.Read(out, &v); err != nil || v.Error != nil {
				return err
			}
			return flat.Read(out, answer)
		})
	if err != nil || v.Error == nil {
		return err
	}
	failed := &diag.Error{}
	if err := json.Unmarshal(v.Error, failed); err != nil {
		return err
	}
	return failed
}

// Alive reports whether the worker can be asked.
func (w *Worker) Alive() bool {
	w.process.mu.Lock()
	defer w.process.mu.Unlock()
	return w.process.dead == nil
}

// Close ends the worker.
func (w *Worker) Close() { w.process.close() }

// Work must come first in the main function, or in TestMain, of a program that opens workers with
// Self. It returns unless the process was started as a child with the verb; then it answers what it
// is asked and ends the process.
func Work[Request, Answer any](verb string, answer func(*Request) (*Answer, error)) {
	if len(os.Args) != 2 || os.Args[1] != verb {
		return
	}
	out, err := answerPipe(verb)
	if err != nil {
		fmt.Fprint(os.Stderr, diag.From(err).Format())
		os.Exit(int(diag.Usage))
	}
	requests := make(chan *Request)
	go func() { // so that the end of the input ends the process in the middle of its work
		for {
			r := new(Request)
			if flat.Read(os.Stdin, r) != nil {
				os.Exit(0)
			}
			requests <- r
		}
	}()
	for r := range requests {
		a, err := answer(r)
		if reported(out, a, err) != nil {
			os.Exit(int(diag.Failed)) // the parent is gone
		}
	}
}

// reported sends an answer, or the error in its place.
func reported[Answer any](to io.Writer, a *Answer, err error) error {
	var v verdict
	if err != nil {
		text, failed := json.Marshal(diag.From(err))
		if failed != nil {
			return errors.Join(err, failed)
		}
		v.Error = text
	}
	if failed := flat.Write(to, v); failed != nil || err != nil {
		return failed
	}
	return flat.Write(to, a)
}

// answerPipe is the pipe that a child answers on. Processes that the child starts, such as ptxas,
// do not inherit it.
func answerPipe(verb string) (*os.File, error) {
	var at syscall.Stat_t
	if err := syscall.Fstat(answers, &at); err != nil || at.Mode&syscall.S_IFMT != syscall.S_IFIFO {
		return nil, diag.New(diag.BadUsage, "%s is for deepwell itself", verb).
			Try("deepwell compile --help")
	}
	syscall.CloseOnExec(answers)
	return os.NewFile(answers, "answers"), nil
}
