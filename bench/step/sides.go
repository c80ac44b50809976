package main

import (
	"bufio"
	_ "embed"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/internal/resident"
)

//go:embed jax_side.py
var jaxSide string

//go:embed torch_side.py
var torchSide string

// weights are what everyone begins from. Matrices are [in, out].
type weights struct {
	at          map[string][]float32 // by the name that a layer of our model has
	ids, labels []int32
	file        string // the same for Python: in order, then the tokens
}

// newWeights draws weights and tokens and writes them to a file.
func newWeights(s size) (*weights, error) {
	w := &weights{at: map[string][]float32{}}
	r := rand.New(rand.NewPCG(1, uint64(s.Hidden)))
	var file []byte
	add := func(name string, n int64, scale float64) {
		list := make([]float32, n)
		for i := range list {
			if list[i] = 1; scale > 0 {
				list[i] = float32(scale * r.NormFloat64())
			}
			file = binary.LittleEndian.AppendUint32(file, math.Float32bits(list[i]))
		}
		w.at[name] = list
	}
	d, deep := s.Hidden, 0.02/math.Sqrt(2*float64(s.Layers)) // as GPT-2 begins
	add("embed", s.Vocab*d, 0.02)
	add("position", s.Seq*d, 0.02)
	for i := range s.Layers {
		for _, p := range []struct {
			name  string
			n     int64
			scale float64
		}{
			{"norm1", d, 0}, {"q", d * d, 0.02}, {"k", d * d, 0.02}, {"v", d * d, 0.02},
			{"o", d * d, deep}, {"norm2", d, 0}, {"up", 4 * d * d, 0.02}, {"down", 4 * d * d, deep},
		} {
			add(fmt.Sprintf("%s.%d", p.name, i), p.n, p.scale)
		}
	}
	add("norm", d, 0)
	for _, list := range []*[]int32{&w.ids, &w.labels} {
		for range s.Batch * s.Seq {
			n := int32(r.Int64N(s.Vocab))
			*list = append(*list, n)
			file = binary.LittleEndian.AppendUint32(file, uint32(n))
		}
	}
	f, err := os.CreateTemp("", "deepwell-step-*.bin")
	if err != nil {
		return nil, err
	}
	w.file = f.Name()
	_, err = f.Write(file)
	return w, errors.Join(err, f.Close())
}

func (w *weights) remove() { _ = os.Remove(w.file) }

// A process is a side in Python, which answers one line for each line.
type process struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func start(python, script string, s size, w *weights, kept bool) (*process, error) {
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
		cmd.Env = append(cmd.Env, "GLIBC_TUNABLES="+resident.Tunables)
	}
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
	p := &process{cmd: cmd, in: in, out: bufio.NewScanner(out)}
	if !p.out.Scan() || !strings.HasPrefix(p.out.Text(), "ready ") {
		p.stop()
		return nil, fmt.Errorf("%s did not start; pip install -r bench/requirements.txt", python)
	}
	return p, nil
}

func (p *process) turn(steps int) (turn, error) {
	if _, err := fmt.Fprintln(p.in, steps); err != nil {
		return turn{}, err
	}
	if !p.out.Scan() {
		return turn{}, errors.New("the process ended")
	}
	var list []float64
	for word := range strings.FieldsSeq(p.out.Text()) {
		v, err := strconv.ParseFloat(word, 64)
		if err != nil {
			return turn{}, err
		}
		list = append(list, v)
	}
	if len(list) != 2+steps {
		return turn{}, fmt.Errorf("answered %q", p.out.Text())
	}
	return turn{list[0], list[1], list[2:]}, nil
}

func (p *process) stop() {
	_ = p.in.Close()
	_ = p.cmd.Wait()
}
