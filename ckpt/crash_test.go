package ckpt

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/event"
)

const (
	envChild = "DEEPWELL_CKPT_TEST_CHILD"
	envDir   = "DEEPWELL_CKPT_TEST_DIR"
)

// The test binary is its own victim: a child writes checkpoints until it is killed, or into a
// file system that takes no more than a few bytes a file.
func TestMain(m *testing.M) {
	switch os.Getenv(envChild) {
	case "loop":
		childLoop()
	case "limit":
		childLimit()
	}
	os.Exit(m.Run())
}

// crashTensors is large enough that most kills strike in the middle of a part file.
func crashTensors() []Tensor {
	return []Tensor{{"w", dtype.F32, []int64{512, 128}}, {"m.w", dtype.F32, []int64{512, 128}},
		{"v.w", dtype.F32, []int64{512, 128}}}
}

func stamp(m *Memory, step int64) {
	for _, x := range m.Tensors() {
		r := rand.New(rand.NewPCG(uint64(step), uint64(len(x.Name))))
		b := m.Bytes(x.Name)
		for i := 0; i < len(b); i += 64 {
			b[i] = byte(r.Uint32())
		}
	}
}

func childLoop() {
	dir := os.Getenv(envDir)
	m := &Memory{}
	for _, x := range crashTensors() {
		if _, err := m.Add(x); err != nil {
			panic(err)
		}
	}
	fmt.Println("ready")
	for {
		list, err := steps(dir)
		step := int64(1)
		if err == nil && len(list) > 0 {
			step = list[0] + 1
		}
		stamp(m, step)
		meta := Meta{Data: map[string]int64{"x": step * 100}}
		if err == nil {
			err = Save(context.Background(), dir, step, meta, m, Options{Keep: 2})
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(3)
		}
		fmt.Println("saved")
	}
}

// Killed at any moment, the folder's latest checkpoint opens, is whole, and holds one step's
// state and position, not a mixture.
func TestKillAtRandomMoments(t *testing.T) {
	kills := 22
	if testing.Short() {
		kills = 5
	}
	dir := t.TempDir()
	reached, least, mid := int64(0), int64(0), 0
	want := state(t, 0, crashTensors()...)
	for i := range kills {
		lines := 1 + rand.IntN(2) // a slow machine must get somewhere too
		least += int64(lines - 1)
		strike(t, dir, lines, time.Duration(rand.IntN(30))*time.Millisecond)
		mid += len(hidden(t, dir))
		var warned heard
		c, err := Latest(t.Context(), dir, &warned)
		if errors.Is(err, diag.CheckpointMissing) && reached == 0 {
			continue
		}
		if err != nil || len(warned.list) > 0 {
			t.Fatalf("after kill %d: %v %v", i, err, warned.list)
		}
		if c.Step < reached || c.Data["x"] != c.Step*100 {
			t.Fatalf("step %d at %d after step %d", c.Step, c.Data["x"], reached)
		}
		reached = c.Step
		for _, x := range want.Tensors() {
			clear(want.Bytes(x.Name))
		}
		stamp(want, c.Step)
		sameState(t, c, want)
		c.Close()
	}
	// A run that did nothing, or was never struck at work, would prove nothing.
	if reached < least || mid < kills/5 {
		t.Errorf("%d steps of %d, %d kills in mid-write", reached, least, mid)
	}
	t.Logf("%d kills, %d of them in mid-write, %d steps", kills, mid, reached)
	save(t, dir, reached+1, Options{})
	if left := hidden(t, dir); len(left) > 0 {
		t.Errorf("the next writer left %v", left)
	}
}

// strike starts a child, waits until it has printed n lines and then a little, and kills it.
func strike(t *testing.T, dir string, lines int, delay time.Duration) {
	t.Helper()
	var stderr strings.Builder
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), envChild+"=loop", envDir+"="+dir)
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	in := bufio.NewScanner(out)
	for range lines {
		in.Scan()
	}
	time.Sleep(delay)
	_ = cmd.Process.Kill()
	err = cmd.Wait()
	if e, ok := errors.AsType[*exec.ExitError](err); !ok || e.ExitCode() == 3 {
		t.Fatalf("the child ended by itself: %v %s", err, stderr.String())
	}
}

// hidden lists unfinished folders.
func hidden(t *testing.T, dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for _, e := range entries {
		if e.IsDir() && strings.HasPrefix(e.Name(), ".") {
			list = append(list, e.Name())
		}
	}
	return list
}

// A power cut loses what was not synced: half of every file written since its last sync, and
// every name made since its folder's last sync. This one strikes before the n-th operation.
type powerCut struct {
	mu     sync.Mutex // writers work side by side
	strike int
	ops    []string
	dirty  map[string]bool            // files
	moves  map[string]string          // folders under their new names → the old
	names  map[string]map[string]bool // folder → new names
	last   func()                     // takes effect when the next operation begins
}

var errCut = errors.New("the power fails")

func newCut(strike int) *powerCut {
	return &powerCut{strike: strike, dirty: map[string]bool{},
		moves: map[string]string{}, names: map[string]map[string]bool{}}
}

func (p *powerCut) before(op, path string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.last != nil {
		p.last()
		p.last = nil
	}
	if len(p.ops) >= p.strike {
		return errCut
	}
	p.ops = append(p.ops, op+" "+filepath.Base(path))
	dir := filepath.Dir(path)
	p.last = func() {
		switch op {
		case "create", "mkdir":
			p.made(dir, path)
		case "write":
			p.dirty[path] = true
		case "sync":
			delete(p.dirty, path)
		case "syncdir":
			delete(p.names, path)
			maps.DeleteFunc(p.moves, func(to, _ string) bool { return filepath.Dir(to) == path })
		case "rename":
			base := filepath.Base(path)
			from := filepath.Join(dir, tempPrefix+base)
			if name, old := strings.CutPrefix(base, oldPrefix); old {
				from = filepath.Join(dir, name)
			}
			p.moved(from, path)
			p.moves[path] = from
		}
	}
	return nil
}

func (p *powerCut) made(dir, path string) {
	if p.names[dir] == nil {
		p.names[dir] = map[string]bool{}
	}
	p.names[dir][path] = true
}

// moved follows the files of a folder to its new name.
func (p *powerCut) moved(from, to string) {
	for file := range maps.Clone(p.dirty) {
		if filepath.Dir(file) == from {
			delete(p.dirty, file)
			p.dirty[filepath.Join(to, filepath.Base(file))] = true
		}
	}
	for file := range p.names[from] {
		p.made(to, filepath.Join(to, filepath.Base(file)))
	}
	delete(p.names, from)
}

// lose loses; a rename that was not synced may be lost or kept.
func (p *powerCut) lose(t *testing.T, renames bool) {
	for file := range p.dirty {
		if info, err := os.Stat(file); err == nil {
			if err := os.Truncate(file, info.Size()/2); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, names := range p.names {
		for path := range names {
			_ = os.RemoveAll(path)
		}
	}
	for to, from := range p.moves {
		if renames {
			_ = os.Rename(to, from)
		}
	}
}

// A save with pruning, stopped before each of its operations, leaves the old step or the new one, and
// the next save succeeds. Once Save has returned, it is the new one.
func TestPowerCutBeforeEveryOperation(t *testing.T) {
	base := t.TempDir()
	save(t, base, 1, Options{})
	save(t, base, 2, Options{})
	var ops []string
	for n := 0; ; n++ {
		done := false
		for _, renames := range []bool{false, true} {
			dir := t.TempDir()
			if err := os.CopyFS(dir, os.DirFS(base)); err != nil {
				t.Fatal(err)
			}
			cut := newCut(n)
			err := Save(t.Context(), dir, 3, meta(), state(t, 3, small()...), Options{Keep: 2,
				Workers: 1, chunk: 64, disk: disk{before: cut.before}})
			ops = cut.ops
			if done = len(cut.ops) < n; done && err != nil {
				t.Fatal(err)
			}
			if cut.last != nil {
				cut.last()
			}
			cut.lose(t, renames)
			var warned heard
			c, err := Latest(t.Context(), dir, &warned)
			if err != nil || len(warned.list) > 0 {
				t.Fatalf("stopped before operation %d, after %v: %v %v", n, ops, err, warned.list)
			}
			if c.Step != 3 && (c.Step != 2 || done) {
				t.Fatalf("stopped before operation %d, after %v: step %d", n, ops, c.Step)
			}
			sameState(t, c, state(t, uint64(c.Step), small()...))
			c.Close()
			if renames {
				save(t, dir, 4, Options{Keep: 1})
			}
		}
		if done {
			break
		}
	}
	for _, op := range []string{"sync part-00000.safetensors", "sync manifest.json",
		"syncdir .tmp-step-00000003", "rename step-00000003", "rename .old-step-00000001"} {
		if !slices.Contains(ops, op) {
			t.Errorf("no operation %q among %v", op, ops)
		}
	}
	t.Logf("%d operations", len(ops))
}

// What Save has returned from is not lost, though nothing after it syncs the folder.
func TestSaveOutlivesAPowerCut(t *testing.T) {
	dir, cut := t.TempDir(), newCut(1<<30)
	save(t, dir, 1, Options{disk: disk{before: cut.before}})
	cut.last()
	cut.lose(t, true)
	c, err := Latest(t.Context(), dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

// A step that could not be written says how much it needs and leaves the folder as it was.
func TestFullAndReadOnlyDisks(t *testing.T) {
	for errno, want := range map[error][]string{
		syscall.ENOSPC: {"step 2 needs ", "the disk has ", "prune"},
		syscall.EDQUOT: {"step 2 needs ", "left"},
		syscall.EROFS:  {"it needs ", "read-only"},
		syscall.EACCES: {"it needs ", "may write"},
		syscall.EIO:    {"it needs ", "input/output error"},
	} {
		dir := t.TempDir()
		save(t, dir, 1, Options{})
		o := Options{disk: disk{before: func(op, _ string) error {
			if op == "write" {
				return errno
			}
			return nil
		}}}
		err := Save(t.Context(), dir, 2, meta(), state(t, 2, small()...), o)
		e := wantCode(t, err, diag.CheckpointWrite)
		for _, text := range want {
			if !strings.Contains(e.Error(), text) {
				t.Errorf("%q does not say %q", e, text)
			}
		}
		if left := hidden(t, dir); len(left) > 0 {
			t.Errorf("%v: left %v", errno, left)
		}
		if !errors.Is(err, errno) {
			t.Errorf("%v is lost", errno)
		}
	}
}

// childLimit saves under RLIMIT_FSIZE, where the kernel itself refuses to write on.
func childLimit() {
	signal.Ignore(syscall.SIGXFSZ)
	limit := syscall.Rlimit{Cur: 100 << 10, Max: 100 << 10}
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
		panic(err)
	}
	m := &Memory{}
	for _, x := range crashTensors() {
		if _, err := m.Add(x); err != nil {
			panic(err)
		}
	}
	err := Save(context.Background(), os.Getenv(envDir), 2, Meta{}, m, Options{})
	fmt.Println(err)
	os.Exit(0)
}

func TestLimitOnFileSize(t *testing.T) {
	dir := t.TempDir()
	save(t, dir, 1, Options{})
	cmd := exec.Command(os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), envChild+"=limit", envDir+"="+dir)
	out, err := cmd.Output()
	if err != nil || !strings.Contains(string(out), "DW2905 step 2 cannot be written; it needs 768.") {
		t.Errorf("%s %v", out, err)
	}
	if c, err := Latest(t.Context(), dir, nil); err != nil || c.Step != 1 || len(hidden(t, dir)) > 0 {
		t.Errorf("%v, left %v", err, hidden(t, dir))
	}
}

func TestTwoWriters(t *testing.T) {
	dir := t.TempDir()
	d, err := Begin(t.Context(), dir, 1, Options{})
	if err != nil {
		t.Fatal(err)
	}
	soon := Options{wait: 30 * time.Millisecond, Events: event.Discard}
	err = Save(t.Context(), dir, 2, meta(), state(t, 2, small()...), soon)
	e := wantCode(t, err, diag.CheckpointBusy)
	if !strings.Contains(e.What, "process "+strconv.Itoa(os.Getpid())) || e.Fix == "" {
		t.Errorf("%v", e)
	}
	_, err = pruneFolder(t.Context(), dir, 1, soon)
	wantCode(t, err, diag.CheckpointBusy)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = Prune(ctx, dir, 1, nil)
	wantCode(t, err, diag.Canceled)
	d.Abort()
	d.Abort()
	save(t, dir, 2, Options{})
	wantCode(t, d.Commit(t.Context(), Meta{}), diag.BadUsage)
}

// A writer waits for the one before it, and says for whom: a prune beside a run ends neither.
func TestWritersWait(t *testing.T) {
	dir := t.TempDir()
	save(t, dir, 1, Options{})
	for name, second := range map[string]func(event.Sink) error{
		"save": func(s event.Sink) error {
			return Save(t.Context(), dir, 3, meta(), state(t, 3, small()...), Options{Events: s})
		},
		"prune": func(s event.Sink) error { _, err := Prune(t.Context(), dir, 1, s); return err },
	} {
		first, err := Begin(t.Context(), dir, 2, Options{})
		must(t, err)
		var warning event.Warning
		err = second(listener(func(e event.Event) { // the second is waiting now
			if w, ok := e.(event.Warning); ok {
				warning = w
				first.Abort()
			}
		}))
		if err != nil || !strings.Contains(warning.Text, "process "+strconv.Itoa(os.Getpid())) {
			t.Errorf("%s: %v, warned %q", name, err, warning.Text)
		}
	}
}

type listener func(event.Event)

func (l listener) Emit(e event.Event) { l(e) }
