package deepwell_test

import (
	"os"
	"strings"
	"testing"
)

// README's Go code is the body of engine's Example, which tests compile and run.
func TestReadmeShowsTheEngineExample(t *testing.T) {
	page, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	source, err := os.ReadFile("engine/example_test.go")
	if err != nil {
		t.Fatal(err)
	}
	_, shown, _ := strings.Cut(string(page), "```go\n")
	shown, _, _ = strings.Cut(shown, "```")
	_, body, _ := strings.Cut(string(source), "\nfunc Example() {\n")
	body, _, _ = strings.Cut(body, "\t// Output")
	var want strings.Builder
	for line := range strings.Lines(body) {
		want.WriteString(strings.TrimPrefix(line, "\t"))
	}
	if shown == "" || shown != want.String() {
		t.Errorf("README.md shows\n%s\nengine/example_test.go has\n%s", shown, want.String())
	}
}
