package lower_test

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/internal/irtest"
	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
)

const allocates = "stablehlo.custom_call @AllocateBuffer"

// Stacks of forward loops begin uninitialized on the GPUs that Deepwell trains on: every slice is
// written before it can be read. Others, and elsewhere all, begin as zeros.
func TestStacksAreWrittenBeforeTheyAreRead(t *testing.T) {
	g, err := irtest.Tiny(3)
	if err != nil {
		t.Fatal(err)
	}
	all := []ir.Tag{ir.Norm, ir.Attn, ir.MLP}
	for _, arch := range []string{"", "cpu", "sm_80", "sm_90", "sm_100", "sm_103", "sm_120"} {
		s := kernels.For(arch)
		if arch == "" {
			s = nil
		}
		for _, how := range []ir.GradPlan{{}, {Recompute: all}, {Recompute: all, Offload: true}} {
			gr, err := ir.Grad(g, how)
			if err != nil {
				t.Fatal(err)
			}
			joint, err := gr.Joint()
			if err != nil {
				t.Fatal(err)
			}
			stacks := 0
			for _, g := range []*ir.Graph{gr.Forward, gr.Backward, joint} {
				text, err := lower.StableHLO(g, lower.Options{Kernels: s})
				if err != nil {
					t.Fatal(err)
				}
				want := 0
				if s.UninitializedStacks() {
					want = stackedResults(g)
				}
				n, err := uninitialized(text)
				if err != nil || n != want {
					t.Errorf("%q, %s: %d of %d stacks are uninitialized, %v\n%s", arch, g.Name, n, want, err,
						text)
				}
				stacks += want
			}
			if s.UninitializedStacks() && stacks < 2 {
				t.Errorf("%q: %d stacks", arch, stacks)
			}
		}
	}
}

// stackedResults counts the values that forward loops of a graph stack.
func stackedResults(g *ir.Graph) (n int) {
	for _, op := range g.Ops {
		if op.Kind == "repeat" && !op.Loop().Reverse {
			n += len(op.Out) - len(op.Loop().Carries) + stackedResults(op.Loop().Body)
		}
	}
	return n
}

// The proof finds what would read memory that nothing was written to.
func TestUninitializedFindsFaults(t *testing.T) {
	good := `
  %a = stablehlo.custom_call @AllocateBuffer() {api_version = 1 : i32} : () -> tensor<3x4xf32>
  %z = stablehlo.constant dense<0> : tensor<i32>
  %w:2 = stablehlo.while(%i = %z, %s = %a) : tensor<i32>, tensor<3x4xf32>
    cond {
      %n = stablehlo.constant dense<3> : tensor<i32>
      %c = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    } do {
      %l = stablehlo.constant dense<2> : tensor<i32>
      %at = stablehlo.subtract %l, %i : tensor<i32>
      %x = stablehlo.constant dense<1.0> : tensor<1x4xf32>
      %o = stablehlo.constant dense<0> : tensor<i32>
      %u = stablehlo.dynamic_update_slice %s, %x, %at, %o : (tensor<3x4xf32>, tensor<1x4xf32>, t)
      %e = stablehlo.constant dense<1> : tensor<i32>
      %j = stablehlo.add %i, %e : tensor<i32>
      stablehlo.return %j, %u : tensor<i32>, tensor<3x4xf32>
    }
`
	forward := strings.Replace(good, "%s, %x, %at, %o", "%s, %x, %i, %o", 1)
	for _, text := range []string{good, forward} {
		if n, err := uninitialized(text); n != 1 || err != nil {
			t.Errorf("%d stacks, %v:\n%s", n, err, text)
		}
	}
	for _, fault := range []struct{ name, old, new string }{
		{"a round too few", "dense<3>", "dense<2>"},
		{"not from the first", "%z = stablehlo.constant dense<0>", "%z = stablehlo.constant dense<1>"},
		{"every second slice", "%e = stablehlo.constant dense<1>", "%e = stablehlo.constant dense<2>"},
		{"an index below zero", "%l = stablehlo.constant dense<2>", "%l = stablehlo.constant dense<1>"},
		{"always one slice", "%s, %x, %at, %o", "%s, %x, %o, %o"},
		{"another axis", "%s, %x, %at, %o", "%s, %x, %at, %i"},
		{"a part of a slice", "tensor<1x4xf32>, t)", "tensor<1x2xf32>, t)"},
		{"not written", "return %j, %u", "return %j, %s"},
		{"read in the loop", "%x = stablehlo.constant dense<1.0>", "%x = stablehlo.slice %s"},
		{"read besides", "  %z =", "  %y = stablehlo.negate %a : tensor<3x4xf32>\n  %z ="},
		{"no loop", "%s = %a)", "%s = %b)"},
	} {
		bad := strings.Replace(good, fault.old, fault.new, 1)
		if _, err := uninitialized(bad); err == nil || bad == good {
			t.Errorf("%s: not found", fault.name)
		}
	}
}

var (
	whileLine  = regexp.MustCompile(`^( *)%\S+ = stablehlo\.while\((.*?)\) : `)
	defLine    = regexp.MustCompile(`^ *(%\w+)\S* = (.*?)( : .*)?$`)
	returnLine = regexp.MustCompile(`^ *stablehlo\.return (.*?) : `)
	updateLine = regexp.MustCompile(`^ *(\S+) = stablehlo\.dynamic_update_slice (.*?) : ` +
		`\(tensor<(\d+)x(.*?)>, tensor<1x(.*?)>, `)
	word = regexp.MustCompile(`%\w+`)
)

// uninitialized counts the buffers that a module allocates, and proves of each that it is what one
// loop stacks: the loop writes all of it and reads none.
func uninitialized(text string) (n int, err error) {
	lines := strings.Split(text, "\n")
	defs, uses := map[string]string{}, map[string]int{}
	for _, line := range lines {
		if m := defLine.FindStringSubmatch(line); m != nil {
			defs[m[1]] = m[2]
		}
		for _, name := range word.FindAllString(line, -1) {
			uses[name]++
		}
	}
	for at, line := range lines {
		m := whileLine.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		end := at + 1 + slices.Index(lines[at+1:], m[1]+"  }")
		l := printedLoop{lines: lines[at+1 : end], state: strings.Split(m[2], ", "), defs: defs}
		for i, s := range l.state {
			name, begin, _ := strings.Cut(s, " = ")
			if !strings.HasPrefix(defs[begin], allocates) {
				continue
			}
			if n++; uses[begin] != 2 {
				return n, fmt.Errorf("%s has another reader than its loop", begin)
			}
			if err := l.stacks(i, name); err != nil {
				return n, err
			}
		}
	}
	if all := strings.Count(text, allocates); n != all {
		return n, fmt.Errorf("of %d buffers %d are stacks of a loop", all, n)
	}
	return n, nil
}

// A printedLoop is a loop in a module's text.
type printedLoop struct {
	lines []string          // of its two regions
	state []string          // name inside = name outside
	defs  map[string]string // what defines a name, without types
}

// stacks proves that each of a stack's slices is written once, and none is read: as many rounds as
// it has slices count from zero, and the only line that has its name writes the slice of the round,
// from the first or from the last on, whole.
func (l *printedLoop) stacks(i int, name string) error {
	mentions := lists.Filter(l.lines, func(line string) bool {
		return slices.Contains(word.FindAllString(line, -1), name)
	})
	if len(mentions) != 1 {
		return fmt.Errorf("%s stands in %d lines of its loop", name, len(mentions))
	}
	m := updateLine.FindStringSubmatch(mentions[0])
	if m == nil || m[4] != m[5] {
		return fmt.Errorf("%s is not written by slices: %s", name, mentions[0])
	}
	args, rounds := strings.Split(m[2], ", "), m[3]
	returned := strings.Split(returnLine.FindStringSubmatch(l.lines[len(l.lines)-1])[1], ", ")
	round, begin, _ := strings.Cut(l.state[0], " = ")
	constant := func(name string) string {
		value, _ := strings.CutPrefix(l.defs[name], "stablehlo.constant dense<")
		return strings.TrimSuffix(value, ">")
	}
	// operand is the constant that stands between two texts in the line that defines a name.
	operand := func(name, before, after string) string {
		value, ok := strings.CutPrefix(l.defs[name], before)
		value, also := strings.CutSuffix(value, after)
		if !ok || !also {
			return ""
		}
		return constant(value)
	}
	var last int
	_, _ = fmt.Sscan(rounds, &last)
	limit := returnLine.FindStringSubmatch(l.lines[3])[1]
	switch {
	case args[0] != name || returned[i] != m[1]:
		return fmt.Errorf("%s is not what %s was written into", returned[i], name)
	case constant(begin) != "0" || operand(returned[0], "stablehlo.add "+round+", ", "") != "1" ||
		operand(limit, "stablehlo.compare LT, "+round+", ", "") != rounds:
		return fmt.Errorf("%s: rounds do not count from 0 to %s", name, rounds)
	case args[2] != round && operand(args[2], "stablehlo.subtract ", ", "+round) != fmt.Sprint(last-1):
		return fmt.Errorf("%s: a round does not write its own slice", name)
	}
	for _, start := range args[3:] {
		if constant(start) != "0" {
			return fmt.Errorf("%s: a slice does not begin at 0", name)
		}
	}
	return nil
}
