package train

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/plantest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/link"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
)

// childEnv tells the test binary that it is the second process of a run: the place of the plan in
// twoProcesses, the model, the address of the first process, and a file with the states that it
// goes on from, if any.
const childEnv = "DEEPWELL_TEST_TRAIN"

// twoProcesses are plans for two processes with four devices each.
func twoProcesses() []plantest.Row {
	return []plantest.Row{
		{Name: "zero3 tp 1f1b", Apply: func(p *plan.Plan) {
			p.FSDP.Size, p.TP.Size, p.PP = 2, 2, plan.PP{Size: 2, Schedule: "1f1b"}
		}},
		{Name: "zero1 1f1b, two ranks in each process", Apply: func(p *plan.Plan) {
			p.FSDP = plan.FSDP{Size: 2, Zero: 1, Gather: "step"}
			p.PP = plan.PP{Size: 4, Schedule: "1f1b"}
		}},
		{Name: "sp ring zb-v", Apply: func(p *plan.Plan) {
			p.TP, p.CP = plan.TP{Size: 2, Sequence: true}, plan.CP{Size: 2, Kind: "ring"}
			p.PP = plan.PP{Size: 2, Schedule: "zb-v"}
		}},
	}
}

// half runs one of two processes. The other's address is sent when both are known.
func half(ctx context.Context, self int, model string, row plantest.Row, said func(string),
	other func() (string, error), states []map[string][]byte) (*history, error) {
	e, err := engine.Open(ctx, "cpu", engine.Options{Devices: 4, Cache: cache})
	if err != nil {
		return nil, err
	}
	defer e.Close()
	hub, err := link.Listen(ctx, "127.0.0.1:0", 7, nil, event.Discard)
	if err != nil {
		return nil, err
	}
	defer func() { _ = hub.Close() }()
	said(hub.Addr())
	peer, err := other()
	if err != nil {
		return nil, err
	}
	p := parityOf(e, model)
	p.want = &history{States: states}
	addresses := []string{hub.Addr(), peer}
	if self == 1 {
		addresses = []string{peer, hub.Addr()}
	}
	return p.run(ctx, p.plan(row), Options{
		Processes: &Processes{Self: self, Addresses: addresses, Hub: hub}})
}

// readStates reads what the first process wrote.
func readStates(path string) (list []map[string][]byte, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return list, json.Unmarshal(b, &list)
}

// child is the second process: it prints what it has of the outcome.
func child() {
	words := strings.Fields(os.Getenv(childEnv))
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	var at int
	_, err := fmt.Sscan(words[0], &at)
	var states []map[string][]byte
	if err == nil {
		states, err = readStates(words[3])
	}
	if err == nil {
		var h *history
		h, err = half(ctx, 1, words[1], twoProcesses()[at], func(a string) { fmt.Println(a) },
			func() (string, error) { return words[2], nil }, states)
		if err == nil {
			err = json.NewEncoder(os.Stdout).Encode(h)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "second process:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// Two processes with four devices each, with stage transfers over TCP, end where one device
// ends.
func TestTwoProcessesEndAlike(t *testing.T) {
	slowtest.Only(t)
	e, err := engine.Open(context.Background(), "cpu", engine.Options{Devices: 1, Cache: cache})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	for _, model := range []string{"llama", "qwen3", "mxfp8/qwen3", "nvfp4/llama"} {
		one := parityOf(e, model)
		if one.want, err = one.run(t.Context(), nil, Options{}); err != nil {
			t.Fatal(err)
		}
		states := filepath.Join(t.TempDir(), "states.json")
		if b, err := json.Marshal(one.want.States); err != nil || os.WriteFile(states, b, 0o600) != nil {
			t.Fatal("the states were not written: ", err)
		}
		for at, row := range twoProcesses() {
			if one.quantized != "" && at == 1 {
				continue // the others have more
			}
			// Each compiles for a minute: all of them are for -plans.all.
			if turn := map[string]int{"qwen3": 1, "mxfp8/qwen3": 2}; !*plansAll && model != "llama" &&
				at != turn[model] {
				continue
			}
			t.Run(model+" "+row.Name, func(t *testing.T) {
				cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^$")
				cmd.Stderr = os.Stderr
				pipe, err := cmd.StdoutPipe()
				if err != nil {
					t.Fatal(err)
				}
				out := bufio.NewReader(pipe)
				got, err := half(t.Context(), 0, model, row, func(address string) {
					cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%d %s %s %s", childEnv, at, model, address,
						states))
				}, func() (string, error) {
					if err := cmd.Start(); err != nil {
						return "", err
					}
					address, err := out.ReadString('\n')
					return strings.TrimSpace(address), err
				}, one.want.States)
				if err != nil {
					t.Fatal(err)
				}
				var theirs history
				if err := json.NewDecoder(out).Decode(&theirs); err != nil {
					t.Fatal(err)
				}
				if err := cmd.Wait(); err != nil {
					t.Error(err)
				}
				if len(theirs.Losses) != paritySteps || theirs.Eval != got.Eval {
					t.Errorf("the other process has losses %v and %v", theirs.Losses, theirs.Eval)
				}
				for i, x := range theirs.Losses {
					if x != got.Losses[i] {
						t.Errorf("the processes have losses %v and %v", got.Losses[i], x)
					}
				}
				for name, list := range theirs.Params {
					if mine := got.Params[name]; mine != nil && !slices.Equal(mine, list) {
						t.Errorf("the processes have different copies of %s", name)
					}
				}
				maps.Copy(got.Params, theirs.Params)
				maps.Copy(got.Blocks, theirs.Blocks)
				for name, list := range theirs.Grads {
					for i, x := range list {
						if len(got.Grads[name]) <= i {
							got.Grads[name] = append(got.Grads[name], 0)
						}
						got.Grads[name][i] += x // of what both have
					}
				}
				if one.quantized != "" {
					one.compareQuantized(t, row, got)
				} else {
					one.compare(t, row.Name, got)
				}
			})
		}
	}
}

// Two ranks that send each other more than lies between them do not wait for each other.
func TestLargeGradientsAreSwapped(t *testing.T) {
	e, err := engine.Open(context.Background(), "cpu", engine.Options{Devices: 2})
	if err != nil {
		t.Fatalf("the tests need the CPU engine (deepwell engine install cpu): %v", err)
	}
	t.Cleanup(e.Close)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var hubs [2]*link.Hub
	for i := range hubs {
		if hubs[i], err = link.Listen(ctx, "127.0.0.1:0", 7, nil, event.Discard); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = hubs[i].Close() }()
	}
	const n = 96 << 20 // more than the buffers of two sockets
	spec := program.Array{Name: "g", Global: dtype.Shape{Type: dtype.U8, Dims: []int64{n}}}
	errs := make(chan error, 2)
	for i := range hubs {
		l := e.Wired(hubs[i].Wire(i, 1-i, hubs[1-i].Addr()))
		m := &program.Module{Name: "s", Devices: program.Devices{i}}
		a, err := e.Place(m, spec, engine.Copied, func(int) ([]byte, error) { return make([]byte, n), nil })
		if err != nil {
			t.Fatal(err)
		}
		defer a.Free()
		go func() {
			got, err := swap(ctx, l, a, m, spec)
			if err == nil {
				got.Free()
			}
			errs <- err
		}()
	}
	for range hubs {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}
