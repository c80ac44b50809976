package main

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// A compiler compiles the programs of combinations. What it has compiled once it keeps in a file,
// so that a run that was stopped goes on where it was.
type compiler struct {
	gpu   *engine.Compiler
	cpu   *engine.Engine
	known map[string]step.Needs
	file  *os.File
}

// kept is a line of the file.
type kept struct {
	Key   string     `json:"key"`
	Name  string     `json:"name"`
	Needs step.Needs `json:"needs"`
}

// newCompiler reads the file of what is known; "" keeps nothing.
func newCompiler(path string) (*compiler, error) {
	c := &compiler{known: map[string]step.Needs{}}
	if path == "" {
		return c, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	old, err := os.Open(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if err == nil {
		lines := bufio.NewScanner(old)
		for lines.Scan() {
			var k kept
			if json.Unmarshal(lines.Bytes(), &k) == nil { // a truncated line is compiled again
				c.known[k.Key] = k.Needs
			}
		}
		if err := old.Close(); err != nil {
			return nil, err
		}
	}
	c.file, err = os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	return c, err
}

func (c *compiler) close() {
	if c.gpu != nil {
		c.gpu.Close()
	}
	if c.cpu != nil {
		c.cpu.Close()
	}
	if c.file != nil {
		_ = c.file.Close()
	}
}

// write makes the programs of a combination as deepwell compile does, but for one document in each
// sequence.
func write(c combination) (*step.Programs, machine.Cluster, error) {
	cluster, err := machine.ParseCluster(c.plan.Cluster)
	if err != nil {
		return nil, cluster, err
	}
	p, err := step.Build(step.Spec{Model: c.config, Documents: 1, Recipe: step.RecipeOf(c.plan),
		Arch: cluster.Arch(), Plan: c.plan})
	return p, cluster, err
}

// compile gives what the ranks of a combination hold and what each of its programs needs.
func (c *compiler) compile(ctx context.Context, one combination) (*row, error) {
	p, cluster, err := write(one)
	if err != nil {
		return nil, err
	}
	out := &row{key: one.key(), cluster: one.plan.Cluster, model: one.plan.Model}
	var failed error
	out.ranks, err = p.Footprints(func(s *program.Module) step.Needs {
		// The loss alone is never the largest program, and would take a third of the time.
		if failed != nil || s.Name == string(step.Evaluate) {
			return step.Needs{}
		}
		stage := *s
		if !p.Joint() { // what is compiled for one rank serves all
			stage.Devices = p.Ranks[0].Devices
		}
		var n step.Needs
		if n, failed = c.needs(ctx, &stage, cluster); failed == nil {
			out.add(s.Name, n)
		}
		return n
	})
	if failed != nil {
		err = failed
	}
	return out, err
}

// needs compiles a program, unless it is known.
func (c *compiler) needs(ctx context.Context, s *program.Module, cl machine.Cluster) (n step.Needs,
	err error) {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s\n%d\n%v\n%s", cl, len(s.Devices), s.Flags, s.Text))
	key := hex.EncodeToString(sum[:12])
	if n, ok := c.known[key]; ok {
		return n, nil
	}
	var r *engine.Report
	if cl.CPU() {
		r, err = c.onCPU(ctx, s)
	} else {
		r, err = c.onGPU(ctx, s, cl)
	}
	if err != nil {
		return n, err
	}
	if r.Recomputed > 0 {
		return n, diag.New(diag.TooLarge, "%s does not fit %s", s.Name, cl)
	}
	n = step.Needs{Temp: r.Memory.Temp, Output: r.Memory.Output, Alias: r.Memory.Alias,
		Host: r.Memory.Host}
	c.known[key] = n
	if c.file == nil {
		return n, nil
	}
	line, err := json.Marshal(kept{key, s.Name, n})
	if err == nil {
		_, err = c.file.Write(append(line, '\n'))
	}
	return n, err
}

func (c *compiler) onGPU(ctx context.Context, s *program.Module,
	cl machine.Cluster) (r *engine.Report, err error) {
	if c.gpu == nil {
		if c.gpu, err = engine.OpenCompiler(ctx, engine.Options{}); err != nil {
			return nil, err
		}
	}
	return c.gpu.Compile(ctx, s, cl)
}

// cpuDevices is the most that a plan for the CPU has here.
const cpuDevices = 8

func (c *compiler) onCPU(ctx context.Context, s *program.Module) (r *engine.Report, err error) {
	if c.cpu == nil {
		c.cpu, err = engine.Open(ctx, "cpu", engine.Options{Devices: cpuDevices})
		if err != nil {
			return nil, err
		}
	}
	x, err := c.cpu.Compile(ctx, s)
	if err != nil {
		return nil, err
	}
	defer x.Free()
	return x.Report()
}

// planOf reads the plan of a row and finds its model.
func planOf(text string) (combination, error) {
	p, err := plan.Parse([]byte(text), table)
	if err != nil {
		return combination{}, err
	}
	c, err := configOf(p.Model)
	return combination{c, p}, err
}
