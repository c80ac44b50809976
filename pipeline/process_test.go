package pipeline_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/link"
	"github.com/deepwell/deepwell/pipeline"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/schedule"
)

// childEnv tells the test binary that it is the second process of a pipeline: schedule, address of
// the first process, and how it ends.
const childEnv = "DEEPWELL_TEST_PIPELINE"

// half is one of two processes with two ranks each, on two devices.
type half struct {
	engine *engine.Engine
	hub    *link.Hub
	ranks  []pipeline.Rank
	p      *pipeline.Pipeline
}

const halfMicros = 8

// open makes the ranks of a process, linked inside by a pipe. join links them to the other process.
func openHalf(ctx context.Context, name string, first int) (*half, error) {
	e, err := open(ctx, 2)
	if err != nil {
		return nil, err
	}
	h := &half{engine: e}
	if h.hub, err = link.Listen(ctx, "127.0.0.1:0", 42, nil, event.Discard); err != nil {
		return nil, err
	}
	s, err := schedule.New(name, schedule.Shape{Ranks: 4, Micros: halfMicros})
	if err != nil {
		return nil, err
	}
	h.ranks, err = hosted(ctx, e, s, []int{first, first + 1}, isSplit(name), func(r int) int { return r - first })
	if err != nil {
		return nil, err
	}
	a, b, err := e.Pipe(program.Devices{0}, program.Devices{1}, 2)
	if err != nil {
		return nil, err
	}
	h.ranks[0].Links[first+1], h.ranks[1].Links[first] = a, b
	return h, nil
}

func (h *half) join(name string, address string) (err error) {
	for _, r := range h.ranks {
		for other := range 4 {
			if r.Links[other] == nil && other != r.Number {
				r.Links[other] = h.engine.Wired(h.hub.Wire(r.Number, other, address))
			}
		}
	}
	s, err := schedule.New(name, schedule.Shape{Ranks: 4, Micros: halfMicros})
	if err != nil {
		return err
	}
	h.p, err = pipeline.New(pipeline.Config{Schedule: s, Ranks: h.ranks})
	return err
}

func (h *half) close() {
	free(h.ranks)
	h.hub.Close()
	h.engine.Close()
}

// child is the second process. It says where it listens, runs its half, and prints what it got.
func child() {
	fail := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, "second process:", err)
			os.Exit(1)
		}
	}
	words := strings.Fields(os.Getenv(childEnv))
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	h, err := openHalf(ctx, words[0], 2)
	fail(err)
	fmt.Println(h.hub.Addr())
	fail(h.join(words[0], words[1]))
	data := feed(h.engine)
	if words[2] == "dies" {
		data = func(ctx context.Context, stage, microbatch int, m *program.Module, spec program.Array) (*engine.Array, error) {
			if microbatch == 3 {
				os.Exit(0)
			}
			return feed(h.engine)(ctx, stage, microbatch, m, spec)
		}
	}
	out, err := h.p.Run(ctx, data)
	fail(err)
	got, err := gathered(ctx, h.ranks, out)
	fail(err)
	fail(json.NewEncoder(os.Stdout).Encode(got))
	out.Free()
	h.close()
	os.Exit(0)
}

// second starts the second process and links the first to it.
func second(t *testing.T, h *half, name, how string) (*exec.Cmd, *bufio.Reader) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %s %s", childEnv, name, h.hub.Addr(), how))
	cmd.Stderr = os.Stderr
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	out := bufio.NewReader(pipe)
	address, err := out.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	if err := h.join(name, strings.TrimSpace(address)); err != nil {
		t.Fatal(err)
	}
	return cmd, out
}

// Two processes with two ranks each give what the uncut model gives.
func TestTwoProcesses(t *testing.T) {
	for _, name := range schedule.Names() {
		if testing.Short() && name != "zb-v" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			h, err := openHalf(t.Context(), name, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer h.close()
			want := reference(t, h.engine, halfMicros)
			cmd, stdout := second(t, h, name, "lives")
			out, err := h.p.Run(t.Context(), feed(h.engine))
			if err != nil {
				t.Fatal(err)
			}
			got, err := gathered(t.Context(), h.ranks, out)
			if err != nil {
				t.Fatal(err)
			}
			out.Free()
			var theirs map[string][]float64
			if err := json.NewDecoder(stdout).Decode(&theirs); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); err != nil {
				t.Error(err)
			}
			for name, list := range theirs {
				for i, v := range list {
					if len(got[name]) <= i {
						got[name] = append(got[name], 0)
					}
					got[name][i] += v
				}
			}
			compare(t, got, want)
		})
	}
}

// A process that dies in the middle of a step ends the other with an error that names it.
func TestTheOtherProcessDies(t *testing.T) {
	h, err := openHalf(t.Context(), "1f1b", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer h.close()
	cmd, _ := second(t, h, "1f1b", "dies")
	_, err = h.p.Run(t.Context(), feed(h.engine))
	if !errors.Is(err, diag.LinkLost) {
		t.Errorf("%v", err)
	} else {
		t.Log(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}
