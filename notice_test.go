package deepwell

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/internal/golden"
)

// licensed are the modules that a binary links, by path, with the folder that their license is in.
func licensed(t *testing.T, binary string) map[string][2]string {
	t.Helper()
	cmd := exec.Command("go", "list", "-deps", "-json=Module", binary)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0") // as the product is built
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	modules := map[string][2]string{}
	dec := json.NewDecoder(strings.NewReader(string(out)))
	for dec.More() {
		var p struct {
			Module *struct {
				Path, Version, Dir string
				Main               bool
			}
		}
		if err := dec.Decode(&p); err != nil {
			t.Fatal(err)
		}
		if m := p.Module; m != nil && !m.Main {
			modules[m.Path] = [2]string{m.Version, m.Dir}
		}
	}
	return modules
}

// licenseFiles are the texts that a license asks to be passed on.
func licenseFiles(t *testing.T, dir string) (list []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		name := strings.ToUpper(e.Name())
		for _, want := range []string{"LICENSE", "LICENCE", "COPYING", "NOTICE", "PATENTS"} {
			if strings.HasPrefix(name, want) && e.Type().IsRegular() {
				list = append(list, filepath.Join(dir, e.Name()))
			}
		}
	}
	return list
}

// The licenses of linked modules want their texts beside the binary: NOTICE holds them, and is
// printed from the modules themselves.
func TestNoticeListsLinkedModules(t *testing.T) {
	var b strings.Builder
	b.WriteString("Deepwell\n\nThe binary links the modules below. Their licenses follow, as they ask.\n" +
		"Printed by go test . -run Notice -update.\n")
	goroot, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	modules := licensed(t, "./cmd/deepwell")
	// The runtime and the standard library are linked as well; their version is the builder's.
	modules["the Go standard library"] = [2]string{"", strings.TrimSpace(string(goroot))}
	paths := make([]string, 0, len(modules))
	for path := range modules {
		paths = append(paths, path)
	}
	slices.Sort(paths)
	for _, path := range paths {
		m := modules[path]
		files := licenseFiles(t, m[1])
		if len(files) == 0 {
			t.Errorf("%s has no license", path)
		}
		fmt.Fprintf(&b, "\n%s\n%s\n", strings.Repeat("=", 80), strings.TrimSpace(path+" "+m[0]))
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			lines := strings.Split(strings.ReplaceAll(string(text), "\r\n", "\n"), "\n")
			for i := range lines {
				lines[i] = strings.TrimRight(lines[i], " \t")
			}
			fmt.Fprintf(&b, "\n%s:\n\n%s\n", filepath.Base(file),
				strings.Trim(strings.Join(lines, "\n"), "\n"))
		}
	}
	golden.Compare(t, "NOTICE", []byte(b.String())) // go test . -run Notice -update
}
