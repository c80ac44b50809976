package isolate

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/program"
)

// verb is the one argument of a child. It stands in no help: people have nothing to say to it.
const verb = "__compile"

// answers is the descriptor that a child answers on.
const answers = 3

// Main must come first in the main function, or in TestMain, of a program that opens compilers
// with Self. It returns unless the process was started as a child; then it compiles what it is
// asked to and ends the process.
func Main() {
	if len(os.Args) == 2 && os.Args[1] == verb {
		os.Exit(serve())
	}
}

// serve answers requests until standard input ends.
func serve() int {
	out, err := answerPipe(verb)
	if err != nil {
		fmt.Fprint(os.Stderr, diag.From(err).Format())
		return int(diag.Usage)
	}
	in := bufio.NewReaderSize(os.Stdin, 64<<10)
	var hello greeting
	if err := readLine(in, &hello); err != nil {
		return int(diag.Usage)
	}
	c, err := hello.open(event.NewJSON(out, time.Now))
	if err != nil {
		return reply(out, answer{Error: diag.From(err)})
	}
	if status := reply(out, answer{Ready: true}); status != 0 {
		return status
	}
	for m := range orders(in) {
		r, err := c.Compile(context.Background(), m)
		a := answer{Report: r}
		if err != nil {
			a = answer{Error: diag.From(err)}
		}
		if status := reply(out, a); status != 0 {
			return status
		}
	}
	return 0
}

// open loads what a greeting asks for.
func (g greeting) open(events event.Sink) (*Compiler, error) {
	if g.Version != wireVersion {
		return nil, diag.New(diag.EngineAPI, "the binary that compiles speaks version %d of the "+
			"protocol, not %d", wireVersion, g.Version).Try("use a deepwell of the same release")
	}
	cluster, err := machine.ParseCluster(g.Cluster)
	if err != nil {
		return nil, err
	}
	return Open(context.Background(), Options{Engines: g.Engines, Cluster: cluster, Cache: g.Cache,
		WithoutCuDNN: g.WithoutCuDNN, Ahead: g.Ahead, Events: events})
}

// orders reads modules in the background, so that the end of the input ends the process in the
// middle of a compile: nobody is left to hear of it.
func orders(in *bufio.Reader) <-chan *program.Module {
	modules := make(chan *program.Module)
	go func() {
		for {
			m, err := receive(in)
			if err != nil {
				os.Exit(0)
			}
			modules <- m
		}
	}()
	return modules
}

func reply(out *os.File, a answer) int {
	if err := writeLine(out, a); err != nil {
		return int(diag.Failed) // the parent is gone
	}
	return 0
}
