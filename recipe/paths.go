package recipe

import (
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
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

// complete makes a path of a key that does not depend on where the program is started, and
// remembers how it was written.
func (p *reader) complete(key, s string) (string, *problem) {
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

func sourceKey(key string, at func(*Recipe) *string) field {
	return placeKey(key, at, (*reader).source)
}

func placeKey(key string, at func(*Recipe) *string,
	find func(p *reader, key, s string) (string, *problem)) field {
	return field{
		set: func(p *reader, v any) *problem {
			s, bad := text(v)
			if bad == nil {
				*at(p.r), bad = find(p, key, s)
			}
			return bad
		},
		get: func(r *Recipe) string { return quote(r.spell(key, *at(r))) },
	}
}

func text(v any) (string, *problem) {
	s, ok := v.(string)
	switch {
	case !ok:
		return "", wrong("write a string in quotes", "it is %s, not a string", kind(v))
	case s == "":
		return "", wrong("leave the key out, or give it a value", "it is empty")
	}
	return s, nil
}

func (p *reader) source(key, s string) (string, *problem) {
	if strings.HasPrefix(s, "hf:") {
		return s, nil
	}
	if strings.ContainsAny(s, `/\$`) ||
		slices.Contains([]string{".json", ".model"}, filepath.Ext(s)) {
		out, bad := p.complete(key, s)
		if bad == nil && !strings.ContainsRune(out, filepath.Separator) {
			out = "." + string(filepath.Separator) + out // or it would be taken for a name
			p.r.written[spelling{key, out}] = s
		}
		return out, bad
	}
	return s, nil
}

func evalKey() field {
	const key = "eval.data"
	return field{
		set: func(p *reader, v any) *problem {
			s, bad := text(v)
			if bad != nil {
				return bad
			}
			if share, ok := strings.CutSuffix(s, "%"); ok {
				percent, err := strconv.ParseFloat(strings.TrimSpace(share), 64)
				if err != nil || !(percent > 0 && percent <= 50) {
					return wrong(`write a share such as "1%"`, "%s is not a share from 0 %% to 50 %%",
						quote(s))
				}
				p.r.Eval.Share = percent / 100
				p.r.written[spelling{key, float(percent / 100)}] = s
				return nil
			}
			p.r.Eval.Path, bad = p.complete(key, s)
			return bad
		},
		get: func(r *Recipe) string {
			if s := r.Eval.Share; s > 0 {
				if written := r.spell(key, float(s)); written != float(s) {
					return quote(written)
				}
				return quote(strconv.FormatFloat(100*s, 'g', -1, 64) + "%")
			}
			return quote(r.spell(key, r.Eval.Path))
		},
	}
}

// sourceKeys are what a table of data.sources may have.
var sourceKeys = []string{"path", "name", "weight", "format", "template"}

func sourcesKey() field {
	return field{
		set: func(p *reader, v any) *problem {
			list, ok := v.([]any)
			if !ok {
				if s, single := v.(string); single {
					return wrong("write ["+quote(s)+"]", "it is %s, not a list", kind(v))
				}
				return wrong(`write a list of paths: ["a.txt"]`, "it is %s, not a list", kind(v))
			}
			if len(list) == 0 {
				return wrong(`write a list of paths: ["a.txt"]`, "it is empty")
			}
			for i, v := range list {
				p.item = i
				s, bad := p.dataSource(v)
				if bad != nil {
					return bad
				}
				p.r.Data.Sources = append(p.r.Data.Sources, s)
			}
			return nil
		},
		get: printSources,
	}
}

func (p *reader) dataSource(v any) (Source, *problem) {
	const key = "data.sources"
	var s Source
	table, ok := v.(map[string]any)
	if !ok {
		path, bad := text(v)
		if bad == nil {
			s.Path, bad = p.complete(key, path)
		}
		return s, bad
	}
	for _, name := range sorted(table) {
		var bad *problem
		v := table[name]
		switch name {
		case "path":
			if s.Path, bad = text(v); bad == nil {
				s.Path, bad = p.complete(key, s.Path)
			}
		case "name":
			s.Name, bad = text(v)
		case "weight":
			s.Weight, bad = number(v, 0, maxFloat)
			if bad == nil && s.Weight == 0 {
				bad = wrong("take the source out", "a weight of 0 never gives a token")
			}
		case "format":
			s.Format, bad = word(v, formats)
		case "template":
			s.Template, bad = text(v)
		default:
			fix := "a source has " + strings.Join(sourceKeys, ", ")
			if near := diag.Nearest(name, sourceKeys); near != "" {
				fix = "did you mean " + quote(near) + "?"
			}
			bad = wrong(fix, "a source has no key %s", quote(name))
		}
		if bad != nil {
			p.part = name
			return s, bad
		}
	}
	if s.Path == "" {
		return s, wrong(`add path = "…"`, "a source has no path")
	}
	return s, nil
}

func printSources(r *Recipe) string {
	var list []string
	for _, s := range r.Data.Sources {
		text := quote(r.spell("data.sources", s.Path))
		if s != (Source{Path: s.Path}) {
			text = "{path = " + text
			add := func(key, value string, given bool) {
				if given {
					text += ", " + key + " = " + value
				}
			}
			add("name", quote(s.Name), s.Name != "")
			add("weight", float(s.Weight), s.Weight != 0)
			add("format", quote(s.Format), s.Format != "")
			add("template", quote(s.Template), s.Template != "")
			text += "}"
		}
		list = append(list, text)
	}
	return "[" + strings.Join(list, ", ") + "]"
}
