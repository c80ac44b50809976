package recipe

import (
	"fmt"
	"strings"
)

// Example is a recipe with every key and its explanation; what has a default is commented out.
func Example() string {
	var b strings.Builder
	b.WriteString("# A recipe for deepwell train. Keys with a leading # have the default shown.\n" +
		"# A resumed run keeps its recipe: only keys marked † may change.\n")
	section := ""
	for _, k := range table {
		if s := k.section(); s != section {
			section = s
			fmt.Fprintf(&b, "\n[%s]\n", s)
		}
		b.WriteByte('\n')
		mark := ""
		if k.free() {
			mark = " †"
		}
		for _, line := range wrap(k.Doc+mark, 96) {
			fmt.Fprintf(&b, "# %s\n", line)
		}
		value, words := k.toml()
		switch {
		case k.sample != "":
			fmt.Fprintf(&b, "%s = %s\n", k.short(), k.sample)
		case value == "":
			fmt.Fprintf(&b, "#%s =  # by default %s\n", k.short(), words)
		case words == "":
			fmt.Fprintf(&b, "#%s = %s\n", k.short(), value)
		default:
			fmt.Fprintf(&b, "#%s = %s  # or%s\n", k.short(), value, words)
		}
	}
	return b.String()
}

// wrap breaks a text into lines of at most width letters.
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
