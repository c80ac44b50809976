package recipe

import (
	"fmt"
	"strings"
)

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
