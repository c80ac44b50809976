package ckpt

import (
	"bytes"
	"crypto/sha256"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/golden"
)

// testdata/v1 was written by the first form of this package and must be readable for ever.
func TestVersionOneOpens(t *testing.T) {
	dir := filepath.Join("testdata", "v1")
	if golden.Update() {
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		save(t, dir, 110, Options{})
		save(t, dir, 120, Options{})
		if err := os.Remove(filepath.Join(dir, lockName)); err != nil {
			t.Fatal(err)
		}
	}
	c, err := Latest(t.Context(), dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	want, err := meta().clone()
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, c.Meta); d != "" || c.Step != 120 {
		t.Errorf("step %d, meta (-want +got):\n%s", c.Step, d)
	}
	sameState(t, c, state(t, 120, small()...))
	list, err := List(dir)
	if err != nil || len(list) != 2 || list[0].Step != 110 || list[0].Err != nil {
		t.Errorf("%+v %v", list, err)
	}
}

const partName = "part-00000.safetensors"

// flip turns one bit over in place: writing the file anew costs a flush on some file systems.
func flip(t *testing.T, path string, at int64, bit byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	var b [1]byte
	_, err = f.ReadAt(b[:], at)
	must(t, err)
	b[0] ^= 1 << bit
	_, err = f.WriteAt(b[:], at)
	must(t, err)
}

// Each damage is found and named, Latest steps back to the step before with a warning that says
// why, and the damaged step can be written again.
func TestDamageIsNamedAndPassedOver(t *testing.T) {
	base := t.TempDir()
	save(t, base, 1, Options{})
	save(t, base, 2, Options{})
	for name, c := range map[string]struct {
		do   func(t *testing.T, step string)
		says string
	}{
		"part truncated": {func(t *testing.T, step string) {
			must(t, os.Truncate(filepath.Join(step, partName), 700))
		}, `part-00000\.safetensors has 700 bytes instead of \d+`},
		"part empty": {func(t *testing.T, step string) {
			must(t, os.Truncate(filepath.Join(step, partName), 0))
		}, `has 0 bytes instead`},
		"part longer": {func(t *testing.T, step string) {
			must(t, os.Truncate(filepath.Join(step, partName), 7000))
		}, `has 7000 bytes instead`},
		"part missing": {func(t *testing.T, step string) {
			must(t, os.Remove(filepath.Join(step, partName)))
		}, `part-00000\.safetensors is missing`},
		"part is a folder": {func(t *testing.T, step string) {
			must(t, os.Remove(filepath.Join(step, partName)))
			must(t, os.Mkdir(filepath.Join(step, partName), 0o755))
		}, `is not a plain file`},
		"part is a pipe": {func(t *testing.T, step string) {
			must(t, os.Remove(filepath.Join(step, partName)))
			must(t, syscall.Mkfifo(filepath.Join(step, partName), 0o644))
		}, `is not a plain file`},
		"bit in a tensor": {func(t *testing.T, step string) {
			m := manifestOf(t, step)
			flip(t, filepath.Join(step, partName), m.Tensors[1].Parts[0].Offset+5, 3)
		}, `part-00000\.safetensors: tensor "embed" has another SHA-256`},
		"bit in a header": {func(t *testing.T, step string) {
			flip(t, filepath.Join(step, partName), 30, 0)
		}, `part-00000\.safetensors: the header has another SHA-256`},
		"manifest missing": {func(t *testing.T, step string) {
			must(t, os.Remove(filepath.Join(step, manifestName)))
		}, `manifest\.json is missing`},
		"manifest truncated": {func(t *testing.T, step string) {
			must(t, os.Truncate(filepath.Join(step, manifestName), 300))
		}, `the manifest is truncated`},
		"manifest empty": {func(t *testing.T, step string) {
			must(t, os.Truncate(filepath.Join(step, manifestName), 0))
		}, `the manifest is truncated`},
		"bit in the manifest": {func(t *testing.T, step string) {
			flip(t, filepath.Join(step, manifestName), 14, 1) // the version: 1 becomes 3
		}, `truncated or was changed`},
		"another step's folder": {func(t *testing.T, step string) {
			must(t, os.RemoveAll(step))
			must(t, os.CopyFS(step, os.DirFS(filepath.Join(filepath.Dir(step), stepName(1)))))
		}, `the manifest is of step 1`},
		"nothing in it": {func(t *testing.T, step string) {
			must(t, os.RemoveAll(step))
			must(t, os.Mkdir(step, 0o755))
		}, `manifest\.json is missing`},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			must(t, os.CopyFS(dir, os.DirFS(base)))
			step := filepath.Join(dir, stepName(2))
			c.do(t, step)
			var warned heard
			got, err := Latest(t.Context(), dir, &warned)
			if err != nil {
				t.Fatal(err)
			}
			sameState(t, got, state(t, 1, small()...))
			got.Close()
			if got.Step != 1 || len(warned.list) != 1 ||
				!regexp.MustCompile(c.says).MatchString(warned.list[0].Text) {
				t.Errorf("step %d, warnings %v; want %s", got.Step, warned.list, c.says)
			}
			if _, err := Prune(t.Context(), dir, 1, nil); err != nil {
				t.Errorf("prune: %v", err)
			}
			if list, _ := steps(dir); len(list) != 2 {
				t.Errorf("prune left steps %v", list)
			}
			save(t, dir, 2, Options{})
			got, err = Latest(t.Context(), dir, &warned)
			if err != nil || got.Step != 2 || len(warned.list) != 1 {
				t.Errorf("written again: %v %v", err, warned.list)
			}
		})
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func manifestOf(t *testing.T, step string) *Manifest {
	t.Helper()
	c, err := Open(step)
	must(t, err)
	must(t, c.Close())
	return &c.Manifest
}

// Every single flipped bit of every file is found.
func TestEveryBitCounts(t *testing.T) {
	dir := t.TempDir()
	save(t, dir, 1, Options{})
	step := filepath.Join(dir, stepName(1))
	for _, name := range []string{manifestName, partName} {
		path := filepath.Join(step, name)
		info, err := os.Stat(path)
		must(t, err)
		stride := int64(1)
		if testing.Short() {
			stride = 7
		}
		for at := int64(0); at < info.Size(); at += stride {
			flip(t, path, at, byte(at%8))
			if err := verifyAt(t.Context(), step); err == nil {
				t.Fatalf("%s: bit %d of byte %d flipped unseen", name, at%8, at)
			}
			flip(t, path, at, byte(at%8))
		}
	}
	must(t, verifyAt(t.Context(), step))
}

func TestAllDamagedIsNotNone(t *testing.T) {
	dir := t.TempDir()
	save(t, dir, 1, Options{})
	must(t, os.Truncate(filepath.Join(dir, stepName(1), partName), 9))
	_, err := Latest(t.Context(), dir, nil)
	wantCode(t, err, diag.CheckpointDamaged)
	// Prune refuses to take the last hope away.
	must(t, os.Mkdir(filepath.Join(dir, stepName(2)), 0o755))
	_, err = Prune(t.Context(), dir, 1, nil)
	wantCode(t, err, diag.CheckpointDamaged)
	if list, _ := steps(dir); len(list) != 2 {
		t.Errorf("left %v", list)
	}
}

// A version to come is refused by name, and no older step is taken in its place.
func TestUnknownVersion(t *testing.T) {
	dir := t.TempDir()
	save(t, dir, 1, Options{})
	save(t, dir, 2, Options{})
	path := filepath.Join(dir, stepName(2), manifestName)
	text, err := os.ReadFile(path)
	must(t, err)
	must(t, os.WriteFile(path, reseal(bytes.Replace(text, []byte(`"version": 1`), []byte(`"version": 9, "new": {}`), 1)), 0o644))
	_, err = Latest(t.Context(), dir, nil)
	if e := wantCode(t, err, diag.CheckpointVersion); !strings.Contains(e.What, "version 9; this binary reads 1") {
		t.Error(e)
	}
	removed, err := Prune(t.Context(), dir, 1, nil)
	if err != nil || len(removed) > 0 {
		t.Errorf("removed %v, %v", removed, err)
	}
}

// reseal gives a changed text a seal that fits.
func reseal(text []byte) []byte {
	body := text[:len(text)-len(seal([sha256.Size]byte{}))]
	return append(bytes.Clone(body), seal(sha256.Sum256(body))...)
}

func TestLinksAreRefused(t *testing.T) {
	dir := t.TempDir()
	save(t, dir, 1, Options{})
	part := filepath.Join(dir, stepName(1), partName)
	outside := filepath.Join(t.TempDir(), "outside")
	must(t, os.Rename(part, outside))
	must(t, os.Symlink(outside, part))
	_, err := Open(filepath.Join(dir, stepName(1)))
	wantCode(t, err, diag.FileError)
}

// A backup by hard links (cp -al) takes nothing away from a run, nor the run from the backup.
func TestHardLinksAreRead(t *testing.T) {
	dir, backup := t.TempDir(), t.TempDir()
	want := save(t, dir, 1, Options{})
	for _, name := range []string{partName, manifestName} {
		must(t, os.Link(filepath.Join(dir, stepName(1), name), filepath.Join(backup, name)))
	}
	c, err := Latest(t.Context(), dir, nil)
	must(t, err)
	sameState(t, c, want)
	must(t, c.Close())
	save(t, dir, 2, Options{Keep: 1})
	if _, err := os.Lstat(filepath.Join(dir, stepName(1))); !os.IsNotExist(err) {
		t.Errorf("step 1 was not pruned: %v", err)
	}
	must(t, os.MkdirAll(filepath.Join(dir, "again"), 0o755))
	must(t, os.Rename(backup, filepath.Join(dir, "again", stepName(1))))
	c, err = Latest(t.Context(), filepath.Join(dir, "again"), nil)
	must(t, err)
	defer c.Close()
	sameState(t, c, want)
}

// moved puts a step on another disk, so to speak, and links it back.
func moved(t *testing.T, dir string, step int64) (to string) {
	t.Helper()
	to = filepath.Join(t.TempDir(), "elsewhere")
	must(t, os.Rename(filepath.Join(dir, stepName(step)), to))
	must(t, os.Symlink(to, filepath.Join(dir, stepName(step))))
	return to
}

// A step that is a link is read as any other. It is never removed, nor what it leads to.
func TestLinkedStepIsRead(t *testing.T) {
	dir := t.TempDir()
	save(t, dir, 10, Options{})
	want := save(t, dir, 20, Options{})
	to := moved(t, dir, 20)
	c, err := Latest(t.Context(), dir, nil)
	must(t, err)
	if c.Step != 20 {
		t.Errorf("resumed from step %d", c.Step)
	}
	sameState(t, c, want)
	must(t, c.Close())
	if list, err := List(dir); err != nil || len(list) != 2 || list[1].Err != nil {
		t.Errorf("%+v %v", list, err)
	}
	err = Save(t.Context(), dir, 20, meta(), state(t, 1, small()...), Options{})
	wantCode(t, err, diag.CheckpointExists)
	save(t, dir, 30, Options{Keep: 1})
	var rec event.Recorder
	removed, err := Prune(t.Context(), dir, 1, &rec)
	if err != nil || len(removed) != 0 {
		t.Errorf("%+v %v", removed, err)
	}
	if len(rec.Events()) != 1 || !strings.Contains(rec.Events()[0].Line(), "step 20 stays: it is a link") {
		t.Errorf("%v", rec.Events())
	}
	if list, err := List(dir); err != nil || len(list) != 2 || list[0].Step != 20 {
		t.Errorf("%+v %v", list, err)
	}
	if _, err := Open(to); err != nil {
		t.Error(err)
	}
}

// A damaged step that is a link makes room for a new one; what it leads to stays to be looked at.
func TestDamagedLinkIsReplaced(t *testing.T) {
	dir := t.TempDir()
	save(t, dir, 10, Options{})
	save(t, dir, 20, Options{})
	to := moved(t, dir, 20)
	must(t, os.Truncate(filepath.Join(to, partName), 3))
	want := save(t, dir, 20, Options{})
	c, err := Latest(t.Context(), dir, nil)
	must(t, err)
	defer c.Close()
	sameState(t, c, want)
	if info, err := os.Stat(filepath.Join(to, partName)); err != nil || info.Size() != 3 {
		t.Errorf("%v %v", info, err)
	}
}

// A file or folder that is named like a step and holds no checkpoint stops a run by name: nobody
// begins anew beside it.
func TestStepThatIsNoFolder(t *testing.T) {
	for name, c := range map[string]struct {
		lay  func(path string) error
		says string
	}{
		"file":      {func(path string) error { return os.WriteFile(path, []byte("x"), 0o600) }, "is not a folder"},
		"dead link": {func(path string) error { return os.Symlink("/nowhere/step", path) }, "a link to /nowhere/step"},
		"to a file": {func(path string) error { return os.Symlink("/dev/null", path) }, "a link to /dev/null"},
		"loop":      {func(path string) error { return os.Symlink(filepath.Base(path), path) }, "is a link to step-"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			save(t, dir, 10, Options{})
			path := filepath.Join(dir, stepName(20))
			must(t, c.lay(path))
			_, err := Latest(t.Context(), dir, nil)
			if e := wantCode(t, err, diag.CheckpointLink); !strings.Contains(e.What, c.says) ||
				e.Where != path || e.Fix == "" {
				t.Error(e)
			}
			err = Save(t.Context(), dir, 20, meta(), state(t, 1, small()...), Options{})
			wantCode(t, err, diag.CheckpointLink)
			if list, err := List(dir); err != nil || len(list) != 2 || list[1].Err == nil {
				t.Errorf("%+v %v", list, err)
			}
			save(t, dir, 30, Options{Keep: 1})
			if _, err := os.Lstat(path); err != nil {
				t.Error(err)
			}
		})
	}
}

// The lock is never taken, nor written, through a link.
func TestLockThatIsALink(t *testing.T) {
	dir := t.TempDir()
	save(t, dir, 1, Options{})
	mine := filepath.Join(t.TempDir(), "authorized_keys")
	must(t, os.WriteFile(mine, []byte("ssh-ed25519 AAAA"), 0o600))
	must(t, os.Remove(filepath.Join(dir, lockName)))
	must(t, os.Symlink(mine, filepath.Join(dir, lockName)))
	_, err := Prune(t.Context(), dir, 1, nil)
	wantCode(t, err, diag.NotPlain)
	err = Save(t.Context(), dir, 2, meta(), state(t, 2, small()...), Options{})
	if e := wantCode(t, err, diag.NotPlain); e.Where == "" || e.Fix == "" {
		t.Error(e)
	}
	if text, err := os.ReadFile(mine); err != nil || string(text) != "ssh-ed25519 AAAA" {
		t.Errorf("%q %v", text, err)
	}
}

// A checkpoint that is open stays readable when it is pruned, as a slow reader needs it.
func TestPrunedWhileOpen(t *testing.T) {
	dir := t.TempDir()
	want := save(t, dir, 1, Options{})
	c, err := Latest(t.Context(), dir, nil)
	must(t, err)
	defer c.Close()
	save(t, dir, 2, Options{Keep: 1})
	sameState(t, c, want)
	must(t, c.Verify(t.Context()))
}
