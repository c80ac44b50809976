package replay

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/internal/human"
)

// docs/verify.md has a row for each bound, in order, and for each convention.
func TestDocsHaveBoundsAndConventions(t *testing.T) {
	text, err := os.ReadFile("../docs/verify.md")
	if err != nil {
		t.Fatal(err)
	}
	rest := string(text)
	for _, b := range bounds {
		row := fmt.Sprintf(" | %s | %s |\n", human.Small(b.Limit), b.Why)
		_, after, found := strings.Cut(rest, row)
		if !found {
			t.Errorf("docs/verify.md has no row %q behind the one before", row)
			continue
		}
		rest = after
	}
	for _, c := range Conventions() {
		if row := fmt.Sprintf("\n| `%s` | %s | ", c.Name, c.Says); !strings.Contains(rest, row) {
			t.Errorf("docs/verify.md has no row %q", row)
		}
	}
}
