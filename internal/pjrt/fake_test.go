package pjrt

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
)

// fake compiles testdata/fakeplugin.c: it plays what no machine here has.
func fake(t *testing.T, flags ...string) string {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler: the plugin that plays other versions cannot be built")
	}
	out := filepath.Join(t.TempDir(), "fake.so")
	args := append([]string{"-shared", "-fPIC", "-o", out, "testdata/fakeplugin.c"}, flags...)
	if text, err := exec.Command(cc, args...).CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, text)
	}
	return out
}

func TestVersionsOutsideTheRangeAreRefused(t *testing.T) {
	for _, c := range []struct {
		flags []string
		code  diag.Code // "" is taken
	}{
		{[]string{"-DMINOR=81", "-DSLOTS=118"}, ""},
		{[]string{"-DMINOR=116"}, ""},
		{[]string{"-DMINOR=80"}, diag.EngineAPI},
		{[]string{"-DMINOR=117"}, diag.EngineAPI},
		{[]string{"-DMAJOR=1", "-DMINOR=90"}, diag.EngineAPI},
	} {
		_, err := Load(fake(t, c.flags...))
		if c.code == "" && err != nil || c.code != "" && !errors.Is(err, c.code) {
			t.Errorf("%v: %v, want %q", c.flags, err, c.code)
		}
	}
}

func TestWhatIsNotAPluginIsRefused(t *testing.T) {
	dir := t.TempDir()
	text := filepath.Join(dir, "text.so")
	if err := os.WriteFile(text, []byte("not a library"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{filepath.Join(dir, "none.so"), text, "libc.so.6", "/lib/x86_64-linux-gnu/libm.so.6"} {
		if _, err := Load(path); !errors.Is(err, diag.EngineLoad) {
			t.Errorf("%s: %v", filepath.Base(path), err)
		}
	}
	if _, err := Load(text, filepath.Join(dir, "needed.so")); !errors.Is(err, diag.EngineLoad) {
		t.Errorf("missing preload: %v", err)
	}
}

// An old plugin's table ends early; a call beyond it must be an error, not a jump into nothing.
func TestFunctionsBeyondTheTable(t *testing.T) {
	p, err := Load(fake(t, "-DMINOR=81", "-DSLOTS=100"))
	if err != nil {
		t.Fatal(err)
	}
	c, err := p.NewClient(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	err = c.UpdateProcesses(nil)
	if !errors.Is(err, diag.NotSupported) ||
		!strings.Contains(err.Error(), "UpdateGlobalProcessInfo") {
		t.Errorf("got %v", err)
	}
}

// memoryKV is a store for processes that are goroutines.
type memoryKV struct {
	mu     sync.Mutex
	values map[string][]byte
}

type timeoutError struct{}

func (timeoutError) Error() string { return "no value in time" }
func (timeoutError) Timeout() bool { return true }

func (m *memoryKV) Get(key string, timeout time.Duration) ([]byte, error) {
	for end := time.Now().Add(timeout); time.Now().Before(end); time.Sleep(time.Millisecond) {
		if v, err := m.TryGet(key); err == nil {
			return v, nil
		}
	}
	return nil, timeoutError{}
}

func (m *memoryKV) TryGet(key string) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v, ok := m.values[key]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return v, nil
}

func (m *memoryKV) Put(key string, value []byte) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.values[key] = value
	return nil
}

// Two clients, each a node of two, find each other through Go functions called from C.
func TestKeyValueCallbacks(t *testing.T) {
	p, err := Load(fake(t))
	if err != nil {
		t.Fatal(err)
	}
	for round := range 50 {
		kv := &memoryKV{values: map[string][]byte{}}
		var wg sync.WaitGroup
		for node := range 2 {
			wg.Go(func() {
				c, err := p.NewClient([]Option{{"node_id", node}, {"num_nodes", 2}}, kv)
				if err != nil {
					t.Errorf("round %d: %v", round, err)
					return
				}
				defer c.Close()
				if want := "node " + string(rune('0'+1-node)); c.PlatformVersion() != want {
					t.Errorf("node %d heard %q", node, c.PlatformVersion())
				}
			})
		}
		wg.Wait()
	}
	if left := len(p.callbacks.answers.live); left != 0 {
		t.Errorf("%d answers were never released", left)
	}
}

func TestKeyValueFailuresReachTheClient(t *testing.T) {
	p, err := Load(fake(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.NewClient([]Option{{"node_id", 0}, {"num_nodes", 2}}, nil); err == nil {
		t.Error("a client of two processes was made without a store")
	}
	kv := &memoryKV{values: map[string][]byte{}}
	_, err = p.NewClient([]Option{{"node_id", 0}, {"timeout_ms", 20}}, kv)
	var s *Status
	if !errors.As(err, &s) || s.Code != statusDeadline {
		t.Errorf("a neighbour that never comes: %v", err)
	}
	if _, err := p.NewClient([]Option{{"bad", struct{}{}}}, nil); err == nil {
		t.Error("an option of no known type was taken")
	}
}

func TestUpdateProcessesIsEncodedAsTheHeaderSays(t *testing.T) {
	p, err := Load(fake(t))
	if err != nil {
		t.Fatal(err)
	}
	c, err := p.NewClient(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	err = c.UpdateProcesses([]ProcessInfo{
		{Task: 0, Incarnation: 77, State: ProcessConnected},
		{Task: 1, Incarnation: 1 << 40, State: ProcessFailed, Code: 14, Message: "lost"},
	})
	if want := "[0 77 3 0 ][1 1099511627776 4 14 lost]"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("the plugin read %v, want %s", err, want)
	}
}

// panicKV is a store with a fault.
type panicKV struct{ memoryKV }

func (*panicKV) Put(string, []byte) error { panic("no room") }

func TestKeyValuePanicIsAnError(t *testing.T) {
	p, err := Load(fake(t))
	if err != nil {
		t.Fatal(err)
	}
	_, err = p.NewClient([]Option{{"node_id", 0}, {"num_nodes", 2}}, &panicKV{})
	if err == nil || !strings.Contains(err.Error(), "no room") {
		t.Errorf("got %v", err)
	}
}

// A slowKV never answers a Get, or with too much.
type slowKV struct {
	memoryKV
	end  chan struct{}
	much bool
}

func (s *slowKV) Get(string, time.Duration) ([]byte, error) {
	if s.much {
		return make([]byte, maxKVValue+1), nil
	}
	<-s.end
	return nil, fs.ErrNotExist
}

// What a plugin asks of a store is bounded in bytes and in time, whatever either of them does.
func TestKeyValueBounds(t *testing.T) {
	p, err := Load(fake(t))
	if err != nil {
		t.Fatal(err)
	}
	p.calls().patience = 50 * time.Millisecond
	end := make(chan struct{})
	defer close(end)
	for name, c := range map[string]struct {
		option Option
		much   bool
		code   int
		want   string
	}{
		"no answer":          {Option{"timeout_ms", 30}, false, statusDeadline, "does not answer"},
		"an answer too long": {Option{"timeout_ms", 30}, true, statusInternal, "too many"},
		"a key too long":     {Option{"key_len", 1 << 40}, false, statusInternal, "1099511627776 bytes"},
		"a value too long":   {Option{"value_len", 1 << 40}, false, statusInternal, "1099511627776 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			kv := &slowKV{memoryKV: memoryKV{values: map[string][]byte{}}, end: end, much: c.much}
			began := time.Now()
			_, err := p.NewClient([]Option{{"node_id", 0}, {"num_nodes", 2}, c.option}, kv)
			var s *Status
			if !errors.As(err, &s) || s.Code != c.code || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("it took %s", took)
			}
		})
	}
}
