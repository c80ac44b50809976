package recipe

import (
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// names are the places in a path that the environment fills; $$ is a dollar.
var names = regexp.MustCompile(`\$(\$|[A-Za-z_][A-Za-z0-9_]*|\{[A-Za-z_][A-Za-z0-9_]*\})?`)

// expand replaces $NAME, ${NAME} and a leading ~.
func (p *reader) expand(s string) (string, *problem) {
	var bad *problem
	lookup := func(name string) string {
		value := p.getenv(name)
		if value == "" && bad == nil {
			bad = wrong("set "+name+", or write the path", "%s is not set in the environment", name)
		}
		return value
	}
	out := names.ReplaceAllStringFunc(s, func(m string) string {
		switch m {
		case "$":
			bad = wrong("write $$ for a dollar", "a $ is followed by no name in %s", quote(s))
			return ""
		case "$$":
			return "$"
		}
		return lookup(strings.Trim(m, "${}"))
	})
	if rest, ok := strings.CutPrefix(out, "~/"); ok {
		out = lookup("HOME") + "/" + rest
	}
	return out, bad
}

// complete makes a path that does not depend on the working directory, and remembers how the recipe
// wrote it.
func (p *reader) complete(key, s string) (string, *problem) {
	if key == "data.sources" && s == Stdin {
		return s, nil
	}
	out, bad := p.expand(s)
	switch {
	case bad != nil:
		return "", bad
	case strings.ContainsRune(out, 0):
		return "", wrong("take it out", "a path cannot hold a zero byte")
	}
	out = filepath.FromSlash(out)
	if !filepath.IsAbs(out) {
		out = filepath.Join(p.dir, out)
	}
	out = filepath.Clean(out)
	p.r.written[spelling{key, out}] = s
	return out, nil
}

// spell gives a path of a key as the recipe wrote it.
func (r *Recipe) spell(key, path string) string {
	if s, ok := r.written[spelling{key, path}]; ok {
		return s
	}
	return path
}

// place completes a path. A source may also be a preset or hf:org/name, which stay as they are.
func (p *reader) place(key, s string, source bool) (string, *problem) {
	if source && (strings.HasPrefix(s, "hf:") || !strings.ContainsAny(s, `/\$`) &&
		!slices.Contains([]string{".json", ".model", ".pt2"}, filepath.Ext(s))) {
		return s, nil
	}
	out, bad := p.complete(key, s)
	if source && bad == nil && !strings.ContainsRune(out, filepath.Separator) {
		out = "." + string(filepath.Separator) + out // or it would be taken for a name
		p.r.written[spelling{key, out}] = s
	}
	return out, bad
}
