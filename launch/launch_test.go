package launch

import (
	"errors"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
)

// Nothing that a shell would read as more than a word gets into a script.
func TestWordsOfAScript(t *testing.T) {
	good := Run{Name: "a", Hosts: 2, GPUs: 8, Recipe: "run.toml", Plan: "p.json", Key: "k", Port: 7000,
		Image: "i", Volume: "v", Folder: "/run"}
	for _, bad := range []string{"a b", "a;b", "$(x)", "`x`", "a\nb", "a'b", "a\"b", "a|b", "a&b", "*"} {
		for _, set := range []func(*Run){func(r *Run) { r.Name = bad }, func(r *Run) { r.Recipe = bad },
			func(r *Run) { r.Plan = bad }, func(r *Run) { r.Key = bad }, func(r *Run) { r.Image = bad },
			func(r *Run) { r.Volume = bad }, func(r *Run) { r.Folder = bad },
			func(r *Run) { r.Set = []string{"steps=1", bad} }} {
			r := good
			set(&r)
			for _, to := range []string{"slurm", "jobset"} {
				if text, err := Script(to, r); !errors.Is(err, diag.BadUsage) {
					t.Errorf("%q stands in\n%s", bad, text)
				}
			}
		}
	}
	text, err := Script("jobset", good)
	if err != nil || !strings.Contains(text, "--peers 'a-hosts-0-[0-1].a:7000'") {
		t.Errorf("%v\n%s", err, text)
	}
}
