package table

import (
	"encoding/csv"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/capture"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/plan"
	"github.com/deepwell/deepwell/step"
)

var targets = []string{"b200", "gb300", "rtx6000pro", "cpu"}

// The tables of docs/kernels.md are what the code does; -update writes them anew.
func TestDocsShowWhatRuns(t *testing.T) {
	path := filepath.Join("..", "..", "docs", "kernels.md")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	tables := map[string]func(*testing.T) string{"operations": operations, "attention": attentions,
		"sources": sources, "compiled": compiled}
	block := regexp.MustCompile(`(?s)<!-- table (\w+) -->\n.*?<!-- end -->`)
	left := maps.Clone(tables)
	got := block.ReplaceAllStringFunc(string(text), func(b string) string {
		name := block.FindStringSubmatch(b)[1]
		make := tables[name]
		if make == nil {
			t.Fatalf("there is no table %s", name)
		}
		delete(left, name)
		return fmt.Sprintf("<!-- table %s -->\n%s<!-- end -->", name, make(t))
	})
	if len(left) > 0 {
		t.Errorf("the page lacks %v", slices.Collect(maps.Keys(left)))
	}
	golden.Compare(t, path, []byte(got))
}

// row prints cells of a table.
func row(cells ...string) string { return "| " + strings.Join(cells, " | ") + " |\n" }

// head prints the first two lines.
func head(cells ...string) string {
	return row(cells...) + "|" + strings.Repeat("---|", len(cells)) + "\n"
}

// operations lists the choices for a model with experts, by operation and target.
func operations(t *testing.T) string {
	kinds, cells := []string{}, map[string]map[string]string{}
	why := &footnotes{}
	for _, target := range targets {
		for _, f := range []dtype.Format{dtype.FormatBF16, dtype.MXFP8, dtype.NVFP4} {
			for _, c := range choices(t, target, f) {
				kind := c.Kind
				if kind == "quantize" || kind == "block_dot" {
					kind += ", " + string(f)
				}
				if !slices.Contains(kinds, kind) {
					kinds, cells[kind] = append(kinds, kind), map[string]string{}
				}
				cell := c.Kernel + why.mark(c.Why)
				if old := cells[kind][target]; !strings.Contains(old, cell) {
					cells[kind][target] = strings.TrimPrefix(old+"; "+cell, "; ")
				}
			}
		}
	}
	slices.Sort(kinds)
	out := head(append([]string{"operation"}, targets...)...)
	for _, kind := range kinds {
		list := []string{"`" + kind + "`"}
		for _, target := range targets {
			if cells[kind][target] == "" {
				cells[kind][target] = "XLA"
			}
			list = append(list, cells[kind][target])
		}
		out += row(list...)
	}
	return out + "\n" + why.String()
}

// choices builds the step of a model with experts, and gives what was chosen.
func choices(t *testing.T, target string, f dtype.Format) []kernels.Choice {
	const name = "mixtral-8x7b"
	m, err := capture.Open(name, capture.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }()
	c, err := machine.ParseCluster("1x" + target)
	if err != nil {
		t.Fatal(err)
	}
	p := plan.Default()
	p.Model, p.Cluster, p.Seq, p.Batch, p.Precision = name, c.String(), 8192, 1, string(f)
	p.Types = plan.Types{Params: dtype.BF16, Grads: dtype.F32, Collectives: dtype.BF16}
	w, err := step.Build(step.Spec{Model: m.Trained(), Recipe: step.RecipeOf(p), Arch: c.Arch()})
	if err != nil {
		t.Fatal(err)
	}
	return w.Choices
}

// attentions lists what forms of attention become.
func attentions(*testing.T) string {
	base := kernels.Attention{Elem: dtype.BF16, Head: 128, Causal: true}
	with := func(change func(*kernels.Attention)) kernels.Attention {
		a := base
		change(&a)
		return a
	}
	out := head(append([]string{"attention"}, targets...)...)
	why := &footnotes{}
	for _, one := range []struct {
		name string
		a    kernels.Attention
	}{
		{"causal, heads of 128", base},
		{"without a mask", with(func(a *kernels.Attention) { a.Causal = false })},
		{"window", with(func(a *kernels.Attention) { a.Window = 1024 })},
		{"packed documents", with(func(a *kernels.Attention) { a.Documents = true })},
		{"heads of 256", with(func(a *kernels.Attention) { a.Head = 256 })},
		{"heads of 192, values of 128 (MLA)", with(func(a *kernels.Attention) { a.Head, a.Value = 192, 128 })},
		{"heads of 160", with(func(a *kernels.Attention) { a.Head = 160 })},
		{"soft cap", with(func(a *kernels.Attention) { a.Capped = true })},
		{"in float32", with(func(a *kernels.Attention) { a.Elem = dtype.F32 })},
		{"ring", with(func(a *kernels.Attention) { a.Chunk, a.Ring = 1024, true })},
	} {
		cells := []string{one.name}
		for _, target := range targets {
			c, err := machine.ParseCluster("1x" + target)
			if err != nil {
				panic(err)
			}
			kernel, reason := kernels.For(c.Arch()).Attention(one.a)
			cells = append(cells, kernel+why.mark(reason))
		}
		out += row(cells...)
	}
	return out + "\n" + why.String()
}

// footnotes number reasons.
type footnotes struct{ list []string }

func (f *footnotes) mark(why string) string {
	if !slices.Contains(f.list, why) {
		f.list = append(f.list, why)
	}
	return fmt.Sprintf(" [%d]", slices.Index(f.list, why)+1)
}

func (f *footnotes) String() (out string) {
	for i, why := range f.list {
		out += fmt.Sprintf("%d. %s\n", i+1, why)
	}
	return out
}

// sources lists the expressions that have a name.
func sources(*testing.T) string {
	out := head("kernel", "expression")
	for _, s := range fused.Sources() {
		out += row("`"+s.Name+"`", "`"+s.Expr.String()+"`")
	}
	return out
}

// compiled shows the committed table of what ptxas made of each kernel: registers, and instructions
// per element.
func compiled(t *testing.T) string {
	f, err := os.Open(filepath.Join("..", "fused", "table.csv"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	lines, err := csv.NewReader(f).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	cells := map[string]map[string]string{}
	column := map[string]int{}
	for i, name := range lines[0] {
		column[name] = i
	}
	for _, line := range lines[1:] {
		get := func(name string) string { return line[column[name]] }
		kernel := get("kernel")
		if cells[kernel] == nil {
			names, cells[kernel] = append(names, kernel), map[string]string{}
		}
		if get("spill bytes") != "0" {
			t.Errorf("%s spills on %s", kernel, get("target"))
		}
		each := get("instructions per element")
		if each == "0.0" { // a kernel that has no elements to count by
			each = "–"
		}
		cells[kernel][get("target")] = strings.TrimSuffix(fmt.Sprintf("%s, %s, %s", get("registers"), each,
			get("tensor cores")), ", ")
	}
	out := head(append([]string{"kernel"}, targets[:3]...)...)
	for _, name := range names {
		out += row(name, cells[name]["b200"], cells[name]["gb300"], cells[name]["rtx6000pro"])
	}
	return out
}
