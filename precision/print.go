package precision

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/strictjson"
)

// Marshal writes the policy in the form that [Parse] reads, one key per line, so that diffs of
// rules are diffs of lines. Equal policies have equal text.
func (p *Policy) Marshal() ([]byte, error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "{\n  \"version\": %d,\n  \"layers\": %d,\n", Version, p.Layers)
	if p.Payload != "" {
		fmt.Fprintf(&b, "  \"payload\": %s,\n", quote(string(p.Payload)))
	}
	b.WriteString("  \"rules\": [")
	for i, r := range p.Rules {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString("\n    {")
		words := slices.SortedFunc(slices.Values(r.Linears), compareWords)
		lines := []string{
			`"linears": ` + quoteAll(words),
			`"layers": ` + quote(r.Span(p.Layers)),
		}
		if len(r.GEMMs) > 0 {
			lines = append(lines, `"products": `+quoteAll(r.GEMMs))
		}
		lines = append(lines, `"format": `+quote(string(r.Format)))
		if r.Fallen {
			lines = append(lines, `"fallen": true`)
		}
		lines = append(lines, `"why": `+quote(r.Why))
		b.WriteString("\n      " + strings.Join(lines, ",\n      ") + "\n    }")
	}
	if len(p.Rules) > 0 {
		b.WriteString("\n  ")
	}
	b.WriteString("]\n}\n")
	return b.Bytes(), nil
}

// String is the JSON form.
func (p *Policy) String() string {
	b, _ := p.Marshal() // cannot fail
	return string(b)
}

// Span spells the layers of a rule, in a model with that many layers.
func (r *Rule) Span(layers int) string {
	switch {
	case r.From == 0 && r.To == layers:
		return "all"
	case r.To == r.From+1:
		return fmt.Sprint(r.From)
	}
	return fmt.Sprintf("%d-%d", r.From, r.To-1)
}

func quoteAll(list []string) string {
	return "[" + strings.Join(lists.Map(list, quote), ", ") + "]"
}

// quote encodes a JSON string without escaping < and &.
func quote(s string) string {
	text, _ := strictjson.Encode(s) // a string can always be encoded
	return strings.TrimSpace(string(text))
}
