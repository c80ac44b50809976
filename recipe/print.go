package recipe

import (
	"fmt"
	"strings"
)

// Reference is the page that documents every key: docs/run.toml.md.
func Reference() string {
	var b strings.Builder
	b.WriteString("# run.toml\n\n" +
		"Printed from `recipe/keys.txt`; `go test ./recipe -update` writes it.\n\n" +
		"A recipe tells `deepwell train` everything about a run. `deepwell train --example` prints " +
		"one with\nevery key. A relative path starts at the folder of run.toml; `$NAME` and " +
		"`${NAME}` in a path come from\nthe environment, `~/` is the home folder and `$$` a " +
		"dollar. `--set optimizer.lr=1e-3` replaces one\nvalue for one run.\n\n" +
		"A run that is resumed keeps its recipe: only the keys marked † may change.\n")
	section := "-"
	for _, k := range table {
		if s := k.section(); s != section {
			section = s
			if s != "" {
				fmt.Fprintf(&b, "\n## [%s]\n", s)
			}
			b.WriteString("\n| key | type | default | meaning |\n|---|---|---|---|\n")
		}
		mark, def := "", "**must be given**"
		if k.fixed == nil {
			mark = " †"
		}
		if k.Default != "" {
			def = k.Default
			if strings.ContainsAny(def[:1], `"[0123456789`) && !strings.Contains(def, ", or") {
				def = "`" + def + "`"
			}
		}
		fmt.Fprintf(&b, "| `%s`%s | %s | %s | %s |\n", k.short(), mark, k.Type, def, k.Doc)
	}
	return b.String()
}

// Example is a recipe with every key and its explanation; what has a default is commented out.
func Example() string {
	var b strings.Builder
	b.WriteString("# A recipe for deepwell train. Keys with a leading # have the default shown.\n")
	section := ""
	for _, k := range table {
		if s := k.section(); s != section {
			section = s
			fmt.Fprintf(&b, "\n[%s]\n", s)
		}
		b.WriteByte('\n')
		for _, line := range wrap(k.Doc, 96) {
			fmt.Fprintf(&b, "# %s\n", line)
		}
		switch {
		case k.sample != "":
			fmt.Fprintf(&b, "%s = %s\n", k.short(), k.sample)
		case strings.ContainsAny(k.Default[:1], `"[0123456789`):
			value, words, _ := strings.Cut(k.Default, ", or")
			if words != "" {
				words = "  # or" + words
			}
			fmt.Fprintf(&b, "#%s = %s%s\n", k.short(), value, words)
		default:
			fmt.Fprintf(&b, "#%s =  # by default %s\n", k.short(), k.Default)
		}
	}
	return b.String()
}

// wrap breaks a text into lines of at most so many letters.
func wrap(text string, width int) []string {
	var lines []string
	line := ""
	for word := range strings.FieldsSeq(text) {
		if line != "" && len(line)+1+len(word) > width {
			lines, line = append(lines, line), ""
		}
		line = strings.TrimLeft(line+" "+word, " ")
	}
	return append(lines, line)
}
