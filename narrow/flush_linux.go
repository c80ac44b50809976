package narrow

import (
	"os"

	"golang.org/x/sys/unix"
)

// A flusher writes pieces and asks the kernel to begin with the large ones at once, so that the
// disk works while the next pieces are turned, and the sync at the end finds little left to do.
type flusher struct{ f *os.File }

// WriteAt writes a piece to its place.
func (w *flusher) WriteAt(p []byte, at int64) (int, error) {
	n, err := w.f.WriteAt(p, at)
	if err == nil && n >= band/4 {
		// Where the file system cannot, the sync does it all.
		_ = unix.SyncFileRange(int(w.f.Fd()), at, int64(n), unix.SYNC_FILE_RANGE_WRITE)
	}
	return n, err
}
