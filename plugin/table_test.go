package plugin

import (
	"os"
	"path"
	"regexp"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/internal/strictjson"
)

// TestTable holds the built-in table to its own rules.
func TestTable(t *testing.T) {
	digest := regexp.MustCompile(`^[0-9a-f]{64}$`)
	if err := strictjson.Decode(wheelsText, new(map[string][]wheel)); err != nil {
		t.Fatal("wheels.json: ", err)
	}
	names := map[string]bool{}
	for _, e := range engines() {
		if names[e.name] || e.name == "" || e.purpose == "" || e.plugin == "" || len(e.wheels) == 0 {
			t.Errorf("engine %q: a name twice, or a field is missing", e.name)
		}
		names[e.name] = true
		if e.version != e.wheels[0].Version {
			t.Errorf("engine %q: version %s differs from %s", e.name, e.version, e.wheels[0].spec())
		}
		if e.covers != "" && !names[e.covers] {
			t.Errorf("engine %q covers %q, which is not above it", e.name, e.covers)
		}
		if (e.cudnn == "") != (e.data == "") {
			t.Errorf("engine %q: cuDNN and the data folder come together", e.name)
		}
		for host, tree := range e.trees {
			if !digest.MatchString(tree) || !slices.Contains([]string{amd64, arm64}, host) {
				t.Errorf("engine %q: bad tree for %s", e.name, host)
			}
			for _, w := range e.wheels {
				p, pinned := w.Pins[host]
				if !pinned || !digest.MatchString(p.SHA256) || p.Bytes <= 0 || p.Unpacked <= 0 {
					t.Errorf("engine %q: %s is not pinned for %s", e.name, w.spec(), host)
				}
			}
		}
		for _, w := range e.wheels {
			for _, pattern := range append(slices.Clone(w.Keep), keepAlways...) {
				if _, err := path.Match(pattern, ""); err != nil {
					t.Errorf("%s: pattern %q: %v", w.spec(), pattern, err)
				}
			}
		}
	}
}

// TestWheels unpacks the real wheels of every engine and host and compares with the pins. It runs
// only if DEEPWELL_WHEELS names a folder that holds them; set a new pin from what it prints.
func TestWheels(t *testing.T) {
	folder := os.Getenv("DEEPWELL_WHEELS")
	if folder == "" {
		t.Skip("DEEPWELL_WHEELS is not set")
	}
	for _, host := range []string{amd64, arm64} {
		for _, e := range engines() {
			t.Run(e.name+"/"+host, func(t *testing.T) {
				c := &catalogue{engines: engines(), host: host, driver: hostHasDriver}
				in := &Installer{From: []string{folder}}
				files, err := in.fill(t.Context(), c, &e, t.TempDir(), t.TempDir())
				if err != nil {
					t.Fatal(err)
				}
				got, bytes := treeDigest(files), manifest{Files: files}.bytes()
				t.Logf("%d files, %d bytes", len(files), bytes)
				if got != e.trees[host] {
					t.Errorf("tree %s, pinned %q", got, e.trees[host])
				}
			})
		}
	}
}
