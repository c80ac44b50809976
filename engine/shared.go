package engine

import (
	"sync"

	"github.com/deepwell/deepwell/internal/pjrt"
)

// loadedPrograms are the programs that an engine has on its devices, by their keys in the compile
// cache. Variants of a step (another precision policy, an inspection) differ in some of their
// programs; what they have in common is compiled and loaded once, and goes with its last user.
type loadedPrograms struct {
	mu  sync.Mutex
	all map[string]*shared
}

// A shared is a loaded program and how many executables run it.
type shared struct {
	*pjrt.Loaded
	key     string
	users   int
	seconds float64 // that the compile took
}

// take gives the program of a key to one more user, nil if it is not loaded.
func (l *loadedPrograms) take(key string) *shared {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.all[key]
	if s != nil {
		s.users++
	}
	return s
}

// put gives a program that was compiled or read from the cache to its first user. If another
// goroutine was first, the program is that one's.
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

// release ends one user's use.
func (l *loadedPrograms) release(s *shared) {
	l.mu.Lock()
	s.users--
	last := s.users == 0
	if last {
		delete(l.all, s.key)
	}
	l.mu.Unlock()
	if last {
		s.Free() // which waits for runs that begin, and nobody else has to
	}
}
