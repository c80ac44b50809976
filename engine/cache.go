package engine

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/cas"
	"github.com/deepwell/deepwell/internal/environ"
	"github.com/deepwell/deepwell/internal/pjrt"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/program"
)

// cacheVersion is part of every key. It changes with the layout of entries or of keys.
const cacheVersion = "4"

// cacheLimit bounds the compile cache: some hundred steps of large models.
const cacheLimit = 10 << 30

// A cache stores compiled programs by a hash of everything they were compiled from. Whatever is
// wrong with it, the program can be compiled again, so it warns and never fails. An entry is the
// length of a head (32 bits, little-endian), the head as JSON, and the compiler's bytes.
type cache struct {
	store  cas.Store
	events event.Sink
}

// newCache opens the subfolder of the user's caches that has programs; tokens are another.
func newCache(o Options) cache {
	c := cache{events: o.Events}
	if c.events == nil {
		c.events = event.Discard
	}
	if o.Cache != "" {
		c.store = cas.Open(filepath.Join(o.Cache, "programs"))
	}
	return c
}

// unlessDumped returns an empty cache if flags or the environment make XLA dump files while it
// compiles: a program from the cache would dump none.
func (c cache) unlessDumped(flags map[string]any, variables *environ.Set) cache {
	if dumps(flags, variables) {
		c.store = cas.Store{}
	}
	return c
}

func dumps(flags map[string]any, variables *environ.Set) bool {
	found := variables.Dumps()
	for name := range flags {
		found = found || environ.DumpFlags(name)
	}
	return found
}

// checkDumps returns an error if the folder of xla_dump_to cannot be written. XLA itself would
// compile, dump nothing and say nothing.
func checkDumps(flags map[string]any) error {
	dir, _ := flags["xla_dump_to"].(string)
	if dir == "" || dir == "-" || dir == "sponge" { // standard output, and a folder of Bazel
		return nil
	}
	err := os.MkdirAll(dir, 0o777)
	if err == nil {
		var f *os.File
		if f, err = os.CreateTemp(dir, ".deepwell-*"); err == nil {
			err = errors.Join(f.Close(), os.Remove(f.Name()))
		}
	}
	if err != nil {
		return diag.New(diag.FileError, "XLA cannot write its dumps").At("xla_dump_to=%s", dir).Wrap(err)
	}
	return nil
}

// get decodes an entry's head, calls use with its bytes, and reports whether both succeeded.
func (c cache) get(key string, head any, use func(code []byte) error) bool {
	entry, err := c.store.Get(key)
	if errors.Is(err, fs.ErrNotExist) && !errors.Is(err, cas.ErrDamaged) {
		return false
	}
	if err == nil {
		var code []byte
		if code, err = decodeEntry(entry, head); err == nil {
			err = use(code)
		}
	}
	if err != nil {
		c.warn(err, "")
	}
	return err == nil
}

// has reports whether there is a sound entry.
func (c cache) has(key string) bool {
	_, err := c.store.Get(key)
	return err == nil
}

// keep stores an entry, and removes the oldest entries beyond cacheLimit.
func (c cache) keep(key string, head any, bytes func() ([]byte, error)) {
	if c.store == (cas.Store{}) {
		return
	}
	code, err := bytes()
	if err == nil {
		var entry []byte
		if entry, err = encodeEntry(head, code); err == nil {
			err = c.store.Put(key, entry)
		}
	}
	if err == nil {
		err = c.store.Trim(cacheLimit)
	}
	if err != nil {
		c.warn(err, "set DEEPWELL_CACHE to a folder that can be written")
	}
}

// warn emits that an entry could not be used, with the reason.
func (c cache) warn(err error, fix string) {
	c.events.Emit(event.Warning{Code: string(diag.CacheFailed),
		Text: fmt.Sprintf("the compile cache was not used: %v", err), Fix: fix})
}

func encodeEntry(head any, code []byte) ([]byte, error) {
	js, err := json.Marshal(head)
	if err != nil {
		return nil, err
	}
	out := binary.LittleEndian.AppendUint32(nil, uint32(len(js)))
	return append(append(out, js...), code...), nil
}

func decodeEntry(b []byte, head any) (code []byte, err error) {
	if len(b) < 4 || int(binary.LittleEndian.Uint32(b)) > len(b)-4 {
		return nil, errors.New("the cached program is truncated")
	}
	n := 4 + int(binary.LittleEndian.Uint32(b))
	return b[n:], json.Unmarshal(b[4:n], head)
}

// loadedPrograms are the programs that an engine has loaded, by their cache keys, with reference
// counts. Two steps that differ in their precision policy have most programs in common; those are
// compiled and loaded once, and freed with their last executable.
type loadedPrograms struct {
	mu  sync.Mutex
	all map[string]*shared
}

// A shared is a loaded program and the number of executables that use it.
type shared struct {
	*pjrt.Loaded
	key     string
	users   int
	seconds float64 // compile time
}

// take returns the program of a key for one more user; nil if it is not loaded.
func (l *loadedPrograms) take(key string) *shared {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.all[key]
	if s != nil {
		s.users++
	}
	return s
}

// put adds a program that was compiled or read from the cache, for its first user. If another
// goroutine has added the same key meanwhile, x is freed and that program is used.
func (l *loadedPrograms) put(key string, x *pjrt.Loaded, seconds float64) *shared {
	l.mu.Lock()
	s := l.all[key]
	first := s == nil
	if first {
		s = &shared{Loaded: x, key: key, seconds: seconds}
		if l.all == nil {
			l.all = map[string]*shared{}
		}
		l.all[key] = s
	}
	s.users++
	l.mu.Unlock()
	if !first {
		x.Free()
	}
	return s
}

// release ends one use, and frees the program with the last.
func (l *loadedPrograms) release(s *shared) {
	l.mu.Lock()
	s.users--
	last := s.users == 0
	if last {
		delete(l.all, s.key)
	}
	l.mu.Unlock()
	if last {
		s.Free() // waits for runs that are being started; l.mu is not held
	}
}

// A build is a program to compile, with the key of its cache entry.
type build struct {
	m       *program.Module
	code    []byte
	options pjrt.CompileOptions
	key     string
}

// An obtained is a program that was compiled, or came from somewhere else.
type obtained struct {
	*pjrt.Loaded
	head   programHead
	cached bool
	from   string        // as [event.Compiled] has it
	waited time.Duration // for another process
}

// load loads the bytes of a cache entry, whose head is decoded.
func (p *obtained) load(e *Engine, b build, code []byte) (err error) {
	p.Loaded, err = e.client.Load(code, b.options, p.head.Signature)
	return err
}

// make takes a program from the cache, from a compile ahead, or from XLA.
func (e *Engine) make(b build) (*obtained, error) {
	p := &obtained{cached: true}
	load := func(code []byte) error { return p.load(e, b, code) }
	kept := e.cache.unlessDumped(b.options.Flags, e.environ)
	if kept.get(b.key, &p.head, load) {
		return p, nil
	}
	if e.ahead && e.platform == "cuda" && !b.options.HLO && handsOver(b.m) {
		key := aheadKey(e.version, e.gpuModel(), e.environ, b.m)
		if kept.get(key, &p.head, load) {
			p.from = "a compile ahead"
			return p, nil
		}
	}
	start := time.Now()
	one, err := e.compileAsPlanned(b.code, b.options)
	if err != nil {
		return nil, err
	}
	p.Loaded, p.cached = one, false
	p.head = programHead{one.Signature(), time.Since(start).Seconds()}
	kept.keep(b.key, p.head, one.Serialize)
	return p, nil
}

// handsOver reports whether a program that was compiled without a device runs on one as it is.
// cuDNN's plans were never seen to do so.
func handsOver(m *program.Module) bool { return !strings.Contains(m.Text, "__cudnn$") }

// aheadKey is the key of a program that was compiled without a device, for GPUs of a model. It has
// nothing of a host: neither the devices' numbers nor the memory that XLA's scheduler may use.
func aheadKey(version, gpu string, variables *environ.Set, m *program.Module) string {
	flags, err := json.Marshal(m.Flags)
	if err != nil {
		flags = fmt.Append(nil, m.Flags)
	}
	return cas.Key([]byte("ahead"), []byte(cacheVersion), []byte(version), []byte(gpu),
		[]byte(variables.Recorded()["XLA_FLAGS"]), fmt.Append(nil, len(m.Devices)), []byte(m.Text), flags)
}

// gpuModel is the name of this process's GPUs in the catalogue.
func (e *Engine) gpuModel() string {
	local := e.client.Local()
	if len(local) == 0 {
		return ""
	}
	kind := local[0].Kind
	if known, err := machine.FindGPUModel(kind); err == nil {
		return known.Name
	}
	return kind
}
