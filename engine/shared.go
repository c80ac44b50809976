package engine

import (
	"sync"

	"github.com/deepwell/deepwell/internal/pjrt"
)

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
