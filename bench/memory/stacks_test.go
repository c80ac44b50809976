package main

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// allocation is a stack that begins uninitialized, in a program's text.
var allocation = regexp.MustCompile(`stablehlo\.custom_call @AllocateBuffer\(.*?\) ` +
	`\{.*?\} : \(.*?\) -> (tensor<(?:\d+x)+(\w+)>)`)

// ofZeros is the program whose stacks all begin as zeros.
func ofZeros(m *program.Module) *program.Module {
	out := *m
	out.Text = allocation.ReplaceAllStringFunc(m.Text, func(call string) string {
		of, zero := allocation.FindStringSubmatch(call), "0.0"
		if strings.Contains(of[2], "i") { // ui8, i32
			zero = "0"
		}
		return "stablehlo.constant dense<" + zero + "> : " + of[1]
	})
	return &out
}

// stackBytes sums the stacks of a program that begin uninitialized.
func stackBytes(t *testing.T, m *program.Module) (sum int64) {
	t.Helper()
	for _, of := range allocation.FindAllStringSubmatch(m.Text, -1) {
		words := strings.Split(strings.Trim(of[1], "tensor<>"), "x")
		n := int64(1)
		for _, size := range words[:len(words)-1] {
			k, err := strconv.ParseInt(size, 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			n *= k
		}
		bits, err := strconv.ParseInt(regexp.MustCompile(`\d+`).FindString(of[2]), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		sum += n * bits / 8
	}
	return sum
}

// With zeros in the place of uninitialized stacks XLA:GPU writes each of them once more, before the
// loop does, and needs as much memory, or 1.5 % more. Gradients are filled in any case: stacks of the backward
// loop, and the embedding's, to which rows are added. The stage once had 45 % more temp: XLA
// allocated its stacks before the gathered embedding was free.
func TestForwardStacksAreNotFilled(t *testing.T) {
	slowtest.Only(t)
	c := enginetest.GPUCompiler(t, true) // cuDNN's plans fill nothing
	for _, row := range []struct {
		kind step.Kind
		plan string
	}{
		{step.Gradient, `{"version": 1, "model": "llama3.1-8b", "cluster": "8xb200", "seq": 8192,
"batch": 8, "microbatches": 1, "fsdp": {"size": 8, "zero": 3, "gather": "layer"},
"types": {"params": "bf16", "grads": "f32", "collectives": "bf16"}, "precision": "mxfp8"}`},
		{step.Forward, `{"version": 1, "model": "llama3.2-3b", "cluster": "8xrtx6000pro", "seq": 4096,
"batch": 32, "microbatches": 8, "fsdp": {"size": 2, "zero": 3, "gather": "layer"},
"cp": {"size": 2, "kind": "ring"}, "pp": {"size": 2, "schedule": "gpipe"},
"recompute": ["norm", "attn"],
"types": {"params": "bf16", "grads": "f32", "collectives": "bf16"}}`},
	} {
		one, err := planOf(row.plan)
		if err != nil {
			t.Fatal(err)
		}
		p, cluster, err := write(one)
		if err != nil {
			t.Fatal(err)
		}
		m := p.Find(row.kind, 0).Module
		fills, temp := filled(t, c, m, cluster)
		fillsOfZeros, tempOfZeros := filled(t, c, ofZeros(m), cluster)
		stacks := stackBytes(t, m)
		t.Logf("%s, %s: stacks %.2f GB, fills %.2f, with stacks of zeros %.2f; temp is %.2f GB, with them %.2f",
			one.plan.Model, m.Name, float64(stacks)/1e9, float64(fills)/1e9, float64(fillsOfZeros)/1e9, float64(temp)/1e9,
			float64(tempOfZeros)/1e9)
		// None of the stacks is filled: all of them are what zeros add.
		if float64(fillsOfZeros-fills) < 0.99*float64(stacks) || stacks == 0 {
			t.Errorf("%s fills %d bytes, and %d with stacks of zeros, which have %d", m.Name, fills,
				fillsOfZeros, stacks)
		}
		if float64(temp) > (1+slack)*float64(tempOfZeros) {
			t.Errorf("temp of %s is %d bytes, and %d with stacks of zeros", m.Name, temp, tempOfZeros)
		}
	}
}

// filled compiles a program and gives the bytes that it fills, and its temp.
func filled(t *testing.T, c *engine.Compiler, m *program.Module, cl machine.Cluster) (fills,
	temp int64) {
	t.Helper()
	r, err := c.Compile(t.Context(), m, cl)
	if err != nil {
		t.Fatal(err)
	}
	_, format, code, err := c.Optimized(t.Context(), m, cl) // in the cache now
	if err != nil {
		t.Fatal(err)
	}
	x, err := hlo.Read(format, code)
	if err != nil {
		t.Fatal(err)
	}
	entry, err := x.Schedule()
	if err != nil {
		t.Fatal(err)
	}
	return fillBytes(entry), r.Memory.Temp
}

// fillBytes sums what a computation writes by instructions that only repeat constants. One kernel
// fills several stacks of one shape, as copies, and small ones of several, which it concatenates.
func fillBytes(c *hlo.Computation) (n int64) {
	constant := []string{"parameter", "constant", "broadcast", "copy", "bitcast", "reshape",
		"concatenate", "slice", "tuple"}
	other := func(x hlo.Instruction) bool { return !slices.Contains(constant, x.Opcode) }
	for _, i := range c.Body {
		if i.Opcode == "while" {
			for _, called := range i.Calls {
				n += max(1, i.Trips) * fillBytes(called)
			}
		}
		if i.Opcode != "broadcast" && (i.Opcode != "fusion" || slices.ContainsFunc(i.Calls[0].Body,
			other)) {
			continue
		}
		if slices.ContainsFunc(i.Operands, func(at int) bool { return c.Body[at].Opcode != "constant" }) {
			continue
		}
		for _, v := range i.Results {
			n += v.Bytes
		}
	}
	return n
}
