package recipe

import (
	"fmt"
	"math"
	"reflect"
	"slices"
	"testing"

	"github.com/pelletier/go-toml/v2"
)

// documents are texts that are TOML, or nearly.
var documents = []string{
	"", "a = 1\n", "a = 1\na = 2\n", "a.b = 1\na.c = 2\n", "a.b = 1\na = 2\n", "a = 1\na.b = 2\n",
	"[a]\nb = 1\n[a]\nc = 2\n", "[a]\nb = 1\n[a.c]\nd = 2\n", "[a.c]\nd = 2\n[a]\nb = 1\n",
	"[a]\nb.c = 1\n[a.b]\nd = 2\n", "[a]\nb.c = 1\n[a.b.e]\nd = 2\n", "[a.b]\nc = 1\n[a]\nb.d = 2\n",
	"a = {b = 1, c.d = 2}\n", "a = {b = 1}\na.c = 2\n", "a = {b = 1}\n[a]\nc = 2\n",
	"a = {b = {}}\n[a.b.c]\n", "a = {b = 1, b = 2}\n", "a = {b.c = 1, b.d = 2}\n", "a = {b = {c = 1}, b.d = 2}\n",
	"[[a]]\nb = 1\n[[a]]\nb = 2\n[a.c]\nd = 3\n", "[[a]]\n[a]\n", "[a]\n[[a]]\n", "a = []\n[[a]]\n",
	"a = [1, 2.5, \"x\", true, [], {b = 1}]\n", "a = 0x_1\n", "a = 0xff\nb = 0o17\nc = 0b11\n", "a = 1_000\n",
	"a = 017\n", "a = +7\nb = -0\nc = +0.5\n", "a = 9223372036854775807\n", "a = 9223372036854775808\n",
	"a = 1e400\n", "a = inf\nb = -inf\nc = nan\n", "a = 1e3\nb = 1_0.2_5e-1\n", "a = .5\n", "a = 5.\n",
	"a = 'x'\nb = \"\\u00e9\\n\"\nc = \"\"\"\nd\"\"\"\n", "\"a b\".c = 1\n", "a = \n", "a\n", "= 1\n", "[a\n",
	"a = 1 b = 2\n", "# x\n\n a = 1 # y\r\n", "a = \"\xff\"\n", "a = True\n", "a = 1979-05-27\n",
	"[a.b]\n[a.b.c]\n[a]\n[a.b]\n", "[[a.b]]\nc = 1\n[[a.b]]\n[[a]]\n", "a.b.c = 1\n[a.b]\n", "[x.y]\n[x]\ny = 1\n",
}

// A document is what the library's decoder makes of it, and refused if that refuses it.
func TestDocumentsAreRead(t *testing.T) {
	for _, text := range documents {
		compareTOML(t, text)
	}
}

func compareTOML(t *testing.T, text string) {
	t.Helper()
	want := map[string]any{}
	wantErr := toml.Unmarshal([]byte(text), &want)
	got, err := parseTOML([]byte(text))
	if (err != nil) != (wantErr != nil) {
		if !dated(want) && !dated(got) {
			t.Errorf("%q: %v; the library says %v", text, err, wantErr)
		}
		return
	}
	if err == nil && !dated(got) && fmt.Sprint(normal(got)) != fmt.Sprint(normal(want)) {
		t.Errorf("%q is %v; the library says %v", text, got, want)
	}
}

// dated reports whether a document has dates, whose numbers are not checked: no key takes one.
func dated(v any) bool {
	switch v := v.(type) {
	case moment:
		return true
	case []any:
		return slices.ContainsFunc(v, dated)
	case map[string]any:
		for _, one := range v {
			if dated(one) {
				return true
			}
		}
	}
	return false
}

// normal makes equal values print alike: types are shown, NaN and empty lists too.
func normal(v any) any {
	switch v := v.(type) {
	case []any:
		list := []any{}
		for _, one := range v {
			list = append(list, normal(one))
		}
		return list
	case map[string]any:
		list := map[string]any{}
		for name, one := range v {
			list[name] = normal(one)
		}
		return list
	case float64:
		return fmt.Sprintf("float %x", math.Float64bits(v))
	}
	return fmt.Sprintf("%v %#v", reflect.TypeOf(v), v)
}

func FuzzTOML(f *testing.F) {
	for _, text := range documents {
		f.Add(text)
	}
	f.Add(Example())
	f.Fuzz(compareTOML)
}
