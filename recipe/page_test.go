package recipe

import (
	_ "embed" // for withplan.txt
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/internal/golden"
)

func TestPagesAreWritten(t *testing.T) {
	for path, text := range map[string]string{
		filepath.Join("..", "docs", "run.toml.md"): reference(),
		filepath.Join("testdata", "example.toml"):  Example(),
	} {
		golden.Compare(t, path, []byte(text))
	}
}

// reference is the page that documents every key: docs/run.toml.md.
func reference() string {
	var b strings.Builder
	b.WriteString("# run.toml\n\n" +
		"Printed from `recipe/keys.txt`; `go test ./recipe -update` writes it.\n\n" +
		"The config of a training run, called its recipe. `deepwell train --example` prints one with " +
		"every key.\nA relative path starts at the folder of run.toml; `$NAME` and `${NAME}` in a path " +
		"come from the\nenvironment, `~/` is the home folder and `$$` a dollar sign. " +
		"`--set optimizer.lr=1e-3` overrides one\nkey.\n\n" +
		"Parallelism (dp, fsdp, tp, cp, pp) is not here: it is in a plan, `train --plan plan.json`\n" +
		"([plan.json](plan.json.md)).\n\n" +
		"A resumed run keeps its recipe: only the keys marked † may change.\n")
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
		if k.free() {
			mark = " †"
		}
		value, words := k.toml()
		switch {
		case value != "" && words == "":
			def = "`" + value + "`"
		case k.Default != "":
			def = k.Default
		}
		fmt.Fprintf(&b, "| `%s`%s | %s | %s | %s |\n", k.short(), mark, k.Type, def, k.Doc)
	}
	b.WriteString(withPlan)
	return b.String()
}

// withPlan ends the reference page: which of run.toml and a plan decides. Env.Train fills the
// recipe from the plan, and package step checks that they agree.
//
//go:embed withplan.txt
var withPlan string
