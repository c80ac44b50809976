package plugin

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
)

// TestMain also is the process that the hostile tests start and kill.
func TestMain(m *testing.M) {
	if dir := os.Getenv(helperDir); dir != "" {
		helper(dir)
		return
	}
	goleak.VerifyTestMain(m)
}

// An entry is one entry of a made-up wheel.
type entry struct {
	name string
	text string
	mode fs.FileMode
	raw  func(*zip.FileHeader) // changes the header of an entry that is stored as it is
}

// zipped makes a wheel.
func zipped(entries ...entry) []byte {
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for _, e := range entries {
		h := &zip.FileHeader{Name: e.name, Method: zip.Deflate}
		h.SetMode(e.mode | 0o644)
		create := z.CreateHeader
		if e.raw != nil {
			h.Method = zip.Store
			h.CRC32 = crc32.ChecksumIEEE([]byte(e.text))
			h.CompressedSize64, h.UncompressedSize64 = uint64(len(e.text)), uint64(len(e.text))
			e.raw(h)
			create = z.CreateRaw
		}
		w, err := create(h)
		if err != nil {
			panic(err)
		}
		if _, err := w.Write([]byte(e.text)); err != nil {
			panic(err)
		}
	}
	if err := z.Close(); err != nil {
		panic(err)
	}
	return b.Bytes()
}

// good is what an honest wheel of the made-up engine holds.
func good() []entry {
	return []entry{
		{name: "alpha/alpha.so", text: strings.Repeat("machine code ", 1000)},
		{name: "alpha/bin/tool", text: "#!/bin/sh\n"},
		{name: "alpha/include/alpha.h", text: "not kept"},
		{name: "alpha-1.0.dist-info/licenses/LICENSE", text: "free as in air"},
	}
}

const wheelName = "alpha_pjrt-1.0-py3-none-any.whl"

// A fixture is a made-up engine "alpha" of one wheel, and a folder to install it in.
type fixture struct {
	home   string // everything else is below
	dir    string // engines
	wheels string // holds the wheel
	table  *catalogue
	ahead  time.Duration // of the clock that the table reads
}

// build makes a fixture around the bytes of a wheel, pinned as they are.
func build(home string, data []byte) *fixture {
	sum := sha256.Sum256(data)
	files := []file{}
	for _, e := range good() {
		if e.name != "alpha/include/alpha.h" {
			digest := sha256.Sum256([]byte(e.text))
			files = append(files, file{Path: e.name, SHA256: hex.EncodeToString(digest[:])})
		}
	}
	alpha := engine{
		name: "alpha", version: "1.0", purpose: "tests", plugin: "alpha/alpha.so", data: "alpha",
		wheels: []wheel{{
			Name: "alpha-pjrt", Version: "1.0", Keep: []string{"alpha/alpha.so", "alpha/bin/*"},
			Pins: map[string]pin{"test/host": {hex.EncodeToString(sum[:]), int64(len(data)), 20_000}},
		}},
		trees: map[string]string{"test/host": treeDigest(files)},
	}
	more := alpha
	more.name, more.covers = "alpha-run", "alpha"
	x := &fixture{home: home, dir: filepath.Join(home, "data", "engines"),
		wheels: filepath.Join(home, "wheels")}
	x.table = &catalogue{engines: []engine{alpha, more}, host: "test/host",
		driver: func() bool { return false }, now: func() time.Time { return time.Now().Add(x.ahead) }}
	return x
}

func newFixture(t *testing.T, data []byte) *fixture {
	t.Helper()
	x := build(t.TempDir(), data)
	if err := os.MkdirAll(x.wheels, 0o755); err != nil {
		t.Fatal(err)
	}
	x.write(t, filepath.Join(x.wheels, wheelName), data)
	return x
}

func (x *fixture) write(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o755); err != nil {
		t.Fatal(err)
	}
}

func (x *fixture) installer() *Installer {
	return &Installer{Dir: x.dir, From: []string{x.wheels}, catalogue: x.table}
}

// installed reads the names and modes of what is in the folder of engines.
func (x *fixture) installed(t *testing.T) []string {
	t.Helper()
	var names []string
	err := filepath.WalkDir(x.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		info, err := d.Info()
		rel, _ := filepath.Rel(x.dir, path)
		names = append(names, fmt.Sprintf("%v %s", info.Mode(), rel))
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
		t.Fatal(err)
	}
	return names
}

// unsealed compares bundles by what they say.
var unsealed = cmpopts.IgnoreUnexported(Bundle{})

func last(r *event.Recorder) event.Event { return r.Events()[len(r.Events())-1] }

func TestInstall(t *testing.T) {
	x := newFixture(t, zipped(good()...))
	in, seen := x.installer(), &event.Recorder{}
	in.Events = seen
	b, err := in.Install(t.Context(), "alpha")
	if err != nil {
		t.Fatal(err)
	}
	folder := filepath.Join(x.dir, "alpha")
	want := &Bundle{Name: "alpha", Version: "1.0", Digest: x.table.engines[0].trees["test/host"],
		Plugin: filepath.Join(folder, "alpha", "alpha.so"), DataDir: filepath.Join(folder, "alpha")}
	if diff := cmp.Diff(want, b, unsealed); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{
		"-rw-r--r-- .alpha.lock",
		"-rw-r--r-- alpha/alpha/alpha.so",
		"-rwxr-xr-x alpha/alpha/bin/tool",
		"-rw-r--r-- alpha/alpha-1.0.dist-info/licenses/LICENSE",
		"-rw-r--r-- alpha/manifest.json",
	}, x.installed(t)); diff != "" {
		t.Error(diff)
	}
	if done, ok := last(seen).(event.Installed); !ok || done.Bytes != 13_024 || done.Digest != want.Digest {
		t.Errorf("last event %+v", last(seen))
	}

	// The second time there is nothing to do, not even a wheel to read.
	in.From = []string{filepath.Join(x.home, "gone")}
	if again, err := in.Install(t.Context(), "alpha"); err != nil || !cmp.Equal(again, b, unsealed) {
		t.Errorf("second installation: %+v, %v", again, err)
	}
	if note, ok := last(seen).(event.Note); !ok ||
		note.Text != `engine "alpha" is already installed` {
		t.Errorf("second installation said %+v", last(seen))
	}
	opened, err := x.table.open(t.Context(), x.dir, "alpha", false)
	if err != nil || !cmp.Equal(opened, b, unsealed) {
		t.Errorf("open: %+v, %v", opened, err)
	}
}

// TestMend installs over an engine that was changed.
func TestMend(t *testing.T) {
	x := newFixture(t, zipped(good()...))
	in, seen := x.installer(), &event.Recorder{}
	in.Events = seen
	for range 2 {
		if _, err := in.Install(t.Context(), "alpha"); err != nil {
			t.Fatal(err)
		}
		x.write(t, filepath.Join(x.dir, "alpha", "extra.so"), []byte("x"))
	}
	if err := os.Remove(filepath.Join(x.dir, "alpha", "extra.so")); err != nil {
		t.Fatal(err)
	}
	if _, err := x.table.open(t.Context(), x.dir, "alpha", false); err != nil {
		t.Error(err)
	}
	warned := slices.ContainsFunc(seen.Events(), func(e event.Event) bool {
		w, ok := e.(event.Warning)
		return ok && strings.Contains(w.Text, "extra.so was added")
	})
	if !warned {
		t.Error("no warning that the engine was changed")
	}
}

// TestCovers opens a larger engine in place of one that it includes.
func TestCovers(t *testing.T) {
	x := newFixture(t, zipped(good()...))
	if _, err := x.installer().Install(t.Context(), "alpha-run"); err != nil {
		t.Fatal(err)
	}
	if b, err := x.table.open(t.Context(), x.dir, "alpha", false); err != nil || b.Name != "alpha-run" {
		t.Errorf("opened %+v, %v", b, err)
	}
}

func TestListAndRemove(t *testing.T) {
	x := newFixture(t, zipped(good()...))
	if _, err := x.installer().Install(t.Context(), "alpha"); err != nil {
		t.Fatal(err)
	}
	state := func() string {
		all, err := x.table.list(x.dir)
		if err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		for _, s := range all {
			fmt.Fprintf(&b, "%s %s %t %d;", s.Name, s.Packages, s.Installed, s.Bytes)
		}
		return b.String()
	}
	const absent = "alpha-run [alpha-pjrt==1.0] false 0;"
	if got := state(); got != "alpha [alpha-pjrt==1.0] true 13024;"+absent {
		t.Error(got)
	}
	if err := x.table.remove(x.dir, "alpha"); err != nil {
		t.Fatal(err)
	}
	if got := state(); got != "alpha [alpha-pjrt==1.0] false 0;"+absent {
		t.Error(got)
	}
	if err := x.table.remove(x.dir, "alpha"); diag.From(err).Code != diag.EngineMissing {
		t.Error(err)
	}
	if got := x.installed(t); len(got) != 1 {
		t.Errorf("left behind: %q", got)
	}
}

func TestDefaultDir(t *testing.T) {
	for _, row := range []struct{ deepwell, xdg, home, want string }{
		{"/data", "/xdg", "/home/a", "/data/engines"},
		{"", "/xdg", "/home/a", "/xdg/deepwell/engines"},
		{"", "relative", "/home/a", "/home/a/.local/share/deepwell/engines"},
		{"", "", "/home/a", "/home/a/.local/share/deepwell/engines"},
		{"", "", "", ""},
	} {
		env := map[string]string{
			"DEEPWELL_HOME": row.deepwell, "XDG_DATA_HOME": row.xdg, "HOME": row.home}
		got, err := DefaultDir(func(name string) string { return env[name] })
		if got != row.want || (err != nil) != (row.want == "") {
			t.Errorf("%v: %q, %v", row, got, err)
		}
	}
}

// TestDriver holds the rule that the stand-in is never given out where a driver is.
func TestDriver(t *testing.T) {
	for _, row := range []struct {
		name, file, text string
		want             bool
	}{
		{"nothing", "etc/hostname", "", false},
		{"device", "dev/nvidiactl", "", true},
		{"library", "usr/lib/x86_64-linux-gnu/libcuda.so.1", "", true},
		{"search path", "opt/driver/libcuda.so.1", "", true},
		{"cache", "etc/ld.so.cache", "libcuda.so.1\x00/opt/x/libcuda.so.1\x00", true},
		{"other cache", "etc/ld.so.cache", "/opt/x/libcudart.so.13\x00", false},
	} {
		root := t.TempDir()
		(&fixture{}).write(t, filepath.Join(root, row.file), []byte(row.text))
		path := "/nonexistent:" + filepath.Join(root, "opt/driver")
		got := hasDriver(root, path)
		if got != row.want {
			t.Errorf("%s: %t", row.name, got)
		}
		c := builtin()
		c.host, c.driver = amd64, func() bool { return got }
		for _, e := range c.engines {
			b := c.bundle("/engines", &e, nil)
			if want := !row.want && e.stub != ""; (b.Stub != "") != want || (len(b.Preload) > 0) != want {
				t.Errorf("%s, %s: stub %q, preload %q", row.name, e.name, b.Stub, b.Preload)
			}
			if want := row.want && e.stub != ""; b.Driver != want {
				t.Errorf("%s, %s: driver %t", row.name, e.name, b.Driver)
			}
		}
	}
}

// TestBadName: a name that passes stays in its folder.
func TestBadName(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.StringOf(rapid.SampledFrom([]rune("ab./\\\x00:C\u212a~ "))).Draw(t, "name")
		if badName(name) != "" {
			return
		}
		at := filepath.Join("/base/dir", filepath.FromSlash(name))
		if rel, err := filepath.Rel("/base/dir", at); err != nil || rel != name {
			t.Fatalf("%q becomes %q", name, rel)
		}
	})
}

// TestTreeDigest: the order of the files does not matter, everything else does.
func TestTreeDigest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		one := rapid.Custom(func(t *rapid.T) file {
			return file{Path: rapid.StringMatching(`[a-c]{1,3}`).Draw(t, "path"),
				SHA256: rapid.StringMatching(`[0-9a-f]{4}`).Draw(t, "digest")}
		})
		files := rapid.SliceOfNDistinct(one, 1, 6, func(f file) string { return f.Path }).Draw(t, "files")
		mixed := rapid.Permutation(files).Draw(t, "mixed")
		if treeDigest(files) != treeDigest(mixed) {
			t.Fatal("the order matters")
		}
		i := rapid.IntRange(0, len(mixed)-1).Draw(t, "changed")
		mixed[i].SHA256 += "0"
		if treeDigest(files) == treeDigest(mixed) {
			t.Fatal("a digest does not matter")
		}
	})
}

// FuzzUnpack: whatever the bytes are, nothing is written outside the folder, and what is written
// is what is reported.
func FuzzUnpack(f *testing.F) {
	f.Add(zipped(good()...))
	for _, h := range hostileWheels() {
		f.Add(h.data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		outer := t.TempDir()
		inner := filepath.Join(outer, "inner")
		if err := os.Mkdir(inner, 0o755); err != nil {
			t.Fatal(err)
		}
		root, err := os.OpenRoot(inner)
		if err != nil {
			t.Fatal(err)
		}
		defer root.Close()
		files, err := unpack(t.Context(), bytes.NewReader(data), int64(len(data)), root, selection{
			wheel: "fuzz.whl", maybe: []string{"*", "*/*", "*/*/*", "*/*/*/*"}, limit: 1 << 20})
		if err != nil && diag.From(err).Code == diag.Internal {
			t.Errorf("an error without a code: %v", err)
		}
		if entries, _ := os.ReadDir(outer); len(entries) != 1 {
			t.Fatalf("%d entries beside the folder", len(entries)-1)
		}
		if err == nil {
			if _, err := checkNames(inner, files); err != nil {
				t.Fatal(err)
			}
			_, changed, err := checkBytes(t.Context(), inner, files, record{})
			if changed != "" || err != nil {
				t.Fatal(changed, err)
			}
		}
	})
}

func ExampleDefaultDir() {
	env := map[string]string{"HOME": "/home/ada"}
	dir, _ := DefaultDir(func(name string) string { return env[name] })
	fmt.Println(dir)
	// Output: /home/ada/.local/share/deepwell/engines
}

func ExampleOpen() {
	_, err := Open(context.Background(), "/nonexistent", "cuda")
	fmt.Print(diag.From(err).Format())
	// Output:
	// DW2001 no engine is called "cuda"; did you mean "cuda13"?
	//   fix    use one of cpu, cuda13, cuda13-run
}
