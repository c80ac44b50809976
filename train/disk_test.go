package train

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
)

func (l *log) warnings() (list []string) {
	for _, e := range l.list {
		if w, ok := e.(event.Warning); ok {
			list = append(list, w.Text)
		}
	}
	return list
}

var errDisk = diag.New(diag.CheckpointWrite, "the disk is full")

// A periodic save that fails is tried again and then warned about; the next one saves. The last one
// is tried for longer, and ends the run.
func TestFailedSaveIsAWarningUntilTheLast(t *testing.T) {
	r := newRig(t)
	out, l := t.TempDir(), &log{}
	var waited []time.Duration
	r.edit = func(o *Options) { o.Sleep = func(d time.Duration) { waited = append(waited, d) } }
	tr := r.start(out, counting{}, l, "steps=12")
	defer tr.Close()
	tries := map[int64]int{}
	tr.failSaves(func(_ string, step int64) error {
		tries[step]++
		if step == 10 || step == 5 && tries[step] < 3 || step == 12 && tries[step] < 6 {
			return errDisk
		}
		return nil
	})
	if err := tr.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if tries[5] != 3 || tries[10] != 3 || tries[12] != 6 || len(waited) != 2+2+5 {
		t.Errorf("tries %v, waits %v", tries, waited)
	}
	list := slices.DeleteFunc(l.warnings(), func(s string) bool { return strings.Contains(s, "trying again in") })
	if len(list) != 1 || !strings.Contains(list[0], "step 10 is not saved, nothing is saved since step 5") {
		t.Errorf("%q", list)
	}
	r.same(r.tensors(checkpoints(out)), func() map[string][]byte { // the state that is saved is whole
		other := t.TempDir()
		r.run(other, counting{}, "steps=12")
		return r.tensors(checkpoints(other))
	}())

	l = &log{}
	r.edit = func(o *Options) { o.Sleep = func(time.Duration) {} }
	tr = r.start(t.TempDir(), counting{}, l, "steps=12")
	defer tr.Close()
	tr.failSaves(func(string, int64) error { return errDisk })
	if err := tr.Run(t.Context()); !errors.Is(err, errDisk) {
		t.Errorf("the last save failed: %v", err)
	}
	var again, given int
	for _, text := range l.warnings() {
		switch {
		case strings.Contains(text, "trying again in"):
			again++
		case strings.Contains(text, "nothing is saved yet"):
			given++
		default:
			t.Error(text)
		}
	}
	if given != 2 || again == 0 || len(l.losses()) != 12 {
		t.Errorf("%d warnings, %d of another try, %d steps", given, again, len(l.losses()))
	}
}

// Only the newest rejected step is kept, and it can be replayed. Folders that runs did not make,
// and what links lead to, stay.
func TestRejectedStepsAreBounded(t *testing.T) {
	r := newRig(t)
	out, l := t.TempDir(), &log{}
	tr := r.start(out, counting{}, l, "steps=9", "save.every=0")
	defer tr.Close()
	all := filepath.Join(out, "rejected")
	foreign, linked := filepath.Join(all, "step-00000001"), t.TempDir()
	for _, name := range []string{filepath.Join(foreign, "mine.txt"), filepath.Join(foreign, "batch.json"),
		filepath.Join(linked, "batch.json")} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(name), 0o777), os.WriteFile(name, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(linked, filepath.Join(all, "step-00000002")); err != nil {
		t.Fatal(err)
	}
	tr.poison(3, 5, 7)
	if err := tr.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(all)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	rejected := l.rejected()
	if len(rejected) != 3 {
		t.Fatalf("%+v", rejected)
	}
	last := filepath.FromSlash(rejected[2].Replay)
	if want := []string{"step-00000001", "step-00000002", filepath.Base(last)}; !slices.Equal(names, want) {
		t.Errorf("%v, want %v", names, want)
	}
	for _, name := range []string{filepath.Join(foreign, "mine.txt"), filepath.Join(linked, "batch.json")} {
		if _, err := os.Stat(name); err != nil {
			t.Error(err)
		}
	}
	if got, err := tr.Rerun(t.Context(), last); err != nil || got.Step != rejected[2].Step {
		t.Errorf("%+v %v", got, err)
	}
}

// A disk without room for a rejected step, or one that fails, is a warning.
func TestRejectedStepWithoutRoomIsAWarning(t *testing.T) {
	r := newRig(t)
	for name, fail := range map[string]func(tr *Trainer){
		"full": func(*Trainer) {},
		"failing": func(tr *Trainer) {
			tr.failSaves(func(dir string, _ int64) error {
				if strings.Contains(dir, "rejected") {
					return errDisk
				}
				return nil
			})
		},
	} {
		out, l := t.TempDir(), &log{}
		if r.edit = nil; name == "full" {
			r.edit = func(o *Options) { o.Disk = func(string) (int64, error) { return 1000, nil } }
		}
		tr := r.start(out, counting{}, l, "steps=6")
		fail(tr)
		tr.poison(3)
		if err := tr.Run(t.Context()); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		tr.Close()
		list := l.warnings()
		if len(list) != 1 || !strings.Contains(list[0], "rejected step 3 is not kept for --rerun") {
			t.Errorf("%s: %q", name, list)
		}
		if rejected := l.rejected(); len(rejected) != 1 || rejected[0].Replay != "" {
			t.Errorf("%s: %+v", name, rejected)
		}
		if entries, _ := os.ReadDir(filepath.Join(out, "rejected")); len(entries) != 0 {
			t.Errorf("%s: left %v", name, entries)
		}
	}
}

// The disk is held to the checkpoints that the run will have at once.
func TestDiskIsCheckedBeforeTraining(t *testing.T) {
	r := newRig(t)
	out := t.TempDir()
	tr := r.start(out, counting{}, event.Discard, "steps=12", "save.keep=2")
	defer tr.Close()
	check := func(free int64, keep, every, until int) error {
		rec := *tr.opts.Recipe
		rec.Save.Keep, rec.Save.Every = keep, every
		return FitsDisk(tr.Programs(), DiskCheck{Recipe: &rec, Until: until,
			Events: event.Discard,
			Free:   func(string) (int64, error) { return free, nil }})
	}
	atLeast := func(keep, every, until int) int64 {
		low, high := int64(0), int64(1)<<40
		for low < high {
			middle := (low + high) / 2
			switch err := check(middle, keep, every, until); {
			case err == nil:
				high = middle
			case diag.From(err).Code == diag.HostDisk && diag.From(err).Class() == diag.NoFit:
				low = middle + 1
			default:
				t.Fatal(err)
			}
		}
		return low
	}
	one := atLeast(2, 0, 0) // one save, at the end
	if one < 10_000 {
		t.Fatalf("a checkpoint of %d bytes", one)
	}
	for _, c := range []struct {
		keep, every, until int
		want               int64
	}{{2, 1, 0, 3}, {1, 1, 0, 2}, {5, 5, 0, 3}, {0, 1, 0, 2}, {2, 1, 2, 2}} {
		if got := atLeast(c.keep, c.every, c.until); got != c.want*one {
			t.Errorf("%+v: %d checkpoints", c, got/one)
		}
	}
	for free, named := range map[int64]bool{one - 1: false, 2*one - 1: false, 2 * one: true} {
		if err := check(free, 2, 1, 0); strings.Contains(diag.From(err).Fix, "save.keep = 1") != named {
			t.Errorf("%d bytes are left: %v", free, err)
		}
	}
	if err := tr.Run(t.Context()); err != nil { // what is there is room, and a run that is done needs none
		t.Fatal(err)
	}
	if got := atLeast(2, 1, 0); got != 0 {
		t.Errorf("a run that is done needs %d bytes", got)
	}
	list, err := filepath.Glob(filepath.Join(out, ".deepwell-probe-*"))
	if err != nil || len(list) > 0 {
		t.Errorf("left %v", list)
	}
	if err := os.RemoveAll(checkpoints(out)); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(checkpoints(out), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := check(1<<40, 2, 1, 0); !errors.Is(err, diag.HostDisk) {
		t.Errorf("checkpoints is a file: %v", err)
	}
}

// failSaves lets writing a checkpoint fail as the function says, before a byte is written.
func (t *Trainer) failSaves(fails func(dir string, step int64) error) {
	t.hooks.put = func(ctx context.Context, dir string, step int64, m ckpt.Meta, src ckpt.Source,
		o ckpt.Options) error {
		if err := fails(dir, step); err != nil {
			return err
		}
		return ckpt.Save(ctx, dir, step, m, src, o)
	}
}
