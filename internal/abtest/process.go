package abtest

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/internal/malloc"
)

// A Process is a script in Python, which answers each line with a line of numbers.
type Process struct {
	Version string // of the framework
	cmd     *exec.Cmd
	in      io.WriteCloser
	out     *bufio.Scanner
}

// Start starts the script of a side with more environment; kept lets it keep the memory that it
// frees, as our own process does.
func Start(python, script string, s Size, w *Weights, kept bool, env ...string) (*Process, error) {
	sizes, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(python, "-c", script, string(sizes), w.file)
	cmd.Env = os.Environ()
	for i, kv := range cmd.Env { // ours is not theirs
		if strings.HasPrefix(kv, "GLIBC_TUNABLES=") {
			cmd.Env[i] = "DEEPWELL_STEP=1"
		}
	}
	if kept {
		cmd.Env = append(cmd.Env, "GLIBC_TUNABLES="+malloc.Tunables)
	}
	cmd.Env = append(cmd.Env, env...)
	return Python(cmd, "bench/requirements.txt")
}

// Python starts a script that says "ready" and a version before its first answer. Requirements is
// the file that lists what it imports.
func Python(cmd *exec.Cmd, requirements string) (*Process, error) {
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &Process{cmd: cmd, in: in, out: bufio.NewScanner(out)}
	ready := false
	if p.out.Scan() {
		p.Version, ready = strings.CutPrefix(p.out.Text(), "ready ")
	}
	if !ready {
		p.Stop()
		return nil, fmt.Errorf("%s did not start; pip install -r %s", cmd.Path, requirements)
	}
	return p, nil
}

// Ask sends a line and returns the n numbers of the answer.
func (p *Process) Ask(n int, line ...any) ([]float64, error) {
	if _, err := fmt.Fprintln(p.in, line...); err != nil {
		return nil, err
	}
	if !p.out.Scan() {
		return nil, errors.New("the process ended")
	}
	var list []float64
	for word := range strings.FieldsSeq(p.out.Text()) {
		v, err := strconv.ParseFloat(word, 64)
		if err != nil {
			return nil, err
		}
		list = append(list, v)
	}
	if len(list) != n {
		return nil, fmt.Errorf("answered %q", p.out.Text())
	}
	return list, nil
}

// Turn lets the process make some steps.
func (p *Process) Turn(steps int) (Turn, error) {
	list, err := p.Ask(2+steps, steps)
	if err != nil {
		return Turn{}, err
	}
	return Turn{list[0], list[1], list[2:]}, nil
}

// Stop ends the process.
func (p *Process) Stop() {
	_ = p.in.Close()
	_ = p.cmd.Wait()
}
