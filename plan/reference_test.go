package plan

import (
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/schedule"
)

// docs/plan.json.md has a row for each key that Parse reads, in the order of the JSON form, with
// the words that the key takes and its default. Its example parses.
func TestReference(t *testing.T) {
	page, err := os.ReadFile("../docs/plan.json.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string][]string{}
	var listed []string
	for line := range strings.Lines(string(page)) {
		if cells := strings.Split(line, " | "); strings.HasPrefix(line, "| `") {
			key := strings.Trim(cells[0], "|` ")
			rows[key], listed = cells, append(listed, key)
		}
	}
	d := Default()
	keys := keysOf(reflect.TypeFor[Plan](), "")
	if fmt.Sprint(listed) != fmt.Sprint(keys) {
		t.Errorf("the page lists\n%v\nthe plan has\n%v", listed, keys)
	}
	for _, f := range (reader{}).fields(d) { // keys of the top level; Parse reads nested ones by name
		if !slices.ContainsFunc(keys, func(k string) bool { return strings.HasPrefix(k+".", f.Name+".") }) {
			t.Errorf("Parse reads %s, which the plan does not have", f.Name)
		}
	}
	for key, words := range map[string][]string{
		"fsdp.gather": gathers, "cp.kind": contexts, "offload": offloads, "precision": precisions,
		"recompute": recompute, "order": order, "pp.schedule": schedule.Names(),
	} {
		if want := strings.Join(words, ", "); !strings.HasSuffix(rows[key][1], want) {
			t.Errorf("%s takes %q; the page has %q", key, want, rows[key][1])
		}
	}
	for key, value := range map[string]any{
		"cluster": d.Cluster, "batch": d.Batch, "fsdp.size": d.FSDP.Size, "fsdp.zero": d.FSDP.Zero,
		"fsdp.gather": d.FSDP.Gather, "cp.kind": d.CP.Kind, "cp.balance": d.CP.Balance,
		"tp.sequence": d.TP.Sequence, "pp.schedule": d.PP.Schedule, "types.params": d.Types.Params,
		"types.grads": d.Types.Grads, "types.collectives": d.Types.Collectives,
	} {
		if fmt.Sprint(value) != rows[key][2] {
			t.Errorf("%s defaults to %v; the page has %q", key, value, rows[key][2])
		}
	}
	_, text, _ := strings.Cut(string(page), "```json\n")
	text, _, _ = strings.Cut(text, "```")
	if _, err := Parse([]byte(text), "plan.json"); err != nil {
		t.Error(err)
	}
}

// keysOf lists the JSON keys of a struct, nested ones with a point. Parse must know each of them.
func keysOf(s reflect.Type, prefix string) []string {
	return slices.Concat(lists.Map(reflect.VisibleFields(s), func(f reflect.StructField) []string {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Type.Kind() == reflect.Struct {
			return keysOf(f.Type, name+".")
		}
		return []string{prefix + name}
	})...)
}
