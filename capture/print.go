package capture

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
)

// WriteText writes the summary as a person reads it: a line of what it is, a table of its blocks,
// and what it costs.
func (s *Summary) WriteText(w io.Writer) error {
	var b strings.Builder
	line := func(label string, facts ...string) {
		facts = slices.DeleteFunc(facts, func(f string) bool { return f == "" })
		if len(facts) > 0 {
			fmt.Fprintf(&b, "%-10s %s\n", label, strings.Join(facts, " · "))
		}
	}
	fmt.Fprintf(&b, "%s · %s · %s parameters", s.Name, s.Family, short(s.Parameters))
	if s.Active != s.Parameters {
		fmt.Fprintf(&b, ", %s active", short(s.Active))
	}
	fmt.Fprintf(&b, " · %s\n", human.Count(s.Layers, "layer"))
	line("sizes", "hidden "+human.Thousands(s.Hidden), s.mlp(), "vocabulary "+human.Thousands(s.Vocab),
		s.context(), s.experts())
	line("attention", s.attention()...)
	b.WriteByte('\n')
	s.table(&b)
	b.WriteByte('\n')
	line("work", flops(s.Training)+" a token in training", flops(s.Forward)+" forward",
		fmt.Sprintf("%s attention, in sequences of %s", percent(s.Attention), human.Thousands(s.Seq)))
	m := s.Memory
	line("memory", event.Size(m.Sum())+" without activations", "bf16 weights "+event.Size(m.Weights),
		"f32 gradients "+event.Size(m.Gradients))
	line("", "f32 master "+event.Size(m.Master), "f32 moments "+event.Size(m.Moments))
	s.checkpoint(line)
	line("tokenizer", s.Tokenizer)
	line("note", s.Note)
	_, err := io.WriteString(w, b.String())
	return err
}

// context is the longest sequence; a program may have no bound.
func (s *Summary) context() string {
	if s.Context > 1<<40 {
		return "sequences of any length"
	}
	return "context " + human.Thousands(s.Context)
}

func (s *Summary) mlp() string {
	c := s.config
	text := fmt.Sprintf("MLP %s", human.Thousands(s.MLP))
	if c == nil {
		return text
	}
	if c.Gated {
		text += " gated"
	}
	return text + " " + string(c.Activation)
}

func (s *Summary) experts() string {
	if s.config == nil || s.config.MoE == nil {
		return ""
	}
	m := s.config.MoE
	return fmt.Sprintf("%d of %d experts of %s", m.TopK, m.Experts, human.Thousands(m.MLP))
}

func (s *Summary) attention() []string {
	c := s.config
	facts := []string{fmt.Sprintf("%d heads of %d", s.Heads, s.HeadDim)}
	if c != nil && c.MLA != nil {
		facts = append(facts, fmt.Sprintf("through a rank of %d", c.MLA.KVRank))
	} else if s.KVHeads != s.Heads {
		facts = append(facts, fmt.Sprintf("%d KV heads", s.KVHeads))
	}
	switch {
	case s.Windowed == 0:
	case s.Windowed == s.Layers:
		facts = append(facts, "window "+human.Thousands(s.Window))
	case s.Windowed > 0:
		facts = append(facts, fmt.Sprintf("window %s in %d of %d layers", human.Thousands(s.Window),
			s.Windowed, s.Layers))
	}
	if c == nil {
		return facts
	}
	if c.Learned {
		return append(facts, "learned positions")
	}
	return append(facts, "rotary, base "+human.Thousands(int64(c.Rope.Theta)))
}

func (s *Summary) table(b *strings.Builder) {
	fmt.Fprintf(b, "%-8s %8s %12s %8s\n", "block", "tensors", "parameters", "share")
	all := Block{Tag: "all", Parameters: s.Parameters, Share: 1}
	row := func(r Block) {
		tensors := "-" // of a model that is counted but not built
		if r.Tensors > 0 {
			tensors = human.Thousands(r.Tensors)
		}
		fmt.Fprintf(b, "%-8s %8s %12s %8s\n", r.Tag, tensors, short(r.Parameters), percent(r.Share))
	}
	for _, r := range s.Blocks {
		row(r)
		all.Tensors += r.Tensors
	}
	if s.Tied && !slices.ContainsFunc(s.Blocks, func(r Block) bool { return r.Tag == "head" }) {
		fmt.Fprintf(b, "%-8s %8s %12s\n", "head", "-", "is embed's")
	}
	row(all)
}

// checkpoint tells what the files hold.
func (s *Summary) checkpoint(line func(string, ...string)) {
	f := s.Files
	if f == nil {
		return
	}
	var types []string
	for _, t := range slices.Sorted(maps.Keys(f.Types)) {
		types = append(types, fmt.Sprintf("%s %s", human.Thousands(int64(f.Types[t])), t))
	}
	files := human.Count(f.Files, "file")
	if len(f.Missing) > 0 {
		files = "an index without its files"
	}
	line("checkpoint", files, event.Size(f.Bytes), human.Count(f.Tensors, "tensor"),
		strings.Join(types, ", "))
	line("missing", some(f.Missing))
	line("unused", some(f.Unused))
	line("MTP, not taken", some(f.MTP))
	line("left over", some(f.Leftover))
	bad := lists.Map(f.NotFinite, func(d Damaged) string {
		return fmt.Sprintf("%s of %s", human.Count(d.Elements, "number"), d.Tensor)
	})
	line("not finite", some(bad))
	if len(bad) == 0 && !f.Scanned && len(f.Missing) == 0 {
		line("numbers", "not looked at; --scan finds those that are not finite")
	}
}

// short writes a number of parameters with the usual letters.
func short(n int64) string {
	if n < 1e3 {
		return strconv.FormatInt(n, 10)
	}
	return human.Parameters(n, 1)
}

// flops writes a number of operations.
func flops(f float64) string {
	for _, unit := range []string{"", "k", "M", "G", "T"} {
		if f < 999.5 {
			return fmt.Sprintf("%.3g %sFLOP", f, unit)
		}
		f /= 1e3
	}
	return fmt.Sprintf("%.3g PFLOP", f)
}

func percent(f float64) string {
	if f > 0 && f < 0.0005 {
		return "< 0.1 %"
	}
	return fmt.Sprintf("%.1f %%", 100*f)
}
