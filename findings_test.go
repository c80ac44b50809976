package deepwell

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// Every test that docs/findings.md names is there.
func TestFindingsHaveTheirTests(t *testing.T) {
	page, err := os.ReadFile("docs/findings.md")
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("git", "grep", "-hoE", `^func (Test|Fuzz)\w+`, "--", "*_test.go").Output()
	if err != nil {
		t.Skipf("not in a git work tree: %v", err)
	}
	there := string(out)
	for _, name := range regexp.MustCompile("`((?:Test|Fuzz)\\w+)`").FindAllStringSubmatch(string(page), -1) {
		if !strings.Contains(there, "func "+name[1]+"\n") {
			t.Errorf("there is no test %s", name[1])
		}
	}
	for _, name := range regexp.MustCompile("`(\\w+\\.txtar)`").FindAllStringSubmatch(string(page), -1) {
		if _, err := os.Stat("cmd/deepwell/testdata/script/" + name[1]); err != nil {
			t.Error(err)
		}
	}
}
