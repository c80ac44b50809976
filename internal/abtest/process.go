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

// A Process is a side in Python, which answers one line for each line.
type Process struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

// Start starts a script with more environment; kept lets it keep the memory that it frees, as our
// own process does.
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
	if !p.out.Scan() || !strings.HasPrefix(p.out.Text(), "ready ") {
		p.Stop()
		return nil, fmt.Errorf("%s did not start; pip install -r bench/requirements.txt", python)
	}
	return p, nil
}

// Turn lets the process make some steps.
func (p *Process) Turn(steps int) (Turn, error) {
	if _, err := fmt.Fprintln(p.in, steps); err != nil {
		return Turn{}, err
	}
	if !p.out.Scan() {
		return Turn{}, errors.New("the process ended")
	}
	var list []float64
	for word := range strings.FieldsSeq(p.out.Text()) {
		v, err := strconv.ParseFloat(word, 64)
		if err != nil {
			return Turn{}, err
		}
		list = append(list, v)
	}
	if len(list) != 2+steps {
		return Turn{}, fmt.Errorf("answered %q", p.out.Text())
	}
	return Turn{list[0], list[1], list[2:]}, nil
}

// Stop ends the process.
func (p *Process) Stop() {
	_ = p.in.Close()
	_ = p.cmd.Wait()
}
