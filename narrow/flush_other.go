//go:build !linux

package narrow

import "os"

// A flusher leaves the writing to the sync at the end.
type flusher struct{ f *os.File }

// WriteAt writes a piece to its place.
func (w *flusher) WriteAt(p []byte, at int64) (int, error) { return w.f.WriteAt(p, at) }
